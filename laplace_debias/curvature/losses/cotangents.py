"""The cotangents at the outputs whose outer products make the curvature."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laplace_debias.curvature.losses.likelihood import Likelihood
from laplace_debias.curvature.network.class_dim import targets_classes_last

FISHERS = ("exact", "mc", "empirical")


@dataclass(frozen=True)
class Fisher:
    r"""How the loss Hessian of an example becomes a sum of outer products $\sum_k s_k s_k^\top$.

    Attributes:
        kind: `"exact"`: columns of the Hessian's root (the GGN, or type-II Fisher); `"mc"`:
            gradients at labels drawn from the model (type-I); `"empirical"`: the gradient at the
            true label.
        mc_samples: Labels an example for `"mc"`.
        seed: Fixes the labels of `"mc"`: an example's labels depend on the seed and its position in
            the data alone, not on how the data is cut into batches, nor on how far it is padded.

    Raises:
        ValueError: For an unknown kind, or fewer than one sample.
    """

    kind: str = "exact"
    mc_samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in FISHERS:
            raise ValueError(f"Unknown fisher={self.kind!r}: use one of {', '.join(FISHERS)}.")
        if self.mc_samples < 1:
            raise ValueError(f"mc_samples must be at least 1, got {self.mc_samples}.")
        if self.kind != "mc" and self.mc_samples != 1:
            raise ValueError(
                f'mc_samples={self.mc_samples} belongs to fisher="mc", not to {self.kind!r}.'
            )

    def num_columns(self, outputs: Float[Tensor, "batch *positions outputs"]) -> int:
        """K, at most: how many cotangents an example has."""
        return outputs[0].numel() if self.kind == "exact" else self.mc_samples

    def columns(
        self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, first: int
    ) -> Float[Tensor, "columns batch *outputs"]:
        """The cotangents of a batch, `[K, B, ..., C]`.

        An example's loss is the sum over its positions, so that with T of them `"exact"` has T
        times the columns, each at one position, while the labels of `"mc"` and `"empirical"` are
        those of all positions at once.

        Args:
            likelihood: What the outputs mean.
            outputs: `[B, C]`, or `[B, ..., C]` with further positions.
            targets: The true targets: used by `"empirical"`, and to leave out ignored positions.
            first: Position of the batch's first example in the data.
        """
        terms, labels = flat_terms(outputs, targets)
        counted = likelihood.counted(labels)
        if self.kind == "exact":
            columns = likelihood.hessian_root(terms)
        elif self.kind == "empirical":
            columns = likelihood.gradient(terms, labels).unsqueeze(0)
        else:
            columns = self._sampled(likelihood, outputs, terms, counted, first)
        if counted is not None:
            columns = columns * counted.unsqueeze(-1)
        columns = columns.unflatten(1, outputs.shape[:-1])
        if self.kind == "exact" and outputs.ndim > 2:
            columns = columns.flatten(2, -2)
            at = torch.eye(columns.shape[2], dtype=outputs.dtype, device=outputs.device)
            columns = columns.unsqueeze(1) * at[:, None, :, None]
            return columns.flatten(0, 1).unflatten(2, outputs.shape[1:-1])
        return columns

    def _sampled(
        self,
        likelihood: Likelihood,
        outputs: Tensor,
        terms: Tensor,
        counted: Tensor | None,
        first: int,
    ) -> Float[Tensor, "samples terms outputs"]:
        gradients = []
        numbers = None
        if counted is not None:
            of_terms = counted.reshape(len(terms), -1).expand_as(terms)
            numbers = places(of_terms.reshape(len(outputs), -1))
        for sample in range(self.mc_samples):
            uniforms = keyed_uniforms(self.seed, sample, first, outputs.flatten(1), numbers)
            labels = likelihood.sample(terms, uniforms.reshape(terms.shape))
            gradients.append(likelihood.gradient(terms, labels))
        return torch.stack(gradients) / self.mc_samples**0.5


@runtime_checkable
class Cotangents(Protocol):
    """Which cotangents at a batch's outputs stand for the curvature of its loss."""

    def num_columns(self, outputs: Float[Tensor, "batch *outputs"]) -> int:
        """K, at most: how many cotangents an example has."""

    def counted(self, targets: Tensor, ndim: int, first: int) -> Tensor | None:
        """Which outputs count, broadcasting to the outputs; None for all.

        Args:
            targets: What the loss takes, checked later.
            ndim: How many dimensions the outputs have.
            first: Position of the batch's first example in the data.
        """

    def __call__(
        self, outputs: Float[Tensor, "batch *outputs"], targets: Tensor, first: int
    ) -> tuple[Float[Tensor, "columns batch *outputs"], Tensor]:
        """The cotangents of a batch, `[K, B, ...]`, and its loss, summed over examples, 0-d.

        Args:
            outputs: `[B, ...]`.
            targets: What the loss takes.
            first: Position of the batch's first example in the data.

        Raises:
            ValueError: If the targets do not fit.
            TypeError: If they are of the wrong dtype.
        """


@dataclass(frozen=True)
class LikelihoodCotangents:
    """The cotangents of a likelihood, whose outputs have the classes in the last dimension.

    Attributes:
        likelihood: What the outputs mean.
        fisher: Which cotangents stand for its Hessian.
        class_dim: Which dimension of targets with an entry for every output has the classes, as it
            was in the outputs; the last if None.
    """

    likelihood: Likelihood
    fisher: Fisher
    class_dim: int | None = None

    def num_columns(self, outputs: Float[Tensor, "batch *positions outputs"]) -> int:
        """As `Cotangents`."""
        return self.fisher.num_columns(outputs)

    def counted(self, targets: Tensor, ndim: int, first: int) -> Tensor | None:
        """As `Cotangents`."""
        targets = targets_classes_last(targets, ndim, self.class_dim)
        positions = targets.shape[: ndim - 1]
        if len(positions) < ndim - 1:
            return None
        counted = self.likelihood.counted(targets.flatten(0, ndim - 2))
        if counted is None:
            return None
        return counted.reshape(*positions, -1)

    def __call__(self, outputs: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """As `Cotangents`; the loss is the negative log-likelihood in nats."""
        targets = targets_classes_last(targets, outputs.ndim, self.class_dim)
        terms, labels = flat_terms(outputs, targets)
        self.likelihood.check(terms, labels)
        nll = self.likelihood.nll(terms, labels).double().sum()
        return self.fisher.columns(self.likelihood, outputs, targets, first), nll


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


def places(counted: Bool[Tensor, "batch entries"]) -> Int[Tensor, "batch entries"]:
    """The number of an entry among those of its row that count; anything for the others."""
    return (counted.cumsum(1) - 1).clamp_min(0)


def keyed_uniforms(
    seed: int,
    stream: int,
    first: int,
    like: Float[Tensor, "batch outputs"],
    columns: Int[Tensor, "batch outputs"] | None = None,
) -> Float[Tensor, "batch outputs"]:
    """Uniform numbers in (0, 1), a function of (seed, stream, row, column) alone, float64.

    A counter-based generator, so that the numbers do not depend on the batch size or the device:
    the finaliser of SplitMix64 (Steele, Lea & Flood, 2014), applied once per key.

    Args:
        seed: Any integer.
        stream: Which of several independent tables.
        first: Row number of the first row.
        like: Gives shape and device.
        columns: Column numbers; in their order if None.
    """
    rows = torch.arange(first, first + like.shape[0], device=like.device)[:, None]
    if columns is None:
        columns = torch.arange(like.shape[1], device=like.device)[None, :]
    state = torch.full_like(rows, seed)
    for key in (torch.full_like(rows, stream), rows, columns):
        state = _mix(state + (key + 1) * -7046029254386353131)  # 0x9E3779B97F4A7C15, signed
    return (_shift(state, 11).double() + 0.5) / 2**53


def _shift(values: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _mix(values: Tensor) -> Tensor:
    values = (values ^ _shift(values, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    values = (values ^ _shift(values, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return values ^ _shift(values, 31)
