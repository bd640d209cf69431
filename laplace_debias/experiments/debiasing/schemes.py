"""Ways to take directions and magnitudes of a Kronecker factor from the same few examples.

One pass over the data gives the factors of small groups of examples. All methods are functions of
these: mini-batches, two batches of any sizes, any number of folds and running averages are sums
over groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.fits.crossfit import crossfit_magnitudes
from laplace_debias.curvature.fits.directions import eigh
from laplace_debias.curvature.fits.magnitudes import directional_curvature

EKFAC = "EKFAC, "
"""What the names of EKFAC's methods begin with."""

FULL = "full-batch"
MINI = "mini-batch"
ORACLE = "oracle magnitudes"
FULL_WITH_MINI = "full-batch directions, mini-batch magnitudes"
FULL_WITH_CROSSFIT = "full-batch directions, cross-fitted magnitudes"

USUAL_FOLDS = 8
"""Folds of the method that is also measured with other directions."""


def crossfit_name(folds: int) -> str:
    """The method of K folds."""
    return f"crossfit, {folds} folds"


def split_name(directions: int, magnitudes: int) -> str:
    """The method of two batches of these sizes."""
    return f"debiased, {directions} + {magnitudes}"


def oracle_name(directions: int) -> str:
    """Directions of so many examples, and the full-batch curvature along them."""
    return f"debiased, {directions} + all"


def trace_name(method: str) -> str:
    """The method's magnitudes, scaled so that each factor has the full-batch trace."""
    return f"{method}, full-batch trace"


def outputs_name(method: str) -> str:
    """The method's magnitudes, scaled by the loss curvature of all data from forward passes."""
    return f"{method}, scaled by the outputs"


def average_name(decay: float, magnitudes: str = "") -> str:
    """A running average; its own magnitudes, or those of `NEXT` or `STREAM`."""
    return f"average, decay {decay:g}{magnitudes}"


NEXT = ", measured on the next batch"
"""Each batch is measured along the eigenvectors of the average before it."""

STREAM = ", directions and magnitudes of two streams"
"""Directions from the average over every other batch, magnitudes from that over the rest."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a draw's examples are divided.

    Attributes:
        batch_size: b; a draw has 2b examples.
        groups: Number of groups of equal size; example i is in group i modulo `groups`.
        folds: Numbers of folds to cross-fit with, divisors of `groups`.
        further_batches: How many further magnitude batches of b examples there are.
        average_batch_size: Examples in a batch of the running average, a multiple of a group's and
            a divisor of b.
        average_decays: Decays of the running averages, in (0, 1), one average each.
    """

    batch_size: int
    groups: int
    folds: tuple[int, ...]
    further_batches: int
    average_batch_size: int
    average_decays: tuple[float, ...]

    @property
    def group_size(self) -> int:
        """Examples in a group."""
        return 2 * self.batch_size // self.groups

    @property
    def usual(self) -> str:
        """The cross-fitted method that is combined with others."""
        return crossfit_name(min(USUAL_FOLDS, self.groups))

    @property
    def scaled(self) -> dict[str, str]:
        """The methods that are also scaled to the full-batch trace, and their bases."""
        b = self.batch_size
        return {
            MINI: "all",
            split_name(b, b): "half",
            self.usual: "all",
            FULL_WITH_CROSSFIT: "full",
        }

    @property
    def measured_on(self) -> dict[str, slice]:
        """Which of the 2b examples the magnitudes of some methods are measured on."""
        b = self.batch_size
        return {MINI: slice(None), split_name(b, b): slice(1, None, 2), self.usual: slice(None)}

    @property
    def methods(self) -> dict[str, str]:
        """The basis of each method."""
        b = self.batch_size
        return {
            MINI: "all",
            split_name(b, b): "half",
            split_name(3 * b // 2, b // 2): "most",
            split_name(b // 2, 3 * b // 2): "few",
            **{crossfit_name(folds): "all" for folds in self.folds},
            ORACLE: "all",
            **{split_name(b, m * b): "half" for m in range(2, self.further_batches + 2)},
            oracle_name(b): "half",
            FULL_WITH_MINI: "full",
            FULL_WITH_CROSSFIT: "full",
            **{trace_name(method): basis for method, basis in self.scaled.items()},
            **{outputs_name(method): self.scaled[method] for method in self.measured_on},
            **{
                average_name(decay, of): f"{'stream' if of == STREAM else 'average'} {decay:g}"
                for decay in self.average_decays
                for of in ("", NEXT, STREAM)
            },
        }


@dataclass(frozen=True, eq=False)
class Factors:
    """One Kronecker factor of a draw.

    Attributes:
        groups: Of each group, summed over its examples, `[groups, d, d]`.
        further: Of each further batch of `average_batch_size` examples, summed, `[n, d, d]`.
        full: Of all data, the mean, `[d, d]`.
        precision: The dtype of the computation.
    """

    groups: Float[Tensor, "groups d d"]
    further: Float[Tensor, "further d d"]
    full: Float[Tensor, "d d"]
    precision: torch.dtype

    def fold(self, k: int, folds: int) -> Float[Tensor, "d d"]:
        """Sum over the examples i with `i % folds == k`."""
        return self.groups[k::folds].sum(0)


def magnitudes_of(
    factors: Factors, plan: Plan
) -> tuple[dict[str, Float[Tensor, "d d"]], dict[str, Float[Tensor, " d"]]]:
    """All methods on one factor.

    Args:
        factors: The factor.
        plan: How the examples are cut.

    Returns:
        Bases by name, all but `full`; and the magnitudes of each of `plan.methods`.
    """
    b = plan.batch_size
    total = factors.groups.sum(0)
    values: dict[str, Tensor] = {}
    bases: dict[str, Tensor] = {}
    values[MINI], bases["all"] = _eigh(total / (2 * b))
    for folds in plan.folds:
        values[crossfit_name(folds)] = crossfit_magnitudes(
            torch.stack([factors.fold(k, folds) for k in range(folds)]),
            torch.full((folds,), 2 * b // folds),
            (values[MINI], bases["all"]),
            factors.precision,
        )
    values[ORACLE] = directional_curvature(factors.full, bases["all"])

    even, odd = factors.fold(0, 2), factors.fold(1, 2)
    bases["half"] = _eigh(even)[1]
    values[oracle_name(b)] = directional_curvature(factors.full, bases["half"])
    values[split_name(b, b)] = directional_curvature(odd, bases["half"]) / b
    per_batch = b // plan.average_batch_size
    measured = odd
    for m in range(2, plan.further_batches + 2):
        measured = measured + factors.further[(m - 2) * per_batch :][:per_batch].sum(0)
        values[split_name(b, m * b)] = directional_curvature(measured, bases["half"]) / (m * b)

    quarter = factors.fold(3, 4)
    bases["most"], bases["few"] = _eigh(total - quarter)[1], _eigh(quarter)[1]
    values[split_name(3 * b // 2, b // 2)] = directional_curvature(quarter, bases["most"]) / (
        b // 2
    )
    values[split_name(b // 2, 3 * b // 2)] = directional_curvature(
        total - quarter, bases["few"]
    ) / (3 * b // 2)

    values[FULL_WITH_MINI] = values[MINI]
    values[FULL_WITH_CROSSFIT] = values[plan.usual]
    for method in plan.scaled:
        scale = factors.full.trace() / values[method].sum()
        values[trace_name(method)] = values[method] * scale
    _averages(factors, plan, bases, values)
    return bases, values


def _averages(
    factors: Factors, plan: Plan, bases: dict[str, Tensor], values: dict[str, Tensor]
) -> None:
    """Running averages over batches, with bias correction: newer batches weigh more."""
    batches = [*_batches(factors, plan)]
    for decay in plan.average_decays:
        averages = list(_running(batches, decay))
        values[average_name(decay)], basis = _eigh(averages[-1])
        bases[f"average {decay:g}"] = basis
        ahead = []
        for before, batch in zip(averages, batches[1:], strict=False):
            _, of_before = eigh(before)
            ahead.append(directional_curvature(batch, of_before))
        *_, values[average_name(decay, NEXT)] = _running(ahead, decay)
        *_, directions = _running(batches[::2], decay)
        *_, magnitudes = _running(batches[1::2], decay)
        bases[f"stream {decay:g}"] = _eigh(directions)[1]
        values[average_name(decay, STREAM)] = directional_curvature(
            magnitudes, bases[f"stream {decay:g}"]
        )


def _batches(factors: Factors, plan: Plan) -> Iterator[Float[Tensor, "d d"]]:
    size = plan.average_batch_size
    for groups in factors.groups.split(size // plan.group_size):
        yield groups.sum(0) / size
    for batch in factors.further:
        yield batch / size


def _running(batches: Sequence[Tensor], decay: float) -> Iterator[Tensor]:
    total, norm = torch.zeros_like(batches[0]), 0.0
    for batch in batches:
        total = decay * total + batch
        norm = decay * norm + 1
        yield total / norm


def _eigh(factor: Float[Tensor, "d d"]) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors, computed in double precision."""
    values, vectors = eigh(factor.double())
    assert vectors is not None
    return values.to(factor.dtype), vectors.to(factor.dtype)
