"""How good predictions of real targets are."""

from jaxtyping import Float
from torch import Tensor

from laplace_debias.metrics.checks import check_same_device, check_values


def rmse(
    mean: Float[Tensor, "n *outputs"], targets: Float[Tensor, "n *outputs"]
) -> Float[Tensor, ""]:
    """Root of the mean squared error, over examples and outputs alike.

    Args:
        mean: Predictions, `[n]` or `[n, outputs]`.
        targets: Targets, of the same shape.

    Returns:
        The error, in units of the targets.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: Shapes differ, or an argument is empty or holds NaN or Inf.
    """
    check_values(mean, "mean")
    check_values(targets, "targets")
    if mean.shape != targets.shape:
        raise ValueError(
            f"`mean` has shape {list(mean.shape)} and `targets` {list(targets.shape)}; expected "
            "the same, as broadcasting would pair every example with every other. Reshape one."
        )
    check_same_device(mean, targets, "mean", "targets")
    return (mean - targets).square().mean().sqrt()
