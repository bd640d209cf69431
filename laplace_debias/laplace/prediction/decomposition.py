"""Total, aleatoric and epistemic uncertainty of one or several posteriors.

All parts are computed from the same draws (or, in closed form, from the same moments), so that they
add up: by the law of total variance for a regression, and by `H[E p] = E H[p] + I` for classes and
labels.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent

from laplace_debias import metrics
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.inputs import Inputs, Record
from laplace_debias.laplace.functional.gaussian_outputs import GaussianOutputs
from laplace_debias.laplace.prediction.intervals import single_targets
from laplace_debias.laplace.prediction.predictive import (
    FitWithLink,
    PredictionMethod,
    check_same_shape,
    equal_mixture,
    stack_members,
)
from laplace_debias.metrics import Uncertainty
from laplace_debias.metrics.uncertainties import (
    leading_classes,
    margin_instability,
)


def uncertainty(
    fits: Sequence[FitWithLink], x: Inputs | Record, method: PredictionMethod
) -> Uncertainty:
    """Decompose the uncertainty of a mixture of one or more fits with equal weights."""
    likelihood = fits[0].likelihood
    if method.is_closed_form and likelihood.has_marginals:
        return _closed_variances(fits, x, method)
    with torch.inference_mode(False):
        if method.name == "glm" and likelihood.activation is not None:
            return _uncertainty_of_gaussian_logits(fits, x, method)
        draws = [fit.draws(x, method) for fit in fits]
        return uncertainty_of_draws([fit.likelihood for fit in fits], draws)


def _closed_variances(
    fits: Sequence[FitWithLink], x: Inputs | Record, method: PredictionMethod
) -> Uncertainty:
    """Decompose the variance of a regression in closed form, by the law of total variance."""
    means = []
    totals = []
    epistemics = []
    for fit in fits:
        mean, variances = fit.mean_and_variances(x, method)
        marginals = fit.likelihood.marginals(mean, variances)
        total = marginals.variance
        means.append(marginals.mean)
        totals.append(total)
        epistemics.append(fit.likelihood.epistemic_variances(mean, variances).to(total.dtype))
    between = stack_members(means).var(0, unbiased=False)
    total = torch.stack(totals)
    epistemic = torch.stack(epistemics)
    aleatoric = (total - epistemic).mean(0)
    return Uncertainty(total.mean(0) + between, aleatoric, epistemic.mean(0) + between)


def _uncertainty_of_gaussian_logits(
    fits: Sequence[FitWithLink], x: Inputs | Record, method: PredictionMethod
) -> Uncertainty:
    """Decompose the entropy over draws of Gaussian logits, and compute scores from their moments.

    If the predictive has a closed form, the scores `entropy` and `max_probability` are computed
    from it.
    """
    members = []
    draws = []
    predictives = []
    for fit in fits:
        outputs = fit.gaussian_outputs(x, method)
        draws.append(fit.draws_of_outputs(outputs, method))
        if method.is_closed_form:
            predictives.append(fit.predictive_of_outputs(outputs))
        members.append(outputs.divided_by(fit.temperature))
    decomposed = uncertainty_of_draws([fit.likelihood for fit in fits], draws)
    scores = dict(decomposed.scores)
    if predictives:
        scores |= scores_of_predictive(equal_mixture(predictives))
    likelihood = fits[0].likelihood
    scores |= scores_of_logits(likelihood, members)
    if likelihood.activation == "softmax":
        # Logits of different networks have no common origin, so the scores are averaged over the
        # members.
        means = torch.stack([member.mean for member in members])
        scores["energy"] = metrics.energy(means).mean(0)
        scores["max_logit"] = metrics.max_logit(means).mean(0)
    return replace(decomposed, scores=scores)


def uncertainty_of_draws(
    likelihoods: Sequence[Likelihood], draws: Sequence[Float[Tensor, "samples *batch outputs"]]
) -> Uncertainty:
    """Decompose the entropy or the variance, estimated from samples of the outputs.

    Args:
        likelihoods: The likelihood of each member.
        draws: Samples of each member's outputs, of the same number for all members; logits must
            already be divided by the member's temperature.
    """
    check_same_shape([tuple(outputs.shape[1:]) for outputs in draws])
    predictives = [
        likelihood.predictive(outputs, None)
        for likelihood, outputs in zip(likelihoods, draws, strict=True)
    ]
    if isinstance(single_targets(predictives[0]), Categorical | Bernoulli):
        return _entropies_of_draws(predictives)
    means = torch.cat([predictive.mean for predictive in predictives])
    variances = torch.cat([predictive.variance for predictive in predictives])
    aleatoric = variances.mean(0)
    epistemic = torch.var(means, dim=0, unbiased=False)
    return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)


def _entropies_of_draws(predictives: Sequence[Distribution]) -> Uncertainty:
    """Decompose the entropy of predictives of shape `[samples, *batch]`, one for each member.

    For several labels that form one event, the entropies of the labels are added up.
    """
    probs = torch.cat([single_targets(predictive).probs for predictive in predictives])
    shape = single_targets(predictives[0]).batch_shape[1:]
    # Each row is a term: an example, a position or a label.
    rows = probs.flatten(1, len(shape))
    term_uncertainty = metrics.uncertainty(rows)
    total = term_uncertainty.total.view(shape)
    aleatoric = term_uncertainty.aleatoric.view(shape)
    epistemic = term_uncertainty.epistemic.view(shape)
    scores = {}
    if isinstance(predictives[0], Independent):
        total = total.sum(-1)
        aleatoric = aleatoric.sum(-1)
        epistemic = epistemic.sum(-1)
    else:
        scores["max_probability"] = metrics.max_probability(rows.mean(0)).view(shape)
    scores = {"entropy": total, **scores, "mutual_information": epistemic}
    return Uncertainty(total, aleatoric, epistemic, scores)


def scores_of_predictive(predictive: Distribution) -> dict[str, Float[Tensor, "*n"]]:
    """Compute the scores of a predictive: its entropy and largest probability."""
    base = single_targets(predictive)
    shape = base.batch_shape
    rows = base.probs.flatten(0, len(shape) - 1)
    entropy = metrics.entropy(rows).view(shape)
    if isinstance(predictive, Independent):
        return {"entropy": entropy.sum(-1)}
    return {"entropy": entropy, "max_probability": metrics.max_probability(rows).view(shape)}


def scores_of_logits(
    likelihood: Likelihood, members: Sequence[GaussianOutputs]
) -> dict[str, Float[Tensor, "*n"]]:
    """Compute the scores `variance` and `instability` of an equal mixture of Gaussian logits.

    For independent labels, the variance is averaged over the labels, and the instability is the
    maximum over the labels.
    """
    means = stack_members([member.mean for member in members])
    if likelihood.activation == "softmax":
        first, second = leading_classes(means)
        within = torch.stack([member.mean_variance() for member in members]).mean(0)
        # A part common to all logits changes no probability, so its variance is left out.
        between = (means - means.mean(0)).double().var(-1, unbiased=False).mean(0)
        margin_variances = [member.difference_variances(first, second) for member in members]
        return {
            "variance": (within + between).to(means.dtype),
            "instability": margin_instability(means, torch.stack(margin_variances)),
        }
    variances = torch.stack([member.variances() for member in members])
    variance = variances.mean(0) + means.var(0, unbiased=False)
    # For an independent label, the choice is between the label's logit and zero.
    both_means = torch.stack([torch.zeros_like(means), means], -1)
    instability = margin_instability(both_means, variances.double())
    return {"variance": variance.mean(-1), "instability": instability.amax(-1)}
