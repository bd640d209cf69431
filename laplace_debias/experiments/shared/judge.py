"""Regularised loss and accuracy of a network at any parameters."""

import copy
import math

import torch
from torch import Tensor, nn

from laplace_debias.curvature.network.weight_decay import is_decayed
from laplace_debias.problems import ImageBatches, Images

METRICS = ("train_loss", "test_loss", "train_accuracy", "test_accuracy")


def worst_if_nan(loss: float) -> float:
    """The loss, or infinity if it is NaN: then it has overflowed."""
    return math.inf if math.isnan(loss) else loss


class Judge:
    """Regularised loss and accuracy of a network anywhere on a trajectory (Eq. 1).

    Args:
        model: The trained network, at θ₀. It is copied, and the copy is moved.
        train: Training images to measure on.
        test: Test images.
        weight_decay: β, of weights alone, as in `Quadratic.from_data`.
        chunk_size: Images per forward pass.
    """

    def __init__(
        self, model: nn.Module, train: Images, test: Images, weight_decay: float, chunk_size: int
    ) -> None:
        self._model = copy.deepcopy(model).eval()
        self._start = nn.utils.parameters_to_vector(self._model.parameters()).detach().clone()
        self._parts = {"train": train, "test": test}
        self._weight_decay, self._chunk_size = weight_decay, chunk_size

    @torch.no_grad()
    def __call__(self, step: Tensor | float = 0.0) -> dict[str, float]:
        """The four metrics at θ₀ + step `[D]`; losses in nats."""
        theta = self._start + step
        nn.utils.vector_to_parameters(theta, self._model.parameters())
        penalty = 0.5 * self._weight_decay * self._squared_weights()
        found: dict[str, float] = {}
        for part, data in self._parts.items():
            loss, hits = 0.0, 0
            every = torch.arange(len(data))
            for x, y in ImageBatches(data, every, self._chunk_size, theta.dtype):
                logits, labels = self._model(x.to(theta.device)), y.to(theta.device)
                loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
                hits += int((logits.argmax(1) == labels).sum())
            found[f"{part}_loss"] = loss / len(data) + penalty
            found[f"{part}_accuracy"] = hits / len(data)
        return found

    def _squared_weights(self) -> float:
        return sum(
            float(parameter.double().square().sum())
            for parameter in self._model.parameters()
            if is_decayed(parameter)
        )
