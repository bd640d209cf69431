"""The classes of laplace-torch for each combination of structure and subset of weights."""

from typing import Any, ClassVar

from torch import nn

from laplace_debias.compat.laplace_torch.posteriors import Laplace


class StructuredLaplace(Laplace):
    """A `Laplace` whose class determines the structure and the subset of the weights.

    Args:
        model: The trained network.
        likelihood: `"classification"`, `"regression"` or `"reward_modeling"`.
        *arguments: Further positional arguments of `Laplace`, from `sigma_noise` on.
        **options: Keyword arguments of `Laplace`.

    Example:
        >>> from torch import nn
        >>> from laplace_debias.compat.laplace_torch import KronLaplace
        >>> la = KronLaplace(nn.Linear(4, 3), "classification", prior_precision=0.5)
    """

    hessian_structure: ClassVar[str]
    subset_of_weights: ClassVar[str] = "all"

    def __init__(self, model: nn.Module, likelihood: str, *arguments: Any, **options: Any) -> None:
        super().__init__(
            model,
            likelihood,
            self.subset_of_weights,
            self.hessian_structure,
            *arguments,
            **options,
        )


class DiagLaplace(StructuredLaplace):
    """A diagonal Laplace approximation of all parameters."""

    hessian_structure = "diag"


class FullLaplace(StructuredLaplace):
    """A Laplace approximation of all parameters with the full curvature matrix."""

    hessian_structure = "full"


class KronLaplace(StructuredLaplace):
    """A Kronecker-factored Laplace approximation of all parameters."""

    hessian_structure = "kron"


class LowRankLaplace(StructuredLaplace):
    """A Laplace approximation that keeps the leading eigenvectors of the curvature."""

    hessian_structure = "lowrank"


class DiagLLLaplace(DiagLaplace):
    """A diagonal Laplace approximation of the last layer."""

    subset_of_weights = "last_layer"


class FullLLLaplace(FullLaplace):
    """A Laplace approximation of the last layer with the full curvature matrix."""

    subset_of_weights = "last_layer"


class KronLLLaplace(KronLaplace):
    """A Kronecker-factored Laplace approximation of the last layer."""

    subset_of_weights = "last_layer"
