"""Priors with one precision per parameter or per tensor of parameters, and their evidence.

Such a prior replaces the prior precision of a fit with a diagonal or full curvature matrix.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.laplace.gaussian_prior import GaussianPrior
from laplace_debias.laplace.laplace import Laplace
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.laplace.state.model_spec import ModelSpec
from laplace_debias.laplace.state.parameter_blocks import ParameterBlocks
from laplace_debias.laplace.tuning import evidence
from laplace_debias.linalg import diagonal
from laplace_debias.operators import LinearOperator, Permuted

STRUCTURES = ("diag", "full")
"""The structures of laplace-torch that support a prior precision per parameter."""


class ParameterwisePrior:
    """A prior with one precision per parameter, which replaces the prior precision of a fit.

    Args:
        precisions: The prior precisions, `[D]`; for `"full"`, also one per weight or bias.
        hessian_structure: The structure of the fit.
    """

    def __init__(self, precisions: Float[Tensor, " precisions"], hessian_structure: str) -> None:
        self.precisions = precisions
        self._hessian_structure = hessian_structure
        self._latest: tuple[FittedPosterior, Laplace] | None = None

    def check_size(self, parameters: ParameterBlocks) -> None:
        """Require as many precisions as the structure supports."""
        size = len(self.precisions)
        sizes = {"diag": (parameters.size,), "full": (parameters.size, len(parameters.names))}
        if size not in sizes.get(self._hessian_structure, ()):
            raise ValueError(
                f"`prior_precision` has {size} entries, but there are {parameters.size} "
                f"parameters in {len(parameters.block_names)} blocks, with "
                f"hessian_structure={self._hessian_structure!r}. Pass one number. For "
                '"kron" and "diag", you can also pass one number per block; for "full", one number '
                'per weight or bias; and for "diag" and "full", one number per parameter.'
            )

    def posterior(self, fitted: FittedPosterior) -> Laplace:
        """Return the posterior of a fit under these precisions and the prior mean of the fit.

        The posterior of the latest fit is cached, so do not change its noise or its temperature;
        change those of the fit instead.

        Raises:
            ValueError: If the fit has a different number of parameters.
        """
        self.check_size(fitted.parameters)
        latest = self._latest
        if latest is None or latest[0] is not fitted:
            mean = self.precisions.new_zeros(())
            if fitted.prior.mean is not None:
                mean = fitted.prior.mean.to(self.precisions)
            parameters = fitted.parameters
            precisions = by_parameter(self.precisions, parameters, fitted.spec)
            prior = GaussianPrior(mean.expand(parameters.size), precisions, parameters.names)
            latest = fitted, Laplace.from_posterior(prior.applied_to(fitted))
            self._latest = latest
        return latest[1]


def by_parameter(
    precisions: Float[Tensor, " precisions"], parameters: ParameterBlocks, spec: ModelSpec
) -> Float[Tensor, " parameters"]:
    """Repeat the precision of each weight or bias for all of its entries.

    Precisions of which there is already one per parameter are returned unchanged.
    """
    if len(precisions) == parameters.size:
        return precisions
    sizes = parameters.layout(spec.plain_model).sizes
    return precisions.repeat_interleave(torch.tensor(sizes, device=precisions.device))


def parameterwise_log_marginal_likelihood(
    fitted: FittedPosterior,
    precisions: Float[Tensor, " precisions"],
    log_factor: Float[Tensor, ""],
) -> Float[Tensor, ""]:
    """Compute the log marginal likelihood of a fit under one prior precision per parameter.

    The result is differentiable in the precisions and the factor.

    Args:
        fitted: The fit.
        precisions: The prior precisions, one per parameter, or one per weight or bias.
        log_factor: The logarithm of the factor by which the noise of the fit is multiplied.
    """
    precisions = by_parameter(precisions, fitted.parameters, fitted.spec)
    data_precision = (-2 * log_factor).exp() * _data_precision(fitted)
    if data_precision.ndim == 1:
        log_det = (data_precision + precisions).log().sum()
    else:
        log_det = torch.logdet(data_precision + precisions.diag())
    scatter = (precisions * fitted.posterior.displacement.double().square()).sum()
    nll = torch.tensor(fitted.nll, dtype=torch.float64)
    if fitted.residuals is not None:
        nll = nll + fitted.residuals.nll_change(log_factor)
    log_likelihood = -nll / fitted.temperature
    return log_likelihood - 0.5 * (log_det - precisions.log().sum() + scatter)


def best_precisions(
    fitted: FittedPosterior, shared: Float[Tensor, ""]
) -> Float[Tensor, " parameters"]:
    r"""Compute the prior precision of each parameter that maximises the marginal likelihood.

    For data precision h and distance d from the prior mean, the optimum is the root of
    $h / (h + \delta) = \delta d^2$. A parameter without curvature has no optimum.

    Args:
        fitted: The fit, with a diagonal curvature.
        shared: The best common prior precision, which parameters without curvature get.
    """
    h = _data_precision(fitted)
    squared_distances = fitted.posterior.displacement.double().square()
    product = h * squared_distances
    low, high = evidence.search_range(torch.ones_like(h), squared_distances)
    # The positive root of d² δ² + h d² δ - h, in a form that is also accurate for a small d.
    root = 2 * h / (product + (product * (product + 4)).sqrt())
    return torch.where(h > 0, root.clamp(low, high), shared.to(h))


def _data_precision(
    fitted: FittedPosterior,
) -> Float[Tensor, " parameters"] | Float[Tensor, "parameters parameters"]:
    """Compute the precision that the data add to the prior: a vector, or a full matrix."""
    posterior = fitted.posterior
    curvature: LinearOperator = posterior.curvature
    if posterior.order is not None:
        curvature = Permuted(curvature, posterior.order)
    is_full = fitted.config.structure.is_dense
    matrix = curvature.to_dense() if is_full else diagonal(curvature).value
    return posterior.curvature_weight * matrix.double()
