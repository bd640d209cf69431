"""A Gaussian prior with one precision per parameter."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.fits.dense import DENSE_BLOCK
from laplace_debias.curvature.fits.information import Information
from laplace_debias.curvature.network.precision import wide
from laplace_debias.curvature.network.unwrapping import unwrapped
from laplace_debias.curvature.structures import CurvatureStructure
from laplace_debias.curvature.structures.base import CurvatureBlock
from laplace_debias.curvature.structures.diagonal import DiagonalCurvature
from laplace_debias.curvature.structures.full import FullCurvature
from laplace_debias.laplace.state.fitted import FitSetup, FittedPosterior
from laplace_debias.laplace.state.parameter_blocks import ParameterBlocks
from laplace_debias.laplace.state.prior import Prior
from laplace_debias.operators import BlockDiagonal, EigenKronecker, LinearOperator
from laplace_debias.operators.eigh import eigh


@dataclass(frozen=True, eq=False)
class GaussianPrior:
    r"""The prior $N(\mu, P_0^{-1})$ with one precision per parameter.

    Add `penalty` to the training loss of the network, and then pass the prior to
    `Laplace(model, prior=...)`. To use an earlier posterior as the prior, see `posterior_as_prior`.

    Args:
        mean: The mean μ, `[D]`, in the order of `param_names`.
        precision: One positive number per parameter, `[D]`.
        param_names: The names of the parameters, as in `model.named_parameters()`.

    Raises:
        TypeError: If the mean or the precision is not a tensor of floating-point numbers.
        ValueError: If their shapes differ, a number is not finite, or a precision is not positive.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias import GaussianPrior, Laplace
        >>> model = nn.Linear(2, 3)
        >>> names = [name for name, _ in model.named_parameters()]
        >>> prior = GaussianPrior(torch.zeros(9), torch.linspace(0.5, 2.0, 9), names)
        >>> prior.penalty(model).backward()
        >>> data = [(torch.randn(16, 2), torch.randint(3, (16,)))]
        >>> la = Laplace(model.eval(), curvature="diag", prior=prior).fit(data)
    """

    mean: Float[Tensor, " parameters"]
    precision: Float[Tensor, " parameters"] | LinearOperator
    param_names: Sequence[str]

    def __post_init__(self) -> None:
        for name, value in (("mean", self.mean), ("precision", self.precision)):
            if not isinstance(value, Tensor) or not value.is_floating_point():
                dtype_or_type = getattr(value, "dtype", type(value).__name__)
                raise TypeError(
                    f"{name} is {dtype_or_type}. Pass a tensor [D] of floating-point numbers."
                )
            if value.ndim != 1 or len(value) != len(self.mean):
                raise ValueError(
                    f"`{name}` has shape {tuple(value.shape)}. Pass one number per parameter. "
                    "The mean and the precision must have the same number of entries."
                )
            if not value.isfinite().all():
                raise ValueError(f"`{name}` contains NaN or Inf. Check how it was computed.")
        assert isinstance(self.precision, Tensor)
        # Copies are kept, because the mean may be a view of weights that are trained further.
        object.__setattr__(self, "mean", self.mean.detach().clone())
        object.__setattr__(self, "precision", self.precision.detach().clone())
        if not (self.precision > 0).all():
            raise ValueError(
                "The prior precision must be positive, but its smallest entry is "
                f"{float(self.precision.min()):.3g}. For a flat prior, use a small number, such "
                "as 1e-6."
            )

    def penalty(self, model: nn.Module) -> Float[Tensor, ""]:
        r"""Compute $\tfrac12(\theta - \mu)^\top P_0 (\theta - \mu)$, in nats.

        The penalty is the negative logarithm of the prior density, up to a constant. Add it to the
        loss summed over all N training examples, or divide it by N if the loss is a mean.

        Args:
            model: A model that has parameters with these names.

        Raises:
            ValueError: If these parameters of the model differ from the prior in size, dtype or
                device.
        """
        plain = unwrapped(model)
        values = [plain.get_parameter(name).flatten() for name in self.param_names]
        theta = torch.cat([value.to(wide(value.dtype)) for value in values])
        mean = self.mean
        if theta.shape != mean.shape or theta.dtype != mean.dtype or theta.device != mean.device:
            raise ValueError(
                f"The prior has {len(mean)} entries in {mean.dtype} on {mean.device}, but "
                f"the corresponding parameters of the model have {len(theta)} entries in "
                f"{theta.dtype} on {theta.device}. Pass a model of the same sizes, dtype "
                "and device."
            )
        step = theta - mean
        if isinstance(self.precision, Tensor):
            return 0.5 * (self.precision * step.square()).sum()
        return 0.5 * step @ (self.precision @ step)

    def on(self, parameters: ParameterBlocks, structure: CurvatureStructure) -> Prior:
        """Prepare this prior for a fit with these parameters and this structure.

        The precision of each parameter is split into δ, which is the same for all parameters, and
        the remainder.

        Raises:
            ValueError: If the parameters differ from the parameters of the prior, or the structure
                has neither a diagonal nor the full matrix.
        """
        self.check_parameters(parameters)
        if not isinstance(structure, (DiagonalCurvature, FullCurvature)):
            raise ValueError(
                f"With curvature={structure.name!r}, the prior precision cannot have a value per "
                'parameter. Use curvature="diag" or "full", or pass one number as prior_precision=.'
            )
        assert isinstance(self.precision, Tensor)
        delta = self.precision.double().min()
        excess = self.precision.double() - delta
        if parameters.order is not None:
            excess = excess[parameters.order.to(excess.device)]
        blocks = {}
        if structure.is_dense:
            blocks[DENSE_BLOCK] = EigenKronecker(None, None, excess.unsqueeze(1))
        else:
            by_block = excess.split([block.size for block in parameters.blocks])
            for block, entries in zip(parameters.blocks, by_block, strict=True):
                magnitudes = entries.view(*block.groups, *block.shape)
                blocks[block.name] = EigenKronecker(None, None, magnitudes)
        return Prior(delta, self.mean.double(), Information(BlockDiagonal(blocks), 1.0))

    def applied_to(self, fitted: FittedPosterior) -> FittedPosterior:
        """Replace the prior of a fit by this prior without reading data.

        Raises:
            ValueError: If the parameters differ from the parameters of the prior, or the structure
                has neither a diagonal nor the full matrix.
        """
        posterior = fitted.posterior
        assert posterior.prior.information is None
        prior = self.on(fitted.parameters, fitted.config.structure)
        assert prior.information is not None
        excess = prior.information.curvature.blocks
        curvature = posterior.curvature.map(
            lambda name, block: _with_excess(block, posterior.curvature_weight, excess[name])
        )
        posterior = posterior.changed(curvature=curvature, prior=prior)
        # The curvature is no longer proportional to σ⁻², so `num_targets` is None.
        return replace(fitted, posterior=posterior, num_targets=None)

    def check_parameters(self, parameters: ParameterBlocks) -> None:
        """Require that a fit and the prior have the same parameters."""
        names = list(self.param_names)
        if names != parameters.names or len(self.mean) != parameters.size:
            raise ValueError(
                f"The prior is over {names[:4]} ({len(self.mean)} entries), but the "
                f"Bayesian parameters are {parameters.names[:4]} ({parameters.size} "
                "entries). Pass the names of the prior's parameters to `params=`, and "
                "use a model with parameters of the same sizes."
            )


def setup_with_prior(setup: FitSetup, prior: GaussianPrior) -> FitSetup:
    """Set a Gaussian prior, whose names select the parameters until a fit has found the last layer.

    The first fit then checks that the parameters of the last layer have these names.
    """
    parameters = setup.parameters
    if parameters is None:
        config = replace(setup.config, params=list(prior.param_names))
        parameters = ParameterBlocks.selected(setup.spec.plain_model, config, None)
    checked = prior.on(parameters, setup.config.structure).to(setup.device)
    checked = checked.for_parameters(parameters)
    return replace(setup, parameters=parameters, prior=checked)


def _with_excess(
    block: CurvatureBlock, curvature_weight: float, excess: CurvatureBlock
) -> EigenKronecker:
    """Average a block over its examples and one more example whose curvature is `excess`."""
    assert isinstance(block, EigenKronecker)
    total_weight = curvature_weight + 1
    if block.U_G is None:
        magnitudes = curvature_weight * block.magnitudes.double() + excess.magnitudes
        return EigenKronecker(None, None, magnitudes / total_weight).to(block.dtype)
    matrix = curvature_weight * block.to_dense().double() + excess.to_dense()
    eigenvalues, U = eigh(matrix / total_weight, "the curvature and the prior")
    magnitudes = eigenvalues.clamp_min(0).unsqueeze(1)
    return EigenKronecker(U, None, magnitudes).to(block.dtype)
