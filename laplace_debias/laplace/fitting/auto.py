"""A fit in increasingly large rounds, each of which estimates its own error."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, SupportsIndex

import torch
from torch.utils.data import SequentialSampler, Subset

from laplace_debias.curvature.data.batches import Batches, Stream
from laplace_debias.curvature.data.dataset_size import TrainingSize, training_size
from laplace_debias.curvature.data.shards import ShardedBatches
from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.curvature.network.fingerprints import fingerprint
from laplace_debias.curvature.structures import CurvatureStructure
from laplace_debias.curvature.structures.kfac import KfacCurvature
from laplace_debias.laplace.fitting.fit_stream import FitStream
from laplace_debias.laplace.fitting.importance_sampler import ImportanceSampler, SampledSums
from laplace_debias.laplace.fitting.noise import estimate_noise
from laplace_debias.laplace.fitting.prepared import PreparedFit
from laplace_debias.laplace.fitting.rounds import CURVE, Round, errors_by_block, fit_round
from laplace_debias.laplace.fitting.schemes import Scheme
from laplace_debias.laplace.state.fit_report import FitReport, StopReason
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.system.checks import real, whole
from laplace_debias.system.ranks import Ranks
from laplace_debias.system.shown import warn

FIRST_ROUND = 64
"""The number of examples drawn in the first round."""
FORWARD_RATIO = 8
"""The number of examples passed forward per example passed backward."""
_MIN_EXAMPLES = 16


@dataclass(frozen=True, eq=False)
class Continuation:
    """The state of an unfinished fit, from which a later fit continues.

    Attributes:
        sums: The sums over the examples that have been read.
        last_round: The posterior after the last round, and its error.
    """

    sums: SampledSums
    last_round: Round


@dataclass
class _Progress:
    """The progress of a fit that is running.

    Attributes:
        sampler: The reader of the data.
        sums: The sums over the examples that have been read.
        clock: A function that returns the seconds since the start, including those of an earlier
            fit.
        last_round: The posterior after the last round, and its error; None before the first one.
        rounds: For each round, the number of examples drawn so far, and the error.
    """

    sampler: ImportanceSampler
    sums: SampledSums
    clock: Callable[[], float]
    last_round: Round | None = None
    rounds: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Auto(Scheme):
    """A fit that stops reading examples once its error is within a tolerance.

    The fit cross-fits increasingly large random samples. After each round, it estimates how much
    the standard deviations of the outputs still differ from a fit to all data, and stops once the
    estimate is below the tolerance or a budget is used up. The estimate covers prior precisions
    from the current value to 10⁴ times that value, so it remains valid after tuning.

    The first batch decides which layers a hard gate hides from some examples, as in a mixture of
    experts, because most examples are only passed forward. A gate that removes only examples of
    later batches is noticed at the end of a round, from the examples that were passed backward.

    Attributes:
        data: Randomly ordered batches `(x, y)`, of which only as many as needed are read.
        tolerance: The relative error at which the fit stops.
        seconds: Time budget; the fit stops if one more round would exceed it.
        examples: Stop after this many examples have been drawn for the backward pass, rounded up to
            full batches.
        forward_ratio: The number of examples read per example drawn for the backward pass.
        after: The `fit_report` of an earlier fit that missed its tolerance or was interrupted. The
            new fit continues after the last round of the earlier fit, whose examples and seconds
            count towards the budgets. The data must be the same. Batches that were already read are
            skipped, unless the data is an iterator.

    Raises:
        TypeError: If a number has the wrong type.
        ValueError: If the tolerance or the seconds are not positive, `examples` is below 16, the
            forward ratio is below 1, or `after` is the report of a fit that reached its tolerance
            or used all the data.
    """

    label = "auto"
    is_resumable = False
    reads_all = False
    data: Batches
    tolerance: float = 0.05
    seconds: float | None = None
    examples: int | None = None
    forward_ratio: int = FORWARD_RATIO
    after: FitReport | None = None

    def __post_init__(self) -> None:
        for name in ("tolerance", "seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < float(real(value, name)) < math.inf:
                raise ValueError(
                    f"`{name}` must be positive and finite, got {value}. Pass a positive number."
                )
        if self.examples is not None:
            whole(self.examples, "examples", _MIN_EXAMPLES)
        whole(self.forward_ratio, "forward_ratio")
        if self.after is not None and self.after.continuation is None:
            raise ValueError(
                "`after=` is the report of a fit that reached its tolerance or used all the "
                "data, so the fit cannot be continued. Remove `after=`."
            )

    @property
    def sources(self) -> Mapping[str, Batches]:
        """The data that the fit reads."""
        return {"data": self.data}

    def training_size(self, num_data: SupportsIndex | None) -> TrainingSize:
        """Return the number of training examples N."""
        return training_size(self.data, num_data, self.label, reads_whole_loader=False)

    def check(self, structure: CurvatureStructure) -> None:
        """Check that the curvature is K-FAC and that the data are in random order."""
        if not isinstance(structure, KfacCurvature):
            raise ValueError(
                f'`mode="auto"` requires `curvature="kfac"`, got {structure.name!r}. Use '
                '`curvature="kfac"`, or another mode.'
            )
        if structure.rank is not None:
            raise ValueError(
                '`rank=` cannot be combined with `mode="auto"`, because the error '
                'estimate of `mode="auto"` does not include the error from reducing the '
                "rank. Remove `rank=`. For a smaller posterior, call la.thin(x) after "
                "tuning."
            )
        if _is_in_order(self.data):
            raise ValueError(
                '`mode="auto"` uses only the first examples, but this loader yields them '
                "in the order of the data set. Use DataLoader(..., shuffle=True). With "
                "several processes, use ShardedBatches(..., shuffle=True)."
            )

    def estimate_noise(self, context: FitContext, streams: Sequence[Stream]) -> Gaussian:
        """Estimate the noise from the first batch, or reuse the noise of the earlier fit."""
        if self.after is not None:
            likelihood = _continuation(self.after).last_round.fitted.likelihood
            if isinstance(likelihood, Gaussian) and likelihood.is_assumed:
                return likelihood
        (data,) = streams
        return estimate_noise(context, data.first, filter(None, [data.first]))

    def fit(self, prepared: PreparedFit) -> CurvatureFit:
        """Fit in rounds until the error is within the tolerance, or a budget is used up.

        Raises:
            ValueError: If the data has only one example; if `after` is the report of a fit with a
                different network.
            KeyboardInterrupt: If the fit is interrupted before the first round has ended, or with
                several processes. A later interrupt ends the fit without an error.
        """
        (data,) = prepared.streams
        progress = self._start(prepared, data)
        try:
            stop_reason = self._run_rounds(progress, prepared)
            if stop_reason is StopReason.END_OF_DATA and self._uses_all(data, progress):
                return self._fit_all(prepared, data, progress)
        except KeyboardInterrupt:
            if progress.last_round is None or prepared.context.ranks.size > 1:
                raise
            stop_reason = StopReason.INTERRUPT
        last_round = progress.last_round
        assert last_round is not None
        report = _report(last_round, progress, stop_reason)
        if stop_reason is not StopReason.TOLERANCE:
            _warn_of_error(report, self.tolerance)
        posterior = last_round.fitted.posterior
        return CurvatureFit(posterior.curvature, last_round.totals, posterior.factor_scales, report)

    def _start(self, prepared: PreparedFit, data: FitStream) -> _Progress:
        """Begin a new fit, or continue the fit that `after` reports."""
        context = prepared.context
        if self.after is None:
            batches = iter(data.stream)
            sampler, sums = ImportanceSampler.start(context, batches, self.forward_ratio)
            clock = partial(_seconds_since, perf_counter(), context.ranks)
            return _Progress(sampler, sums, clock)
        earlier = _continuation(self.after)
        _check_same_fit(earlier.last_round.fitted, prepared)
        sampler = ImportanceSampler.after(earlier.sums, context, data.stream, self.forward_ratio)
        # The seconds of the earlier fit count, as if this fit had started that much earlier.
        started = perf_counter() - self.after.seconds
        return _Progress(
            sampler,
            earlier.sums,
            clock=partial(_seconds_since, started, context.ranks),
            last_round=earlier.last_round,
            rounds=list(self.after.rounds),
        )

    def _run_rounds(self, progress: _Progress, prepared: PreparedFit) -> StopReason:
        """Run rounds until the fit ends, and return the reason."""
        while True:
            round_started = progress.clock()
            target = self._target(progress.sums.num_drawn, progress.last_round)
            sums = progress.sampler.read(progress.sums, target)
            if sums.num_drawn < target:
                return StopReason.END_OF_DATA
            progress.sums = sums
            progress.last_round = fit_round(sums, prepared)
            error = progress.last_round.error
            progress.rounds.append((sums.num_drawn, error))
            stop_reason = self._reason_to_stop(
                sums.num_drawn, error, round_started, progress.clock()
            )
            if stop_reason is not None:
                return stop_reason

    def _uses_all(self, data: FitStream, progress: _Progress) -> bool:
        """Whether to fit all data without sampling, because they ended before the fit was done."""
        if progress.last_round is None:
            return True
        has_budget = self.seconds is not None or self.examples is not None
        return not has_budget and not isinstance(data.stream.source, Iterator)

    def _fit_all(self, prepared: PreparedFit, data: FitStream, progress: _Progress) -> CurvatureFit:
        """Fit to all data without sampling."""
        if isinstance(data.stream.source, Iterator):
            raise ValueError(
                "The data ended before the first round of the fit was complete, and this "
                "iterator cannot be read again. Pass a DataLoader or a list of batches, "
                'or use `mode="full"`.'
            )
        curvature_fit = KfacCurvature().fit(prepared.context, data)
        report = _report_on_all(prepared, curvature_fit, progress)
        if report.ended_by is not StopReason.ALL_DATA:
            _warn_of_error(report, self.tolerance)
        return replace(curvature_fit, report=report)

    def _target(self, num_drawn: int, last_round: Round | None) -> int:
        """Return the total number of examples to draw by the end of the next round."""
        target = FIRST_ROUND
        if last_round is not None:
            # The error is inversely proportional to the square root of the number of examples, so
            # an error of twice the tolerance needs four times as many examples.
            growth = 4 if last_round.error > 2 * self.tolerance else 2
            target = growth * num_drawn
        # Each round ends with decompositions. If the target is at least half of the budget, the
        # next round uses the whole budget, which saves the decompositions of one round.
        if self.examples is not None and self.examples <= 2 * target:
            return self.examples
        return target

    def _reason_to_stop(
        self, num_drawn: int, error: float, started: float, ended: float
    ) -> StopReason | None:
        """Return the reason why the fit ends after a round, or None if the fit continues."""
        if error <= self.tolerance:
            return StopReason.TOLERANCE
        if self.examples is not None and num_drawn >= self.examples:
            return StopReason.EXAMPLES
        # The next round usually draws as many examples as all rounds so far, so it takes about
        # twice as long as this one.
        if self.seconds is not None and ended + 2 * (ended - started) > self.seconds:
            return StopReason.SECONDS
        return None


def _continuation(report: FitReport) -> Continuation:
    """Return the state from which a later fit continues; `Auto` has checked that it exists."""
    assert isinstance(report.continuation, Continuation)
    return report.continuation


def _is_in_order(data: Any) -> bool:
    """Whether a loader yields its examples in the order of the data set."""
    batches = getattr(data, "batch_sampler", None)
    if isinstance(batches, ShardedBatches):
        data_set: Any = batches.data
        is_in_order = not batches.shuffle
    else:
        sampler = getattr(batches, "sampler", None)
        data_set = getattr(sampler, "data_source", None)
        is_in_order = isinstance(sampler, SequentialSampler)
    if isinstance(data_set, Subset):
        indices = list(data_set.indices)
        return is_in_order and indices == sorted(indices)
    return is_in_order


def _seconds_since(start: float, ranks: Ranks) -> float:
    """Return the seconds since the start, as the same number on all processes."""
    return max(ranks.exchange(perf_counter() - start))


def _report(last_round: Round, progress: _Progress, stop_reason: StopReason) -> FitReport:
    """Report the last round and the contribution of each block to its error."""
    fitted = last_round.fitted
    errors = errors_by_block(last_round, progress.sums.probes)
    num_examples, _ = progress.rounds[-1]
    continuation = None
    if stop_reason is not StopReason.TOLERANCE:
        continuation = Continuation(progress.sums, last_round)
    return FitReport(
        num_examples=num_examples,
        num_read=last_round.totals.num_examples,
        seconds=progress.clock(),
        ended_by=stop_reason,
        rounds=tuple(progress.rounds),
        curve=dict(zip(CURVE, last_round.curve, strict=True)),
        error_by_block=dict(zip(fitted.parameters.block_names, errors, strict=True)),
        continuation=continuation,
    )


def _warn_of_error(report: FitReport, tolerance: float) -> None:
    """Warn that a fit ended before it reached its tolerance, and state the remaining error."""
    reasons = {
        StopReason.SECONDS: "Stopped by the time budget",
        StopReason.EXAMPLES: "Stopped by the budget of examples",
        StopReason.INTERRUPT: "Interrupted",
        StopReason.END_OF_DATA: "The data ended",
    }
    reason = f"{reasons[report.ended_by]} before the fit reached the tolerance of {tolerance:g}."
    if math.isnan(report.error):
        warn(
            f"{reason} It used all {report.num_examples:,} examples of the data, which are fewer "
            "than the number of training examples. The error of the standard deviations is "
            "unknown. Check `num_data=`, or pass more data."
        )
        return
    warn(
        f"{reason} After {report.num_examples:,} examples, the estimated error of the standard "
        f"deviations is {report.error:.3g}. Twice as many examples would reduce it to about "
        f"{report.error_with_twice_the_examples:.3g}."
    )


def _check_same_fit(earlier: FittedPosterior, prepared: PreparedFit) -> None:
    """Require that the network and the options are the same as in the earlier fit."""
    spec = prepared.setup.spec
    names = prepared.parameters.names
    is_same = (
        earlier.config == prepared.config
        and repr(earlier.likelihood) == repr(spec.likelihood)
        and earlier.parameters.names == names
        and torch.equal(earlier.posterior.mean, prepared.parameters.flattened(spec.plain_model))
        and earlier.fitted_model.frozen_fingerprint == fingerprint(spec.plain_model, names)
    )
    if not is_same:
        raise ValueError(
            "`after=` is the report of a fit with a different network, likelihood or curvature. "
            "Remove `after=`, or pass the report of an earlier fit of this posterior."
        )


def _report_on_all(
    prepared: PreparedFit, curvature_fit: CurvatureFit, progress: _Progress
) -> FitReport:
    """Report on a fit to all the data.

    If the data has fewer than N examples, the error relative to a fit to N examples is bounded by
    the estimate for the last round, which used only some of the examples. If no round was
    completed, the error is unknown.
    """
    num_read = curvature_fit.totals.num_examples
    weight = curvature_fit.totals.weight
    is_complete = weight >= prepared.size.after_reading(weight)
    if not is_complete and progress.last_round is not None:
        report = _report(progress.last_round, progress, StopReason.END_OF_DATA)
        return replace(
            report,
            num_examples=num_read,
            num_read=num_read,
            rounds=(*report.rounds, (num_read, report.error)),
            continuation=None,
        )
    if is_complete:
        error = 0.0
        stop_reason = StopReason.ALL_DATA
    else:
        error = math.nan
        stop_reason = StopReason.END_OF_DATA
    return FitReport(
        num_examples=num_read,
        num_read=num_read,
        seconds=progress.clock(),
        ended_by=stop_reason,
        rounds=(*progress.rounds, (num_read, error)),
        curve=dict.fromkeys(CURVE, error),
        error_by_block=dict.fromkeys(prepared.parameters.block_names, error),
    )
