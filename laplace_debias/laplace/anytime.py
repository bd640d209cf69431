"""A fit in growing rounds, which says after each how far it is from that of all the data."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import SequentialSampler, Subset

from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.fits.crossfit import crossfit_with_replicates
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.kinds import CurvatureKind
from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.curvature.network.batches import Batches, Stream
from laplace_debias.curvature.network.dataset_size import TrainingSize, training_size
from laplace_debias.curvature.network.inputs import Inputs, take
from laplace_debias.curvature.network.shards import ShardedBatches
from laplace_debias.laplace.fit import build_posterior
from laplace_debias.laplace.fit_report import FitReport
from laplace_debias.laplace.functional.linearised import asked_of, map_outputs, moments
from laplace_debias.laplace.noise import estimate_noise
from laplace_debias.laplace.prepared import PreparedFit
from laplace_debias.laplace.reading import Reading
from laplace_debias.laplace.schemes import OpenStream, Scheme, fit_curvature
from laplace_debias.laplace.state import FittedPosterior
from laplace_debias.operators import BlockDiagonal
from laplace_debias.system.checks import real, whole
from laplace_debias.system.ranks import Ranks
from laplace_debias.system.shown import warn

FIRST_ROUND = 64
"""Examples of the first round."""
LOOKS = 8
"""How many examples go forward for one that goes backward."""
_LEAST = 16
# Of each input so many outputs are compared, the largest ones.
_OUTPUTS = 4
# Prior precisions at which the error is told, in units of the fit's own.
_CURVE = (1.0, 10.0, 100.0, 1e3, 1e4)
# What leaves a block's variance and takes away that of the others.
_WITHOUT = 1e12
NUM_ERRORS = 1.9
"""Standard errors that are told as the error, which the true one rarely exceeds."""


@dataclass(frozen=True)
class _Round:
    """A fit to what was read, its replicates without each fold, and the error along the curve.

    `spread` is the relative standard error of the mean curvature in the outputs.
    """

    fitted: FittedPosterior
    totals: DataTotals
    replicates: list[BlockDiagonal]
    spread: float
    curve: list[float]

    @property
    def error(self) -> float:
        return max(self.curve)


@dataclass(frozen=True)
class Auto(Scheme):
    """As many examples as it takes: cross-fitted in growing rounds, each of which tells its error.

    See `laplace.anytime`. The error is that of standard deviations of the outputs against those of
    a fit of all the data, at the prior precision that `Laplace` has and up to 10⁴ times it.

    Attributes:
        data: Batches `(x, y)` in random order; no more of them are read than are needed.
        tolerance: The relative error at which the fit ends.
        seconds: The fit ends where a further round would take it beyond so many seconds.
        examples: The fit ends when so many examples went backward, in whole batches.
        looks: How many examples go forward for one that goes backward.
        after: The report of a fit that fell short of its tolerance, or was interrupted: this one
            goes on behind its last round, of which examples and seconds count. The data must be
            the same; batches that were read are skipped, those of an iterator excepted.

    Raises:
        TypeError: For numbers of the wrong kind.
        ValueError: For a tolerance or seconds that are not positive, fewer than 16 examples, no
            looks, or the report of a fit that reached its tolerance.
    """

    mode = "auto"
    is_resumable = False
    data: Batches
    tolerance: float = 0.05
    seconds: float | None = None
    examples: int | None = None
    looks: int = LOOKS
    after: FitReport | None = None

    def __post_init__(self) -> None:
        for name in ("tolerance", "seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < float(real(value, name)) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}.")
        if self.examples is not None:
            whole(self.examples, "examples", _LEAST)
        whole(self.looks, "looks")
        if self.after is not None and self.after.left is None:
            raise ValueError(
                "after is the report of a fit that reached its tolerance, and kept nothing to go "
                "on with: leave it out."
            )

    @property
    def sources(self) -> Sequence[Batches]:
        """The data."""
        return [self.data]

    def opened(self, open_stream: OpenStream) -> "Auto":
        """Return the scheme with a stream of checked pairs in place of its data."""
        return replace(self, data=open_stream(self.data, "data"))

    def training_size(self, num_data: SupportsIndex | None) -> TrainingSize:
        """Determine N: as passed, or inferred from the loader; raises as `training_size`."""
        return training_size(self.data, num_data, self.mode, reads_all=False)

    def check(self, kind: CurvatureKind) -> None:
        """Require K-FAC and data in random order, of which a subset such as `random_split`'s is."""
        if kind.name != "kfac":
            raise ValueError(f'mode="auto" fits curvature="kfac", not {kind.name!r}.')
        if kind.rank is not None:
            raise ValueError(
                'mode="auto" tells an error that rank would add to: leave rank out, and call '
                "la.thin(x) after tuning, or use another mode."
            )
        batches = getattr(self.data, "batch_sampler", None)
        sampler = getattr(batches, "sampler", None)
        data: Any = getattr(sampler, "data_source", None)
        is_in_order = isinstance(sampler, SequentialSampler)
        if isinstance(batches, ShardedBatches):
            data, is_in_order = batches.data, not batches.shuffle
        if isinstance(data, Subset):
            is_in_order &= list(data.indices) == sorted(data.indices)
        if is_in_order:
            raise ValueError(
                'mode="auto" reads the first examples, and this loader gives them in the order of '
                "the data set: use DataLoader(..., shuffle=True), of several processes "
                "ShardedBatches(..., shuffle=True)."
            )

    def estimate_noise(self, context: FitContext) -> Gaussian:
        """Estimate the noise from the first batch, or take that of the fit that this continues."""
        if self.after is not None:
            likelihood = self.after.left[1].fitted.likelihood
            if type(likelihood) is Gaussian and likelihood.is_assumed:
                return likelihood
        assert isinstance(self.data, Stream)
        return estimate_noise(context, [self.data.first])

    def fit(self, prepared: PreparedFit) -> CurvatureFit:
        """Fit in rounds until the error is within the tolerance, or a budget is spent.

        Raises:
            ValueError: If the data has one example, or weights of examples mean nothing to a block;
                if `after` is of another network; as `factor_sums`.
            KeyboardInterrupt: Before the first round has ended, or of several processes; else it
                ends the fit.
        """
        context = prepared.context
        if any(block.is_joint or block.role == "table" for block in context.blocks):
            raise ValueError(
                'mode="auto" weighs examples, which neither joint=True nor an embedding\'s table '
                'can be: leave out joint, name other parameters (params="last_layer"), or use '
                'mode="full".'
            )
        assert isinstance(self.data, Stream)
        before = 0.0 if self.after is None else self.after.seconds
        clock, ended_by = partial(_seconds, context.ranks, perf_counter() - before), ""
        if self.after is None:
            last, rounds = None, list[tuple[int, float]]()
            reading = Reading(context, self.data.in_step(), self.looks)
        else:
            (reading, last), rounds = self.after.left, [*self.after.rounds]
            _check_same(last.fitted, prepared)
            reading = reading.going_on(context, self.data, self.looks)
        try:
            while not ended_by:
                before, target = clock(), self._target(reading.num_drawn, last)
                further = reading.until(target)
                if further.num_drawn < target:
                    ended_by = "data"
                    break
                reading = further
                last, now = _round(reading, prepared), clock()
                rounds.append((reading.num_drawn, last.error))
                if last.error <= self.tolerance:
                    ended_by = "tolerance"
                elif self.examples is not None and reading.num_drawn >= self.examples:
                    ended_by = "examples"
                elif self.seconds is not None and now + 2 * (now - before) > self.seconds:
                    ended_by = "seconds"
            if ended_by == "data":
                is_bounded = self.seconds is not None or self.examples is not None
                if last is None or not (is_bounded or isinstance(self.data.source, Iterator)):
                    return _exact(prepared, self.data, rounds, clock)
                ended_by = "the end of the data"
        except KeyboardInterrupt:
            if last is None or context.ranks.size > 1:
                raise
            ended_by = "interrupt"
        assert last is not None
        reading.pairs = iter(())  # Workers of a loader end.
        return _reported(last, rounds, ended_by, clock(), self.tolerance, reading)

    def _target(self, num_drawn: int, last: _Round | None) -> int:
        """How many examples shall be drawn in all when the next round ends."""
        target = FIRST_ROUND
        if last is not None:
            # The error falls with the root of the number: twice the tolerance takes four times.
            target = num_drawn * (4 if last.error > 2 * self.tolerance else 2)
        # Decompositions end a round: none is made for less than the budget's last doubling.
        if self.examples is not None and self.examples <= 2 * target:
            return self.examples
        return target


def _seconds(ranks: Ranks, start: float) -> float:
    """Seconds since the start, the same on all processes, which decide by them."""
    return max(ranks.exchange(perf_counter() - start))


def _reported(
    last: _Round,
    rounds: Sequence[tuple[int, float]],
    ended_by: str,
    seconds: float,
    tolerance: float,
    reading: Reading,
) -> CurvatureFit:
    """The fit of the last round, with its report; warns if the tolerance was not reached."""
    # The error that each block brings, by its own part of the variances.
    own, fitted, x = last.fitted.posterior.deltas(), last.fitted, reading.probes
    alone = torch.where(torch.eye(len(own), device=own.device).bool(), own, _WITHOUT * own)
    total = _variances(fitted, fitted.posterior.curvature, x, own[None])
    errors = (_chances(last, x, alone)[1] / (2 * total)).nan_to_num(0.0)
    of_blocks = errors.square().mean((1, 2)).sqrt().tolist()
    report = FitReport(
        rounds[-1][0],
        last.totals.num_examples,
        seconds,
        ended_by,
        tuple(rounds),
        dict(zip(_CURVE, last.curve, strict=True)),
        dict(zip(fitted.parameters.block_names, of_blocks, strict=True)),
        None if ended_by == "tolerance" else (reading, last),
    )
    if ended_by != "tolerance":
        warn(
            f"The tolerance {tolerance:g} was not reached, as the fit was ended by {ended_by}: "
            f"after {report.num_examples:,} examples the error of standard deviations is "
            f"{report.error:.3g}. Twice as many would bring it to some {report.error_of_twice:.3g}."
        )
    return CurvatureFit(fitted.posterior.curvature, last.totals, report)


def _check_same(before: FittedPosterior, prepared: PreparedFit) -> None:
    """Require that a fit goes on with the network that it began with, and in the same way."""
    totals = DataTotals(1, 0.0, 1, 1.0)
    now = build_posterior(prepared, CurvatureFit(before.posterior.curvature, totals))
    if _fit_options(before) != _fit_options(now) or not torch.equal(
        before.posterior.mean, now.posterior.mean
    ):
        raise ValueError(
            "after is the report of a fit of another network, likelihood or way to take the "
            "curvature: leave it out, or fit what it was made for."
        )


def _fit_options(fitted: FittedPosterior) -> tuple[Any, ...]:
    options = fitted.config, repr(fitted.likelihood), fitted.parameters.names
    return *options, fitted.frozen_fingerprint


def _round(reading: Reading, prepared: PreparedFit) -> _Round:
    """The posterior of what was read, and its error."""
    of_all = reading.curvatures
    sums = [fold.factors(float(of_all.mean())) for fold in reading.folds]
    sizes = [fold.num_read for fold in reading.folds]
    curvature, plain, *replicates = crossfit_with_replicates(reading.problem, sizes, sums)
    now = build_posterior(prepared, CurvatureFit(curvature, reading.seen))
    deltas = now.posterior.deltas() * now.posterior.mean.new_tensor(_CURVE)[:, None]
    # The mean curvature's error is told by all that was read: the folds have the same mean.
    spread = float(of_all.std() / of_all.mean()) / len(of_all) ** 0.5
    last = _Round(now, reading.seen, replicates, spread, [])
    variances, chance = _chances(last, reading.probes, deltas)
    in_fold = _variances(now, plain, reading.probes, deltas)
    # Magnitudes out of fold are off by far less than those in fold, but not by nothing.
    bias = (in_fold / variances).log() / 8
    relative = torch.hypot(chance / (2 * variances), bias).nan_to_num(0.0)
    errors = relative.square().mean((1, 2)).sqrt().tolist()
    # All processes decide by the same bits.
    return replace(last, curve=reading.problem.ranks.from_rank(errors, 0))


def _exact(
    prepared: PreparedFit,
    data: Stream,
    rounds: Sequence[tuple[int, float]],
    clock: Callable[[], float],
) -> CurvatureFit:
    """The fit of all the data."""
    if isinstance(data.source, Iterator):
        raise ValueError(
            "The data ended before the first round did, and this iterator cannot be read again: "
            'pass a DataLoader or a list of batches, or use mode="full".'
        )
    curvature_fit = fit_curvature(CurvatureKind("kfac"), prepared.context, data)
    num_data = build_posterior(prepared, curvature_fit).posterior.num_data
    report = FitReport(
        num_data,
        num_data,
        clock(),
        "data",
        (*rounds, (num_data, 0.0)),
        dict.fromkeys(_CURVE, 0.0),
        dict.fromkeys(prepared.parameters.block_names, 0.0),
    )
    return replace(curvature_fit, report=report)


def _chances(
    last: _Round, x: Inputs, deltas: Float[Tensor, "grid blocks"]
) -> tuple[Float[Tensor, "grid inputs outputs"], Float[Tensor, "grid inputs outputs"]]:
    """Variances, and what chance may have made of them: `NUM_ERRORS` of their standard errors."""
    fitted, curvature, scale = last.fitted, last.fitted.posterior.curvature, 1 + last.spread
    own = _variances(fitted, curvature, x, deltas)
    of_mean = _variances(fitted, curvature, x, deltas / scale) / scale - own
    of_folds = jackknife(torch.stack([_variances(fitted, r, x, deltas) for r in last.replicates]))
    return own, NUM_ERRORS * torch.hypot(of_mean, of_folds)


def _variances(
    fitted: FittedPosterior,
    curvature: BlockDiagonal,
    x: Inputs,
    deltas: Float[Tensor, "grid blocks"],
) -> Float[Tensor, "grid inputs outputs"]:
    """Variances of the largest outputs with another curvature, at some prior precisions."""
    fitted = replace(fitted, posterior=replace(fitted.posterior, curvature=curvature))
    with asked_of(fitted, take(x, slice(0, 1))) as asked:
        size = map_outputs(asked.network, asked.x).numel()
    return moments(fitted, x, deltas, True, min(_OUTPUTS, size))[1].double()


def jackknife(of_replicates: Float[Tensor, "folds *values"]) -> Float[Tensor, "*values"]:
    """The standard error of what was computed without each fold."""
    return (of_replicates.var(0, correction=0) * (len(of_replicates) - 1)).sqrt()
