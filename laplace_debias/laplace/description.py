"""The text that a `Laplace` prints as."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from laplace_debias.curvature.losses.likelihoods import Gaussian, Likelihood
from laplace_debias.curvature.losses.likelihoods.names import LIKELIHOODS
from laplace_debias.curvature.network.wrappers import unwrapped
from laplace_debias.laplace.fitted import Fitted
from laplace_debias.laplace.prior import Prior, PriorMean
from laplace_debias.laplace.subject import Subject

_FEW = 4


def described(subject: Subject, prior: Prior, fitted: Fitted | None) -> dict[str, str]:
    """A few facts by name, none of which holds a weight or grows with the model.

    Args:
        subject: The model and the choices made.
        prior: The prior, of which the defaults are not told.
        fitted: The fit; None before it.
    """
    model, known = unwrapped(subject.model), subject.parameters
    total = sum(parameter.numel() for parameter in model.parameters())
    parameters, blocks = f"those of the last layer, found at the fit, of {total:,}", None
    if known is not None:
        size = sum(model.get_parameter(name).numel() for name in known.names)
        parameters, blocks = f"{size:,} of {total:,}", known.block_names
    fit = "none yet"
    if fitted is not None:
        fit = f"N = {fitted.posterior.num_data:,}" + (f", {fitted.mode}" if fitted.mode else "")
    lines = {
        "model": type(model).__name__,
        "likelihood": _likelihood(subject.likelihood),
        "curvature": subject.settings.kind.name,
        "parameters": parameters,
        "blocks": "found at the fit" if blocks is None else _some(blocks),
        "prior precision": _delta(prior.precision),
        "prior mean": _mean(prior.given_mean if known is None else prior.mean),
        "temperature": "" if prior.temperature == 1 else f"{prior.temperature:g}",
        "link": "" if prior.link is None else str(prior.link),
        "fit": fit,
    }
    return {key: value for key, value in lines.items() if value}


def _likelihood(likelihood: Likelihood) -> str:
    if type(likelihood) is Gaussian:
        sigma = likelihood.sigma
        noise = f"{sigma.item():g}" if sigma.ndim == 0 else f"one for each of {len(sigma)} outputs"
        return f"regression, sigma = {noise}"
    names = {kind: name for name, kind in LIKELIHOODS.items()}
    name = names.get(type(likelihood))
    if name is None:
        return type(likelihood).__name__
    values = vars(likelihood).items()
    weighed = [key.replace("_", " ") for key, value in values if isinstance(value, Tensor)]
    if smoothing := getattr(likelihood, "label_smoothing", 0):
        weighed.append(f"label smoothing {smoothing:g}")
    return ", ".join([name, *weighed])


def _some(names: Sequence[str]) -> str:
    if len(names) <= _FEW:
        return f"{len(names)}: {', '.join(names)}"
    return f"{len(names)}: {', '.join(names[: _FEW - 2])}, …, {names[-1]}"


def _mean(prior_mean: PriorMean | None) -> str:
    """The prior's mean in a few words, none if it is zero."""
    if prior_mean is None:
        return ""
    if isinstance(prior_mean, Mapping) or (isinstance(prior_mean, Tensor) and prior_mean.ndim):
        return "one for each parameter"
    return f"{float(prior_mean):g}" if prior_mean else ""


def _delta(prior_precision: Tensor) -> str:
    if prior_precision.ndim == 0:
        return f"{prior_precision.item():g}"
    low, high = prior_precision.min().item(), prior_precision.max().item()
    return f"{low:g} to {high:g}, one per block"
