"""A posterior that serves as the prior when its network is trained further."""

from dataclasses import dataclass, field

from laplace_debias.curvature.fits.information import Information
from laplace_debias.curvature.structures import CurvatureStructure
from laplace_debias.laplace.gaussian_prior import GaussianPrior
from laplace_debias.laplace.laplace import Laplace
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.laplace.state.parameter_blocks import ParameterBlocks
from laplace_debias.laplace.state.prior import Prior


@dataclass(frozen=True, eq=False)
class PosteriorPrior(GaussianPrior):
    """A posterior that serves as a prior; see `posterior_as_prior`.

    Attributes:
        fitted: The posterior, with its parameters and options.
    """

    fitted: FittedPosterior = field(repr=False)

    def __post_init__(self) -> None:
        if self.fitted.thinned_at is not None:
            raise ValueError(
                "The posterior is thinned, so it lacks eigenvectors that new data may "
                "need. Load the posterior that was saved before `thin`."
            )

        structure = self.fitted.config.structure
        if structure.takes_inducing:
            raise ValueError(
                f"A posterior with `curvature={structure.name!r}` cannot be a prior, "
                "because it is built from Jacobians at its own parameters, and a new fit "
                'has other Jacobians. Use a different curvature, such as "lowrank".'
            )

    def on(self, parameters: ParameterBlocks, structure: CurvatureStructure) -> Prior:
        """Return the prior of a fit with the same parameters, blocks and structure.

        Raises:
            ValueError: If the parameters, the blocks or the structure differ.
        """
        self.check_parameters(parameters)
        earlier = self.fitted.config.structure
        block_names = self.fitted.parameters.block_names
        if earlier.name != structure.name or block_names != parameters.block_names:
            raise ValueError(
                f"The posterior in `prior=` has curvature={earlier.name!r} and blocks "
                f"{block_names[:4]}, but the new posterior has curvature={structure.name!r} and "
                f"blocks {parameters.block_names[:4]}. Use the same `curvature=`, `joint=` and "
                "`params=` for both."
            )
        posterior = self.fitted.posterior
        information = Information(
            posterior.curvature, posterior.curvature_weight, posterior.factor_scales
        )
        return Prior(posterior.prior_precision, self.mean.double(), information)


def posterior_as_prior(la: Laplace) -> GaussianPrior:
    r"""Turn a posterior into the prior for further training on new data.

    The prior is $N(\theta^*, P^{-1})$, with the mean and the precision of the posterior. Add its
    `penalty` to the loss during training, and then fit with `Laplace(model, prior=...)`. The
    precision of the new posterior is $\tfrac NT C + P$, where C is the curvature of the new data at
    the new parameters. Kronecker products and low-rank matrices are added in the same way as in
    `Laplace.update`. To add data without training, use `Laplace.update`.

    Args:
        la: A fitted `Laplace`. Later changes to it do not affect the prior.

    Raises:
        RuntimeError: If `la` has not been fitted.
        ValueError: If the posterior was thinned, or has `curvature="gp"`, whose directions change
            with the parameters.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias import Laplace, posterior_as_prior
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
        >>> first, second = [(torch.randn(32, 2), torch.randint(3, (32,))) for _ in range(2)]
        >>> prior = posterior_as_prior(Laplace(model).fit([first]))
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        >>> for _ in range(10):
        ...     x, y = second
        ...     loss = nn.functional.cross_entropy(model(x), y) + prior.penalty(model) / 32
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        >>> la = Laplace(model, prior=prior).fit([second])
    """
    fitted = la.fitted
    posterior = fitted.posterior
    names = tuple(fitted.parameters.names)
    return PosteriorPrior(posterior.mean, posterior.precision, names, fitted)
