"""A likelihood as a loss in the outputs."""

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.losses.base import Labels, OutputLoss, OutputMap
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.losses.uniforms import Uniforms


class NegativeLogLikelihood(OutputLoss):
    """−log p(y | f) of outputs `[B, ..., C]`, summed over an example's positions, in nats.

    The mean is one over examples. What a likelihood does not count, as `ignore_index` says it, adds
    nothing.

    Args:
        likelihood: What the outputs mean.
    """

    reduction = "mean"
    class_dim = -1
    # A likelihood may be a user's own.
    is_recordable = False

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Targets of the outputs' positions, as the likelihood has them."""
        self.likelihood.check(*flat_terms(outputs, targets))

    def labels(self, targets: Tensor, first: int, ndim: int) -> Labels:
        """The targets with a row for each term, and which terms count, `[B, ..., 1]`, or all."""
        positions = targets.shape[: ndim - 1]
        rows = targets.flatten(0, ndim - 2)
        counted = self.likelihood.counted(rows)
        return (rows,) if counted is None else (rows, counted.reshape(*positions, -1))

    def count(self, targets: Tensor) -> float:
        """The number of examples."""
        return float(len(targets))

    def counted(self, labels: Labels) -> Tensor | None:
        """Positions that the likelihood counts."""
        return None if len(labels) == 1 else labels[1]

    def value(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Σ ℓ, summed in double precision."""
        return self.likelihood.nll(outputs.flatten(0, -2), labels[0]).double().sum()

    def gradient(self, outputs: Tensor, labels: Labels) -> Tensor:
        """∇ ℓ at every position that counts."""
        return self._gradient(outputs, labels[0], labels)

    def root(self, outputs: Tensor, labels: Labels) -> Tensor:
        """The likelihood's columns, each at one position."""
        columns = self.likelihood.hessian_root(outputs.flatten(0, -2))
        columns = self._placed(columns, outputs, labels)
        if outputs.ndim == 2:
            return columns
        columns = columns.flatten(2, -2)
        at = torch.eye(columns.shape[2], dtype=outputs.dtype, device=outputs.device)
        columns = columns.unsqueeze(1) * at[:, None, :, None]
        return columns.flatten(0, 1).unflatten(2, outputs.shape[1:-1])

    def hessian(self, outputs: Tensor, labels: Labels) -> OutputMap:
        """By the root, position by position."""
        columns = self._placed(
            self.likelihood.hessian_root(outputs.flatten(0, -2)), outputs, labels
        )

        def product(v: Tensor) -> Tensor:
            along = torch.einsum("k...c,...c->k...", columns, v)
            return torch.einsum("k...c,k...->...c", columns, along)

        return product

    def hessian_trace(self, outputs: Tensor, labels: Labels) -> Float[Tensor, ""]:
        """The trace of the Hessian of `value`, float64; Σ (1 − Σ p²) for a softmax."""
        traces = self.likelihood.hessian_trace(outputs.flatten(0, -2))
        return traces.sum() if len(labels) == 1 else (traces * labels[1].flatten()).sum()

    def drawn_gradient(self, outputs: Tensor, labels: Labels, uniforms: Uniforms) -> Tensor:
        """∇ ℓ at labels drawn from p(y | f)."""
        terms = outputs.flatten(0, -2)
        numbers = uniforms(outputs, self.counted(labels)).reshape(terms.shape)
        return self._gradient(outputs, self.likelihood.sample(terms, numbers), labels)

    def _gradient(self, outputs: Tensor, rows: Tensor, labels: Labels) -> Tensor:
        gradient = self.likelihood.gradient(outputs.flatten(0, -2), rows)
        return self._placed(gradient.unsqueeze(0), outputs, labels)[0]

    def _placed(self, columns: Tensor, outputs: Tensor, labels: Labels) -> Tensor:
        """Columns `[K, terms, C]` where the outputs are, `[K, B, ..., C]`, of terms that count."""
        columns = columns.unflatten(1, outputs.shape[:-1])
        return columns if len(labels) == 1 else columns * labels[1]


def flat_terms(
    outputs: Float[Tensor, "batch *positions outputs"], targets: Tensor
) -> tuple[Float[Tensor, "terms outputs"], Tensor]:
    """Outputs and targets with one row for each term of the loss.

    Args:
        outputs: `[B, ..., C]`.
        targets: `[B, ...]` or `[B, ..., C]`, as the likelihood has them.

    Raises:
        ValueError: If the targets do not have the outputs' positions.
    """
    positions = outputs.shape[:-1]
    if targets.shape[: len(positions)] != positions:
        raise ValueError(
            f"Targets of shape {tuple(targets.shape)} do not fit outputs of shape "
            f"{tuple(outputs.shape)}: expected {tuple(positions)}, one for each position; outputs "
            "have the classes in the last dimension (for [B, C, ...] use class_dim=1, or "
            "`outputs.movedim(1, -1)` in the model)."
        )
    return outputs.flatten(0, -2), targets.flatten(0, len(positions) - 1)
