"""Searches for the prior precision, by marginal likelihood or on held-out data."""

from jaxtyping import Float
from torch import Tensor

from laplace_debias.compat.laplace_torch.arguments import check_has_layers
from laplace_debias.compat.laplace_torch.parameterwise import best_precisions
from laplace_debias.curvature.data.batches import Batches
from laplace_debias.laplace.laplace import Laplace as Posterior
from laplace_debias.laplace.links import Link

PRIOR_STRUCTURES = ("scalar", "layerwise", "diag")


def check_prior_structure(prior_structure: str, hessian_structure: str, method: str) -> None:
    """Require that the search supports this prior structure for the structure of the fit."""
    if prior_structure == "diag" and (hessian_structure != "diag" or method != "marglik"):
        raise NotImplementedError(
            '`prior_structure="diag"` requires hessian_structure="diag" and method="marglik", '
            f'got {hessian_structure!r} and {method!r}. Use `prior_structure="scalar"`.'
        )
    if prior_structure == "layerwise":
        check_has_layers(hessian_structure)


def maximise_marginal_likelihood(
    posterior: Posterior, prior_structure: str
) -> Float[Tensor, " parameters"] | None:
    """Set the prior precision that maximises the marginal likelihood.

    Args:
        posterior: The posterior; its noise does not change.
        prior_structure: `"scalar"`, `"layerwise"` or `"diag"`.

    Returns:
        For `"diag"`, the best prior precision of each parameter. The posterior cannot store these,
        so it gets the best common precision. None for other structures.
    """
    per = "block" if prior_structure == "layerwise" else None
    posterior.tune_evidence(sigma=_fixed_noise(posterior), per=per)
    if prior_structure != "diag":
        return None
    return best_precisions(posterior.fitted, posterior.prior_precision)


def search_grid(
    posterior: Posterior,
    val_loader: Batches | None,
    grid: Float[Tensor, " grid"],
    *,
    prior_structure: str,
    pred_type: str,
    link_approx: str,
    progress_bar: bool,
) -> None:
    """Set the prior precision from a grid that has the smallest NLL on held-out data.

    Args:
        posterior: The posterior; its noise does not change.
        val_loader: Held-out batches `(x, y)`.
        grid: The prior precisions to try.
        prior_structure: Must be `"scalar"`.
        pred_type: `"glm"` or `"gp"`. Networks with sampled weights have no closed form.
        link_approx: The link; has no effect for a regression.
        progress_bar: Whether to show a progress bar.

    Raises:
        ValueError: If no held-out data are passed.
        NotImplementedError: If the search would need several precisions, or samples.
    """
    if val_loader is None:
        raise ValueError('`method="gridsearch"` needs held-out data. Pass `val_loader=`.')
    if prior_structure != "scalar":
        raise NotImplementedError(
            f"A grid search tunes only one prior precision, got {prior_structure=}. Use "
            '`prior_structure="scalar"` or `method="marglik"`.'
        )
    is_regression = posterior.likelihood.has_sigma
    if pred_type == "nn" or (link_approx == "mc" and not is_regression):
        raise NotImplementedError(
            f"A grid search needs closed-form predictions, got {pred_type=} and "
            f'{link_approx=}. Use `pred_type="glm"` with `link_approx="probit"`, `"bridge"` or '
            '`"bridge_norm"`.'
        )
    posterior.tune(
        val_loader,
        grid=grid,
        progress=progress_bar,
        link=None if is_regression else Link(link_approx),
        sigma=_fixed_noise(posterior),
    )


def _fixed_noise(posterior: Posterior) -> bool | None:
    """Return the value of `sigma=` for which tuning leaves the noise unchanged."""
    return False if posterior.likelihood.has_sigma else None
