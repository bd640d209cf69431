"""Use a fitted regression as a BoTorch model: `pip install laplace-debias[botorch]`."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.laplace import Laplace
from laplace_debias.system.checks import imports_of_extra
from laplace_debias.system.shown import counted

with imports_of_extra("botorch", "botorch"):
    from botorch.acquisition.objective import PosteriorTransform
    from botorch.models.model import Model
    from botorch.posteriors import GPyTorchPosterior, Posterior
    from botorch.sampling import MCSampler
    from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
    from linear_operator import to_linear_operator

__all__ = ["ConditionedModel", "LaplaceModel"]


class LaplaceModel(Model):
    """A fitted regression as a BoTorch `Model` for acquisition functions.

    The posterior at q points is the Gaussian of the linearised network's outputs at these points,
    including the covariances between them. Gradients flow back to points that require them, as in
    `optimize_acqf`; the Jacobians of the q points are then kept in memory.

    Args:
        la: A fitted `Laplace` with a `Gaussian` likelihood, whose network maps points `[B, d]` to
            outputs `[B, C]`.
        num_outputs: C.

    Raises:
        TypeError: If the likelihood is not `Gaussian`.
        RuntimeError: If `la` has not been fitted.
    """

    def __init__(self, la: Laplace, num_outputs: int = 1) -> None:
        super().__init__()
        if not isinstance(la.likelihood, Gaussian):
            raise TypeError(
                "`LaplaceModel` needs a Gaussian likelihood, got "
                f'{type(la.likelihood).__name__}. Pass a Laplace with `likelihood="regression"`.'
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
        """The batch shape of the model, which is empty, because this is a single model."""
        return torch.Size()

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> Posterior:
        """Compute the joint posterior over the outputs at q points.

        Args:
            X: Points, `[..., q, d]`.
            output_indices: Indices of the outputs to return. Default: all outputs.
            observation_noise: Whether to add the noise σ².
            posterior_transform: A transform to apply to the posterior.

        Raises:
            ValueError: If the number of outputs is not `num_outputs`. Also raises the errors of
                `Laplace.functional`.
            NotImplementedError: If `observation_noise` is a tensor with a noise for each point.
        """
        if isinstance(observation_noise, Tensor):
            raise NotImplementedError(
                "`observation_noise` must be True or False, got a tensor. Pass True, and "
                "set the noise of the targets with the regression's `sigma`."
            )
        mean, covariance = self._moments(X, observation_noise)
        if mean.shape[-1] != self._num_outputs:
            raise ValueError(
                f"The network has {counted(mean.shape[-1], 'output')}, but "
                f"num_outputs={self._num_outputs}. Pass num_outputs={mean.shape[-1]} to "
                "LaplaceModel."
            )
        if output_indices is not None:
            num_points, num_outputs = mean.shape[-2:]
            columns = torch.tensor(output_indices, device=mean.device)
            first_columns = num_outputs * torch.arange(num_points, device=mean.device)
            rows = (first_columns[:, None] + columns).flatten()
            mean = mean[..., columns]
            covariance = covariance[..., rows[:, None], rows]
        # Use a linear operator, whose Cholesky decomposition adds jitter if the covariance is
        # singular, for example because two points are equal.
        operator = to_linear_operator(covariance)
        if mean.shape[-1] == 1:
            normal = MultivariateNormal(mean[..., 0], operator)
        else:
            normal = MultitaskMultivariateNormal(mean, operator, interleaved=True)
        posterior = GPyTorchPosterior(normal)
        if posterior_transform is None:
            return posterior
        return posterior_transform(posterior)

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> "ConditionedModel":
        """Condition the model on additional observations, without a new fit.

        Args:
            X: Points, `[..., n, d]`.
            Y: Observations at these points, `[..., n, C]`. Additional leading dimensions make a
                batch of models, such as a batch of fantasies.
            noise: Must be None, because the noise of a regression is its sigma.
            **kwargs: Must be empty.

        Raises:
            NotImplementedError: If a noise or an additional argument is passed.
            ValueError: If the shapes do not match.
        """
        if noise is not None:
            raise NotImplementedError(
                "`noise=` is not supported, because `sigma` already sets the noise of a "
                "regression. Remove `noise=`."
            )
        if kwargs:
            raise NotImplementedError(
                "Conditioning on observations takes no further options. Remove "
                f"{', '.join(kwargs)}."
            )
        if Y.shape[-2:] != (X.shape[-2], self._num_outputs):
            raise ValueError(
                f"Y has shape {tuple(Y.shape)}. Pass the observations at the points as a "
                f"tensor of shape [..., {X.shape[-2]}, {self._num_outputs}]."
            )
        return ConditionedModel(self._la, X, Y)

    def fantasize(
        self,
        X: Tensor,
        sampler: MCSampler,
        observation_noise: Tensor | None = None,
        *,
        propagate_grads: bool = True,
    ) -> "ConditionedModel":
        """Condition the model on observations that are drawn from its posterior at given points.

        Args:
            X: Points, `[..., q, d]`.
            sampler: A BoTorch sampler; its number of samples is the number of fantasies.
            observation_noise: Must be None, because the noise of a regression is its sigma.
            propagate_grads: Accepted because `qMultiStepLookahead` passes it, but without effect:
                gradients always flow back through the fantasies.

        Raises:
            NotImplementedError: If an observation noise is passed.
        """
        if observation_noise is not None:
            raise NotImplementedError(
                "`observation_noise=` is not supported, because `sigma` already sets the noise of "
                "a regression. Remove `observation_noise=`."
            )
        Y = sampler(self.posterior(X, observation_noise=True))
        return self.condition_on_observations(X, Y)

    def _moments(self, X: Tensor, observation_noise: bool) -> tuple[Tensor, Tensor]:
        """Compute the joint mean and covariance at q points; see `joint_moments`."""
        return joint_moments(self._la, X, observation_noise)


class ConditionedModel(LaplaceModel):
    r"""A `LaplaceModel` whose Gaussian is conditioned on additional observations.

    The mean is $m + K_{xo}(K_{oo} + \sigma^2 I)^{-1}(y - m_o)$, where K is the covariance of the
    outputs at the given points (x) and at the observed points (o). For the linearised network, this
    is equivalent to updating the Gaussian over the parameters, including its mean. It is exact for
    any curvature.

    Args:
        la: The fitted regression.
        X: Observed points, `[..., n, d]`.
        Y: Observations at these points, `[..., n, C]`.
    """

    def __init__(self, la: Laplace, X: Tensor, Y: Tensor) -> None:
        super().__init__(la, Y.shape[-1])
        self._X = X
        self._Y = Y

    @property
    def batch_shape(self) -> torch.Size:
        """The batch shape of the model, which is the batch shape of the observations."""
        return self._Y.shape[:-2]

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> "ConditionedModel":
        """Condition the model on further observations; see `LaplaceModel`."""
        added = super().condition_on_observations(X, Y, noise, **kwargs)
        points = _join_rows(self._X, added._X)
        return ConditionedModel(self._la, points, _join_rows(self._Y, added._Y))

    def _moments(self, X: Tensor, observation_noise: bool) -> tuple[Tensor, Tensor]:
        """Compute the moments at points `[..., n, d]`, conditional on the observations."""
        mean, covariance = joint_moments(self._la, _join_rows(X, self._X))
        num_rows = X.shape[-2] * self._num_outputs
        K = covariance[..., :num_rows, :num_rows]
        K_cross = covariance[..., :num_rows, num_rows:]
        K_observed = covariance[..., num_rows:, num_rows:]
        K_observed = K_observed + _noise(self._la, self._X.shape[-2], mean)
        gains = torch.linalg.solve(K_observed, K_cross.mT).mT
        mean_at_points, mean_observed = mean.split([X.shape[-2], self._X.shape[-2]], -2)
        residuals = (self._Y - mean_observed).flatten(-2).unsqueeze(-1)
        change = (gains @ residuals).squeeze(-1).unflatten(-1, mean_at_points.shape[-2:])
        conditional = K - gains @ K_cross.mT
        if observation_noise:
            conditional = conditional + _noise(self._la, X.shape[-2], mean)
        conditional = (conditional + conditional.mT) / 2
        mean_at_points = mean_at_points + change
        batch = mean_at_points.shape[:-2]
        return mean_at_points, conditional.expand(*batch, *conditional.shape[-2:])


def _join_rows(first: Tensor, second: Tensor) -> Tensor:
    """Concatenate the rows of two batches of matrices, after broadcasting the batch dimensions."""
    batch = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    first = first.expand(*batch, *first.shape[-2:])
    second = second.expand(*batch, *second.shape[-2:])
    return torch.cat([first, second], -2)


def _noise(la: Laplace, num_points: int, mean: Tensor) -> Float[Tensor, "rows rows"]:
    """Return the covariance of the noise at q points, `[q·C, q·C]`."""
    assert isinstance(la.likelihood, Gaussian)
    variance = la.likelihood.sigma.square().to(mean).expand(mean.shape[-1])
    return torch.diag(variance.repeat(num_points))


def joint_moments(
    la: Laplace, X: Tensor, observation_noise: bool = False
) -> tuple[Float[Tensor, "*batch q outputs"], Float[Tensor, "*batch qm qm"]]:
    r"""Compute the joint mean and covariance of the linearised network's outputs at q points.

    Args:
        la: A fitted `Laplace`, whose network maps `[B, d]` to `[B, C]`.
        X: Points `[..., q, d]`; the moments are joint over each set of q points. Gradients flow
            back to points that require them.
        observation_noise: Whether to add the noise σ² of a `Gaussian` likelihood.

    Returns:
        The mean `[..., q, C]` and the covariance `[..., q·C, q·C]`, whose rows are ordered by point
        and, for each point, by output.

    Raises:
        ValueError: If X is not `[..., q, d]`, or noise is requested for a likelihood that has no σ.
            Also raises the errors of `Laplace.functional`.
    """
    if X.ndim < 2:
        raise ValueError(
            f"The points must have shape [..., q, d], got {tuple(X.shape)}. For a single point, "
            "pass X[None]."
        )
    differentiable = X.requires_grad and torch.is_grad_enabled()
    sets = X.reshape(-1, *X.shape[-2:])
    if sets.shape[1] == 1:
        # If every set is a single point, there are no covariances between points, so one pass over
        # all sets is enough.
        mean, covariance = la.functional(sets[:, 0], differentiable=differentiable)
        mean = mean.unsqueeze(1)
    else:
        moments = [
            la.functional(points, joint=True, differentiable=differentiable) for points in sets
        ]
        mean = torch.stack([set_mean for set_mean, _ in moments])
        covariance = torch.stack(
            [set_covariance.flatten(2).flatten(0, 1) for _, set_covariance in moments]
        )
    if observation_noise:
        if not isinstance(la.likelihood, Gaussian):
            raise ValueError(
                "`observation_noise=True` needs a Gaussian likelihood, but the "
                f"likelihood is {type(la.likelihood).__name__}, which has no observation "
                "noise. Remove `observation_noise=True`."
            )
        covariance = covariance + _noise(la, sets.shape[1], mean)
    if X.ndim == 2:
        return mean[0], covariance[0]
    return mean.unflatten(0, X.shape[:-2]), covariance.unflatten(0, X.shape[:-2])
