"""The likelihood: a loss in the outputs with a distribution and a predictive."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution

from laplace_debias.system.shown import one_line

Weights = Sequence[float] | Tensor


class Likelihood(ABC):
    """p(y | f) for network outputs f of shape `[B, C]`.

    ℓ is the negative log-likelihood of one example, every constant included. A new likelihood is
    the six abstract methods. One whose Hessian depends on the target, by a weight of its class say,
    also has `curvature_weights`. One of real numbers may have `marginals` and `marginal_mixture`,
    and one that is saved with a posterior `options`. Where a network has further positions,
    `[B, T, C]`, it sees each as an example, and ℓ is their sum; `predictive` and `mixture` see the
    positions as they are.

    Attributes:
        variances_suffice: Whether `predictive` looks at the variances of the outputs alone.
    """

    variances_suffice: bool = False

    __repr__ = one_line

    @abstractmethod
    def check(self, outputs: Float[Tensor, "batch outputs"], targets: Tensor) -> None:
        """Raise a `ValueError` or `TypeError` if the targets do not fit the outputs.

        It is called for every batch. On an accelerator the host waits for numbers that it looks at:
        those of this package's likelihoods are read once a fit.
        """

    @abstractmethod
    def nll(
        self, outputs: Float[Tensor, "batch outputs"], targets: Tensor
    ) -> Float[Tensor, " batch"]:
        """ℓ of every example, in nats, `[B]`; differentiable in the outputs."""

    @abstractmethod
    def hessian_root(
        self, outputs: Float[Tensor, "batch outputs"]
    ) -> Float[Tensor, "columns batch outputs"]:
        """Columns `s_k` with `Σ_k s_k s_kᵀ = ∇²_f ℓ`, `[K, B, C]`, in closed form."""

    @abstractmethod
    def sample(
        self,
        outputs: Float[Tensor, "batch outputs"],
        uniforms: Float[Tensor, "batch outputs"],
    ) -> Tensor:
        """Targets drawn from p(y | f), as many as examples: the labels of the Monte-Carlo Fisher.

        By inversion, so that the caller decides where the randomness comes from.
        """

    @abstractmethod
    def predictive(
        self,
        mean: Float[Tensor, "*batch outputs"],
        covariance: Float[Tensor, "*batch outputs outputs"]
        | Float[Tensor, "*batch outputs"]
        | None,
    ) -> Distribution:
        """p(y) for Gaussian outputs `f ~ N(mean, covariance)`; at `f = mean` for None.

        Closed form: exact for the Gaussian of one σ, its first two moments where each output has a
        σ of its own, the probit approximation (MacKay, 1992) for classes and labels.

        Args:
            mean: `[B, C]`, or `[B, ..., C]`.
            covariance: `[B, C, C]`; where `variances_suffice`, its diagonal `[B, C]` will do.
        """

    @abstractmethod
    def mixture(self, samples: Float[Tensor, "samples *batch outputs"]) -> Distribution:
        """p(y) averaged over samples of the outputs (Eq. 18)."""

    def counted(self, targets: Tensor) -> Tensor | None:
        """The mask of targets that count, `[B]`; None for all."""
        return None

    def curvature_weights(self, targets: Tensor) -> Float[Tensor, "batch weights"] | None:
        r"""ω ≥ 0, how much the Hessian of an example counts, float64, `[B, 1]`; None for 1.

        The curvature of an example is $\mathrm{diag}(\sqrt\omega)\,(\sum_k s_k s_k^\top)\,
        \mathrm{diag}(\sqrt\omega)$ with the columns of `hessian_root`, which see no target. Where
        that Hessian is diagonal, each output may have a weight of its own, `[B, C]`.
        """
        return None

    def counts_any(self, targets: Tensor) -> bool:
        """Whether any target of a batch counts.

        Args:
            targets: `[B, ...]`, as batches hold them, with positions or without.
        """
        counted = self.counted(targets.flatten(0, -2) if targets.ndim > 2 else targets)
        return counted is None or bool(counted.any())

    def hessian_trace(self, outputs: Float[Tensor, "batch outputs"]) -> Float[Tensor, " batch"]:
        """The trace of ∇²_f ℓ of every example, `[B]`, float64."""
        return self.hessian_root(outputs.double()).square().sum((0, 2))

    def gradient(
        self, outputs: Float[Tensor, "batch outputs"], targets: Tensor
    ) -> Float[Tensor, "batch outputs"]:
        """∇_f ℓ of every example, `[B, C]`."""
        with torch.enable_grad():
            f = outputs.detach().requires_grad_()
            return torch.autograd.grad(self.nll(f, targets).sum(), f)[0]

    def drawn_gradient(
        self,
        outputs: Float[Tensor, "batch outputs"],
        uniforms: Float[Tensor, "batch outputs"],
    ) -> Float[Tensor, "batch outputs"]:
        """∇_f of −log p(y | f) at targets drawn from p(y | f), `[B, C]`, without weights.

        Its outer product is, in expectation, that of the columns of `hessian_root`.
        """
        return self.gradient(outputs, self.sample(outputs, uniforms))

    def check_predicted(self, values: Float[Tensor, "batch outputs"], targets: Tensor) -> None:
        """Raise as `check` if targets do not fit a predictive's probabilities or means."""
        self.check(values, targets)

    def marginals(
        self, mean: Float[Tensor, "*batch outputs"], variances: Float[Tensor, "*batch outputs"]
    ) -> Distribution:
        """p(y_c) of each target on its own, with `icdf`, for outputs of these moments.

        Raises:
            TypeError: If targets are not real numbers.
        """
        raise self._no_marginals()

    def marginal_mixture(self, samples: Float[Tensor, "samples *batch outputs"]) -> Distribution:
        """p(y_c) of each target on its own, with `icdf`, averaged over samples of the outputs.

        Raises:
            TypeError: If targets are not real numbers.
        """
        raise self._no_marginals()

    def _no_marginals(self) -> TypeError:
        return TypeError(
            f"{type(self).__name__} has no marginals with quantiles: they are those of regression, "
            "of Gaussian or HeteroscedasticGaussian. `predict` gives class probabilities."
        )

    def options(self) -> dict[str, Any]:
        """The instance's arguments as plain data (JSON), for a posterior file to compare.

        A file holds what this returns beside the import path of a user's class. `Laplace.load`
        refuses an instance that returns something else. Empty by default.
        """
        return {}


RESHAPE_TARGETS = (
    "Reshape the targets in the data, or pass batch=, a function from a batch to (inputs, targets)."
)
"""Advice for targets that do not fit the outputs, whatever a batch is."""


def columns_of(targets: Tensor, ndim: int = 2) -> Tensor:
    """Targets with as many dimensions as the outputs: those of a single output may lack one."""
    return targets.unsqueeze(-1) if targets.ndim == ndim - 1 else targets


def probit(mean: Tensor, covariance: Tensor) -> Tensor:
    """Logits, each shrunk by its variance (MacKay, 1992).

    The logistic function is close to the normal distribution function of √(π/8)·x.
    """
    is_matrix = covariance.ndim > mean.ndim
    variances = covariance.diagonal(dim1=-2, dim2=-1) if is_matrix else covariance
    return mean / (1 + math.pi / 8 * variances).sqrt()


def check_length(weights: Tensor | None, num_outputs: int, name: str, single: bool = False) -> None:
    """Require one weight per output, or, if `single` is true, one for all."""
    if weights is None or len(weights) == num_outputs or (single and len(weights) == 1):
        return
    raise ValueError(
        f"{name} has {len(weights)} entries, the model has {num_outputs} outputs: give one for "
        "each."
    )
