"""Likelihoods for one binary label and for several binary labels."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Bernoulli as BernoulliDistribution
from torch.distributions import Independent

from laplace_debias.curvature.losses.likelihoods.base import (
    RESHAPE_TARGETS,
    Likelihood,
    Weights,
    check_length,
    columns_of,
    probit,
)
from laplace_debias.curvature.network.outputs import require, warn_of_sigmoid
from laplace_debias.system.checks import checked_weights


class _Sigmoids(Likelihood):
    """Independent Bernoulli distributions given logits; subclasses define targets and weights."""

    variances_suffice = True
    checks_last_operation = True

    def training_loss(self) -> tuple[str, nn.Module]:
        """Return the binary cross-entropy, a mean over examples and labels."""
        return "mean binary cross-entropy", nn.BCEWithLogitsLoss()

    def warn_of_outputs(self, network: nn.Module, outputs: Tensor) -> None:
        """Warn if the network ends in a sigmoid."""
        warn_of_sigmoid(network, outputs)

    def hessian_root(self, outputs: Tensor) -> Tensor:
        r"""Compute the C columns of $\mathrm{diag}(\sqrt{p(1-p)})$."""
        return torch.diag_embed(_deviations(outputs)).movedim(-1, 0)

    def signed_root(self, outputs: Tensor, draw_signs: Callable[[int], Tensor]) -> Tensor:
        r"""Compute $\epsilon\sqrt{p(1-p)}$ for each logit."""
        return draw_signs(outputs.shape[-1]).to(outputs.dtype) * _deviations(outputs)

    def hessian_trace(self, outputs: Tensor) -> Tensor:
        """Compute the trace Σ p (1 − p) without forming a matrix of all labels."""
        return _deviations(outputs.double()).square().sum(-1)

    def sample(self, outputs: Tensor, uniforms: Tensor) -> Float[Tensor, "batch labels"]:
        """Draw zeros and ones with the sigmoids as probabilities, using one number per label."""
        return (uniforms < outputs.double().sigmoid()).to(outputs.dtype)

    def drawn_gradient(self, outputs: Tensor, uniforms: Tensor) -> Tensor:
        """Compute p − y for labels y that are drawn from the sigmoids."""
        return MultiLabel().gradient(outputs, self.sample(outputs, uniforms))


class Bernoulli(_Sigmoids):
    r"""Binary classification on one logit; targets in {0, 1}, `[B]` or `[B, 1]`.

    With a weight π for positive labels, as in `nn.BCEWithLogitsLoss(pos_weight=)`,
    $\ell = -\pi y\log p - (1-y)\log(1-p)$, and its Hessian is $\omega\,p(1-p)$ with
    $\omega = 1+(\pi-1)y$. The mean loss of N examples is Σ ℓ / N, as in torch. See `Categorical`
    for how such weights affect the posterior and the marginal likelihood.

    Args:
        positive_weight: π. Default: 1.

    Raises:
        ValueError: If the weight is not positive and finite.
    """

    name = "binary"
    targets = "class"
    activation = "sigmoid"
    outputs_meaning = "logit"
    checks_shapes_only = True

    def __init__(self, positive_weight: float | None = None) -> None:
        self.positive_weight = checked_weights(positive_weight, "positive_weight")
        check_length(self.positive_weight, 1, "positive_weight")

    def options(self) -> dict[str, Any]:
        """Return the weight of the positive class if a weight was given."""
        if self.positive_weight is None:
            return {}
        return {"positive_weight": self.positive_weight.item()}

    def for_drawn_targets(self) -> "Bernoulli":
        """Return the likelihood without the weight for positive labels."""
        likelihood = copy.copy(self)
        likelihood.positive_weight = None
        return likelihood

    def probabilities(self, logits: Tensor) -> Tensor:
        """Compute the probability of the positive class, `[B]`."""
        return logits[..., 0].sigmoid()

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Require a single output, and targets that are 0 or 1."""
        if outputs.shape[1] != 1:
            raise ValueError(
                "Binary classification needs one output (a logit), but the model has "
                f"{outputs.shape[1]}. If several labels can apply to an example, use "
                '`likelihood="multilabel"`. If exactly one class applies, use '
                '`likelihood="classification"`.'
            )
        if columns_of(targets).shape != outputs.shape:
            raise ValueError(
                f"Binary targets must have shape {tuple(outputs.shape[:1])} or "
                f"{tuple(outputs.shape)}, got {tuple(targets.shape)}. {RESHAPE_TARGETS}"
            )
        self.check_targets(targets)

    def check_targets(self, targets: Tensor) -> None:
        """Require targets that are 0 or 1."""
        require(
            ((targets == 0) | (targets == 1)).all(),
            lambda: ValueError("Binary targets must be 0 or 1. Convert the targets."),
        )

    def num_outputs(self, num_targets: int) -> int:
        """Return 1, because a single logit describes two classes."""
        if num_targets > 2:
            raise ValueError(
                f"The data has {num_targets} classes, but binary classification needs two. Use "
                '`likelihood="classification"`.'
            )
        return 1

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the binary cross-entropy of the logit."""
        labels = targets.reshape(outputs.shape).to(outputs.dtype)
        return F.binary_cross_entropy_with_logits(
            outputs, labels, reduction="none", pos_weight=_like(self.positive_weight, outputs)
        )[:, 0]

    def curvature_weights(self, targets: Tensor) -> Tensor | None:
        """Compute the weight ω of each example's Hessian."""
        if self.positive_weight is None:
            return None
        return _curvature_weights(targets.reshape(-1, 1), None, self.positive_weight)

    def predictive(self, mean: Tensor, covariance: Tensor | None) -> BernoulliDistribution:
        r"""Return the Bernoulli distribution of the label (probit approximation), `[B]`."""
        logits = mean if covariance is None else probit(mean, covariance)
        return BernoulliDistribution(logits=logits[..., 0])

    def mixture(self, samples: Tensor) -> BernoulliDistribution:
        """Average the probability over the sampled logits."""
        return BernoulliDistribution(probs=samples[..., 0].sigmoid().mean(0))


class MultiLabel(_Sigmoids):
    r"""Multi-label classification: an independent Bernoulli for each of C logits.

    Targets are 0 or 1, `[B, C]`, or `[B]` for C = 1, of any real dtype. With $p = \sigma(f)$,
    $\ell = -\sum_c \log p(y_c \mid f_c)$, summed over the labels of an example, and
    $\nabla^2_f \ell = \mathrm{diag}(p(1-p))$. With one logit, this is `Bernoulli`, except for the
    shape `[B, 1]` of the predictive.

    With label weights $w$ and weights π for positive labels, like `weight` and `pos_weight` of
    `nn.BCEWithLogitsLoss`, $\ell = -\sum_c w_c\,\big(\pi_c y_c\log p_c + (1-y_c)\log(1-p_c)\big)$
    and $\nabla^2_f \ell = \mathrm{diag}(\omega\,p(1-p))$ with $\omega_c = w_c(1+(\pi_c-1)y_c)$. The
    loss is summed over labels and averaged over examples, so it is C times torch's mean. See
    `Categorical` for how such weights affect the posterior and the marginal likelihood.

    Args:
        ignore_index: An example (or position) does not count if every label has this value. It is
            not possible to ignore only some labels of an example.
        label_weights: w, one number per label.
        positive_weights: π, one number per label or one number for all labels.

    Raises:
        ValueError: If weights are out of range.
    """

    name = "multilabel"
    targets = "labels"
    activation = "sigmoid"
    outputs_meaning = "labels"
    checks_shapes_only = True

    def __init__(
        self,
        ignore_index: int = -100,
        label_weights: Weights | None = None,
        positive_weights: Weights | float | None = None,
    ) -> None:
        self.ignore_index = ignore_index
        self.label_weights = checked_weights(label_weights, "label_weights")
        self.positive_weights = checked_weights(positive_weights, "positive_weights")

    def options(self) -> dict[str, Any]:
        """Return `ignore_index`, and the weights that were given."""
        options: dict[str, Any] = {"ignore_index": self.ignore_index}
        if self.label_weights is not None:
            options["label_weights"] = self.label_weights.tolist()
        if self.positive_weights is not None:
            options["positive_weights"] = self.positive_weights.tolist()
        return options

    def for_drawn_targets(self) -> "MultiLabel":
        """Return the likelihood without ignored examples and weights."""
        likelihood = copy.copy(self)
        likelihood.ignore_index = -100
        likelihood.label_weights = None
        likelihood.positive_weights = None
        return likelihood

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Require targets that are 0 or 1 and have the shape of the outputs."""
        check_length(self.label_weights, outputs.shape[1], "label_weights")
        check_length(self.positive_weights, outputs.shape[1], "positive_weights", single=True)
        if columns_of(targets).shape != outputs.shape:
            hint = ""
            if targets.ndim == 1 and not targets.is_floating_point():
                hint = (
                    " (if the targets are one class index per example, use "
                    '`likelihood="classification"`)'
                )
            raise ValueError(
                "Targets must be 0 or 1 for every label and have the shape of the outputs, "
                f"{tuple(outputs.shape)}, got {tuple(targets.shape)}{hint}. {RESHAPE_TARGETS}"
            )
        is_label = (targets == 0) | (targets == 1)
        are_right = columns_of(is_label).all(-1)
        require(
            (are_right | ~self.counted(targets)).all(),
            lambda: ValueError(
                "Multi-label targets must be 0 or 1 for every label of an example, or "
                f"ignore_index={self.ignore_index} for all of its labels. Remove examples for "
                "which only some labels are known."
            ),
        )

    def num_outputs(self, num_targets: int) -> int:
        """Return the number of labels."""
        return num_targets

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the binary cross-entropy of the logits, summed over the labels."""
        counted = self.counted(targets)
        labels = columns_of(targets).to(outputs.dtype)
        labels = torch.where(counted.unsqueeze(-1), labels, 0)
        losses = F.binary_cross_entropy_with_logits(
            outputs,
            labels,
            _like(self.label_weights, outputs),
            reduction="none",
            pos_weight=_like(self.positive_weights, outputs),
        )
        return losses.sum(-1) * counted

    def curvature_weights(self, targets: Tensor) -> Tensor | None:
        """Compute the weight ω of each label's Hessian."""
        if self.label_weights is None and self.positive_weights is None:
            return None
        targets = columns_of(targets)
        for weights in (self.label_weights, self.positive_weights):
            if weights is not None and len(weights) not in (1, targets.shape[-1]):
                return None  # `check` raises the error.
        labels = torch.where(self.counted(targets).unsqueeze(-1), targets, 0)
        return _curvature_weights(labels, self.label_weights, self.positive_weights)

    def counted(self, targets: Tensor) -> Tensor:
        """Return a mask of the positions that have a label other than `ignore_index`."""
        # In a small unsigned integer type, −100 would wrap around to another number.
        return (columns_of(targets).double() != self.ignore_index).any(-1)

    def predictive(self, mean: Tensor, covariance: Tensor | None) -> Independent:
        r"""Return independent Bernoulli distributions in the probit approximation.

        The batch shape is `[B]`, the event shape is `[C]`, and `.mean` contains the labels'
        probabilities.
        """
        logits = mean if covariance is None else probit(mean, covariance)
        return Independent(BernoulliDistribution(logits=logits), 1)

    def mixture(self, samples: Tensor) -> Independent:
        """Average each label's probability over the sampled logits."""
        return Independent(BernoulliDistribution(probs=samples.sigmoid().mean(0)), 1)


def _like(weights: Tensor | None, outputs: Tensor) -> Tensor | None:
    return None if weights is None else weights.to(outputs, non_blocking=True)


def _curvature_weights(
    labels: Tensor, weights: Tensor | None, positive: Tensor | None
) -> Float[Tensor, "batch labels"]:
    """Compute w (1 + (π − 1) y), float64."""
    y = labels.double()
    weights = _like(weights, y)
    positive = _like(positive, y)
    omega = torch.ones_like(y) if positive is None else 1 + (positive - 1) * y
    return omega if weights is None else weights * omega


def _deviations(logits: Tensor) -> Tensor:
    """Compute √(p (1 − p)) from log-sigmoids, which are accurate for saturated logits."""
    return (0.5 * (F.logsigmoid(logits) + F.logsigmoid(-logits))).exp()
