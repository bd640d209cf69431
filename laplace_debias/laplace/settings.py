"""What `Laplace` fits and from what: the choices, their checks, and which code serves them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from laplace_debias.curvature.fits.crossfit import fit_crossfit
from laplace_debias.curvature.fits.dense import (
    WHOLE_CURVATURES,
    fit_crossfit_whole,
    fit_full,
    fit_low_rank,
)
from laplace_debias.curvature.fits.kfac import FITS, Fitted, Problem
from laplace_debias.curvature.fits.shrinkage import fit_shrunk
from laplace_debias.curvature.layers.blocks import Block, Sharing
from laplace_debias.curvature.layers.stream import Backend
from laplace_debias.curvature.losses.cotangents import Fisher, LikelihoodCotangents
from laplace_debias.curvature.losses.likelihood import Likelihood
from laplace_debias.curvature.losses.loss_curvature import mean_loss_curvature
from laplace_debias.curvature.network.batches import Batches, Counted, OnDevice
from laplace_debias.curvature.network.class_dim import check_class_dim
from laplace_debias.laplace.posterior import scaled

CURVATURES = (*FITS, *WHOLE_CURVATURES)
FOLDS = 8
"""How many folds cross-fitting takes, and how many groups tell how uncertain shrinkage's are."""
MEMORY_BOUND = 2**27
_RANK = 20


@dataclass(frozen=True)
class Examples:
    """What examples a fit sees, and for what.

    Attributes:
        directions: Batches `(x, y)` that give the eigenbases.
        magnitudes: Batches that the curvature along them is measured on; None for the same.
        folds: Measure out of so many folds of `directions` instead.
        shrinkage: Correct the eigenvalues of K-FAC's factors in closed form instead.
        scale: Batches whose loss curvature in the outputs scales the magnitudes.
    """

    directions: Batches
    magnitudes: Batches | None = None
    folds: int | None = None
    shrinkage: bool = False
    scale: Batches | None = None

    @property
    def mode(self) -> str:
        """What kind of fit they make, as `Laplace` calls it."""
        if self.shrinkage:
            kind = "shrinkage"
        elif self.folds is not None:
            kind = "crossfit"
        else:
            kind = "given batches" if self.magnitudes is None else "debiased"
        return kind if self.scale is None else f"{kind}, scaled"

    @property
    def name_of_directions(self) -> str:
        """What errors call `directions`."""
        return "data" if self.magnitudes is None else "batches of the directions"


@dataclass(frozen=True)
class FitSettings:
    """What is fitted; as `Laplace` takes it.

    Attributes:
        curvature: One of `CURVATURES`.
        fisher: Which cotangents stand for the loss Hessian.
        factor_dtype: In what Kronecker factors are summed and decomposed.
        joint: Whether a layer's weight and bias make one block.
        sharing: How positions share a weight.
        rank: Directions of `"lowrank"`, 20 if None.
        memory_bound: Bytes of working memory for output gradients.
        class_dim: Which dimension of the outputs has the classes; the last if None.

    Raises:
        ValueError: If one of them is none that there is, or does not go with another.
    """

    curvature: str
    fisher: Fisher
    factor_dtype: torch.dtype
    joint: bool
    sharing: Sharing
    rank: int | None
    memory_bound: int
    class_dim: int | None = None

    def __post_init__(self) -> None:
        if self.curvature not in CURVATURES:
            raise ValueError(
                f"Unknown curvature={self.curvature!r}: use one of {', '.join(CURVATURES)}."
            )
        if self.rank is not None and (self.curvature != "lowrank" or self.rank < 1):
            raise ValueError(
                f"rank={self.rank} with curvature={self.curvature!r}: give a positive rank, and to "
                '"lowrank" alone.'
            )
        if self.factor_dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"factor_dtype must be torch.float32 or torch.float64, got {self.factor_dtype}."
            )
        if self.memory_bound < 1:
            raise ValueError(
                f"memory_bound must be a positive number of bytes, got {self.memory_bound}."
            )
        check_class_dim(self.class_dim)

    @property
    def is_whole(self) -> bool:
        """Whether all parameters make a single block."""
        return self.curvature in WHOLE_CURVATURES

    def check(self, examples: Examples) -> None:
        """Refuse what cannot be fitted, before any work.

        Raises:
            ValueError: For cross-fitting or shrinkage with what does not go with it.
            TypeError: For data that can be read only once where it is needed twice.
        """
        of_one = examples.magnitudes is None and examples.folds is None
        if examples.folds is not None and examples.magnitudes is not None:
            raise ValueError("Cross-fitting takes its magnitudes from folds: pass no magnitudes.")
        if examples.shrinkage and self.curvature != "kfac":
            raise ValueError(
                "Shrinkage is of the eigenvalues of Kronecker factors, which "
                f"curvature={self.curvature!r} does not have for magnitudes: use "
                'curvature="kfac", or cross-fit (mode="crossfit", folds=8).'
            )
        if examples.shrinkage and not of_one:
            raise ValueError(
                "Shrinkage takes its magnitudes from the directions' own eigenvalues: pass neither "
                "magnitudes nor folds."
            )
        again = [examples.scale]
        if examples.scale is not None:
            again.append(
                examples.directions if examples.magnitudes is None else examples.magnitudes
            )
        if any(isinstance(data, Iterator) for data in again):
            raise TypeError(
                "For the scale the data is gone through again, but an iterator can be read only "
                "once: pass a DataLoader or a list of batches."
            )
        is_read_twice = of_one and self.curvature in ("ekfac", "lowrank")
        if is_read_twice and isinstance(examples.directions, Iterator):
            raise TypeError(
                f"curvature={self.curvature!r} goes through the data twice, but this iterator can "
                "be read only once: pass a DataLoader or a list of batches."
            )

    def problem(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        blocks: list[Block],
        backend: Backend,
        generator: torch.Generator | None,
    ) -> Problem:
        """What curvature is taken of.

        Args:
            model: The trained network, with the classes in the outputs' last dimension.
            likelihood: Its likelihood.
            blocks: The blocks of its Bayesian parameters.
            backend: Where their inputs and output gradients come from.
            generator: Seeds the labels of `fisher="mc"`; torch's global one if None.
        """
        fisher = self.fisher
        if fisher.kind == "mc":
            device = "cpu" if generator is None else generator.device
            seed = torch.randint(2**62, (), generator=generator, device=device)
            fisher = Fisher(fisher.kind, fisher.mc_samples, int(seed))
        cotangents = LikelihoodCotangents(likelihood, fisher, self.class_dim)
        return Problem(model, cotangents, blocks, backend, self.factor_dtype, self.memory_bound)

    def fit(
        self,
        problem: Problem,
        likelihood: Likelihood,
        examples: Examples,
        on_device: Callable[[Batches], OnDevice],
    ) -> Fitted:
        """The curvature, of examples that `check` let pass.

        Args:
            problem: The network and its blocks.
            likelihood: The network's likelihood.
            examples: The examples, anywhere.
            on_device: Moves batches to the model's device.

        Raises:
            ValueError: As the fits; if all targets of the directions, of the magnitudes or of the
                scale are ignored.
        """

        def counted(batches: Batches, what: str) -> Counted:
            return Counted(on_device(batches), likelihood, what)

        ratio = self._ratio(problem, likelihood, examples, counted)
        fitted = self._fit(problem, examples, counted)
        if examples.scale is None:
            return fitted
        return Fitted(fitted.curvature.map(lambda _, block: scaled(block, ratio)), fitted.seen)

    def _fit(
        self, problem: Problem, examples: Examples, counted: Callable[[Batches, str], Counted]
    ) -> Fitted:
        data, folds = counted(examples.directions, examples.name_of_directions), examples.folds
        measured = None
        if examples.magnitudes is not None:
            measured = counted(examples.magnitudes, "batches of the magnitudes")
        if examples.shrinkage:
            return fit_shrunk(problem, data, FOLDS)
        rank = (self.rank or _RANK) if self.curvature == "lowrank" else None
        if folds is not None:
            if self.is_whole:
                return fit_crossfit_whole(problem, data, folds, rank)
            return fit_crossfit(problem, data, folds, self.curvature)
        if rank is not None:
            return fit_low_rank(problem, data, measured, rank)
        fit = fit_full if self.is_whole else FITS[self.curvature]
        return fit(problem, data, measured)

    def _ratio(
        self,
        problem: Problem,
        likelihood: Likelihood,
        examples: Examples,
        counted: Callable[[Batches, str], Counted],
    ) -> float:
        """The loss's curvature in the outputs over the scale's examples, to that over those seen.

        Raises:
            ValueError: If the examples seen have none; as `mean_loss_curvature`.
        """
        if examples.scale is None:
            return 1.0
        measured, name = examples.magnitudes, "batches of the magnitudes"
        if measured is None:
            measured, name = examples.directions, examples.name_of_directions
        of_all, of_seen = (
            mean_loss_curvature(
                problem.model,
                likelihood,
                counted(data, what),
                self.fisher.kind == "empirical",
                self.class_dim,
            )
            for data, what in ((examples.scale, "data of the scale"), (measured, name))
        )
        if of_seen == 0:
            raise ValueError(
                "The loss of the examples at hand has no curvature in the outputs, all of which "
                "are certain: there is nothing to scale; take more examples."
            )
        return of_all / of_seen
