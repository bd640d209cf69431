"""Updates of a posterior with new data: the information of the data adds up."""

from dataclasses import dataclass, replace
from typing import SupportsIndex

import torch

from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.fits.information import Information
from laplace_debias.curvature.losses.base import NegativeLogLikelihood
from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.curvature.network.batches import Batches, check_batches
from laplace_debias.curvature.network.dataset_size import training_size
from laplace_debias.curvature.structures import CurvatureStructure
from laplace_debias.curvature.structures.kfac import KfacCurvature
from laplace_debias.laplace.fit import fit
from laplace_debias.laplace.prepared import PreparedFit
from laplace_debias.laplace.schemes import Full, as_stream
from laplace_debias.laplace.state import FittedPosterior

_MODE = "full"  # All of the new data is read.


@dataclass(frozen=True)
class Added(Full):
    """A scheme that adds the information of all new data to that of earlier data.

    Attributes:
        data: New batches `(x, y)`.
        information: The information of earlier data, for the same parameters.
    """

    information: Information

    def check(self, structure: CurvatureStructure) -> None:
        """Require factors that can be added."""
        if isinstance(structure, KfacCurvature):
            check_has_factors(self.information)

    def estimate_noise(self, context: FitContext) -> Gaussian:
        """Return the noise of the earlier fit, at which its curvature was measured."""
        loss = context.cotangents.loss
        assert isinstance(loss, NegativeLogLikelihood)
        assert isinstance(loss.likelihood, Gaussian)
        return loss.likelihood

    def fit(self, prepared: PreparedFit) -> CurvatureFit:
        """Add the information of the data."""
        names = prepared.parameters.block_names
        earlier_names = list(self.information.curvature.blocks)
        if names != earlier_names:
            differing = sorted(set(names) ^ set(earlier_names)) or names
            raise ValueError(
                f"The new data give other curvature blocks than the earlier data: {differing[:4]} "
                "differ. Fit to the earlier and the new data together."
            )
        num_data = prepared.size.num_data
        structure = prepared.config.structure
        return structure.update(prepared.context, self.information, as_stream(self.data), num_data)


def check_has_factors(information: Information) -> None:
    """Require Kronecker factors that can be recovered from the curvature."""
    for name, block in information.curvature.blocks.items():
        if getattr(block, "trace_A", None) is None:
            raise ValueError(
                f"The Kronecker factors of {name} cannot be recovered: the posterior is from a "
                "file of an earlier version, or from OnlineCurvature. Fit to the earlier and the "
                "new data together."
            )


def update(
    fitted: FittedPosterior,
    loader: Batches,
    num_data: SupportsIndex | None,
    *,
    generator: torch.Generator | None,
    progress: bool,
) -> FittedPosterior:
    """Add the information of new data to a fit; see `Laplace.update`."""
    if fitted.thinned_at is not None:
        raise ValueError(
            "The posterior is thinned: directions that new data may need were left out. Load the "
            "posterior that was saved before thin, and update that."
        )
    check_batches(loader)
    posterior = fitted.posterior
    information = Information(posterior.curvature, posterior.num_data)
    size = training_size(loader, num_data, _MODE, reads_all=True)
    added = fit(
        fitted,
        fitted.parameters,
        Added(loader, information),
        size,
        mode=_MODE,
        generator=generator,
        progress=progress,
    )
    num_targets = None
    if fitted.num_targets is not None and added.num_targets is not None:
        num_targets = fitted.num_targets + added.num_targets
    total = posterior.num_data + added.posterior.num_data
    return replace(
        added,
        posterior=added.posterior.changed(num_data=total),
        nll=fitted.nll + added.nll,
        num_targets=num_targets,
        mode=fitted.mode,
        report=None,
    )
