"""What the first examples tell of a model before a fit."""

import torch
from torch import Tensor, nn

from laplace_debias.curvature.losses.likelihoods import Categorical, Gaussian, Likelihood
from laplace_debias.curvature.network.class_dim import check_layout, warn_of_probabilities
from laplace_debias.curvature.network.inputs import Inputs, call, take
from laplace_debias.curvature.network.shadow import shadow
from laplace_debias.system.warn import warn

_FEW = 4


def look_at(
    network: nn.Module, likelihood: Likelihood, x: Inputs, y: Tensor, class_dim: int | None
) -> None:
    """Run a few examples: where are the classes, and are the outputs logits?

    Args:
        network: The model, with outputs `[B, ..., C]`.
        likelihood: What the outputs mean.
        x: Inputs, `[B, ...]`, on the model's device.
        y: Targets.
        class_dim: Which dimension of the outputs has the classes, as the user gave it.

    Warns:
        UserWarning: If the outputs look like probabilities, or the noise of a regression is not
            given.

    Raises:
        ValueError: If the shapes leave open where the classes are.
        TypeError: If there are no logits among what the model returns.
    """
    with torch.no_grad():
        outputs = call(shadow(network), take(x, slice(0, _FEW)))
    check_layout(torch.Size((len(y), *outputs.shape[1:])), y, class_dim)
    if isinstance(likelihood, Gaussian) and likelihood.is_assumed:
        warn(
            "The noise of the regression is not known, sigma=1.0 is assumed. Pass sigma= in the "
            "targets' units, or tune it after the fit, as la.tune(validation_loader) does, or "
            'la.tune(method="marglik", sigma=True).'
        )
    if isinstance(likelihood, Categorical):
        warn_of_probabilities(outputs)
