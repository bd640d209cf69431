"""A regression as a model of BoTorch: `pip install laplace-debias[botorch]`."""

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models.model import Model
from botorch.posteriors import GPyTorchPosterior, Posterior
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from torch import Tensor

from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.integrations.gaussian_process import joint_moments
from laplace_debias.laplace import Laplace


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
