"""A fit in growing rounds, which says after each how far it is from that of all the data."""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.fits.crossfit import crossfit_with_replicates
from laplace_debias.curvature.fits.directions import Factor, Rows
from laplace_debias.curvature.fits.kinds import CurvatureKind
from laplace_debias.curvature.fits.problem import CurvatureFit, Problem, Seen
from laplace_debias.curvature.fits.sums import FactorSums, factor_sums
from laplace_debias.curvature.network.batches import Pairs, Stream
from laplace_debias.curvature.network.inputs import Inputs, join, num_examples, take, tensors_of
from laplace_debias.laplace.fitted import FitReport, Fitted
from laplace_debias.laplace.functional.linearised import moments
from laplace_debias.laplace.scale import Looked, output_curvatures
from laplace_debias.laplace.schemes import AUTO_FOLDS, FIRST_ROUND, Auto
from laplace_debias.operators import BlockDiagonal
from laplace_debias.system.warn import warn

# Inputs at which the standard deviations of outputs are compared, and the outputs of each.
_PROBES, _OUTPUTS = 16, 4
# Prior precisions at which the error is told, in units of the fit's own.
_CURVE = (1.0, 10.0, 100.0, 1e3, 1e4)
# What leaves a block's variance and takes away that of the others.
_WITHOUT = 1e12
# How many examples go forward for one that goes backward.
LOOKS = 8
NUM_ERRORS = 2.0
"""Standard errors that are told as the error, which the true one rarely exceeds."""


@dataclass(frozen=True)
class _Round:
    """A fit, its replicates without each fold, and the error at every point of the curve."""

    fitted: Fitted
    replicates: list[BlockDiagonal]
    num_drawn: int
    num_read: int
    curve: list[float]


def fit_anytime(problem: Problem, scheme: Auto, fitted: Callable[[CurvatureFit], Fitted]) -> Fitted:
    """Fit in rounds until the error is within a tolerance, or a budget is spent.

    Args:
        problem: The network and its blocks.
        scheme: The data, tolerance and budget.
        fitted: Makes the state of a fit.

    Raises:
        ValueError: If the first batch has one example, or weights of examples mean nothing to a
            block; as `factor_sums`.
        KeyboardInterrupt: Before the first round has ended; later it ends the fit.
    """
    if any(block.is_joint or block.role == "table" for block in problem.blocks):
        raise ValueError(
            'mode="auto" weighs examples, which neither joint=True nor an embedding\'s table can '
            'be: leave out joint, name other parameters (params="last_layer"), or use mode="full".'
        )
    assert isinstance(scheme.data, Stream)
    start, rounds = perf_counter(), list[_Round]()
    reading = _Reading(problem, iter(scheme.data))
    ended_by, target = "", FIRST_ROUND
    try:
        while not ended_by:
            before = perf_counter()
            if not reading.until(min(target, scheme.examples or target)):
                ended_by = "data"
                break
            rounds.append(_round(reading, fitted))
            error, now = max(rounds[-1].curve), perf_counter()
            if error <= scheme.tolerance:
                ended_by = "tolerance"
            elif scheme.examples is not None and reading.num_drawn >= scheme.examples:
                ended_by = "examples"
            elif scheme.seconds is not None and now - start + 2 * (now - before) > scheme.seconds:
                ended_by = "seconds"
            # The error falls with the root of the number: twice the tolerance takes four times.
            growth = 4 if error > 2 * scheme.tolerance else 2
            target = growth * reading.num_drawn
        if ended_by == "data":
            is_bounded = scheme.seconds is not None or scheme.examples is not None
            if not rounds or not (is_bounded or isinstance(scheme.data.source, Iterator)):
                return _exact(problem, scheme.data, fitted, rounds, start)
            ended_by = "the end of the data"
    except KeyboardInterrupt:
        if not rounds:
            raise
        ended_by = "interrupt"
    last = rounds[-1]
    report = FitReport(
        last.num_drawn,
        last.num_read,
        perf_counter() - start,
        ended_by,
        tuple((of.num_drawn, max(of.curve)) for of in rounds),
        dict(zip(_CURVE, last.curve, strict=True)),
        _of_blocks(last, reading.probes),
    )
    if ended_by != "tolerance":
        warn(
            f"The tolerance {scheme.tolerance:g} was not reached, as the fit was ended by "
            f"{ended_by}: after {last.num_drawn:,} examples the error of standard deviations is "
            f"{report.error:.3g}. Twice as many would bring it to some {report.error_of_twice:.3g}."
        )
    return replace(last.fitted, report=report)


def _round(reading: "_Reading", fitted: Callable[[CurvatureFit], Fitted]) -> _Round:
    """The posterior of what was read, and its error."""
    sums, sizes = [fold.calibrated() for fold in reading.folds], [f.num_read for f in reading.folds]
    curvature, plain, replicates = crossfit_with_replicates(reading.problem, sizes, sums)
    now = fitted(CurvatureFit(curvature, reading.seen))
    deltas = _own(now) * now.posterior.mean.new_tensor(_CURVE)[:, None]
    crossed, biased, *logs = [
        _variances(now, of, reading.probes, deltas).log() / 2
        for of in (curvature, plain, *replicates)
    ]
    # The true variance lies between those of magnitudes in fold and out of fold.
    bias = (biased - crossed).nan_to_num(0.0) / 2
    chance = NUM_ERRORS * jackknife(torch.stack(logs))
    errors = (chance.square() + bias.square()).mean((1, 2)).sqrt()
    return _Round(now, replicates, reading.num_drawn, reading.seen.num_examples, errors.tolist())


def _exact(
    problem: Problem,
    data: Stream,
    fitted: Callable[[CurvatureFit], Fitted],
    rounds: Sequence[_Round],
    start: float,
) -> Fitted:
    """The fit of all the data.

    Raises:
        ValueError: If it cannot be read again.
    """
    if isinstance(data.source, Iterator):
        raise ValueError(
            "The data ended before the first round did, and this iterator cannot be read again: "
            'pass a DataLoader or a list of batches, or use mode="full".'
        )
    now = fitted(CurvatureKind("kfac").fit(problem, data, None))
    num_data = now.posterior.num_data
    report = FitReport(
        num_data,
        num_data,
        perf_counter() - start,
        "data",
        (*((of.num_drawn, max(of.curve)) for of in rounds), (num_data, 0.0)),
        dict.fromkeys(_CURVE, 0.0),
        dict.fromkeys(now.parameters.block_names, 0.0),
    )
    return replace(now, report=report)


def _of_blocks(last: _Round, x: Inputs) -> dict[str, float]:
    """The error that each block brings, by its own part of the variances."""
    own, names = _own(last.fitted), last.fitted.parameters.block_names
    alone = torch.where(torch.eye(len(own), device=own.device).bool(), own, _WITHOUT * own)
    total = _variances(last.fitted, last.fitted.posterior.curvature, x, own[None])
    parts = torch.stack([_variances(last.fitted, r, x, alone) for r in last.replicates])
    errors = (jackknife(parts) / (2 * total)).square().mean((1, 2)).sqrt()
    return dict(zip(names, (NUM_ERRORS * errors).tolist(), strict=True))


def _variances(
    fitted: Fitted, curvature: BlockDiagonal, x: Inputs, deltas: Float[Tensor, "grid blocks"]
) -> Float[Tensor, "grid inputs outputs"]:
    """Variances of the largest outputs with another curvature, at some prior precisions."""
    fitted = fitted.with_posterior(replace(fitted.posterior, curvature=curvature))
    with torch.no_grad():
        outputs = fitted.network(fitted.moved(take(x, slice(0, 1))))
    return moments(fitted, x, deltas, True, min(_OUTPUTS, outputs.numel()))[1].double()


def _own(fitted: Fitted) -> Float[Tensor, " blocks"]:
    """The prior precision of every block."""
    num_blocks = len(fitted.parameters.block_names)
    return fitted.posterior.prior_precision.expand(num_blocks).to(fitted.posterior.mean)


def jackknife(of_replicates: Float[Tensor, "folds *values"]) -> Float[Tensor, "*values"]:
    """The standard error of what was computed without each fold."""
    num_folds = len(of_replicates)
    # Of an output that no parameter changes the logarithm is infinite, and the same in all.
    deviations = (of_replicates - of_replicates.mean(0)).nan_to_num(0.0)
    return ((num_folds - 1) / num_folds * deviations.square().sum(0)).sqrt()


def inclusion(
    curvatures: Float[Tensor, " batch"], mean: float, looks: int = LOOKS
) -> Float[Tensor, " batch"]:
    """With what probability examples are drawn: one of `looks`, and more where the loss curves.

    Half of it is the same for all, so that no weight is above twice `looks`; the other half is
    proportional to an example's curvature.

    Args:
        curvatures: As `output_curvatures` gives them.
        mean: Their mean over what was read.
        looks: How many go forward for one that is drawn.
    """
    share = curvatures / mean if mean > 0 else torch.ones_like(curvatures)
    return ((1 + share) / (2 * looks)).clamp_max(1)


@dataclass
class _Fold:
    """A fold: factors of the examples drawn, and what they stand for.

    Attributes:
        sums: Factors of the examples drawn, weighed by their inverse probabilities.
        num_read: How many examples were read.
        weights: The sum of the weights of those drawn.
        curvature: That of the curvatures of all that was read.
        weighed: That of the weighed curvatures of those drawn.
    """

    sums: FactorSums | None = None
    num_read: int = 0
    weights: float = 0.0
    curvature: float = 0.0
    weighed: float = 0.0

    def calibrated(self) -> FactorSums:
        """Factors as of all that was read: A of their number, G of their curvature.

        Raises:
            ValueError: If none of the examples drawn has curvature.
        """
        if self.sums is None or not self.weighed:
            raise ValueError(
                "The loss of the examples at hand has no curvature in the outputs, all of which "
                'are certain: use mode="full".'
            )
        of_G, of_A = self.curvature / self.weighed, self.num_read / self.weights
        return {block: (_times(G, of_G), _times(A, of_A)) for block, (G, A) in self.sums.items()}


class _Reading:
    """Examples that were read.

    Everything that is read goes forward. Of it examples are drawn that go backward, with weights
    that are the inverse of the probability with which each was drawn.

    Args:
        problem: The network and its blocks.
        pairs: The data, of which inputs are set aside.

    Attributes:
        probes: Inputs that are no part of the fit.
        folds: What was read of each fold.
        seen: All that was read.
        num_drawn: How many examples went backward.

    Raises:
        ValueError: If the first batch has one example.
    """

    def __init__(self, problem: Problem, pairs: Iterator[tuple[Any, ...]]) -> None:
        self.problem = problem
        self.folds = [_Fold() for _ in range(AUTO_FOLDS)]
        self.seen, self.num_drawn, self._curvature = Seen(0, 0.0, 0, 0), 0, 0.0
        self._generator = torch.Generator().manual_seed(0)
        x, y, *weights = next(pairs)
        if num_examples(x) < 2:
            raise ValueError(
                'mode="auto" compares fits at inputs of the first batch, which it sets aside: use '
                "batches of two examples or more."
            )
        count = min(_PROBES, num_examples(x) // 2)
        self.probes = take(x, slice(0, count))
        rest = take(x, slice(count, None)), y[count:], *weights
        self._looked = output_curvatures(problem, _chained(rest, pairs))

    def until(self, target: int) -> bool:
        """Read until so many examples are drawn; False if the data ends before."""
        drawn: list[list[tuple[Inputs, Tensor, Tensor]]] = [[] for _ in self.folds]
        num_drawn = self.num_drawn
        while num_drawn < target and (looked := next(self._looked, None)) is not None:
            num_drawn += self._draw(looked, drawn)
        for fold, parts in zip(self.folds, drawn, strict=True):
            if parts:
                sums, seen = factor_sums(self.problem, _joined(parts), self.num_drawn)
                self.num_drawn += seen.num_examples
                fold.sums = sums if fold.sums is None else _added(fold.sums, sums)
        return num_drawn >= target

    def _draw(self, looked: Looked, drawn: list[list[tuple[Inputs, Tensor, Tensor]]]) -> int:
        """Draw examples of a batch, of which every fourth belongs to a fold; how many they are."""
        traces, size, count = looked.traces.cpu(), len(looked.y), 0
        self._curvature += float(traces.sum())
        fold_of = (self.seen.num_examples + torch.arange(size)) % len(self.folds)
        self.seen = self.seen + Seen(size, float(looked.nll), looked.num_outputs, size)
        chances = inclusion(traces, self._curvature / self.seen.num_examples)
        is_drawn = torch.rand(size, generator=self._generator, dtype=torch.float64) < chances
        for number, fold in enumerate(self.folds):
            own = fold_of == number
            fold.num_read += int(own.sum())
            fold.curvature += float(traces[own].sum())
            chosen = (own & is_drawn).nonzero()[:, 0]
            if len(chosen):
                weights = chances[chosen].reciprocal()
                fold.weights += float(weights.sum())
                fold.weighed += float((weights * traces[chosen]).sum())
                drawn[number].append((take(looked.x, chosen), looked.y[chosen], weights))
                count += len(chosen)
        return count


def _joined(
    parts: Sequence[tuple[Inputs, Tensor, Tensor]],
) -> list[tuple[Inputs, Tensor, Tensor]]:
    """Drawn examples as one batch, if they are alike."""
    xs, ys, weights = (list(of) for of in zip(*parts, strict=True))
    shapes = {tuple(t.shape[1:] for t in (*tensors_of(x), y)) for x, y, _ in parts}
    if len(shapes) > 1:
        return list(parts)
    return [(join(xs), torch.cat(ys), torch.cat(weights))]


def _chained(first: tuple[Any, ...], pairs: Pairs) -> Pairs:
    if len(first[1]):
        yield first
    yield from pairs


def _times(factor: Factor, number: float) -> Factor:
    return Rows(factor.rows * number**0.5) if isinstance(factor, Rows) else factor * number


def _added(total: FactorSums, more: FactorSums) -> FactorSums:
    def both(a: Factor, b: Factor) -> Factor:
        if isinstance(a, Rows) and isinstance(b, Rows):
            return a + b
        return operator.add(*(f.rows.mT @ f.rows if isinstance(f, Rows) else f for f in (a, b)))

    return {
        block: (both(of[0], more[block][0]), both(of[1], more[block][1]))
        for block, of in total.items()
    }
