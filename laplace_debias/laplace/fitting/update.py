"""Updates of a posterior with new data: the information of the data adds up."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import SupportsIndex

import torch

from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.information import Information
from laplace_debias.curvature.losses.base import NegativeLogLikelihood
from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.curvature.network.batches import Batches, Stream, check_batches
from laplace_debias.curvature.network.dataset_size import training_size
from laplace_debias.laplace.fitting.fit import fit
from laplace_debias.laplace.fitting.schemes import Added
from laplace_debias.laplace.state.fitted import FittedPosterior


@dataclass(frozen=True)
class Updated(Added):
    """A scheme that adds the information of new data to that of a fit, at its noise."""

    keeps_noise = True

    def estimate_noise(self, context: FitContext, streams: Sequence[Stream]) -> Gaussian:
        """Return the noise of the fit, at which its curvature was measured."""
        loss = context.cotangents.loss
        assert isinstance(loss, NegativeLogLikelihood)
        assert isinstance(loss.likelihood, Gaussian)
        return loss.likelihood


def update(
    fitted: FittedPosterior,
    loader: Batches,
    num_data: SupportsIndex | None,
    *,
    generator: torch.Generator | None,
    resume: Path | None,
    progress: bool,
) -> FittedPosterior:
    """Add the information of new data to a fit; see `Laplace.update`."""
    if fitted.thinned_at is not None:
        raise ValueError(
            "The posterior is thinned, so it lacks eigenvectors that new data may "
            "need. Load the posterior that was saved before `thin`, and update it."
        )
    check_batches(loader)
    posterior = fitted.posterior
    weight = posterior.data_weight * posterior.temperature
    information = Information(posterior.curvature, weight)
    scheme = Updated(loader, information)
    size = training_size(loader, num_data, scheme.mode, reads_whole_loader=True)
    added = fit(
        # The new data are added to the blocks that the fit found.
        replace(fitted, selected=fitted.parameters),
        scheme,
        size,
        generator=generator,
        resume=resume,
        progress=progress,
    )
    num_targets = None
    if fitted.num_targets is not None and added.num_targets is not None:
        num_targets = fitted.num_targets + added.num_targets
    total = posterior.num_data + added.posterior.num_data
    return replace(
        added,
        selected=fitted.selected,
        posterior=added.posterior.changed(num_data=total),
        nll=fitted.nll + added.nll,
        num_targets=num_targets,
        mode=fitted.mode,
        report=None,
    )
