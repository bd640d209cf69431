"""The base class of likelihoods."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Distribution

from laplace_debias.system.shown import counted, one_line

Weights = Sequence[float] | Tensor

_DERIVED_METHODS = {
    "nll": ("gradient",),
    "sample": ("drawn_gradient",),
    "hessian_root": ("signed_root", "hessian_trace", "drawn_gradient"),
}
"""Methods, and the methods that return to their general form if a class overrides the former."""


class Likelihood(ABC):
    """The distribution p(y | f) of targets y, given the network's outputs f, `[B, C]`.

    ℓ is the negative log-likelihood of one example, including all constants. A new likelihood
    implements the six abstract methods. If its Hessian depends on the target, for example through a
    class weight, it also implements `curvature_weights`. If a network has outputs with positions,
    `[B, T, C]`, the methods receive each position as an example, and ℓ is the sum over positions;
    only `predictive` and `mixture` receive the dimension of positions.

    A likelihood also defines everything that other modules need to know about it: the attributes
    below, `marginals` and `epistemic_variances` for targets that are numbers, `options` for files,
    `exported` for programs, `describe` and `warn_of_outputs` for users.

    Attributes:
        name: The name in `Laplace(likelihood=)`, in files and as `--task`. None if the class is not
            in this package.
        targets: The type of a target: one class, several labels, or numbers. None if the type is
            not specified.
        activation: How outputs that are logits become probabilities: by one softmax, or by a
            sigmoid for each output. Links and temperatures apply only to such likelihoods. None if
            the outputs are not logits.
        has_sigma: Whether the curvature is proportional to the inverse square of a noise `sigma`,
            so that a fit, `tune` and `tune_evidence` can determine this noise.
        has_marginals: Whether `marginals` and `epistemic_variances` have a closed form.
        variances_suffice: Whether `predictive` depends only on the variances of the outputs, not on
            covariances.
        outputs_meaning: The name of the network's outputs in messages.
        checks_shapes_only: Whether `check` uses only the shape and dtype of the outputs, so that
            outputs and targets may be on different devices.
        checks_last_operation: Whether `warn_of_outputs` looks at the last operation of the network,
            for which the outputs need an autograd graph.
    """

    name: ClassVar[str | None] = None
    targets: ClassVar[Literal["class", "labels", "numbers"] | None] = None
    activation: ClassVar[Literal["softmax", "sigmoid"] | None] = None
    has_sigma: ClassVar[bool] = False
    has_marginals: ClassVar[bool] = False
    variances_suffice: bool = False
    outputs_meaning: ClassVar[str] = "outputs"
    checks_shapes_only: ClassVar[bool] = False
    checks_last_operation: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        # A subclass may calculate differently, so it has to define these attributes itself.
        for attribute in ("name", "activation", "has_sigma", "checks_shapes_only"):
            if attribute not in vars(cls):
                setattr(cls, attribute, getattr(Likelihood, attribute))
        # If a class overrides a method, the methods derived from it return to their general form,
        # which uses the class's own loss and root of the Hessian.
        for method, derived_methods in _DERIVED_METHODS.items():
            for derived in derived_methods:
                if method in vars(cls) and derived not in vars(cls):
                    setattr(cls, derived, getattr(Likelihood, derived))

    __repr__ = one_line

    @abstractmethod
    def check(self, outputs: Float[Tensor, "batch outputs"], targets: Tensor) -> None:
        """Raise a `ValueError` or `TypeError` if the targets do not fit the outputs.

        The method is called for every batch. On an accelerator, the host waits whenever it reads a
        number, so the likelihoods of this package read their numbers only once per fit.
        """

    @property
    def is_assumed(self) -> bool:
        """Whether there is a noise `sigma` that was neither given nor tuned."""
        return False

    @property
    def has_free_sigma(self) -> bool:
        """Whether there is a noise `sigma` that the user did not set, so that tuning chooses it."""
        return False

    def for_new_fit(self) -> "Likelihood":
        """Return the likelihood for a new fit, without the values that `tune` chose."""
        return self

    def for_same_curvature(self) -> "Likelihood":
        """Return the likelihood as it was when the curvature was measured."""
        return self

    def for_drawn_targets(self) -> "Likelihood":
        """Return the likelihood whose loss is −log p(y | f) for all targets drawn from p(y | f).

        A likelihood whose loss has `curvature_weights` or ignores some targets has to implement
        this method or `drawn_gradient`.
        """
        return self

    @abstractmethod
    def nll(
        self, outputs: Float[Tensor, "batch outputs"], targets: Tensor
    ) -> Float[Tensor, " batch"]:
        """Compute the negative log-likelihood of each example, in nats, `[B]`.

        The result is differentiable in the outputs.
        """

    @abstractmethod
    def hessian_root(
        self, outputs: Float[Tensor, "batch outputs"]
    ) -> Float[Tensor, "columns batch outputs"]:
        """Compute a square root of the loss Hessian: columns with `Σ_k s_k s_kᵀ = ∇²_f ℓ`.

        If the Hessian depends on the target other than through `curvature_weights`, return a root
        of its expectation over targets drawn from p(y | f), which is the Fisher information.
        """

    def signed_root(
        self,
        outputs: Float[Tensor, "batch outputs"],
        draw_signs: Callable[[int], Float[Tensor, "batch columns"]],
    ) -> Float[Tensor, "batch outputs"]:
        """Add up the columns of `hessian_root` with random signs, `Σ_k ε_k s_k`.

        The likelihoods of this package do not form the K columns, which take C times the memory of
        the sum.

        Args:
            outputs: The outputs, `[B, C]`.
            draw_signs: A function of K that returns the signs ε, `[B, K]`.
        """
        columns = root_columns(self, outputs)
        return torch.einsum("kbc,bk->bc", columns, draw_signs(len(columns)).to(columns.dtype))

    @abstractmethod
    def sample(
        self,
        outputs: Float[Tensor, "batch outputs"],
        uniforms: Float[Tensor, "batch outputs"],
    ) -> Tensor:
        """Draw a target for each example from p(y | f), for the Monte-Carlo Fisher.

        Targets are drawn by inversion, so that the caller provides the random numbers.
        """

    @abstractmethod
    def predictive(
        self,
        mean: Float[Tensor, "*batch outputs"],
        covariance: Float[Tensor, "*batch outputs outputs"]
        | Float[Tensor, "*batch outputs"]
        | None,
    ) -> Distribution:
        """Return the distribution of the target, for outputs that are Gaussian or have no variance.

        The closed form depends on the likelihood: exact for a Gaussian with one σ, the first two
        moments if each output has its own σ, and the probit approximation (MacKay, 1992) for
        classes and labels.

        Args:
            mean: The mean of the outputs, `[B, C]` or `[B, ..., C]`.
            covariance: The covariance of the outputs, `[B, C, C]`, or only its diagonal, `[B, C]`,
                if `variances_suffice`. None means that the outputs have no variance.
        """

    @abstractmethod
    def mixture(self, samples: Float[Tensor, "samples *batch outputs"]) -> Distribution:
        """Return the distribution of y, averaged over samples of the outputs (Eq. 18)."""

    def counted(self, targets: Tensor) -> Tensor | None:
        """Return a mask `[B]` of the targets that enter the loss, or None if all of them do."""
        return None

    def curvature_weights(self, targets: Tensor) -> Float[Tensor, "batch weights"] | None:
        r"""Return the weight ω ≥ 0 of each example's Hessian, `[B, 1]`, or None if all are 1.

        The curvature of an example is $\mathrm{diag}(\sqrt\omega)\,(\sum_k s_k s_k^\top)\,
        \mathrm{diag}(\sqrt\omega)$, where $s_k$ are the columns of `hessian_root`, which do
        not depend on the target. If $\sum_k s_k s_k^\top$ is diagonal, each output may have its own
        weight, `[B, C]`.
        """
        return None

    def counts_any(self, targets: Tensor) -> bool:
        """Return whether any target of a batch contributes to the loss.

        Args:
            targets: `[B, ...]`, as they are in batches, with or without positions.
        """
        counted = self.counted(targets.flatten(0, -2) if targets.ndim > 2 else targets)
        return counted is None or bool(counted.any())

    def hessian_trace(self, outputs: Float[Tensor, "batch outputs"]) -> Float[Tensor, " batch"]:
        """Compute the trace of ∇²_f ℓ of every example, `[B]`, float64."""
        return root_columns(self, outputs.double()).square().sum((0, 2))

    def gradient(
        self, outputs: Float[Tensor, "batch outputs"], targets: Tensor
    ) -> Float[Tensor, "batch outputs"]:
        """Compute the gradient ∇_f ℓ of each example, `[B, C]`."""
        with torch.enable_grad():
            f = outputs.detach().requires_grad_()
            return torch.autograd.grad(example_losses(self, f, targets).sum(), f)[0]

    def drawn_gradient(
        self,
        outputs: Float[Tensor, "batch outputs"],
        uniforms: Float[Tensor, "batch outputs"],
    ) -> Float[Tensor, "batch outputs"]:
        """Compute the gradient of −log p(y | f) in f at targets drawn from p(y | f), `[B, C]`.

        Its expected outer product equals the outer product of the columns of `hessian_root`.
        """
        likelihood = self.for_drawn_targets()
        return likelihood.gradient(outputs, likelihood.sample(outputs, uniforms))

    def check_predicted(self, values: Float[Tensor, "batch outputs"], targets: Tensor) -> None:
        """Require targets that have the shape of the predicted probabilities or means."""
        self.check(values, targets)

    def marginals(
        self, mean: Float[Tensor, "*batch outputs"], variances: Float[Tensor, "*batch outputs"]
    ) -> Distribution:
        """Return each target's marginal distribution, given the moments of the outputs.

        Raises:
            TypeError: If targets are not real numbers.
        """
        raise self._no_marginals()

    def marginal_mixture(self, samples: Float[Tensor, "samples *batch outputs"]) -> Distribution:
        """Return each target's marginal distribution, averaged over output samples.

        Raises:
            TypeError: If targets are not real numbers.
        """
        raise self._no_marginals()

    def epistemic_variances(
        self, mean: Float[Tensor, "*batch outputs"], variances: Float[Tensor, "*batch outputs"]
    ) -> Float[Tensor, "*batch targets"]:
        """Compute the variance of the mean of each target, given the moments of the outputs.

        Raises:
            TypeError: If targets are not numbers.
        """
        raise self._no_marginals()

    def _no_marginals(self) -> TypeError:
        name = type(self).__name__
        if self.predicts_numbers:
            return TypeError(
                f"{name} has no quantiles, because it does not define `marginals` and "
                "`marginal_mixture`. Use `predict`, or define these methods."
            )
        return TypeError(
            f"{name} has no quantiles, because its targets are classes, not "
            "numbers. Use `predict`, which returns class probabilities."
        )

    def probabilities(self, logits: Float[Tensor, "*batch outputs"]) -> Float[Tensor, "..."]:
        """Compute the probabilities of classes or labels from the outputs."""
        return logits.softmax(-1) if self.activation == "softmax" else logits.sigmoid()

    @property
    def predicts_numbers(self) -> bool:
        """Whether targets are numbers rather than classes; True unless overridden."""
        return self.targets in ("numbers", None)

    def num_outputs(self, num_targets: int) -> int | None:
        """Return the number of outputs that a network needs, or None if unknown.

        Args:
            num_targets: The number of classes, of labels, or of target columns.

        Raises:
            ValueError: If the likelihood does not support this number.
        """
        return None

    def check_targets(self, targets: Tensor) -> None:  # noqa: B027 (any target fits)
        """Raise a `ValueError` if some targets are impossible under the likelihood.

        Data are checked with this method before a network exists. `check` and `check_predicted`
        also receive the outputs.
        """

    def training_loss(self) -> tuple[str, "nn.Module | Likelihood"]:
        """Return the name of the training loss, and a module or likelihood for its mean."""
        return "mean negative log-likelihood", self

    def with_sigma(self, sigma: float | Sequence[float] | Tensor) -> "Likelihood":
        """Return a likelihood with a different standard deviation of the noise.

        Raises:
            ValueError: If the likelihood has no `sigma`.
        """
        raise ValueError(
            f"`sigma` is the noise of a regression, but {self.describe()} has no such "
            "noise. Remove `sigma=`."
        )

    @property
    def is_exportable(self) -> bool:
        """Whether the predictive distribution has a closed form that can be exported."""
        return self.activation is not None or type(self).exported is not Likelihood.exported

    def exported(
        self, mean: Float[Tensor, "*batch outputs"], covariance: Float[Tensor, "..."]
    ) -> dict[str, Tensor]:
        """Return the predictive distribution's tensors, keyed by attribute name.

        The method must consist of operations that `torch.export` records. It takes the same
        arguments as `predictive`. Likelihoods with an `activation` are exported by means of a link
        instead.

        Raises:
            NotImplementedError: By default.
        """
        raise NotImplementedError(f"{type(self).__name__} has no exported form.")

    def describe(self) -> str:
        """Describe the likelihood in one line."""
        return self.name or type(self).__name__

    def warn_of_outputs(self, network: nn.Module, outputs: Float[Tensor, "*batch outputs"]) -> None:  # noqa: B027 (most have no doubt)
        """Warn if the likelihood needs outputs that differ from the network's outputs.

        The outputs are those of a few examples. They have an autograd graph only if
        `checks_last_operation` is true.
        """

    def options(self) -> dict[str, Any]:
        """Return the constructor arguments as JSON data, to store in a posterior file.

        For a user's class, a file contains these options with the import path of the class, and
        `Laplace.load` rejects an instance with different options. Default: empty.
        """
        return {}

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "Likelihood":
        """Make an instance from the result of `options`."""
        return cls(**options)


RESHAPE_TARGETS = (
    "Reshape the targets in the data, or pass `batch=`, a function that converts a batch to "
    "(inputs, targets)."
)
"""Advice about targets that do not match the outputs, which applies to batches of any form."""


def example_losses(
    likelihood: Likelihood, outputs: Float[Tensor, "batch outputs"], targets: Tensor
) -> Float[Tensor, " batch"]:
    """Compute the loss of each example, and check its shape, which broadcasting can change."""
    losses = likelihood.nll(outputs, targets)
    if losses.shape != outputs.shape[:1]:
        raise ValueError(
            f"{type(likelihood).__name__}.nll returned a tensor of shape {tuple(losses.shape)} for "
            f"outputs of shape {tuple(outputs.shape)}. Return one number per example, of shape "
            f"({len(outputs)},)."
        )
    return losses


def root_columns(
    likelihood: Likelihood, outputs: Float[Tensor, "batch outputs"]
) -> Float[Tensor, "columns batch outputs"]:
    """Compute the columns of `hessian_root`, and check their shape."""
    columns = likelihood.hessian_root(outputs)
    if columns.ndim != 3 or columns.shape[1:] != outputs.shape:
        raise ValueError(
            f"{type(likelihood).__name__}.hessian_root returned a tensor of shape "
            f"{tuple(columns.shape)} for outputs of shape {tuple(outputs.shape)}. Return K columns "
            f"per example, of shape (K, {', '.join(map(str, outputs.shape))})."
        )
    return columns


def columns_of(targets: Tensor, ndim: int = 2) -> Tensor:
    """Return targets with `ndim` dimensions; targets of a single output may lack the last one."""
    return targets.unsqueeze(-1) if targets.ndim == ndim - 1 else targets


def probit(mean: Tensor, covariance: Tensor) -> Tensor:
    """Shrink each logit by its variance (MacKay, 1992).

    The logistic function is close to the normal distribution function of √(π/8)·x.
    """
    return mean / (1 + math.pi / 8 * variances_of(mean, covariance)).sqrt()


def variances_of(
    mean: Float[Tensor, "*batch outputs"], covariance: Float[Tensor, "..."]
) -> Float[Tensor, "*batch outputs"]:
    """Return the variances of outputs, for whose mean there are covariances or only variances."""
    if covariance.ndim > mean.ndim:
        return covariance.diagonal(dim1=-2, dim2=-1)
    return covariance


def check_quantile_probabilities(probabilities: Tensor) -> None:
    """Require probabilities strictly between 0 and 1, where quantiles are finite."""
    if not ((probabilities > 0) & (probabilities < 1)).all():
        raise ValueError(
            "Probabilities of quantiles must be greater than 0 and less than 1, got "
            f"{float(probabilities.min()):g} to {float(probabilities.max()):g}. Remove "
            "values outside this range."
        )


def check_length(weights: Tensor | None, num_outputs: int, name: str, single: bool = False) -> None:
    """Require one weight per output or, if `single` is true, a single weight."""
    if weights is None or len(weights) == num_outputs or (single and len(weights) == 1):
        return
    raise ValueError(
        f"{name} has {counted(len(weights), 'entry', 'entries')}, but the model has "
        f"{counted(num_outputs, 'output')}. Pass one entry per output."
    )
