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
    # A likelihood may be a user's own.
    is_recordable = False

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Targets of the outputs' positions, as the likelihood has them."""
        self.likelihood.check(*flat_terms(outputs, targets))

    def labels(self, targets: Tensor, ndim: int) -> Labels:
        """The targets with a row for each term; which count, `[B, ..., 1]`; curvature weights.

        The second is left out where all count and have weight 1, the third where all have.
        """
        positions = targets.shape[: ndim - 1]
        rows = targets.flatten(0, ndim - 2)
        counted = self.likelihood.counted(rows)
        weights = self.likelihood.curvature_weights(rows)
        if weights is not None:
            if counted is None:
                counted = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
            of_terms = weights.reshape(*positions, -1)
            return rows, counted.reshape(*positions, -1), of_terms
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

    def values(self, outputs: Tensor, labels: Labels) -> Float[Tensor, " batch"]:
        """ℓ of each example, float64."""
        of_terms = self.likelihood.nll(outputs.flatten(0, -2), labels[0]).double()
        return of_terms.reshape(len(outputs), -1).sum(1)

    def gradient(self, outputs: Tensor, labels: Labels) -> Tensor:
        """∇ ℓ at every position that counts."""
        gradient = self.likelihood.gradient(outputs.flatten(0, -2), labels[0])
        return _placed(gradient.unsqueeze(0), outputs, labels[:2])[0]

    def root(self, outputs: Tensor, labels: Labels) -> Tensor:
        """The likelihood's columns, each at one position."""
        return each_at_one_position(self._root(outputs, labels))

    def hessian(self, outputs: Tensor, labels: Labels) -> OutputMap:
        """By the root, position by position."""
        columns = self._root(outputs, labels)

        def product(v: Tensor) -> Tensor:
            along = torch.einsum("k...c,...c->k...", columns, v)
            return torch.einsum("k...c,k...->...c", columns, along)

        return product

    def hessian_traces(self, outputs: Tensor, labels: Labels) -> Float[Tensor, " batch"]:
        """The trace of the Hessian of each example's loss, float64; 1 − Σ p² for a softmax."""
        batch = len(outputs)
        if len(labels) == 3 and labels[2].shape[-1] > 1:
            return self._root(outputs.double(), labels).square().sum(0).reshape(batch, -1).sum(1)
        traces = self.likelihood.hessian_trace(outputs.flatten(0, -2))
        for factor in labels[1:]:
            traces = traces * factor.flatten()
        return traces.reshape(batch, -1).sum(1).double()

    def drawn_gradient(self, outputs: Tensor, labels: Labels, uniforms: Uniforms) -> Tensor:
        """∇ of −log p at labels drawn from p(y | f), times the roots of the curvature weights."""
        terms = outputs.flatten(0, -2)
        numbers = uniforms(outputs, self.counted(labels)).reshape(terms.shape)
        gradient = self.likelihood.drawn_gradient(terms, numbers)
        return _placed(gradient.unsqueeze(0), outputs, labels)[0]

    def _root(self, outputs: Tensor, labels: Labels) -> Tensor:
        """The likelihood's columns, weights included, `[K, B, ..., C]`."""
        return _placed(self.likelihood.hessian_root(outputs.flatten(0, -2)), outputs, labels)


def _placed(columns: Tensor, outputs: Tensor, labels: Labels) -> Tensor:
    """Columns `[K, terms, C]` where the outputs are, `[K, B, ..., C]`, weighed by the labels."""
    columns = columns.unflatten(1, outputs.shape[:-1])
    columns = columns if len(labels) == 1 else columns * labels[1]
    return columns if len(labels) < 3 else columns * labels[2].sqrt().to(columns.dtype)


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


def each_at_one_position(
    columns: Float[Tensor, "columns batch *positions outputs"],
) -> Float[Tensor, "all batch *positions outputs"]:
    """Of columns that all positions have, T times as many, each of them zero at all but one."""
    positions = columns.shape[2:-1]
    if not positions:
        return columns
    columns = columns.flatten(2, -2)
    at = torch.eye(columns.shape[2], dtype=columns.dtype, device=columns.device)
    columns = columns.unsqueeze(1) * at[:, None, :, None]
    return columns.flatten(0, 1).unflatten(2, positions)
