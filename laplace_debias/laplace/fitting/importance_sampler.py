"""Importance sampling: every example is passed forward, but only drawn examples backward."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain, islice, pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batches import Stream
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
from laplace_debias.curvature.network.inputs import Inputs, join, take, tensors_of
from laplace_debias.curvature.network.outputs import (
    DeferredChecks,
    check_outputs,
    targets_classes_last,
)
from laplace_debias.system.ranks import Ranks

NUM_FOLDS = 4
"""The number of folds, whose differences serve to estimate the error."""
# The number of inputs at which the standard deviations of outputs are compared.
_NUM_PROBES = 16
Factors = dict[Block, Factor]


def inclusion_probabilities(
    curvatures: Float[Tensor, " batch"], mean: float, forward_ratio: int
) -> Float[Tensor, " batch"]:
    r"""Compute the probabilities with which examples are drawn, $(1 + c_n / \bar c) / (2r)$.

    On average, one in r = `forward_ratio` examples is drawn. Half of the probability is
    proportional to the curvature $c_n$ of the example. The other half is the same for all examples,
    so that no weight exceeds 2r.
    """
    relative = curvatures / mean if mean > 0 else torch.ones_like(curvatures)
    return ((1 + relative) / (2 * forward_ratio)).clamp_max(1)


def output_curvatures(
    context: FitContext, outputs: Tensor, y: Tensor
) -> tuple[Float[Tensor, " batch"], Tensor]:
    """Compute the curvature of each example's loss with respect to the outputs, and the loss.

    For a softmax, the curvature is 1 − Σ p²; for `fisher="empirical"`, it is ‖∇_f ℓ‖². The trace of
    a block is the mean of squared output gradients times activations, so the contribution of an
    example grows with this curvature, which needs no backward pass.
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


@dataclass(frozen=True, eq=False)
class SampledFold:
    """Sums over the examples of a fold.

    Attributes:
        gradients: The factors G of the drawn examples, weighted by their inverse probabilities.
        inputs: The factors A of all examples read.
        totals: The totals of all examples read, without their loss.
        weighted_curvature: The sum of the curvatures of the drawn examples, weighted like
            `gradients`.
    """

    gradients: Factors = field(default_factory=dict)
    inputs: Factors = field(default_factory=dict)
    totals: DataTotals = field(default_factory=DataTotals)
    weighted_curvature: float = 0.0

    def factors(self, mean_curvature: float) -> FactorSums:
        """Return the fold's factors, with G rescaled to the mean curvature of all examples read."""
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


@dataclass(frozen=True, eq=False)
class SampledSums:
    """Sums over the examples that were read by the end of a round.

    Attributes:
        probes: The inputs at which fits are compared, which are not used for the fit.
        folds: The sums of each fold.
        totals: The totals of all examples read.
        curvatures: The curvature with respect to the outputs, for every example read.
        num_drawn: The number of examples drawn.
        num_batches: The number of batches read.
        random_state: The state of the generator that draws the next examples.
    """

    probes: Inputs
    folds: tuple[SampledFold, ...]
    totals: DataTotals
    curvatures: Float[Tensor, " examples"]
    num_drawn: int
    num_batches: int
    random_state: Tensor

    @classmethod
    def before_reading(cls, probes: Inputs) -> "SampledSums":
        """Return empty sums."""
        return cls(
            probes,
            folds=tuple(SampledFold() for _ in range(NUM_FOLDS)),
            totals=DataTotals(),
            curvatures=torch.zeros(0, dtype=torch.float64),
            num_drawn=0,
            num_batches=0,
            random_state=torch.Generator().manual_seed(0).get_state(),
        )


@dataclass
class _NewExamples:
    """The examples that are read for one fold in one round.

    Attributes:
        inputs: The sums of A over this process's examples.
        totals: The totals of this process's examples.
        drawn: The weighted examples drawn on this process. They are indexed among the drawn
            examples of all processes, in reading order.
        num_drawn: The number of examples drawn on all processes.
    """

    inputs: SideSums
    totals: DataTotals = field(default_factory=DataTotals)
    drawn: list[Batch] = field(default_factory=list)
    num_drawn: int = 0

    def add_drawn(
        self,
        batch: Batch | None,
        is_drawn: Bool[Tensor, " examples"],
        own_part: slice,
        probabilities: Float[Tensor, " examples"],
    ) -> None:
        """Add the drawn examples of a batch, weighted by their inverse probabilities.

        Args:
            batch: This process's batch; None if its data has ended.
            is_drawn: For each example in the batches of all processes, whether it is drawn for this
                fold.
            own_part: The part of these examples that this process reads.
            probabilities: The probabilities with which the examples were drawn.
        """
        own_indices = is_drawn[own_part].nonzero()[:, 0]
        if batch is not None and len(own_indices):
            weights = probabilities[own_part][own_indices].reciprocal()
            first_index = self.num_drawn + int(is_drawn[: own_part.start].sum())
            drawn = replace(batch.take(own_indices), weights=weights, first_index=first_index)
            self.drawn.append(drawn)
        self.num_drawn += int(is_drawn.sum())

    def joined_if_possible(self, needs_indices: bool) -> list[Batch]:
        """Return the drawn examples of this process, joined into one batch if possible.

        Examples of different shapes are not joined. If `needs_indices` is true, neither are
        examples that are separated by examples of other processes.
        """
        shapes = {
            tuple(tensor.shape[1:] for tensor in (*tensors_of(batch.inputs), batch.targets))
            for batch in self.drawn
        }
        are_consecutive = all(
            batch.first_index + batch.num_examples == following.first_index
            for batch, following in pairwise(self.drawn)
        )
        if len(shapes) != 1 or (needs_indices and not are_consecutive):
            return self.drawn
        return [Batch.joined(self.drawn)]


class ImportanceSampler:
    """A reader of examples that draws some of them for the backward pass.

    Every example is passed forward, which gives A and the curvature with respect to the outputs.
    Drawn examples are also passed backward, weighted by the inverse of their probability.

    Args:
        context: The network, its loss and its blocks.
        batches: The batches that have not been read yet.
        forward_ratio: The number of examples read per example drawn for the backward pass.
    """

    def __init__(
        self,
        context: FitContext,
        batches: Iterator[Batch],
        forward_ratio: int,
    ) -> None:
        self._context = context
        self._batches = batches
        self._forward_ratio = forward_ratio
        self._forward = ForwardPasses(context)

    @classmethod
    def start(
        cls, context: FitContext, batches: Iterator[Batch], forward_ratio: int
    ) -> "tuple[ImportanceSampler, SampledSums]":
        """Set the probes aside, and return a reader of the remaining data with empty sums."""
        first_batches, sizes_by_step = _first_batches(batches, context.ranks)
        rank = context.ranks.rank
        num_read = sum(map(sum, sizes_by_step))
        num_missing = min(_NUM_PROBES, num_read // 2)
        own_probes: list[Inputs] = []
        remainders = []
        for batch, sizes in zip(first_batches, sizes_by_step, strict=True):
            # The probes are the first examples of the step, in the order of the processes.
            num_own = min(max(num_missing - sum(sizes[:rank]), 0), sizes[rank])
            num_missing -= min(num_missing, sum(sizes))
            if batch is None:
                continue
            if num_own:
                own_probes.append(take(batch.inputs, slice(0, num_own)))
            # All examples of this batch may have become probes. The empty remainder is kept,
            # because the other processes still read this step.
            remainders.append(replace(batch.take(slice(num_own, None)), number=batch.number))
        probes_by_rank = context.ranks.exchange(own_probes)
        probes = join(list(chain.from_iterable(probes_by_rank)))
        sampler = cls(context, chain(remainders, batches), forward_ratio)
        return sampler, SampledSums.before_reading(probes)

    @classmethod
    def after(
        cls, sums: SampledSums, context: FitContext, data: Stream, forward_ratio: int
    ) -> "ImportanceSampler":
        """Return a reader that skips the batches contained in the sums of an earlier fit."""
        num_skipped = 0 if isinstance(data.source, Iterator) else sums.num_batches
        return cls(context, islice(data, num_skipped, None), forward_ratio)

    def read(self, sums: SampledSums, target: int) -> SampledSums:
        """Read examples until the number of drawn examples reaches a target, and add them to sums.

        If the data ends first, fewer examples are drawn.
        """
        ranks = self._context.ranks
        generator = torch.Generator()
        generator.set_state(sums.random_state)
        checks = DeferredChecks()
        new_by_fold = [_NewExamples(SideSums(self._context, Side.A)) for _ in sums.folds]
        while sums.num_drawn + sum(new.num_drawn for new in new_by_fold) < target:
            batch = next(self._batches, None)
            sizes = ranks.exchange(None if batch is None else batch.num_examples)
            if sizes.count(None) == len(sizes):
                break
            # A process whose data has ended still takes part in the exchanges of the others.
            sizes = [0 if size is None else size for size in sizes]
            number = None
            if batch is not None:
                number = batch.number
                sums = replace(sums, num_batches=sums.num_batches + 1)
            with checks.during_batch(number):
                sums = self._draw(sums, batch, sizes, new_by_fold, generator)
        checks.read()
        num_drawn = sums.num_drawn
        folds = []
        for fold in sums.folds:
            # Each fold is popped, so that the memory of its sums is freed before the next fold.
            new = new_by_fold.pop(0)
            folds.append(self._with_new_examples(fold, new, num_drawn))
            num_drawn += new.num_drawn
        return replace(
            sums, folds=tuple(folds), num_drawn=num_drawn, random_state=generator.get_state()
        )

    def _draw(
        self,
        sums: SampledSums,
        batch: Batch | None,
        sizes: Sequence[int],
        new_by_fold: Sequence[_NewExamples],
        generator: torch.Generator,
    ) -> SampledSums:
        """Draw examples from the batches of all processes, which are dealt to the folds in turn.

        Args:
            sums: The sums over earlier examples.
            batch: This process's batch; None if its data has ended.
            sizes: The number of examples of each process.
            new_by_fold: The examples of this round, for each fold. The drawn examples are added
                to them.
            generator: Seeds the draws.

        Returns:
            The sums with the totals and the curvatures of the batches.
        """
        num_folds = len(sums.folds)
        fold_indices = (sums.totals.num_examples + torch.arange(sum(sizes))) % num_folds
        rank = self._context.ranks.rank
        own_start = sum(sizes[:rank])
        own_part = slice(own_start, own_start + sizes[rank])
        new_curvatures, new_totals = self._pass_forward(batch, fold_indices[own_part], new_by_fold)
        curvatures = torch.cat([sums.curvatures, new_curvatures])
        probabilities = inclusion_probabilities(
            new_curvatures, float(curvatures.mean()), self._forward_ratio
        )
        uniforms = torch.rand(len(new_curvatures), generator=generator, dtype=torch.float64)
        is_drawn = uniforms < probabilities
        folds = []
        for index, (fold, new) in enumerate(zip(sums.folds, new_by_fold, strict=True)):
            is_drawn_in_fold = is_drawn & (fold_indices == index)
            new.add_drawn(batch, is_drawn_in_fold, own_part, probabilities)
            weighted_curvatures = new_curvatures[is_drawn_in_fold] / probabilities[is_drawn_in_fold]
            weighted_curvature = fold.weighted_curvature + float(weighted_curvatures.sum())
            folds.append(replace(fold, weighted_curvature=weighted_curvature))
        return replace(
            sums, folds=tuple(folds), totals=sums.totals + new_totals, curvatures=curvatures
        )

    def _pass_forward(
        self,
        batch: Batch | None,
        fold_indices: Int[Tensor, " own_batch"],
        new_by_fold: Sequence[_NewExamples],
    ) -> tuple[Float[Tensor, " batch"], DataTotals]:
        """Pass the batches of all processes forward, each on its own process.

        Args:
            batch: This process's batch; None if its data has ended.
            fold_indices: The fold of each example of this batch.
            new_by_fold: The examples of this round, for each fold. The sums of A of this process's
                examples are added to them.

        Returns:
            The curvature of each example of all processes, in the order of the processes, and their
            totals.
        """
        own_curvatures, own_totals = self._pass_own_forward(batch, fold_indices, new_by_fold)
        by_rank = self._context.ranks.exchange((own_curvatures.tolist(), own_totals))
        curvatures_by_rank, totals_by_rank = zip(*by_rank, strict=True)
        curvatures = list(chain.from_iterable(curvatures_by_rank))
        return torch.tensor(curvatures, dtype=torch.float64), reduce(operator.add, totals_by_rank)

    def _pass_own_forward(
        self,
        batch: Batch | None,
        fold_indices: Int[Tensor, " batch"],
        new_by_fold: Sequence[_NewExamples],
    ) -> tuple[Float[Tensor, " batch"], DataTotals]:
        """Pass this process's batch forward, fold by fold, because each fold has its own sums of A.

        Returns:
            The curvature of each example, and the totals of the batch.
        """
        curvatures = torch.zeros(len(fold_indices), dtype=torch.float64)
        totals = DataTotals()
        if batch is None:
            return curvatures, totals
        if batch.weights is not None:
            raise ValueError(
                '`mode="auto"` does not support weights of examples. Remove them from the batches.'
            )
        for index, new in enumerate(new_by_fold):
            in_fold = (fold_indices == index).nonzero()[:, 0]
            num_examples = len(in_fold)
            if not num_examples:
                continue
            new.totals.num_examples += num_examples
            new.totals.weight += num_examples
            examples = batch.take(in_fold)
            outputs = self._forward(examples, new.inputs, new.totals)
            fold_curvatures, loss = output_curvatures(self._context, outputs, examples.targets)
            curvatures[in_fold] = fold_curvatures.cpu()
            totals += DataTotals(num_examples, float(loss), outputs.numel(), num_examples)
        return curvatures, totals

    def _with_new_examples(
        self, fold: SampledFold, new: _NewExamples, num_drawn: int
    ) -> SampledFold:
        """Add A of the newly read examples, and G of the drawn ones, to the sums of a fold.

        Args:
            fold: The sums over earlier examples.
            new: The examples of the round.
            num_drawn: The number of examples drawn earlier, in all folds.
        """
        context = self._context
        new_totals = reduce(operator.add, context.ranks.exchange(new.totals.as_numbers()))
        if new_totals.num_examples:
            new_A = sum_at_owners(context, new.inputs)
            fold = replace(
                fold, inputs=_sum_of_both(fold.inputs, new_A), totals=fold.totals + new_totals
            )
        if new.num_drawn:
            # Random labels depend on the index among the drawn examples, so joining must preserve
            # it.
            drawn = new.joined_if_possible(context.cotangents.fisher.is_random)
            factors, _ = factor_sums(context, drawn, num_drawn)
            new_G = {block: G for block, (G, _) in factors.items()}
            fold = replace(fold, gradients=_sum_of_both(fold.gradients, new_G))
        return fold


def _first_batches(
    data: Iterator[Batch], ranks: Ranks
) -> tuple[list[Batch | None], list[list[int]]]:
    """Read the first batches until all processes together have two examples.

    Returns:
        The batch of this process in each step (None if its data has ended), and the number of
        examples of each process in each step.
    """
    batches: list[Batch | None] = []
    sizes_by_step: list[list[int]] = []
    num_read = 0
    while num_read < 2:
        batch = next(data, None)
        sizes = ranks.exchange(0 if batch is None else batch.num_examples)
        if not any(sizes):
            raise ValueError(
                '`mode="auto"` sets some inputs aside and uses them to compare fits, so '
                'it needs at least two examples. Use `mode="full"`.'
            )
        batches.append(batch)
        sizes_by_step.append(sizes)
        num_read += sum(sizes)
    return batches, sizes_by_step


def _sum_of_both(first: Factors, second: Mapping[Block, Factor]) -> Factors:
    """Add up the factors of the blocks in `second`."""
    sums: Factors = {}
    for block, factor in second.items():
        sums[block] = first[block] + factor if block in first else factor
    return sums
