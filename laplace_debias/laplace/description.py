"""The string form of a `Laplace`: a few facts about its model, prior and fit."""

import torch

from laplace_debias.curvature.network.subnetwork import Subnetwork
from laplace_debias.laplace.state.fitted import FitSetup, FittedPosterior
from laplace_debias.laplace.state.prior import Prior

_MOST_SHOWN_BLOCKS = 4


def describe(state: FitSetup | FittedPosterior) -> dict[str, str]:
    """Summarise a model, its prior and its fit in a few named lines, however large the model is."""
    model = state.spec.plain_model
    total = sum(parameter.numel() for parameter in model.parameters())
    # A subnetwork holds copies of its selected entries, which must not be counted twice.
    subnetworks = [module for module in model.modules() if isinstance(module, Subnetwork)]
    total -= sum(subnetwork.entries.numel() for subnetwork in subnetworks)
    lines = {
        "model": type(model).__name__,
        "likelihood": state.spec.likelihood.describe(),
        "curvature": state.config.structure.name,
    }
    if state.config.structure.has_independent_outputs:
        lines["curvature"] += ", independent outputs"
    if state.parameters is None:
        lines["parameters"] = f"those of the last layer, found at the fit, of {total:,}"
        lines["blocks"] = "found at the fit"
    else:
        names = state.parameters.block_names
        shown = names
        if len(names) > _MOST_SHOWN_BLOCKS:
            shown = [*names[: _MOST_SHOWN_BLOCKS - 2], "…", names[-1]]
        lines["parameters"] = f"{state.parameters.size:,} of {total:,}"
        lines["blocks"] = f"{len(names)}: {', '.join(shown)}"
    lines |= _described_prior(state.prior)
    if state.temperature != 1:
        lines["temperature"] = f"{state.temperature:g}"
    if state.link is not None:
        lines["link"] = str(state.link)
    lines["fit"] = "none yet"
    if isinstance(state, FittedPosterior):
        mode = f", {state.mode}" if state.mode else ""
        lines["fit"] = f"N = {state.posterior.num_data:,}{mode}"
    return lines


def _described_prior(prior: Prior) -> dict[str, str]:
    """Return the lines that describe a prior, keyed by their titles."""
    lowest, highest = (f"{delta:g}" for delta in torch.aminmax(prior.precision))
    lines = {"prior precision": lowest}
    if prior.precision.ndim > 0:
        lines["prior precision"] = f"{lowest} to {highest}, one per block"
    if prior.information is not None:
        lines["prior"] = "the one passed as `prior=`, whose common part is the prior precision"
    if prior.mean is not None and prior.mean.any():
        if prior.mean.ndim > 0:
            lines["prior mean"] = "one for each parameter"
        else:
            lines["prior mean"] = f"{float(prior.mean):g}"
    return lines
