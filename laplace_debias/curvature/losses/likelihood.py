"""Likelihoods: what the network's outputs mean, and how the loss curves in them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Integer
from torch import Tensor
from torch.distributions import (
    Bernoulli as BernoulliDistribution,
)
from torch.distributions import (
    Categorical as CategoricalDistribution,
)
from torch.distributions import (
    Distribution,
    Independent,
    MultivariateNormal,
)


class Likelihood(ABC):
    """p(y | f) for network outputs f of shape `[B, C]`.

    ℓ is the negative log-likelihood of one example, every constant included. A new likelihood is
    the six abstract methods. Where a network has further positions, `[B, T, C]`, it sees each as an
    example, and ℓ is their sum; `predictive` and `mixture` see the positions as they are.

    Attributes:
        variances_suffice: Whether `predictive` looks at the variances of the outputs alone.
    """

    variances_suffice: bool = False

    @abstractmethod
    def check(self, outputs: Float[Tensor, "batch outputs"], targets: Tensor) -> None:
        """Raise a `ValueError` or `TypeError` if the targets do not fit the outputs."""

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

        Closed form: exact for the Gaussian, the probit approximation (MacKay, 1992) for the others.

        Args:
            mean: `[B, C]`, or `[B, ..., C]`.
            covariance: `[B, C, C]`; where `variances_suffice`, its diagonal `[B, C]` will do.
        """

    @abstractmethod
    def mixture(self, samples: Float[Tensor, "samples *batch outputs"]) -> Distribution:
        """p(y) averaged over samples of the outputs (Eq. 18)."""

    def counted(self, targets: Tensor) -> Tensor | None:
        """Which targets count, `[B]`; None for all."""
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


def _check_finite_floats(targets: Tensor, kind: str) -> None:
    if not targets.is_floating_point():
        raise TypeError(
            f"{kind} targets must be floating point, got {targets.dtype}: use `targets.float()`."
        )
    if not torch.isfinite(targets).all():
        raise ValueError(f"{kind} targets hold NaN or Inf: remove these examples.")


def _advice_on_columns(outputs: Tensor, targets: Tensor) -> str:
    """What to do with targets of one number a class, which are not class indices."""
    if targets.shape != outputs.shape:
        return ""
    is_one_hot = ((targets == 0) | (targets == 1)).all() and (targets.sum(1) == 1).all()
    if is_one_hot:
        return (
            "; one-hot targets are turned into them by `targets.argmax(1)`, but if several labels "
            'may apply to an example use likelihood="multilabel"'
        )
    return '; if several labels may apply to an example use likelihood="multilabel"'


def _is_resolved(covariance: Float[Tensor, "*batch outputs outputs"]) -> bool:
    """Whether every output keeps a variance of its own, given the others, beside the rounding.

    What Cholesky's pivots say in the covariance's own dtype depends on the machine: they are those
    of double precision, held against the rounding of the entries.
    """
    root, info = torch.linalg.cholesky_ex(covariance.double())
    own = root.diagonal(dim1=-2, dim2=-1).square()
    rounding = covariance.shape[-1] * torch.finfo(covariance.dtype).eps
    of_all = covariance.diagonal(dim1=-2, dim2=-1)
    return bool((info == 0).all() & (own > rounding * of_all).all())


def _probit(mean: Tensor, covariance: Tensor) -> Tensor:
    """Logits, each shrunk by its variance (MacKay, 1992).

    The logistic function is close to the normal distribution function of √(π/8)·x.
    """
    is_matrix = covariance.ndim > mean.ndim
    variances = covariance.diagonal(dim1=-2, dim2=-1) if is_matrix else covariance
    return mean / (1 + math.pi / 8 * variances).sqrt()


class Categorical(Likelihood):
    """Softmax classification; targets are class indices `[B]`.

    Args:
        ignore_index: A target with this value does not count, as in `F.cross_entropy`.
    """

    variances_suffice = True

    def __init__(self, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Require integer labels `[B]` in `0 … C−1`."""
        num_classes = outputs.shape[1]
        if num_classes < 2:
            raise ValueError(
                "Classification needs at least two outputs, the model has one: use "
                'likelihood="binary" for a single logit.'
            )
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise TypeError(
                f"Class labels must be integers, got {targets.dtype}: pass class indices, "
                f"`targets.long()`{_advice_on_columns(outputs, targets)}."
            )
        if targets.shape != outputs.shape[:1]:
            raise ValueError(
                f"Expected one class label an example, shape ({outputs.shape[0]},), got "
                f"{tuple(targets.shape)}{_advice_on_columns(outputs, targets)}."
            )
        counted = targets[self.counted(targets)]
        if counted.numel() == 0:
            return
        low, high = int(counted.min()), int(counted.max())
        if low < 0 or high >= num_classes:
            raise ValueError(
                f"Class labels must lie in 0 … {num_classes - 1} for {num_classes} outputs, got "
                f"{low} … {high}."
            )

    def nll(self, outputs: Tensor, targets: Integer[Tensor, " batch"]) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(
            outputs, targets.long(), reduction="none", ignore_index=self.ignore_index
        )

    def counted(self, targets: Tensor) -> Tensor:
        """Those that are not `ignore_index`."""
        # In a narrow unsigned type −100 would wrap around to the index of a class.
        return targets.long() != self.ignore_index

    def hessian_root(self, outputs: Tensor) -> Tensor:
        r"""The Cholesky factor of $\mathrm{diag}(p) - pp^\top$: C−1 columns.

        With the tail sums $q_j = \sum_{k>j} p_k$ and $q_{-1} = 1$:
        $L_{jj} = \sqrt{p_j q_j / q_{j-1}}$ and, for $i > j$,
        $L_{ij} = -p_i \sqrt{p_j / (q_{j-1} q_j)}$. The last column is zero and left out.

        Reference: Tanabe & Sagae (1992), "An exact Cholesky decomposition and the generalized
        inverse of the variance–covariance matrix of the multinomial distribution".
        """
        p = outputs.softmax(-1)
        tiny = torch.finfo(p.dtype).tiny
        # heads[j] = Σ_{k≥j} p_k, summed from the end so that small tails keep their digits.
        heads = p.flip(-1).cumsum(-1).flip(-1)
        head, tail = heads[..., :-1].clamp_min(tiny), heads[..., 1:]
        ratio = (p[..., :-1] / head).sqrt()
        diagonal = ratio * tail.sqrt()
        below = ratio / tail.clamp_min(tiny).sqrt()
        root = -p.unsqueeze(-1) * below.unsqueeze(-2)  # [B, C, C−1]
        root = root.tril(-1) + F.pad(torch.diag_embed(diagonal), (0, 0, 0, 1))
        return root.movedim(-1, 0)

    def hessian_trace(self, outputs: Tensor) -> Tensor:
        """1 − Σ p², without a matrix of all classes."""
        p = outputs.double().softmax(-1)
        return (p * (1 - p)).sum(-1)

    def sample(self, outputs: Tensor, uniforms: Tensor) -> Int[Tensor, " batch"]:
        """Class indices from the softmax; uses the first uniform of every example."""
        cumulative = outputs.softmax(-1).cumsum(-1)
        above = uniforms[:, :1].to(cumulative) * cumulative[:, -1:]
        return (cumulative[:, :-1] <= above).sum(-1)

    def predictive(self, mean: Tensor, covariance: Tensor | None) -> CategoricalDistribution:
        r"""Softmax of the logits, each divided by $\sqrt{1 + \tfrac{\pi}{8}\,\mathrm{var}}$."""
        if covariance is None:
            return CategoricalDistribution(logits=mean)
        return CategoricalDistribution(logits=_probit(mean, covariance))

    def mixture(self, samples: Tensor) -> CategoricalDistribution:
        """The mean of the softmaxes."""
        return CategoricalDistribution(probs=samples.softmax(-1).mean(0))


class Bernoulli(Likelihood):
    """Binary classification on one logit; targets in {0, 1}, `[B]` or `[B, 1]`."""

    variances_suffice = True

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Require one output and targets 0 or 1."""
        if outputs.shape[1] != 1:
            raise ValueError(
                f"Binary classification needs one output (a logit), the model has "
                f'{outputs.shape[1]}: use likelihood="multilabel" if each output says whether a '
                "label of its own applies (several at once, or none), or "
                '"classification" if exactly one of the classes does.'
            )
        if targets.shape not in (outputs.shape, outputs.shape[:1]):
            raise ValueError(
                f"Expected binary targets of shape {tuple(outputs.shape[:1])} or "
                f"{tuple(outputs.shape)}, got {tuple(targets.shape)}."
            )
        if not ((targets == 0) | (targets == 1)).all():
            raise ValueError("Binary targets must be 0 or 1.")

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Binary cross-entropy on the logit."""
        labels = targets.reshape(outputs.shape).to(outputs.dtype)
        return F.binary_cross_entropy_with_logits(outputs, labels, reduction="none")[:, 0]

    def hessian_root(self, outputs: Tensor) -> Tensor:
        r"""$\sqrt{p(1-p)}$, from log-sigmoids so that saturated logits keep their digits."""
        return (0.5 * (F.logsigmoid(outputs) + F.logsigmoid(-outputs))).exp().unsqueeze(0)

    def sample(self, outputs: Tensor, uniforms: Tensor) -> Float[Tensor, "batch 1"]:
        """Zeros and ones from the sigmoid."""
        return (uniforms < outputs.double().sigmoid()).to(outputs.dtype)

    def predictive(self, mean: Tensor, covariance: Tensor | None) -> BernoulliDistribution:
        r"""Sigmoid of the logit over $\sqrt{1 + \tfrac{\pi}{8}\,\mathrm{var}}$; shape `[B]`."""
        if covariance is None:
            return BernoulliDistribution(logits=mean[..., 0])
        return BernoulliDistribution(logits=_probit(mean, covariance)[..., 0])

    def mixture(self, samples: Tensor) -> BernoulliDistribution:
        """The mean of the sigmoids."""
        return BernoulliDistribution(probs=samples[..., 0].sigmoid().mean(0))


class MultiLabel(Likelihood):
    r"""Several labels, each of which applies or not: independent Bernoullis on C logits.

    Targets are 0 or 1, `[B, C]`, of any real dtype. With $p = \sigma(f)$,
    $\ell = -\sum_c \log p(y_c \mid f_c)$, summed over the labels of an example, and
    $\nabla^2_f \ell = \mathrm{diag}(p(1-p))$. With one logit it is `Bernoulli`, but for the shape
    `[B, 1]` of targets and predictive.

    Args:
        ignore_index: Where every label has this value, the example (or position) does not count.
            A single label cannot be left out.
    """

    variances_suffice = True

    def __init__(self, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Require targets 0 or 1 of the outputs' shape."""
        if targets.shape != outputs.shape:
            hint = ""
            if targets.ndim == 1 and not targets.is_floating_point():
                hint = ' (for one class index an example use likelihood="classification")'
            raise ValueError(
                f"Expected targets of the outputs' shape {tuple(outputs.shape)}, 0 or 1 for every "
                f"label, got {tuple(targets.shape)}{hint}."
            )
        counted = targets[self.counted(targets)]
        if not ((counted == 0) | (counted == 1)).all():
            raise ValueError(
                "Multi-label targets must be 0 or 1 for every label of an example, or "
                f"ignore_index={self.ignore_index} for all of them: leave out the examples of "
                "which some labels are not known."
            )

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Binary cross-entropy on the logits, summed over the labels."""
        counted = self.counted(targets)
        labels = torch.where(counted.unsqueeze(-1), targets.to(outputs.dtype), 0)
        losses = F.binary_cross_entropy_with_logits(outputs, labels, reduction="none").sum(-1)
        return losses * counted

    def counted(self, targets: Tensor) -> Tensor:
        """Those that are not `ignore_index` for every label."""
        # In a narrow unsigned type −100 would wrap around to another number.
        return (targets.double() != self.ignore_index).any(-1)

    def hessian_root(self, outputs: Tensor) -> Tensor:
        r"""The C columns of $\mathrm{diag}(\sqrt{p(1-p)})$, as `Bernoulli` computes them."""
        return torch.diag_embed(Bernoulli().hessian_root(outputs)[0]).movedim(-1, 0)

    def hessian_trace(self, outputs: Tensor) -> Tensor:
        """Σ p (1 − p), without a matrix of all labels."""
        return Bernoulli().hessian_root(outputs.double())[0].square().sum(-1)

    def sample(self, outputs: Tensor, uniforms: Tensor) -> Float[Tensor, "batch labels"]:
        """Zeros and ones from the sigmoids, each label from a uniform of its own."""
        return (uniforms < outputs.double().sigmoid()).to(outputs.dtype)

    def predictive(self, mean: Tensor, covariance: Tensor | None) -> Independent:
        r"""Of each label the sigmoid of its logit over $\sqrt{1 + \tfrac{\pi}{8}\,\mathrm{var}}$.

        Batch shape `[B]`, event shape `[C]`; `.mean` are the labels' probabilities.
        """
        logits = mean if covariance is None else _probit(mean, covariance)
        return Independent(BernoulliDistribution(logits=logits), 1)

    def mixture(self, samples: Tensor) -> Independent:
        """The means of the sigmoids: each label's own probability, labels taken as independent."""
        return Independent(BernoulliDistribution(probs=samples.sigmoid().mean(0)), 1)


class Gaussian(Likelihood):
    r"""Regression with Gaussian noise; targets are floating point, `[B, C]`.

    $\ell = \tfrac12\|(f-y)/\sigma\|^2 + \sum_c \log\sigma_c + \tfrac C2\log 2\pi$

    Args:
        sigma: Standard deviation of the noise in the targets' units, one number or one an output.

    Raises:
        ValueError: If a standard deviation is not positive and finite.
    """

    def __init__(self, sigma: float | Sequence[float] | Tensor = 1.0) -> None:
        self.sigma = torch.as_tensor(sigma, dtype=torch.float64).detach().cpu().clone()
        if self.sigma.ndim > 1 or not (self.sigma.isfinite() & (self.sigma > 0)).all():
            raise ValueError(f"sigma must be one positive number, or one an output, got {sigma}.")

    def _sigma(self, outputs: Tensor) -> Tensor:
        if self.sigma.ndim == 1 and len(self.sigma) != outputs.shape[-1]:
            raise ValueError(
                f"sigma has {len(self.sigma)} entries, the model has {outputs.shape[-1]} outputs."
            )
        variance, limits = self.sigma.square(), torch.finfo(outputs.dtype)
        if float(variance.max()) > limits.max or float(variance.min()) < limits.tiny:
            raise ValueError(
                f"sigma is {self.sigma.tolist()}, whose square is out of the range of "
                f"{outputs.dtype}: rescale the targets and sigma, or convert the model to a wider "
                "dtype."
            )
        return self.sigma.to(outputs).expand(outputs.shape[-1])

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Require floating-point targets of the outputs' shape."""
        self._sigma(outputs)
        if targets.shape != outputs.shape:
            raise ValueError(
                f"Regression targets must have the outputs' shape {tuple(outputs.shape)}, got "
                f"{tuple(targets.shape)}: use `targets.reshape(...)`."
            )
        _check_finite_floats(targets, "Regression")

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-density of the targets."""
        sigma = self._sigma(outputs)
        constant = sigma.log().sum() + 0.5 * outputs.shape[-1] * math.log(2 * math.pi)
        return 0.5 * ((outputs - targets) / sigma).square().sum(-1) + constant

    def hessian_root(self, outputs: Tensor) -> Tensor:
        """The C columns of `diag(1/σ)`, the same for every example."""
        root = torch.diag(1 / self._sigma(outputs))
        return root.unsqueeze(1).expand(-1, outputs.shape[0], -1)

    def sample(self, outputs: Tensor, uniforms: Tensor) -> Float[Tensor, "batch outputs"]:
        """`f + σ ε` with standard normal ε, the normal quantiles of the uniforms."""
        return outputs + self._sigma(outputs) * torch.special.ndtri(uniforms).to(outputs)

    def predictive(self, mean: Tensor, covariance: Tensor | None) -> MultivariateNormal:
        """Normal with the outputs' covariance plus σ² on the diagonal."""
        noise = torch.diag(self._sigma(mean).square()).expand(*mean.shape[:-1], -1, -1)
        total = noise if covariance is None else covariance + noise
        # Rounding may have made it unsymmetric by more than torch's check accepts.
        total = (total + total.mT) / 2
        if not _is_resolved(total):
            largest = float(total.diagonal(dim1=-2, dim2=-1).max())
            raise ValueError(
                f"The predictive covariance is singular in {total.dtype}: beside variances of up "
                f"to {largest:.3g} a noise of sigma = {self.sigma.tolist()} is lost to rounding. "
                "Convert the model to a wider dtype, use a larger prior precision, or rescale the "
                "targets and sigma."
            )
        return MultivariateNormal(mean, covariance_matrix=total)

    def mixture(self, samples: Tensor) -> MultivariateNormal:
        """The normal with the mixture's mean and covariance."""
        mean = samples.mean(0)
        residuals = samples - mean
        covariance = torch.einsum("s...i,s...j->...ij", residuals, residuals) / len(samples)
        return self.predictive(mean, covariance)


def likelihood_from(
    name: str | Likelihood, sigma: float | Sequence[float] | Tensor | None = None
) -> Likelihood:
    """The likelihood of a name, or the instance itself.

    Args:
        name: `"classification"`, `"regression"`, `"binary"`, `"multilabel"`, or a `Likelihood`.
        sigma: Noise of `"regression"` (1.0 if not given).

    Raises:
        ValueError: For an unknown name, or a `sigma` that the likelihood has no use for.
    """
    if sigma is not None and name != "regression":
        raise ValueError(
            f'sigma belongs to likelihood="regression", not to {name!r}; build '
            "`Gaussian(sigma)` to pass an instance."
        )
    if isinstance(name, Likelihood):
        return name
    if name == "classification":
        return Categorical()
    if name == "binary":
        return Bernoulli()
    if name == "multilabel":
        return MultiLabel()
    if name == "regression":
        return Gaussian(1.0 if sigma is None else sigma)
    raise ValueError(
        f"Unknown likelihood {name!r}: use 'classification', 'regression', 'binary', 'multilabel', "
        "or an instance of Likelihood."
    )
