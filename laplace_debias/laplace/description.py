"""The text that a `Laplace` prints as."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from laplace_debias.curvature.losses.likelihoods import Gaussian, Likelihood
from laplace_debias.curvature.losses.likelihoods.names import LIKELIHOODS
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.prior import PriorMean

_FEW = 4


@dataclass(frozen=True)
class Described:
    """The facts that are said of an approximation.

    Attributes:
        model: The model, of which the class and the number of parameters are told.
        likelihood: The likelihood.
        curvature: The curvature's name.
        names: The Bayesian parameters; None if they are found at the fit.
        blocks: The curvature blocks' names; None likewise.
        prior_precision: δ.
        prior_mean: The prior's mean, told unless it is zero (or None).
        temperature: T, told unless it is 1.
        link: What logits become probabilities by, told where one was chosen.
        mode: How it was fitted; None before a fit, or if it is not known.
        num_data: N; None before a fit.
    """

    model: nn.Module
    likelihood: Likelihood
    curvature: str
    names: Sequence[str] | None
    blocks: Sequence[str] | None
    prior_precision: Tensor
    prior_mean: PriorMean | None
    temperature: float
    link: Link | None
    mode: str | None
    num_data: int | None

    @property
    def lines(self) -> dict[str, str]:
        """A few facts by name, none of which holds a weight or grows with the model."""
        lines = {
            "model": type(self.model).__name__,
            "likelihood": _likelihood(self.likelihood),
            "curvature": self.curvature,
            "parameters": self._parameters(),
            "blocks": "found at the fit" if self.blocks is None else _some(self.blocks),
            "prior precision": _delta(self.prior_precision),
            "prior mean": _mean(self.prior_mean),
            "temperature": "" if self.temperature == 1 else f"{self.temperature:g}",
            "link": "" if self.link is None else str(self.link),
            "fit": self._fit(),
        }
        return {key: value for key, value in lines.items() if value}

    def __str__(self) -> str:
        lines = (f"  {key}: {value}" for key, value in self.lines.items())
        return "\n".join(["Laplace(", *lines, ")"])

    def _parameters(self) -> str:
        total = sum(parameter.numel() for parameter in self.model.parameters())
        if self.names is None:
            return f"those of the last layer, found at the fit, of {total:,}"
        bayesian = sum(self.model.get_parameter(name).numel() for name in self.names)
        return f"{bayesian:,} of {total:,}"

    def _fit(self) -> str:
        if self.num_data is None:
            return "none yet"
        mode = "" if self.mode is None else f", {self.mode}"
        return f"N = {self.num_data:,}{mode}"


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
