"""Updates of a posterior, to which the information of new data is added."""

from dataclasses import replace
from pathlib import Path
from typing import SupportsIndex

import torch

from laplace_debias.curvature.data.batches import Batches, check_batches
from laplace_debias.curvature.data.dataset_size import training_size
from laplace_debias.curvature.fits.information import Information
from laplace_debias.laplace.fitting.fit import fit
from laplace_debias.laplace.fitting.schemes import Full
from laplace_debias.laplace.state.fitted import FittedPosterior


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
    weight = posterior.curvature_weight * posterior.temperature
    information = Information(posterior.curvature, weight, posterior.factor_scales)
    scheme = Full(loader, label="full")
    size = training_size(loader, num_data, scheme.label, reads_whole_loader=True)
    added = fit(
        # The parameters are passed on, so that the new data are added to the same blocks.
        replace(fitted.setup, parameters=fitted.parameters),
        scheme,
        size,
        information=information,
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
