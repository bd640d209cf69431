"""What a network is worth anywhere in parameter space: regularised loss and accuracy."""

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from laplace_debias.curvature.network.weight_decay import is_decayed
from laplace_debias.problems import Images

METRICS = ("train_loss", "test_loss", "train_accuracy", "test_accuracy")


class Chunks:
    """Some examples of a data set in their order, a few at a time, any number of times.

    Args:
        data: The data set.
        indices: Which examples.
        chunk_size: How many at a time.
        dtype: Of the images, that of the network.
    """

    def __init__(self, data: Images, indices: Tensor, chunk_size: int, dtype: torch.dtype) -> None:
        self._data, self._indices = data, indices
        self._chunk_size, self._dtype = chunk_size, dtype

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in self._indices.split(self._chunk_size):
            x, y = self._data.batch(indices)
            yield x.to(self._dtype), y


def worst_if_nan(loss: float) -> float:
    """A loss; infinity where it is not a number, since it has overflowed."""
    return math.inf if math.isnan(loss) else loss


class Judge:
    """Regularised loss and accuracy of a network anywhere on a trajectory (Eq. 1).

    Args:
        model: The trained network, from which steps are measured; a copy is moved.
        train: Training images to measure on.
        test: Test images.
        weight_decay: β, of weights alone, as in `Quadratic.from_data`.
        chunk_size: Images that go through the network at a time.
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
            for x, y in Chunks(data, torch.arange(len(data)), self._chunk_size, theta.dtype):
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
