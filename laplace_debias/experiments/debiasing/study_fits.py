"""The debiasing study's fits: all methods' posteriors from one draw, and what they predict."""

from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from laplace_debias import metrics
from laplace_debias.curvature.fits.crossfit import exact_crossfit
from laplace_debias.curvature.fits.directions import Eigenbasis, eigenbasis
from laplace_debias.curvature.fits.folds import Fold
from laplace_debias.curvature.fits.kfac import exact_sums
from laplace_debias.curvature.fits.output_curvature import mean_output_curvature
from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.fits.sums import FactorSums, factor_sums
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.losses.likelihoods import Categorical
from laplace_debias.curvature.losses.negative_log_likelihood import NegativeLogLikelihood
from laplace_debias.experiments.debiasing.schemes import (
    EKFAC,
    FULL,
    MINI,
    USUAL_FOLDS,
    Factors,
    crossfit_name,
    magnitudes_of,
    outputs_name,
    split_name,
)
from laplace_debias.experiments.debiasing.study_settings import DebiasingSettings
from laplace_debias.experiments.shared.store import Row, Store
from laplace_debias.laplace.functional.moments import OutputRequest, functional_moments
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.operators import BlockDiagonal, EigenKronecker
from laplace_debias.problems import Images

MEMORY_BOUND = 2**28
"""Bytes of working memory for output gradients."""

# U_G and U_A of every block; None for the coordinate axes.
Directions = dict[Block, tuple[Tensor | None, Tensor | None]]


class StudyFits:
    """Fits and predicts for the study.

    Args:
        problem: The network and its blocks.
        settings: The settings.
        train: Training images.
        order: The order in which these are used.
        test: Test images and labels.
        store: Where the full-batch factors are stored.
    """

    def __init__(
        self,
        problem: Problem,
        settings: DebiasingSettings,
        train: Images,
        order: Tensor,
        test: tuple[Tensor, Tensor],
        store: Store,
    ) -> None:
        self._problem = problem
        self._settings = settings
        self._train = train
        self._order = order
        self._test = test
        self._store = store
        self._device = problem.model.get_parameter(problem.blocks[0].parameters[0]).device
        self._full: tuple[FactorSums, dict[Block, Eigenbasis]] | None = None

    def full_rows(self) -> list[Row]:
        """What the full-batch posterior predicts."""
        _, bases = self.full
        own = {block: basis.magnitudes for block, basis in bases.items()}
        return self._measured({FULL: self._posterior(_directions(bases), own)}, None)

    def draw_rows(self, draw: int) -> list[Row]:
        """What every K-FAC method's posterior predicts in a draw."""
        settings, plan = self._settings, self._settings.plan
        hand, further = self._examples(draw)
        groups = self._factor_parts([hand[k :: plan.groups] for k in range(plan.groups)])
        extra = self._factor_parts([*further.split(plan.average_batch_size)])
        factors, full_bases = self.full
        bases: dict[str, Directions] = {"full": _directions(full_bases)}
        table: dict[str, dict[Block, Tensor]] = {name: {} for name in plan.methods}
        for block in tqdm(self._problem.blocks, desc="decompose", disable=not settings.progress):
            sides = [
                magnitudes_of(
                    Factors(
                        groups=torch.stack([sums[block][side] for sums in groups]),
                        further=torch.stack([sums[block][side] for sums in extra]),
                        full=factors[block][side],
                        precision=self._problem.dtype,
                    ),
                    plan,
                )
                for side in (0, 1)
            ]
            (bases_G, along_G), (bases_A, along_A) = sides
            for name, U_G in bases_G.items():
                bases.setdefault(name, {})[block] = (U_G, bases_A[name])
            for name in along_G:
                table[name][block] = torch.outer(along_G[name], along_A[name])
        for method, part in plan.measured_on.items():
            scale = self.full_loss_curvature / self._loss_curvature(hand[part])
            table[outputs_name(method)] = {b: scale * values for b, values in table[method].items()}
        return self._measured(
            {
                name: self._posterior(bases[basis], table[name])
                for name, basis in plan.methods.items()
            },
            draw,
        )

    def ekfac_full_rows(self) -> list[Row]:
        """What EKFAC predicts with full-batch directions."""
        _, bases = self.full
        settings = self._settings
        indices = self._order[: min(settings.ekfac_full_examples, settings.full_examples)]
        squares, _ = exact_sums(self._problem, bases, self._batches(indices, "EKFAC"), 0)
        exact = {block: total / len(indices) for block, total in squares.items()}
        return self._measured({EKFAC + FULL: self._posterior(_directions(bases), exact)}, None)

    def ekfac_draw_rows(self, draw: int) -> list[Row]:
        """What EKFAC's posteriors predict in a draw."""
        b, K = self._settings.batch_size, min(USUAL_FOLDS, self._settings.groups)
        hand, _ = self._examples(draw)
        of_folds = self._factor_parts([hand[k::K] for k in range(K)])
        half, whole = self._bases_of(of_folds[::2], b), self._bases_of(of_folds, 2 * b)
        posteriors = {}
        for name, bases, indices in ((MINI, whole, hand), (split_name(b, b), half, hand[1::2])):
            batches = self._batches(indices, f"EKFAC {name}")
            sums, _ = exact_sums(self._problem, bases, batches, 0)
            exact = {block: total / len(indices) for block, total in sums.items()}
            posteriors[EKFAC + name] = self._posterior(_directions(bases), exact)
        folds = [
            Fold([self._batch(hand[k::K])], len(hand[k::K]), k * len(hand) // K) for k in range(K)
        ]
        exact = exact_crossfit(self._problem, folds, of_folds, whole)
        posteriors[EKFAC + crossfit_name(K)] = self._posterior(_directions(whole), exact)
        return self._measured(posteriors, draw)

    def _bases_of(self, parts: list[FactorSums], num_examples: int) -> dict[Block, Eigenbasis]:
        """Eigenbases of the mean factors over all parts."""
        bases = {}
        for block in self._problem.blocks:
            G, A = (
                torch.stack([sums[block][side] for sums in parts]).sum(0) / num_examples
                for side in (0, 1)
            )
            bases[block] = eigenbasis(G, A, block.name)
        return bases

    def _examples(self, draw: int) -> tuple[Tensor, Tensor]:
        """Indices of a draw's 2b examples at hand, and of further ones."""
        b = self._settings.batch_size
        a_draw = (2 + self._settings.further_batches) * b
        start = self._settings.full_examples + draw * a_draw
        hand, further = self._order[start : start + a_draw].split([2 * b, a_draw - 2 * b])
        return self._by_loss(hand) if self._settings.stratified else hand, further

    @torch.no_grad()
    def _by_loss(self, indices: Tensor) -> Tensor:
        """Examples in the order of their losses, the hardest first."""
        x, y = self._batch(indices)
        losses = cross_entropy(self._problem.model(x), y, reduction="none")
        return indices[losses.argsort(descending=True).cpu()]

    @cached_property
    def full_loss_curvature(self) -> float:
        """The full-batch examples' mean trace of the loss Hessian in the outputs."""
        return self._loss_curvature(self._order[: self._settings.full_examples])

    def _loss_curvature(self, indices: Tensor) -> float:
        batches = self._batches(indices, "outputs")
        loss = NegativeLogLikelihood(Categorical())
        return mean_output_curvature(self._problem.model, loss, batches)

    @property
    def full(self) -> tuple[FactorSums, dict[Block, Eigenbasis]]:
        """Mean factors of the full-batch examples and their eigenbases, computed once."""
        if self._full is None:
            stored = self._store.tensors("full", self._full_factors)
            found = {name: tensor.to(self._device) for name, tensor in stored.items()}
            factors = {
                block: (found[f"{block.name}/G"], found[f"{block.name}/A"])
                for block in self._problem.blocks
            }
            dtype = self._problem.dtype
            bases = {}
            for block, (G, A) in factors.items():
                basis = eigenbasis(G.double(), A.double(), block.name)
                assert basis.U_G is not None
                assert basis.U_A is not None
                bases[block] = Eigenbasis(
                    basis.U_G.to(dtype),
                    basis.U_A.to(dtype),
                    basis.along_G.to(dtype),
                    basis.along_A.to(dtype),
                )
            self._full = factors, bases
        return self._full

    def _full_factors(self) -> dict[str, Tensor]:
        """Mean factors of the full-batch examples, by block and side."""
        indices = self._order[: self._settings.full_examples]
        sums, _ = factor_sums(self._problem, self._batches(indices, "full-batch"))
        return {
            f"{block.name}/{side}": factor / len(indices)
            for block, of_block in sums.items()
            for side, factor in zip("GA", of_block, strict=True)
        }

    def _factor_parts(self, parts: list[Tensor]) -> list[FactorSums]:
        """Each part's factors, summed over its examples."""
        bar = tqdm(parts, desc="factors", disable=not self._settings.progress)
        first = 0
        sums: list[FactorSums] = []
        for indices in bar:
            sums.append(factor_sums(self._problem, [self._batch(indices)], first)[0])
            first += len(indices)
        return sums

    def _batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self._train.batch(indices)
        return x.to(self._device, self._problem.dtype), y.to(self._device)

    def _batches(self, indices: Tensor, what: str) -> Iterator[tuple[Tensor, Tensor]]:
        parts = indices.split(self._settings.eval_batch_size)
        bar = tqdm(parts, desc=what, unit="batch", disable=not self._settings.progress)
        return (self._batch(part) for part in bar)

    def _posterior(
        self, directions: Directions, table: Mapping[Block, Tensor]
    ) -> GaussianPosterior:
        blocks = {
            block.name: EigenKronecker(*directions[block], table[block])
            for block in self._problem.blocks
        }
        # Variances do not depend on the mean, and the prior precisions are given as a grid.
        mean = torch.zeros(sum(block.size for block in self._problem.blocks))
        return GaussianPosterior(
            mean, BlockDiagonal(blocks), len(self._train), torch.tensor(1.0), None
        )

    def _measured(self, posteriors: Mapping[str, GaussianPosterior], draw: int | None) -> list[Row]:
        """Predict the test images with all posteriors in one pass."""
        grid = self._settings.prior_precisions
        images, labels = self._test
        blocks, dtype = self._problem.blocks, self._problem.dtype
        deltas = torch.tensor(grid, dtype=dtype, device=self._device)
        deltas = deltas[None, :, None].expand(len(posteriors), -1, len(blocks))
        means, variances = [], []
        bar = tqdm(
            images.split(self._settings.eval_batch_size),
            desc="predict",
            disable=not self._settings.progress,
        )
        for x in bar:
            mean, variance = functional_moments(
                self._problem.model,
                blocks,
                list(posteriors.values()),
                x.to(self._device, dtype),
                deltas,
                OutputRequest(True, None, MEMORY_BOUND),
            )
            means.append(mean.double().cpu())
            variances.append(variance.double().cpu())
        mean, variance = torch.cat(means), torch.cat(variances, dim=2)
        return [
            {
                "method": name,
                "draw": draw,
                "prior_precision": delta,
                **self._metrics(mean, of_delta, labels),
            }
            for name, of_method in zip(posteriors, variance, strict=True)
            for delta, of_delta in zip(grid, of_method, strict=True)
        ]

    def _metrics(
        self,
        mean: Float[Tensor, "n classes"],
        variance: Float[Tensor, "n classes"],
        labels: Tensor,
    ) -> dict[str, float]:
        predictive = Categorical().predictive(mean, variance)
        return {
            "nll": metrics.nll(predictive.probs, labels).item(),
            "log_variance": variance.log().mean().item(),
        }


def _directions(bases: Mapping[Block, Eigenbasis]) -> Directions:
    return {block: (basis.U_G, basis.U_A) for block, basis in bases.items()}
