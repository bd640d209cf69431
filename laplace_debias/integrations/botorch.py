"""A regression as a model of BoTorch: `pip install laplace-debias[botorch]`."""

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.laplace import Laplace
from laplace_debias.system.checks import imports_of_extra

with imports_of_extra("botorch", "botorch"):
    from botorch.acquisition.objective import PosteriorTransform
    from botorch.models.model import Model
    from botorch.posteriors import GPyTorchPosterior, Posterior
    from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal


class LaplaceModel(Model):
    """A fitted regression as BoTorch's `Model`, for acquisition functions.

    The posterior at q points is the Gaussian of the linearised network's outputs there, including
    the covariances between points. It cannot be differentiated in the points: candidates are chosen
    from a set (`optimize_acqf_discrete`), or without gradients
    (`optimize_acqf(..., options={"with_grad": False})`).

    Args:
        la: A fitted `Laplace` with a `Gaussian` likelihood, from points `[B, d]` to `[B, C]`.
        num_outputs: C.

    Raises:
        TypeError: For another likelihood.
        RuntimeError: Before a fit.
    """

    def __init__(self, la: Laplace, num_outputs: int = 1) -> None:
        super().__init__()
        if not isinstance(la.likelihood, Gaussian):
            raise TypeError(
                "LaplaceModel is for regression, whose likelihood is Gaussian, got "
                f"{type(la.likelihood).__name__}. Pass a Laplace with likelihood='regression'."
            )
        la.posterior  # noqa: B018 (raises before a fit)
        self._la = la
        self._num_outputs = num_outputs

    @property
    def num_outputs(self) -> int:
        """Number of outputs, C."""
        return self._num_outputs

    @property
    def batch_shape(self) -> torch.Size:
        """The shape of a batch of models: empty, since this is a single one."""
        return torch.Size()

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> Posterior:
        """The posterior over the outputs at the points.

        Args:
            X: Points, `[..., q, d]`.
            output_indices: Which outputs; all if None.
            observation_noise: Whether to add the noise σ².
            posterior_transform: A transform of the posterior.

        Raises:
            ValueError: If the number of outputs is not `num_outputs`. Otherwise this raises what
                `Laplace.functional` raises.
            NotImplementedError: For points that require gradients, or a noise for each point.
        """
        if isinstance(observation_noise, Tensor):
            raise NotImplementedError(
                "The noise of a regression is its sigma. Pass observation_noise=True or False."
            )
        if X.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                "The posterior cannot be differentiated in the points. Choose candidates with "
                'optimize_acqf_discrete, or pass options={"with_grad": False} to optimize_acqf.'
            )
        mean, covariance = joint_moments(self._la, X, observation_noise)
        if mean.shape[-1] != self._num_outputs:
            raise ValueError(
                f"The network has {mean.shape[-1]} outputs, but num_outputs={self._num_outputs}. "
                f"Pass num_outputs={mean.shape[-1]} to LaplaceModel."
            )
        if output_indices is not None:
            num_points, num_outputs = mean.shape[-2:]
            columns = torch.tensor(output_indices, device=mean.device)
            first_columns = num_outputs * torch.arange(num_points, device=mean.device)
            rows = (first_columns[:, None] + columns).flatten()
            mean = mean[..., columns]
            covariance = covariance[..., rows[:, None], rows]
        if mean.shape[-1] == 1:
            normal = MultivariateNormal(mean[..., 0], covariance)
        else:
            normal = MultitaskMultivariateNormal(mean, covariance, interleaved=True)
        posterior = GPyTorchPosterior(normal)
        if posterior_transform is None:
            return posterior
        return posterior_transform(posterior)


def joint_moments(
    la: Laplace, X: Tensor, observation_noise: bool = False
) -> tuple[Float[Tensor, "*batch q outputs"], Float[Tensor, "*batch qm qm"]]:
    r"""Compute mean and covariance of the linearised network's outputs at q points jointly.

    Args:
        la: A fitted approximation of a network from `[B, d]` to `[B, C]`.
        X: Points `[..., q, d]`, in sets of q.
        observation_noise: Whether to add the noise σ² of a `Gaussian` likelihood.

    Returns:
        The mean `[..., q, C]` and the covariance `[..., q·C, q·C]`, whose rows are ordered by
        points, and for each point by outputs.

    Raises:
        ValueError: If X is not `[..., q, d]`, or for noise of a likelihood that has no σ. Otherwise
            this raises what `Laplace.functional` raises.
    """
    if X.ndim < 2:
        raise ValueError(
            f"Points must have shape [..., q, d], got {tuple(X.shape)}. Pass X[None] for one point."
        )
    sets = X.detach().reshape(-1, *X.shape[-2:])
    if sets.shape[1] == 1:
        # Sets of one point have no covariance between points, so one pass is enough for all.
        mean, covariance = la.functional(sets[:, 0])
        mean = mean.unsqueeze(1)
    else:
        moments = [la.functional(points, joint=True) for points in sets]
        mean = torch.stack([set_mean for set_mean, _ in moments])
        covariance = torch.stack(
            [set_covariance.flatten(2).flatten(0, 1) for _, set_covariance in moments]
        )
    if observation_noise:
        if not isinstance(la.likelihood, Gaussian):
            raise ValueError(
                f"observation_noise=True needs a Gaussian likelihood, which has a σ, got "
                f"{type(la.likelihood).__name__}. Remove observation_noise=True."
            )
        variance = la.likelihood.sigma.square().to(mean).expand(mean.shape[-1])
        covariance = covariance + torch.diag(variance.repeat(sets.shape[1]))
    if X.ndim == 2:
        return mean[0], covariance[0]
    return mean.unflatten(0, X.shape[:-2]), covariance.unflatten(0, X.shape[:-2])
