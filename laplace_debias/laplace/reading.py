"""Examples that a fit in rounds reads: all go forward, those that are drawn go backward."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.directions import Factor, GramFactor
from laplace_debias.curvature.fits.factor_sums import (
    FactorAccumulator,
    FactorSums,
    ForwardPasses,
    factor_sums,
)
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.losses.base import NegativeLogLikelihood
from laplace_debias.curvature.network.batches import Fold, Stream
from laplace_debias.curvature.network.inputs import Inputs, join, take, tensors_of
from laplace_debias.curvature.network.outputs import Faults, check_outputs, targets_classes_last
from laplace_debias.curvature.network.shards import FAR
from laplace_debias.system.ranks import Ranks

AUTO_FOLDS = 4
"""Folds, by whose differences the error is told."""
# Inputs at which the standard deviations of outputs are compared.
_PROBES = 16
Factors = dict[Block, Factor]


def inclusion(
    curvatures: Float[Tensor, " batch"], mean: float, looks: int
) -> Float[Tensor, " batch"]:
    """With what probability examples are drawn: one of `looks`, and more where the loss curves.

    Half of it is the same for all, so that no weight is above twice `looks`; the other half is
    proportional to an example's curvature.
    """
    share = curvatures / mean if mean > 0 else torch.ones_like(curvatures)
    return ((1 + share) / (2 * looks)).clamp_max(1)


def output_curvatures(
    problem: FitContext, outputs: Tensor, y: Tensor
) -> tuple[Float[Tensor, " batch"], Tensor]:
    """The curvature of each example's loss in the outputs, 1 − Σ p² for a softmax; the loss.

    A block's trace is the mean of squared output gradients times activations. What share of it an
    example has goes with its share of this, which takes no backward pass. Of `fisher="empirical"`
    the curvature is ‖∇_f ℓ‖².
    """
    loss = problem.cotangents.loss
    assert isinstance(loss, NegativeLogLikelihood)
    check_outputs(outputs)
    targets = targets_classes_last(y, outputs.ndim, problem.cotangents.class_dim)
    loss.check(outputs, targets)
    labels = loss.labels(targets.to(outputs.device, non_blocking=True), outputs.ndim)
    if problem.cotangents.fisher.kind == "empirical":
        traces = loss.gradient(outputs, labels).double().square().flatten(1).sum(1)
    else:
        traces = loss.hessian_traces(outputs, labels)
    return traces, loss.value(outputs, labels)


@dataclass
class _Fold:
    """A fold: factors of the examples drawn, and of all that was read.

    G, and the sum `weighed` of curvatures, go by the inverse probabilities of those drawn.
    """

    gradients: Factors = field(default_factory=dict)
    inputs: Factors = field(default_factory=dict)
    num_read: int = 0
    weighed: float = 0.0

    def factors(self, mean: float) -> FactorSums:
        """Factors as of all that was read: G of the mean curvature of all folds."""
        if not self.weighed:
            raise ValueError(
                "The loss of the examples at hand has no curvature in the outputs, all of which "
                'are certain: use mode="full".'
            )
        scale = mean * self.num_read / self.weighed
        found: FactorSums = {}
        for block, G in self.gradients.items():
            like = G.rows if isinstance(G, GramFactor) else G
            ones = like.new_full((*block.groups, 1, 1), self.num_read)
            found[block] = G * scale, self.inputs.get(block, ones)
        return found


class Reading:
    """Examples that were read.

    Everything that is read goes forward, which gives its curvature in the outputs and A. Of it
    examples are drawn that go backward, with weights that are the inverse of the probability with
    which each was drawn. The `probes` are inputs that are no part of the fit.
    """

    def __init__(self, problem: FitContext, pairs: Iterator[tuple[Any, ...]], looks: int) -> None:
        self.problem, self._looks_each, self.num_batches = problem, looks, 0
        self.folds = [_Fold() for _ in range(AUTO_FOLDS)]
        self.seen, self.num_drawn, self.curvatures = (
            DataTotals(0, 0.0, 0, 0),
            0,
            torch.zeros(0).double(),
        )
        self._generator, self._forward = torch.Generator().manual_seed(0), ForwardPasses(problem)
        first, steps = _first_batches(pairs, problem.ranks)
        num_left = min(_PROBES, sum(map(sum, steps)) // 2)
        own_probes: list[Inputs] = []
        remainders = []
        for pair, sizes in zip(first, steps, strict=True):
            num_before = sum(sizes[: problem.ranks.rank])
            num_own = min(max(num_left - num_before, 0), sizes[problem.ranks.rank])
            num_left -= min(num_left, sum(sizes))
            if pair is None:
                continue
            x, y, *weights = pair
            if num_own:
                own_probes.append(take(x, slice(0, num_own)))
            # The probes may be all of this process's batch, which the others still read.
            remainders.append((take(x, slice(num_own, None)), y[num_own:], *weights))
        of_ranks = problem.ranks.exchange(own_probes)
        self.probes = join([probes for of_rank in of_ranks for probes in of_rank])
        self.pairs: Iterator[tuple[int, Any]] = enumerate(chain(remainders, pairs), start=1)
        self._faults = Faults()

    def going_on(self, problem: FitContext, data: Stream, looks: int) -> "Reading":
        """The same in a later fit, whose data is read from where this one is."""
        new, skipped = copy(self), 0 if isinstance(data.source, Iterator) else self.num_batches
        new.problem, new._looks_each, new._forward = problem, looks, ForwardPasses(problem)
        new.pairs = enumerate(islice(data.in_step(), skipped, None), start=skipped + 1)
        # The same blocks are other objects there.
        there = dict(zip(self.problem.blocks, problem.blocks, strict=True))
        new.folds = [copy(fold) for fold in self.folds]
        for fold in new.folds:
            fold.gradients = {there[block]: G for block, G in fold.gradients.items()}
            fold.inputs = {there[block]: A for block, A in fold.inputs.items()}
        return new

    def until(self, target: int) -> "Reading":
        """A copy that has read on, until so many are drawn or the data ends."""
        new = copy(self)
        new.folds, new._generator = [copy(f) for f in self.folds], self._generator.clone_state()
        new._read(target)
        return new

    def _read(self, target: int) -> None:
        drawn: list[list[tuple[Inputs, Tensor, Tensor]]] = [[] for _ in self.folds]
        inputs = [FactorAccumulator(self.problem) for _ in self.folds]
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
        for k, fold in enumerate(self.folds):
            of_fold = inputs.pop(0)
            if fold.num_read > before[k]:
                fold.inputs = _added(fold.inputs, of_fold.reduce_side(1))
            if num_drawn[k]:
                # Labels of processes are drawn by numbers far from each other's.
                first = FAR * ranks.rank + self.num_drawn
                sums, seen = factor_sums(self.problem, _joined(drawn[k]), first)
                self.num_drawn += seen.num_examples
                fold.gradients = _added(fold.gradients, {b: G for b, (G, _) in sums.items()})

    def _look(
        self,
        pair: tuple[Any, ...] | None,
        sizes: Sequence[int],
        inputs: Sequence[FactorAccumulator],
        drawn: list[list[tuple[Inputs, Tensor, Tensor]]],
    ) -> Int[Tensor, " folds"]:
        """Draw examples of all processes' batches, of which every fourth belongs to a fold."""
        ranks, total = self.problem.ranks, sum(sizes)
        fold_of = (self.seen.num_examples + torch.arange(total)) % len(self.folds)
        before = sum(sizes[: ranks.rank])
        own_folds = fold_of[before : before + sizes[ranks.rank]]
        traces, nll, num_outputs = torch.zeros(len(own_folds), dtype=torch.float64), 0.0, 0
        if pair is not None:
            x, y, *weights = pair
            if weights:
                raise ValueError('mode="auto" takes no weights of examples: leave them out.')
            for k, of_inputs in enumerate(inputs):
                own = (own_folds == k).nonzero()[:, 0]
                if len(own):
                    outputs = self._forward(take(x, own), y[own], of_inputs)
                    of_own, loss = output_curvatures(self.problem, outputs, y[own])
                    traces[own] = of_own.cpu()
                    nll, num_outputs = nll + float(loss), num_outputs + outputs.numel()
        of_ranks = ranks.exchange((traces.tolist(), nll, num_outputs))
        traces = torch.tensor([c for some, _, _ in of_ranks for c in some], dtype=torch.float64)
        self.curvatures = torch.cat([self.curvatures, traces])
        nll, num_outputs = (sum(of) for of in list(zip(*of_ranks, strict=True))[1:])
        self.seen = self.seen + DataTotals(total, nll, num_outputs, total)
        chances = inclusion(traces, float(self.curvatures.mean()), self._looks_each)
        is_drawn = torch.rand(total, generator=self._generator, dtype=torch.float64) < chances
        for k, fold in enumerate(self.folds):
            of_fold = fold_of == k
            fold.num_read += int(of_fold.sum())
            chosen = of_fold & is_drawn
            fold.weighed += float((traces[chosen] / chances[chosen]).sum())
            own = chosen[before : before + len(own_folds)].nonzero()[:, 0]
            if pair is not None and len(own):
                of_own = chances[before + own].reciprocal()
                drawn[k].append((take(pair[0], own), pair[1][own], of_own))
        return fold_of[is_drawn].bincount(minlength=len(self.folds))


def _first_batches(
    pairs: Iterator[tuple[Any, ...]], ranks: Ranks
) -> tuple[list[tuple[Any, ...] | None], list[list[int]]]:
    """Read the first batches, until all processes together have two examples.

    Returns:
        This process's batch of each step, None if its data has ended, and the number of examples
        that each process has in each step.
    """
    batches: list[tuple[Any, ...] | None] = []
    steps: list[list[int]] = []
    while sum(map(sum, steps)) < 2:
        pair = next(pairs, None)
        sizes = ranks.exchange(0 if pair is None else len(pair[1]))
        if not any(sizes):
            raise ValueError(
                'mode="auto" compares fits at inputs that it sets aside, for which it needs two '
                'examples or more. Use mode="full".'
            )
        batches.append(pair)
        steps.append(sizes)
    return batches, steps


def _joined(parts: Sequence[tuple[Inputs, Tensor, Tensor]]) -> Fold:
    """Drawn examples as one batch, if all have the same shapes."""
    if not parts:
        return Fold.consecutive([])
    xs, ys, weights = (list(of) for of in zip(*parts, strict=True))
    shapes = {tuple(t.shape[1:] for t in (*tensors_of(x), y)) for x, y, _ in parts}
    if len(shapes) > 1:
        return Fold.consecutive(parts)
    return Fold.consecutive([(join(xs), torch.cat(ys), torch.cat(weights))])


def _added(total: Factors, more: Factors) -> Factors:
    """Sums of factors, of the blocks of both."""
    sums: Factors = {}
    for block, factor in more.items():
        sums[block] = _sum_factors(total[block], factor) if block in total else factor
    return sums


def _sum_factors(first: Factor, second: Factor) -> Factor:
    if isinstance(first, GramFactor) and isinstance(second, GramFactor):
        return first + second
    return _matrix(first) + _matrix(second)


def _matrix(factor: Factor) -> Tensor:
    return factor.rows.mT @ factor.rows if isinstance(factor, GramFactor) else factor
