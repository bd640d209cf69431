"""The noise of each output of a regression, chosen on held-out data."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import MultivariateNormal

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.laplace.prediction.evaluation import (
    check_targets,
    concatenate_batches,
    probabilities_or_means,
)
from laplace_debias.laplace.prediction.predictive import predictives_by_links
from laplace_debias.laplace.state.fitted import FittedPosterior

# The range of the noise of an output, relative to its root-mean-square residual.
_RANGE = (1e-3, 1e3)


@dataclass(frozen=True, eq=False)
class OutputNoise:
    """The noise levels with the lowest NLL, one per output.

    Attributes:
        sigma: The standard deviation of the noise of each output.
        nll: The mean NLL of the held-out targets.
        is_at_end: Whether any of the standard deviations is at an end of the search range.
    """

    sigma: Float[Tensor, " outputs"]
    nll: float
    is_at_end: bool


@torch.inference_mode(False)
def tune_output_noise(
    fitted: FittedPosterior, data: Iterable[Batch], prior_precision: float
) -> OutputNoise:
    r"""Choose the noise of each output for a fixed posterior.

    With the covariance $F_n$ of the outputs and the residual $r_n$, the chosen noise minimises
    $$\tfrac12\sum_n\big[r_n^\top S_n^{-1} r_n + \log\det 2\pi S_n\big],\quad
    S_n = F_n + \mathrm{diag}(\sigma_1^2, \dots, \sigma_C^2)$$

    Args:
        fitted: The fit of a regression.
        data: Held-out batches `(x, y)`.
        prior_precision: The prior precision of the posterior.

    Raises:
        ValueError: If the residuals of an output are zero.
    """
    # SciPy is imported here because the import takes a third of a second.
    from scipy.optimize import minimize

    residuals, covariances = _residuals_and_covariances(fitted, data, prior_precision)
    deviations = residuals.square().mean(0).sqrt()
    if not deviations.all():
        outputs = deviations.eq(0).nonzero().flatten().tolist()
        raise ValueError(
            f"The residuals of outputs {outputs} on the validation data are zero, so "
            "the noise of these outputs cannot be estimated. Check that the targets "
            "are not the model's own outputs, or pass `sigma=True`."
        )

    def nll(log_ratios: Tensor) -> Float[Tensor, ""]:
        variances = (deviations * log_ratios.exp()).square()
        root = torch.linalg.cholesky(covariances + variances.diag_embed())
        whitened = torch.linalg.solve_triangular(root, residuals.unsqueeze(-1), upper=False)
        log_dets = 2 * root.diagonal(dim1=1, dim2=2).log().sum(1)
        squares = whitened.square().sum((1, 2))
        return (squares + log_dets).mean() / 2 + len(deviations) * math.log(2 * math.pi) / 2

    def value_and_gradient(numbers: object) -> tuple[float, object]:
        log_ratios = torch.as_tensor(numbers, dtype=torch.float64).requires_grad_()
        value = nll(log_ratios)
        (gradient,) = torch.autograd.grad(value, log_ratios)
        return float(value.detach()), gradient.numpy()

    bounds = [(math.log(_RANGE[0]), math.log(_RANGE[1]))] * len(deviations)
    with torch.enable_grad():
        result = minimize(
            value_and_gradient,
            torch.zeros(len(deviations)).numpy(),
            jac=True,
            bounds=bounds,
            method="L-BFGS-B",
            options={"ftol": 0.0, "gtol": 1e-8},
        )
    log_ratios = torch.tensor(result.x, dtype=torch.float64)
    is_at_end = bool(((log_ratios <= bounds[0][0]) | (log_ratios >= bounds[0][1])).any())
    return OutputNoise(deviations * log_ratios.exp(), float(result.fun), is_at_end)


def _residuals_and_covariances(
    fitted: FittedPosterior, data: Iterable[Batch], prior_precision: float
) -> tuple[Float[Tensor, "targets outputs"], Float[Tensor, "targets outputs outputs"]]:
    """Compute residuals, and covariances of the outputs without noise, and move them to the CPU."""
    likelihood = fitted.likelihood
    assert isinstance(likelihood, Gaussian)
    grid = torch.tensor([prior_precision], dtype=torch.float64)
    batches = []
    for batch in data:
        ((_, predicted),) = predictives_by_links(fitted, batch.inputs, grid, [])
        if isinstance(predicted, ValueError):
            raise predicted
        assert isinstance(predicted, MultivariateNormal)
        checked = check_targets(
            likelihood, predicted, batch.targets, fitted.spec.class_dim, leading=1
        )
        residuals = checked.labels.double() - probabilities_or_means(predicted).double()
        totals = predicted.covariance_matrix.flatten(0, -3).double()
        noise = likelihood.sigma.to(totals).square().expand(totals.shape[-1])
        batches.append([residuals.cpu(), (totals - noise.diag_embed()).cpu()])
    residuals, covariances = concatenate_batches(batches, "tune on")
    return residuals, covariances
