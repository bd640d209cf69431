"""One label that applies or not, or several of them."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliDistribution
from torch.distributions import Independent

from laplace_debias.curvature.losses.likelihoods.base import Likelihood, probit


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
        return BernoulliDistribution(logits=probit(mean, covariance)[..., 0])

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
                hint = ' (for one class index per example use likelihood="classification")'
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
        logits = mean if covariance is None else probit(mean, covariance)
        return Independent(BernoulliDistribution(logits=logits), 1)

    def mixture(self, samples: Tensor) -> Independent:
        """The means of the sigmoids: each label's own probability, labels taken as independent."""
        return Independent(BernoulliDistribution(probs=samples.sigmoid().mean(0)), 1)
