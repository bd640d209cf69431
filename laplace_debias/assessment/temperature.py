"""Temperature scaling: all logits are divided by one number."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from laplace_debias.curvature.losses.likelihoods import Likelihood, likelihood_from
from laplace_debias.laplace.tuning.evidence import root_between

BOUNDS = (1e-3, 1e3)
"""The range in which the temperature is searched.

Limits are needed, because the optimum is T → 0 if all examples are classified correctly, and T → ∞
if the network is no better than chance.
"""


def fit_temperature(
    logits: Float[Tensor, "n outputs"],
    labels: Shaped[Tensor, "n *outputs"],
    likelihood: str | Likelihood,
) -> float:
    r"""Return the temperature that minimises the mean NLL of the divided logits.

    The negative log-likelihood is convex in β = 1/T, with the derivative
    $\tfrac1n\sum_n \big(\sum_c p_{nc}(\beta) z_{nc} - z_{n y_n}\big)$. The root of this derivative
    is found by bracketing, to the precision of float64.

    Args:
        logits: Logits, or logarithms of predicted probabilities, which differ from logits by a
            constant per example.
        labels: Class indices `[n]` for a softmax; zeros and ones in the shape of the logits for
            sigmoids.
        likelihood: The likelihood or its name. Its activation must be a softmax, or a sigmoid for
            each logit.

    Raises:
        ValueError: If there are no examples, or a logit is not finite.

    Reference:
        Guo, Pleiss, Sun, Weinberger (2017), "On calibration of modern neural networks".
    """
    if not len(logits):
        raise ValueError(
            "There are no validation examples for fitting a temperature. Pass validation examples."
        )
    z = logits.detach().double().cpu()
    y = labels.detach().cpu().long()
    if not z.isfinite().all():
        raise ValueError(
            "Some logits are not finite, so a temperature cannot be fitted. Check the network's "
            "inputs and weights."
        )

    if likelihood_from(likelihood).activation == "sigmoid":
        # Treat each label as a two-class problem with the logits 0 and z.
        z = torch.stack([z.new_zeros(z.numel()), z.flatten()], 1)
        y = y.flatten()
    label_logits = z.gather(1, y[:, None])[:, 0]

    def slope(temperature: float) -> float:
        # This is the derivative with respect to β, which decreases as T grows.
        return (((z / temperature).softmax(1) * z).sum(1) - label_logits).mean().item()

    return root_between(BOUNDS, slope, tolerance=1e-12)
