"""A fit in growing rounds, which says after each how far it is from that of all the data."""

import math
import operator
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from time import perf_counter
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import SequentialSampler, Subset

from laplace_debias.curvature.fits.crossfit import crossfit_with_replicates
from laplace_debias.curvature.fits.directions import Factor, Rows
from laplace_debias.curvature.fits.forward import ForwardPasses
from laplace_debias.curvature.fits.kinds import CurvatureKind
from laplace_debias.curvature.fits.problem import CurvatureFit, Problem, Seen
from laplace_debias.curvature.fits.sums import FactorSums, SideSums, factor_sums, owned_factors
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.network.batches import Batches, Placed, Stream
from laplace_debias.curvature.network.inputs import Inputs, join, take, tensors_of
from laplace_debias.curvature.network.outputs import Faults
from laplace_debias.curvature.network.shards import FAR, ShardedBatches
from laplace_debias.laplace.data_size import Expected, expected_of_loader
from laplace_debias.laplace.fitted import FitReport, Fitted
from laplace_debias.laplace.functional.linearised import moments
from laplace_debias.laplace.scale import check_unweighed, looked
from laplace_debias.laplace.schemes import Finish, Scheme
from laplace_debias.operators import BlockDiagonal
from laplace_debias.system.checks import real, whole
from laplace_debias.system.ranks import Ranks
from laplace_debias.system.shown import warn

AUTO_FOLDS = 4
"""Folds, by whose differences the error is told."""
FIRST_ROUND = 64
"""Examples of the first round."""
LOOKS = 8
"""How many examples go forward for one that goes backward."""
_LEAST = 16
# Inputs at which the standard deviations of outputs are compared, and the outputs of each.
_PROBES, _OUTPUTS = 16, 4
# Prior precisions at which the error is told, in units of the fit's own.
_CURVE = (1.0, 10.0, 100.0, 1e3, 1e4)
# What leaves a block's variance and takes away that of the others.
_WITHOUT = 1e12
Factors = dict[Block, Factor]
NUM_ERRORS = 1.75
"""Standard errors that are told as the error, which the true one rarely exceeds."""


@dataclass(frozen=True)
class _Round:
    """A fit, its replicates without each fold, and the error at every point of the curve."""

    fitted: Fitted
    replicates: list[BlockDiagonal]
    num_drawn: int
    num_read: int
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
    saves = False
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

    def expected(self, num_data: SupportsIndex | None) -> Expected:
        """N, which the loader tells if the user does not; raises as `expected_of_loader`."""
        return expected_of_loader(self.data, num_data, self.mode)

    def check(self, kind: CurvatureKind) -> None:
        """Require K-FAC and data in random order, of which a subset such as `random_split`'s is.

        Raises:
            ValueError: Otherwise.
        """
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

    def fit(self, kind: CurvatureKind, problem: Problem, fitted: Finish) -> Fitted:
        """Fit in rounds until the error is within the tolerance, or a budget is spent.

        Raises:
            ValueError: If the first batch has one example, or weights of examples mean nothing to a
                block; if `after` is of another network; as `factor_sums`.
            KeyboardInterrupt: Before the first round has ended, or of several processes; else it
                ends the fit.
        """
        if any(block.is_joint or block.role == "table" for block in problem.blocks):
            raise ValueError(
                'mode="auto" weighs examples, which neither joint=True nor an embedding\'s table '
                'can be: leave out joint, name other parameters (params="last_layer"), or use '
                'mode="full".'
            )
        assert isinstance(self.data, Stream)
        clock = _Clock(problem.ranks, 0.0 if self.after is None else self.after.seconds)
        if self.after is None:
            last, rounds = None, list[tuple[int, float]]()
            reading = _Reading(problem, iter(self.data), self.looks)
        else:
            (reading, last), rounds = self.after.left, [*self.after.rounds]
            _check_same(last.fitted, fitted)
            reading = reading.going_on(problem, self.data, self.looks)
        ended_by = ""
        try:
            while not ended_by:
                before, target = clock(), self._target(last)
                further = reading.until(target)
                if further.num_drawn < target:
                    ended_by = "data"
                    break
                reading = further
                last, now = _round(reading, fitted), clock()
                rounds.append((last.num_drawn, last.error))
                if last.error <= self.tolerance:
                    ended_by = "tolerance"
                elif self.examples is not None and reading.num_drawn >= self.examples:
                    ended_by = "examples"
                elif self.seconds is not None and now + 2 * (now - before) > self.seconds:
                    ended_by = "seconds"
            if ended_by == "data":
                is_bounded = self.seconds is not None or self.examples is not None
                if last is None or not (is_bounded or isinstance(self.data.source, Iterator)):
                    return _exact(problem, self.data, fitted, rounds, clock)
                ended_by = "the end of the data"
        except KeyboardInterrupt:
            if last is None or problem.ranks.size > 1:
                raise
            ended_by = "interrupt"
        assert last is not None
        return _reported(last, rounds, ended_by, clock(), self.tolerance, reading)

    def _target(self, last: _Round | None) -> int:
        """How many examples shall be drawn in all when the next round ends."""
        target = FIRST_ROUND
        if last is not None:
            # The error falls with the root of the number: twice the tolerance takes four times.
            target = last.num_drawn * (4 if last.error > 2 * self.tolerance else 2)
        # Decompositions end a round: none is made for less than the budget's last doubling.
        if self.examples is not None and self.examples <= 2 * target:
            return self.examples
        return target


class _Clock:
    """Seconds since the start, the same on all processes, which decide by them."""

    def __init__(self, ranks: Ranks, before: float) -> None:
        self._ranks, self._start = ranks, perf_counter() - before

    def __call__(self) -> float:
        return max(self._ranks.exchange(perf_counter() - self._start))


def _reported(
    last: _Round,
    rounds: Sequence[tuple[int, float]],
    ended_by: str,
    seconds: float,
    tolerance: float,
    reading: "_Reading",
) -> Fitted:
    """The fit of the last round, with its report; warns if the tolerance was not reached."""
    reading.pairs = iter(())  # Workers of a loader end.
    report = FitReport(
        last.num_drawn,
        last.num_read,
        seconds,
        ended_by,
        tuple(rounds),
        dict(zip(_CURVE, last.curve, strict=True)),
        _of_blocks(last, reading.probes),
        None if ended_by == "tolerance" else (reading, last),
    )
    if ended_by != "tolerance":
        warn(
            f"The tolerance {tolerance:g} was not reached, as the fit was ended by {ended_by}: "
            f"after {last.num_drawn:,} examples the error of standard deviations is "
            f"{report.error:.3g}. Twice as many would bring it to some {report.error_of_twice:.3g}."
        )
    return replace(last.fitted, report=report)


def _check_same(before: Fitted, fitted: Finish) -> None:
    """Require that a fit goes on with the network that it began with, and in the same way."""
    now = fitted(CurvatureFit(before.posterior.curvature, Seen(1, 0.0, 1, 1.0)))
    both = [
        (f.subject.settings, repr(f.subject.likelihood), f.subject.known.names, f.others)
        for f in (before, now)
    ]
    if both[0] != both[1] or not torch.equal(before.posterior.mean, now.posterior.mean):
        raise ValueError(
            "after is the report of a fit of another network, likelihood or way to take the "
            "curvature: leave it out, or fit what it was made for."
        )


def _round(reading: "_Reading", fitted: Finish) -> _Round:
    """The posterior of what was read, and its error."""
    sums, sizes = [fold.factors() for fold in reading.folds], [f.num_read for f in reading.folds]
    curvature, plain, *replicates = crossfit_with_replicates(reading.problem, sizes, sums)
    now = fitted(CurvatureFit(curvature, reading.seen))
    deltas = _own(now) * now.posterior.mean.new_tensor(_CURVE)[:, None]
    crossed, biased, *logs = [
        _variances(now, of, reading.probes, deltas).log() / 2
        for of in (curvature, plain, *replicates)
    ]
    # The true variance lies between those of magnitudes in fold and out of fold.
    bias = (biased - crossed).nan_to_num(0.0) / 2
    chance = NUM_ERRORS * jackknife(torch.stack(logs))
    errors = (chance.square() + bias.square()).mean((1, 2)).sqrt().tolist()
    # All processes decide by the same bits.
    errors = reading.problem.ranks.from_rank(errors, 0)
    return _Round(now, replicates, reading.num_drawn, reading.seen.num_examples, errors)


def _exact(
    problem: Problem,
    data: Stream,
    fitted: Finish,
    rounds: Sequence[tuple[int, float]],
    clock: _Clock,
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
        clock(),
        "data",
        (*rounds, (num_data, 0.0)),
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
    curvatures: Float[Tensor, " batch"], mean: float, looks: int
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
    """A fold: factors of the examples drawn, and of all that was read.

    Attributes:
        gradients: G of the examples drawn, weighed by their inverse probabilities.
        inputs: A of all that was read.
        num_read: How many examples were read.
        curvature: The sum of the curvatures of all that was read.
        weighed: That of the weighed curvatures of those drawn.
    """

    gradients: Factors = field(default_factory=dict)
    inputs: Factors = field(default_factory=dict)
    num_read: int = 0
    curvature: float = 0.0
    weighed: float = 0.0

    def factors(self) -> FactorSums:
        """Factors as of all that was read: G of their curvature.

        Raises:
            ValueError: If none of the examples drawn has curvature.
        """
        if not self.weighed:
            raise ValueError(
                "The loss of the examples at hand has no curvature in the outputs, all of which "
                'are certain: use mode="full".'
            )
        scale = self.curvature / self.weighed
        return {
            block: (G * scale, self.inputs.get(block, self._ones(block, G)))
            for block, G in self.gradients.items()
        }

    def _ones(self, block: Block, like: Factor) -> Tensor:
        like = like.rows if isinstance(like, Rows) else like
        return like.new_full((*block.groups, 1, 1), self.num_read)


class _Reading:
    """Examples that were read.

    Everything that is read goes forward, which gives its curvature in the outputs and A. Of it
    examples are drawn that go backward, with weights that are the inverse of the probability with
    which each was drawn.

    Args:
        problem: The network and its blocks.
        pairs: The data, of which inputs are set aside.
        looks: How many examples go forward for one that is drawn.

    Attributes:
        probes: Inputs that are no part of the fit.
        folds: What was read of each fold.
        seen: All that was read.
        num_drawn: How many examples went backward.
        num_batches: How many batches of this process were read.
        pairs: Those that are left, with their numbers.

    Raises:
        ValueError: If the first batch has one example.
    """

    def __init__(self, problem: Problem, pairs: Iterator[tuple[Any, ...]], looks: int) -> None:
        self.problem, self._looks_each, self.num_batches = problem, looks, 0
        self.folds = [_Fold() for _ in range(AUTO_FOLDS)]
        self.seen, self.num_drawn, self._curvature = Seen(0, 0.0, 0, 0), 0, 0.0
        self._generator, self._forward = torch.Generator().manual_seed(0), ForwardPasses(problem)
        (x, y, *weights), ranks = next(pairs, (None, ())), problem.ranks
        sizes = ranks.exchange(len(y))
        if sum(sizes) < 2:
            raise ValueError(
                'mode="auto" compares fits at inputs of the first batch, which it sets aside: use '
                "batches of two examples or more."
            )
        count = min(_PROBES, sum(sizes) // 2)
        own = min(max(count - sum(sizes[: ranks.rank]), 0), len(y))
        of_ranks = ranks.exchange(take(x, slice(0, own)) if own else None)
        self.probes = join([some for some in of_ranks if some is not None])
        # The probes may be all of this process's first batch, which the others still read.
        rest = [(take(x, slice(own, None)), y[own:], *weights)] if len(y) else []
        self.pairs: Iterator[tuple[int, Any]] = enumerate(chain(rest, pairs), start=1)
        self._faults = Faults()

    def going_on(self, problem: Problem, data: Stream, looks: int) -> "_Reading":
        """The same in a later fit, whose data is read from where this one is."""
        new, skipped = copy(self), 0 if isinstance(data.source, Iterator) else self.num_batches
        new.problem, new._looks_each, new._forward = problem, looks, ForwardPasses(problem)
        new.pairs = enumerate(islice(data, skipped, None), start=skipped + 1)
        return new

    def until(self, target: int) -> "_Reading":
        """What was read and more, until so many are drawn or the data ends; this stays as it is."""
        new = copy(self)
        new.folds, new._generator = [copy(f) for f in self.folds], self._generator.clone_state()
        new._read(target)
        return new

    def _read(self, target: int) -> None:
        drawn: list[list[tuple[Inputs, Tensor, Tensor]]] = [[] for _ in self.folds]
        inputs = [SideSums(self.problem, 1) for _ in self.folds]
        num_drawn, ranks = torch.zeros(len(self.folds), dtype=torch.long), self.problem.ranks
        before = [fold.num_read for fold in self.folds]
        while self.num_drawn + int(num_drawn.sum()) < target:
            number, pair = next(self.pairs, (0, None))
            sizes = ranks.exchange(None if pair is None else len(pair[1]))
            if sizes.count(None) == len(sizes):
                break
            self.num_batches = number or self.num_batches
            with self._faults.of_batch(number):
                num_drawn += self._look(pair, [size or 0 for size in sizes], inputs, drawn)
        self._faults.read()
        # Labels of processes are drawn by numbers far from each other's.
        place = partial(operator.add, FAR * ranks.rank)
        for k, fold in enumerate(self.folds):
            of_fold = inputs.pop(0)
            if fold.num_read > before[k]:
                (of_inputs,) = owned_factors(self.problem, of_fold)
                fold.inputs = _added(fold.inputs, of_inputs)
            if num_drawn[k]:
                placed = Placed(_joined(drawn[k]), lambda _, seen: place(seen))
                sums, seen = factor_sums(self.problem, placed, self.num_drawn)
                self.num_drawn += seen.num_examples
                fold.gradients = _added(fold.gradients, {b: G for b, (G, _) in sums.items()})

    def _look(
        self,
        pair: tuple[Any, ...] | None,
        sizes: Sequence[int],
        inputs: Sequence[SideSums],
        drawn: list[list[tuple[Inputs, Tensor, Tensor]]],
    ) -> Int[Tensor, " folds"]:
        """Draw examples of all processes' batches, of which every fourth belongs to a fold.

        Args:
            pair: This process's batch.
            sizes: Those of the processes' batches.
            inputs: Takes A of this process's examples, fold by fold.
            drawn: Takes those that are drawn.

        Returns:
            How many examples of each fold all processes have drawn.
        """
        ranks, total = self.problem.ranks, sum(sizes)
        fold_of = (self.seen.num_examples + torch.arange(total)) % len(self.folds)
        before = sum(sizes[: ranks.rank])
        own_folds = fold_of[before : before + sizes[ranks.rank]]
        traces, nll, num_outputs = torch.zeros(len(own_folds), dtype=torch.float64), 0.0, 0
        if pair is not None:
            x, y, *weights = pair
            check_unweighed(weights)
            for k, of_inputs in enumerate(inputs):
                own = (own_folds == k).nonzero()[:, 0]
                if len(own):
                    outputs = self._forward(take(x, own), y[own], of_inputs)
                    numbers = looked(self.problem, outputs, y[own])
                    traces[own] = numbers.traces.cpu()
                    nll, num_outputs = nll + float(numbers.nll), num_outputs + numbers.num_outputs
        of_ranks = ranks.exchange((traces.tolist(), nll, num_outputs))
        traces = torch.tensor([c for some, _, _ in of_ranks for c in some], dtype=torch.float64)
        self._curvature += float(traces.sum())
        nll, num_outputs = (sum(of) for of in list(zip(*of_ranks, strict=True))[1:])
        self.seen = self.seen + Seen(total, nll, num_outputs, total)
        mean = self._curvature / self.seen.num_examples
        chances = inclusion(traces, mean, self._looks_each)
        is_drawn = torch.rand(total, generator=self._generator, dtype=torch.float64) < chances
        for k, fold in enumerate(self.folds):
            of_fold = fold_of == k
            fold.num_read += int(of_fold.sum())
            fold.curvature += float(traces[of_fold].sum())
            chosen = of_fold & is_drawn
            fold.weighed += float((traces[chosen] / chances[chosen]).sum())
            own = chosen[before : before + len(own_folds)].nonzero()[:, 0]
            if pair is not None and len(own):
                of_own = chances[before + own].reciprocal()
                drawn[k].append((take(pair[0], own), pair[1][own], of_own))
        return fold_of[is_drawn].bincount(minlength=len(self.folds))


def _joined(
    parts: Sequence[tuple[Inputs, Tensor, Tensor]],
) -> list[tuple[Inputs, Tensor, Tensor]]:
    """Drawn examples as one batch, if they are alike."""
    if not parts:
        return []
    xs, ys, weights = (list(of) for of in zip(*parts, strict=True))
    shapes = {tuple(t.shape[1:] for t in (*tensors_of(x), y)) for x, y, _ in parts}
    if len(shapes) > 1:
        return list(parts)
    return [(join(xs), torch.cat(ys), torch.cat(weights))]


def _added(total: Factors, more: Factors) -> Factors:
    """Sums of factors, of the blocks of both."""

    def both(a: Factor, b: Factor) -> Factor:
        if isinstance(a, Rows) and isinstance(b, Rows):
            return a + b
        return operator.add(*(f.rows.mT @ f.rows if isinstance(f, Rows) else f for f in (a, b)))

    return {b: both(total[b], of) if b in total else of for b, of in more.items()}
