"""How much the loss curves in the outputs: what forward passes alone tell of curvature."""

import torch
from torch import nn

from laplace_debias.curvature.fits.kfac import check_outputs
from laplace_debias.curvature.losses.cotangents import flat_terms
from laplace_debias.curvature.losses.likelihood import Likelihood
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.class_dim import targets_classes_last
from laplace_debias.curvature.network.inputs import call
from laplace_debias.curvature.network.shadow import shadow


def mean_loss_curvature(
    model: nn.Module,
    likelihood: Likelihood,
    batches: Batches,
    empirical: bool = False,
    class_dim: int | None = None,
) -> float:
    """Mean over examples of tr ∇²_f ℓ, summed over an example's terms; 1 − Σ p² for a softmax.

    A block's trace is the mean of squared output gradients times activations. How much of it a few
    examples hold goes with their share of this, which takes no backward pass: the ratio of its
    means over many and over few examples scales the curvature of the few (a ratio estimator).

    Args:
        model: The trained network, with outputs `[B, ..., C]`.
        likelihood: Its likelihood.
        batches: `(x, y)` on the model's device.
        empirical: ‖∇_f ℓ‖² instead, the trace of the empirical Fisher's part.
        class_dim: As `LikelihoodCotangents`.

    Raises:
        ValueError: If there is no example, or outputs or targets are not what they must be.
    """
    network = shadow(model)
    total, num_examples = 0.0, 0
    for x, y in batches:
        with torch.no_grad():
            outputs = call(network, x)
        check_outputs(outputs)
        terms, labels = flat_terms(outputs, targets_classes_last(y, outputs.ndim, class_dim))
        likelihood.check(terms, labels)
        if empirical:
            values = likelihood.gradient(terms, labels).double().square().sum(1)
        else:
            values = likelihood.hessian_trace(terms)
        counted = likelihood.counted(labels)
        total += float(values.sum() if counted is None else (values * counted).sum())
        num_examples += len(y)
    if num_examples == 0:
        raise ValueError("The data of the scale holds no example: pass at least one batch.")
    return total / num_examples
