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

    The posterior at q points is the Gaussian of the linearised network's outputs there, covariances
    between the points included. It cannot be differentiated in the points: candidates are chosen
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
                f"{type(la.likelihood).__name__}."
            )
        la.posterior  # noqa: B018 (raises before a fit)
        self._la = la
        self._num_outputs = num_outputs

    @property
    def num_outputs(self) -> int:
        """C."""
        return self._num_outputs

    @property
    def batch_shape(self) -> torch.Size:
        """Of one model: none."""
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
            posterior_transform: Applied to the posterior.

        Raises:
            ValueError: If the model has another number of outputs than `num_outputs`; as
                `Laplace.functional`.
            NotImplementedError: For points that require gradients, or a noise for each point.
        """
        if isinstance(observation_noise, Tensor):
            raise NotImplementedError(
                "The noise of a regression is its sigma: pass observation_noise=True or False."
            )
        if X.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                "The posterior cannot be differentiated in the points: choose candidates with "
                'optimize_acqf_discrete, or pass options={"with_grad": False} to optimize_acqf.'
            )
        mean, covariance = joint_moments(self._la, X, observation_noise)
        if mean.shape[-1] != self._num_outputs:
            raise ValueError(
                f"The network has {mean.shape[-1]} outputs, LaplaceModel was told "
                f"num_outputs={self._num_outputs}."
            )
        if output_indices is not None:
            wanted = torch.tensor(output_indices, device=mean.device)
            of_point = torch.arange(mean.shape[-2], device=mean.device)[:, None] * mean.shape[-1]
            places = (of_point + wanted).flatten()
            mean, covariance = mean[..., wanted], covariance[..., places[:, None], places]
        if mean.shape[-1] == 1:
            normal = MultivariateNormal(mean[..., 0], covariance)
        else:
            normal = MultitaskMultivariateNormal(mean, covariance, interleaved=True)
        posterior = GPyTorchPosterior(normal)
        return posterior if posterior_transform is None else posterior_transform(posterior)


def joint_moments(
    la: Laplace, X: Tensor, observation_noise: bool = False
) -> tuple[Float[Tensor, "*batch q outputs"], Float[Tensor, "*batch qm qm"]]:
    r"""Mean and covariance of the linearised network's outputs at q points, for each batch of them.

    Args:
        la: A fitted approximation of a network from `[B, d]` to `[B, C]`.
        X: Points `[..., q, d]`, in sets of q.
        observation_noise: Whether to add the noise σ² of a `Gaussian` likelihood.

    Returns:
        The mean `[..., q, C]` and the covariance `[..., q·C, q·C]`, point by point and in it output
        by output.

    Raises:
        ValueError: If X is not `[..., q, d]`, or for noise of a likelihood that has no σ; as
            `Laplace.functional`.
    """
    if X.ndim < 2:
        raise ValueError(f"Points must have shape [..., q, d], got {tuple(X.shape)}.")
    sets = X.detach().reshape(-1, *X.shape[-2:])
    if sets.shape[1] == 1:
        # One pass for all: sets of one point have no covariance between points.
        mean, covariance = la.functional(sets[:, 0])
        mean = mean.unsqueeze(1)
    else:
        moments = [la.functional(points, joint=True) for points in sets]
        mean = torch.stack([of_set for of_set, _ in moments])
        covariance = torch.stack([of_set.flatten(2).flatten(0, 1) for _, of_set in moments])
    if observation_noise:
        if not isinstance(la.likelihood, Gaussian):
            raise ValueError(
                f"observation_noise=True needs a Gaussian likelihood, which has a σ, got "
                f"{type(la.likelihood).__name__}."
            )
        variance = la.likelihood.sigma.square().to(mean).expand(mean.shape[-1])
        covariance = covariance + torch.diag(variance.repeat(sets.shape[1]))
    return (
        mean.unflatten(0, X.shape[:-2]) if X.ndim > 2 else mean[0],
        covariance.unflatten(0, X.shape[:-2]) if X.ndim > 2 else covariance[0],
    )
