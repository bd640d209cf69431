"""A fit in growing rounds, which says after each how far it is from that of all the data."""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from time import perf_counter

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.fits.crossfit import crossfit_with_replicates
from laplace_debias.curvature.fits.directions import Factor, Rows
from laplace_debias.curvature.fits.kfac import assemble
from laplace_debias.curvature.fits.problem import CurvatureFit, Problem, Seen
from laplace_debias.curvature.fits.sums import FactorSums, eigenbases, factor_sums
from laplace_debias.curvature.network.inputs import Inputs, num_examples, take
from laplace_debias.laplace.fitted import FitReport, Fitted
from laplace_debias.laplace.functional.linearised import moments
from laplace_debias.laplace.schemes import AUTO_FOLDS, FIRST_ROUND, Auto
from laplace_debias.operators import BlockDiagonal
from laplace_debias.system.warn import warn

# Inputs at which the standard deviations of outputs are compared, and the outputs of each.
_PROBES, _OUTPUTS = 16, 4
# Prior precisions at which the error is told, in units of the fit's own.
_CURVE = (1.0, 10.0, 100.0, 1e3, 1e4)
# What leaves a block's variance and takes away that of the others.
_WITHOUT = 1e12
# Standard errors that are told as the error: the true one is rarely larger (see docs/method.md).
NUM_ERRORS = 2.0


def fit_anytime(problem: Problem, scheme: Auto, fitted: Callable[[CurvatureFit], Fitted]) -> Fitted:
    """Fit in rounds until the error is within a tolerance, or a budget is spent.

    Args:
        problem: The network and its blocks.
        scheme: The data, tolerance and budget.
        fitted: Makes the state of a fit.

    Raises:
        ValueError: If the first batch has one example; as `factor_sums`.
        KeyboardInterrupt: Before the first round has ended; later it ends the fit.
    """
    start, rounds = perf_counter(), list[tuple[int, float]]()
    reading = _Reading(problem, iter(scheme.data))
    best: tuple[Fitted, list[BlockDiagonal], int, list[float]] | None = None
    probes: Probes | None = None
    ended_by, target = "", FIRST_ROUND
    try:
        while not ended_by:
            before = perf_counter()
            most = target if scheme.examples is None else min(target, scheme.examples)
            is_more = reading.until(most)
            if not is_more:
                return _exact(problem, reading, fitted, rounds, start)
            curvature, replicates = reading.crossfitted()
            now = fitted(CurvatureFit(curvature, reading.seen))
            if probes is None:
                with torch.no_grad():
                    outputs = now.network(now.moved(reading.probes))
                probes = Probes(reading.probes, min(_OUTPUTS, outputs[0].numel()))
            curve = probes.error(now, replicates, _curve(now)).tolist()
            error = max(curve)
            best = now, replicates, reading.seen.num_examples, curve
            rounds.append((best[2], error))
            seconds, round_seconds = perf_counter() - start, perf_counter() - before
            if error <= scheme.tolerance:
                ended_by = "tolerance"
            elif scheme.examples is not None and most == scheme.examples:
                ended_by = "examples"
            elif scheme.seconds is not None and seconds + 2 * round_seconds > scheme.seconds:
                ended_by = "seconds"
            # The error falls with the root of the number: twice the tolerance takes four times.
            growth = 4 if error > 2 * scheme.tolerance else 2
            target = growth * best[2]
    except KeyboardInterrupt:
        if best is None:
            raise
        ended_by = "interrupt"
    assert best is not None
    assert probes is not None
    now, replicates, seen, curve = best
    of_blocks = probes.of_blocks(now, replicates)
    names = now.parameters.block_names
    report = FitReport(
        seen,
        perf_counter() - start,
        ended_by,
        tuple(rounds),
        dict(zip(_CURVE, curve, strict=True)),
        dict(zip(names, of_blocks, strict=True)),
    )
    if ended_by != "tolerance":
        warn(
            f"The tolerance {scheme.tolerance:g} was not reached, as the fit was ended by "
            f"{ended_by}: after {seen:,} examples the error of standard deviations is "
            f"{report.error:.3g}. Twice as many would bring it to some {report.error_of_twice:.3g}."
        )
    return replace(now, report=report)


class _Reading:
    """What was read so far: factors of each fold, and inputs that are no part of the fit."""

    def __init__(self, problem: Problem, pairs: Iterator[tuple[Inputs, Tensor]]) -> None:
        self.problem, self._pairs = problem, pairs
        self.sums: dict[int, FactorSums] = {}
        self.sizes = [0] * AUTO_FOLDS
        self.seen = Seen(0, 0.0, 0)
        x, y = next(pairs)
        if num_examples(x) < 2:
            raise ValueError(
                'mode="auto" compares fits at inputs of the first batch, which it sets aside: use '
                "batches of two examples or more."
            )
        count = min(_PROBES, num_examples(x) // 2)
        self.probes, self._of_probes = take(x, slice(0, count)), y[:count]
        self._waiting: tuple[Inputs, Tensor] | None = (take(x, slice(count, None)), y[count:])

    def crossfitted(self) -> tuple[BlockDiagonal, list[BlockDiagonal]]:
        """As `crossfit_with_replicates`."""
        sums = [self.sums[fold] for fold in range(AUTO_FOLDS)]
        return crossfit_with_replicates(self.problem, self.sizes, sums)

    def until(self, target: int) -> bool:
        """Read until so many examples are seen; False if the data ends before."""
        read, missing = [], target - self.seen.num_examples
        while missing > 0 and (pair := self._next()) is not None:
            x, y = pair
            if len(y) > missing:
                self._waiting = take(x, slice(missing, None)), y[missing:]
                x, y = take(x, slice(0, missing)), y[:missing]
            read.append((x, y))
            missing -= len(y)
        self._add(read)
        return missing == 0

    def _next(self) -> tuple[Inputs, Tensor] | None:
        waiting, self._waiting = self._waiting, None
        return next(self._pairs, None) if waiting is None else waiting

    def _add(self, read: Sequence[tuple[Inputs, Tensor]]) -> None:
        """Add the factors of new examples, of which every fourth belongs to a fold."""
        parts: list[list[tuple[Inputs, Tensor]]] = [[] for _ in range(AUTO_FOLDS)]
        place = self.seen.num_examples
        for x, y in read:
            for fold in range(AUTO_FOLDS):
                part = slice((fold - place) % AUTO_FOLDS, None, AUTO_FOLDS)
                if len(y[part]):
                    parts[fold].append((take(x, part), y[part]))
            place += len(y)
        for fold, pairs in enumerate(parts):
            if pairs:
                sums, seen = factor_sums(self.problem, pairs, self.seen.num_examples)
                known = self.sums.get(fold)
                self.sums[fold] = sums if known is None else _added(known, sums)
                self.sizes[fold] += seen.num_examples
                self.seen = self.seen + seen

    def add_probes(self) -> None:
        """Make the inputs that were set aside a part of the fit."""
        self._add([(self.probes, self._of_probes)])


def _added(total: FactorSums, more: FactorSums) -> FactorSums:
    def both(a: Factor, b: Factor) -> Factor:
        if isinstance(a, Rows) and isinstance(b, Rows):
            return a + b
        return operator.add(*(f.rows.mT @ f.rows if isinstance(f, Rows) else f for f in (a, b)))

    return {
        block: (both(of[0], more[block][0]), both(of[1], more[block][1]))
        for block, of in total.items()
    }


def _exact(
    problem: Problem,
    reading: _Reading,
    fitted: Callable[[CurvatureFit], Fitted],
    rounds: list[tuple[int, float]],
    start: float,
) -> Fitted:
    """The fit of all the data, which takes no fold."""
    reading.add_probes()
    seen = reading.seen
    bases = eigenbases(problem, reduce(_added, reading.sums.values()), seen.num_examples)
    table = {block: basis.magnitudes for block, basis in bases.items()}
    names = [block.name for block in problem.blocks]
    now = fitted(CurvatureFit(assemble(problem, bases, table), seen))
    report = FitReport(
        seen.num_examples,
        perf_counter() - start,
        "data",
        (*rounds, (seen.num_examples, 0.0)),
        dict.fromkeys(_CURVE, 0.0),
        dict.fromkeys(names, 0.0),
    )
    return replace(now, report=report)


@dataclass(frozen=True)
class Probes:
    """Inputs at which fits are compared, by the standard deviations of their largest outputs.

    Attributes:
        x: The inputs.
        outputs: How many outputs of each.
    """

    x: Inputs
    outputs: int

    def variances(
        self, fitted: Fitted, curvature: BlockDiagonal, deltas: Float[Tensor, "grid blocks"]
    ) -> Float[Tensor, "grid inputs outputs"]:
        """Variances with another curvature, at some prior precisions."""
        fitted = fitted.with_posterior(replace(fitted.posterior, curvature=curvature))
        return moments(fitted, self.x, deltas, True, self.outputs)[1].double()

    def error(
        self,
        fitted: Fitted,
        replicates: Sequence[BlockDiagonal],
        deltas: Float[Tensor, "grid blocks"],
    ) -> Float[Tensor, " grid"]:
        """Twice the standard error of log standard deviations: its root mean square.

        Args:
            fitted: The fit.
            replicates: Curvatures without each fold.
            deltas: Prior precisions.
        """
        logs = [self.variances(fitted, without, deltas).log() / 2 for without in replicates]
        return NUM_ERRORS * jackknife(torch.stack(logs)).square().mean((1, 2)).sqrt()

    def of_blocks(self, fitted: Fitted, replicates: Sequence[BlockDiagonal]) -> list[float]:
        """The same of each block's part of the variances, in units of the whole variances."""
        own = _own(fitted)
        alone = torch.where(torch.eye(len(own), device=own.device).bool(), own, _WITHOUT * own)
        total = self.variances(fitted, fitted.posterior.curvature, own[None])
        parts = torch.stack([self.variances(fitted, without, alone) for without in replicates])
        errors = jackknife(parts) / (2 * total)
        return (NUM_ERRORS * errors.square().mean((1, 2)).sqrt()).tolist()


def jackknife(of_replicates: Float[Tensor, "folds *values"]) -> Float[Tensor, "*values"]:
    """The standard error of what was computed without each fold."""
    num_folds = len(of_replicates)
    # Of an output that no parameter changes the logarithm is infinite, and the same in all.
    deviations = (of_replicates - of_replicates.mean(0)).nan_to_num(0.0)
    return ((num_folds - 1) / num_folds * deviations.square().sum(0)).sqrt()


def _curve(fitted: Fitted) -> Float[Tensor, "grid blocks"]:
    """Prior precisions at which the error is told."""
    return _own(fitted) * fitted.posterior.mean.new_tensor(_CURVE)[:, None]


def _own(fitted: Fitted) -> Float[Tensor, " blocks"]:
    """The prior precision of every block."""
    num_blocks = len(fitted.parameters.block_names)
    return fitted.posterior.prior_precision.expand(num_blocks).to(fitted.posterior.mean)
