"""Importance sampling of examples: all are passed forward, those that are drawn also backward."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain, islice

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.factor_keys import Side
from laplace_debias.curvature.fits.factor_sums import (
    FactorSums,
    SideSums,
    factor_sums,
    sum_at_owners,
)
from laplace_debias.curvature.fits.forward_passes import ForwardPasses
from laplace_debias.curvature.fits.gram_factor import Factor, GramFactor
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.losses.base import NegativeLogLikelihood
from laplace_debias.curvature.network.batch import Batch
from laplace_debias.curvature.network.batches import Fold, Stream
from laplace_debias.curvature.network.inputs import Inputs, join, take, tensors_of
from laplace_debias.curvature.network.outputs import Faults, check_outputs, targets_classes_last
from laplace_debias.system.ranks import Ranks

NUM_FOLDS = 4
"""Number of folds. The error is estimated from the differences between them."""
# Inputs at which the standard deviations of outputs are compared.
_NUM_PROBES = 16
Factors = dict[Block, Factor]


def inclusion_probabilities(
    curvatures: Float[Tensor, " batch"], mean: float, forward_ratio: int
) -> Float[Tensor, " batch"]:
    """Compute the probabilities with which examples are drawn.

    On average one of `forward_ratio` examples is drawn. Half of the probability is the same for
    all, so that no weight exceeds twice the ratio; the other half is proportional to an example's
    curvature.
    """
    relative = curvatures / mean if mean > 0 else torch.ones_like(curvatures)
    return ((1 + relative) / (2 * forward_ratio)).clamp_max(1)


def output_curvatures(
    context: FitContext, outputs: Tensor, y: Tensor
) -> tuple[Float[Tensor, " batch"], Tensor]:
    """Compute the curvature of each example's loss in the outputs, and the loss.

    For a softmax the curvature is 1 − Σ p², for `fisher="empirical"` it is ‖∇_f ℓ‖². A block's
    trace is the mean of squared output gradients times activations, and an example's contribution
    to it grows with this curvature, which needs no backward pass.
    """
    loss = context.cotangents.loss
    assert isinstance(loss, NegativeLogLikelihood)
    check_outputs(outputs)
    targets = targets_classes_last(y, outputs.ndim, context.cotangents.class_dim)
    loss.check(outputs, targets)
    labels = loss.labels(targets.to(outputs.device, non_blocking=True), outputs.ndim)
    if context.cotangents.fisher.kind == "empirical":
        traces = loss.gradient(outputs, labels).double().square().flatten(1).sum(1)
    else:
        traces = loss.hessian_traces(outputs, labels)
    return traces, loss.value(outputs, labels)


@dataclass
class _SampledFold:
    """A fold of the examples.

    Attributes:
        gradients: G of the examples drawn, weighted by their inverse probabilities.
        inputs: A of all examples read.
        totals: The totals of all examples read. Their loss is not in it.
        weighted_curvature: The sum of the curvatures of the examples drawn, weighted likewise.
    """

    gradients: Factors = field(default_factory=dict)
    inputs: Factors = field(default_factory=dict)
    totals: DataTotals = field(default_factory=DataTotals)
    weighted_curvature: float = 0.0

    def factors(self, mean_curvature: float) -> FactorSums:
        """Return factors for all examples read, with G rescaled to the folds' mean curvature."""
        if not self.weighted_curvature:
            raise ValueError(
                "In the first round of the fit, the curvature of the loss is zero for "
                "every example, because the network predicts all of them with certainty. "
                'Use `mode="full"`.'
            )
        scale = mean_curvature * self.totals.weight / self.weighted_curvature
        factors: FactorSums = {}
        for block, G in self.gradients.items():
            like = G.rows if isinstance(G, GramFactor) else G
            ones = like.new_full((*block.groups, 1, 1), self.totals.weight)
            factors[block] = G * scale, self.inputs.get(block, ones)
        return factors


@dataclass
class _DrawnExamples:
    """The examples of a fold that were drawn in a round.

    Attributes:
        batches: This process's examples, with weights.
        first_indices: For each batch, the index of its first example among those of all
            processes, in the order in which they are read.
        total: The number of examples of all processes.
    """

    batches: list[Batch] = field(default_factory=list)
    first_indices: list[int] = field(default_factory=list)
    total: int = 0

    def as_fold(self, needs_indices: bool) -> Fold:
        """Return the examples of this process, in one batch if possible.

        Examples of different shapes are not joined. If `needs_indices`, neither are those that
        have examples of other processes between them.
        """
        shapes = {
            tuple(tensor.shape[1:] for tensor in (*tensors_of(batch.inputs), batch.targets))
            for batch in self.batches
        }
        weight = sum(batch.total_weight for batch in self.batches)
        are_consecutive = all(
            first + batch.num_examples == following
            for first, batch, following in zip(
                self.first_indices, self.batches, self.first_indices[1:], strict=False
            )
        )
        if len(shapes) != 1 or (needs_indices and not are_consecutive):
            return Fold(list(self.batches), self.first_indices, weight)
        return Fold([Batch.joined(self.batches)], self.first_indices[:1], weight)


class ImportanceSampler:
    """A reader of examples, which draws some of them for the backward pass.

    All that is read is passed forward, which gives the curvature in the outputs and A. The examples
    drawn are passed backward, with weights that are the inverse of the probability of drawing them.

    Args:
        context: The network, its loss and its blocks.
        batches: The data.
        forward_ratio: Examples passed forward per example passed backward.

    Attributes:
        folds: The factors, by folds.
        totals: The totals of all examples read.
        num_drawn: How many examples were drawn.
        curvatures: The curvature in the outputs of every example read.
        probes: Inputs at which fits are compared, which are no part of the fit.
    """

    def __init__(self, context: FitContext, batches: Iterator[Batch], forward_ratio: int) -> None:
        self.context = context
        self._forward_ratio = forward_ratio
        self._forward = ForwardPasses(context)
        self._generator = torch.Generator().manual_seed(0)
        self._faults = Faults()
        self.num_batches = 0
        self.folds = [_SampledFold() for _ in range(NUM_FOLDS)]
        self.totals = DataTotals(0, 0.0, 0, 0)
        self.num_drawn = 0
        self.curvatures = torch.zeros(0, dtype=torch.float64)
        first_batches, steps = _first_batches(batches, context.ranks)
        rank = context.ranks.rank
        num_needed = min(_NUM_PROBES, sum(map(sum, steps)) // 2)
        own_probes: list[Inputs] = []
        remainders = []
        for batch, sizes in zip(first_batches, steps, strict=True):
            num_own = min(max(num_needed - sum(sizes[:rank]), 0), sizes[rank])
            num_needed -= min(num_needed, sum(sizes))
            if batch is None:
                continue
            if num_own:
                own_probes.append(take(batch.inputs, slice(0, num_own)))
            # The probes may be all of this process's batch, which the others still read.
            remainders.append(batch.take(slice(num_own, None)))
        probes_by_rank = context.ranks.exchange(own_probes)
        self.probes = join(list(chain.from_iterable(probes_by_rank)))
        self.numbered: Iterator[tuple[int, Batch]] = enumerate(chain(remainders, batches), start=1)

    def continued(
        self, context: FitContext, data: Stream, forward_ratio: int
    ) -> "ImportanceSampler":
        """Return a copy for a later fit, which continues after the examples of this one."""
        num_skipped = 0 if isinstance(data.source, Iterator) else self.num_batches
        later = copy(self)
        later.context = context
        later._forward_ratio = forward_ratio
        later._forward = ForwardPasses(context)
        later.numbered = enumerate(
            islice(data.unchecked_pass(), num_skipped, None), start=num_skipped + 1
        )
        return later

    def until(self, target: int) -> "ImportanceSampler":
        """Return a copy that has read until a number of examples are drawn."""
        advanced = copy(self)
        advanced.folds = [copy(fold) for fold in self.folds]
        advanced._generator = self._generator.clone_state()
        advanced._read(target)
        return advanced

    def _read(self, target: int) -> None:
        ranks = self.context.ranks
        drawn = [_DrawnExamples() for _ in self.folds]
        inputs = [SideSums(self.context, Side.A) for _ in self.folds]
        own_totals = [DataTotals() for _ in self.folds]
        while self.num_drawn + sum(examples.total for examples in drawn) < target:
            number, batch = next(self.numbered, (0, None))
            sizes = ranks.exchange(None if batch is None else batch.num_examples)
            if sizes.count(None) == len(sizes):
                break
            self.num_batches = number or self.num_batches
            with self._faults.during_batch(number):
                self._draw(batch, [size or 0 for size in sizes], inputs, drawn, own_totals)
        self._faults.read()
        for index, fold in enumerate(self.folds):
            fold_inputs = inputs.pop(0)
            read = reduce(operator.add, ranks.exchange(own_totals[index].as_numbers()))
            if read.num_examples:
                fold.totals = fold.totals + read
                factors_A = sum_at_owners(self.context, fold_inputs)
                fold.inputs = _sum_of_both(fold.inputs, factors_A)
            if drawn[index].total:
                # Random labels depend on the index among the examples that were drawn.
                examples = drawn[index].as_fold(self.context.cotangents.fisher.is_random)
                sums, totals = factor_sums(self.context, examples, self.num_drawn)
                self.num_drawn += totals.num_examples
                gradients = {block: G for block, (G, _) in sums.items()}
                fold.gradients = _sum_of_both(fold.gradients, gradients)

    def _draw(
        self,
        batch: Batch | None,
        sizes: Sequence[int],
        inputs: Sequence[SideSums],
        drawn: Sequence[_DrawnExamples],
        own_totals: Sequence[DataTotals],
    ) -> None:
        """Draw from all processes' batches, of which every fourth example belongs to a fold.

        Args:
            batch: This process's batch; None if its data has ended.
            sizes: The number of examples of each process.
            inputs: The sums of A, by folds.
            drawn: The drawn examples, by folds, to which those of the batch are added.
            own_totals: The totals of this process's examples, by folds; the batch is added.
        """
        ranks = self.context.ranks
        total = sum(sizes)
        fold_indices = (self.totals.num_examples + torch.arange(total)) % len(self.folds)
        start = sum(sizes[: ranks.rank])
        own_part = slice(start, start + sizes[ranks.rank])
        own_traces, nll, num_outputs = self._pass_forward(
            batch, fold_indices[own_part], inputs, own_totals
        )
        by_rank = ranks.exchange((own_traces.tolist(), nll, num_outputs))
        traces_by_rank, nlls, nums_outputs = zip(*by_rank, strict=True)
        traces = torch.tensor(list(chain.from_iterable(traces_by_rank)), dtype=torch.float64)
        self.curvatures = torch.cat([self.curvatures, traces])
        self.totals = self.totals + DataTotals(total, sum(nlls), sum(nums_outputs), total)
        mean_curvature = float(self.curvatures.mean())
        probabilities = inclusion_probabilities(traces, mean_curvature, self._forward_ratio)
        uniforms = torch.rand(total, generator=self._generator, dtype=torch.float64)
        is_drawn = uniforms < probabilities
        for index, fold in enumerate(self.folds):
            in_fold = fold_indices == index
            is_chosen = in_fold & is_drawn
            fold.weighted_curvature += float((traces[is_chosen] / probabilities[is_chosen]).sum())
            own_indices = is_chosen[own_part].nonzero()[:, 0]
            if batch is not None and len(own_indices):
                weights = probabilities[start + own_indices].reciprocal()
                examples = replace(batch.take(own_indices), weights=weights)
                drawn[index].batches.append(examples)
                first_index = drawn[index].total + int(is_chosen[:start].sum())
                drawn[index].first_indices.append(first_index)
            drawn[index].total += int(is_chosen.sum())

    def _pass_forward(
        self,
        batch: Batch | None,
        fold_indices: Int[Tensor, " batch"],
        inputs: Sequence[SideSums],
        own_totals: Sequence[DataTotals],
    ) -> tuple[Float[Tensor, " batch"], float, int]:
        """Pass a batch forward, fold by fold: curvatures in the outputs, loss, size of outputs."""
        traces = torch.zeros(len(fold_indices), dtype=torch.float64)
        nll = 0.0
        num_outputs = 0
        if batch is None:
            return traces, nll, num_outputs
        if batch.weights is not None:
            raise ValueError(
                '`mode="auto"` does not support weights of examples. Remove them from the batches.'
            )
        for index, (sums, totals) in enumerate(zip(inputs, own_totals, strict=True)):
            in_fold = (fold_indices == index).nonzero()[:, 0]
            if len(in_fold):
                totals.num_examples += len(in_fold)
                totals.weight += len(in_fold)
                examples = batch.take(in_fold)
                outputs = self._forward(examples, sums, totals)
                fold_traces, loss = output_curvatures(self.context, outputs, examples.targets)
                traces[in_fold] = fold_traces.cpu()
                nll += float(loss)
                num_outputs += outputs.numel()
        return traces, nll, num_outputs


def _first_batches(
    data: Iterator[Batch], ranks: Ranks
) -> tuple[list[Batch | None], list[list[int]]]:
    """Read the first batches, until all processes together have two examples.

    Returns:
        This process's batch of each step, None if its data has ended, and the number of examples
        that each process has in each step.
    """
    batches: list[Batch | None] = []
    steps: list[list[int]] = []
    while sum(map(sum, steps)) < 2:
        batch = next(data, None)
        sizes = ranks.exchange(0 if batch is None else batch.num_examples)
        if not any(sizes):
            raise ValueError(
                '`mode="auto"` sets some inputs aside and uses them to compare fits, so '
                'it needs at least two examples. Use `mode="full"`.'
            )
        batches.append(batch)
        steps.append(sizes)
    return batches, steps


def _sum_of_both(first: Factors, second: Mapping[Block, Factor]) -> Factors:
    """Add up factors, for the blocks of the second."""
    sums: Factors = {}
    for block, factor in second.items():
        sums[block] = _sum_factors(first[block], factor) if block in first else factor
    return sums


def _sum_factors(first: Factor, second: Factor) -> Factor:
    if isinstance(first, GramFactor) and isinstance(second, GramFactor):
        return first + second
    return _matrix(first) + _matrix(second)


def _matrix(factor: Factor) -> Tensor:
    return factor.rows.mT @ factor.rows if isinstance(factor, GramFactor) else factor
