"""Ordered classes: cumulative logits with fixed thresholds."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Categorical as CategoricalDistribution

from laplace_debias.curvature.losses.likelihoods.base import Likelihood
from laplace_debias.curvature.network.outputs import require
from laplace_debias.system.shown import counted


class Ordinal(Likelihood):
    r"""Ordinal regression: one output f gives the cumulative logits of classes 0 … K−1.

    With thresholds $t_0 < \dots < t_{K-2}$ and the logistic function σ,
    $p(y \le k) = \sigma(t_k - f)$, as in the proportional odds model (statsmodels' `OrderedModel`).
    A loss Hessian that depends on the target is replaced by its expectation, the Fisher information
    $\sum_k p_k (1 - \sigma(t_k - f) - \sigma(t_{k-1} - f))^2$.

    For a Gaussian output N(m, v), the predictive shrinks $t_k - m$ by $\sqrt{1 + \pi v / 8}$.

    Args:
        thresholds: The K−1 thresholds with which the network was trained, in increasing order. They
            are fixed: the posterior is only over the network's parameters.

    Raises:
        ValueError: If the thresholds are missing, not finite, or not increasing.

    Reference:
        McCullagh (1980), "Regression models for ordinal data".

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias import Laplace, Ordinal
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).eval()
        >>> grades = torch.randint(3, (64,))
        >>> la = Laplace(model, Ordinal([-1.0, 1.0])).fit([(torch.randn(64, 4), grades)])
        >>> la.predict(torch.randn(5, 4)).probs.shape
        torch.Size([5, 3])
    """

    name = "ordinal"
    targets = "class"
    outputs_meaning = "the position on the scale of the thresholds"
    variances_suffice = True

    def __init__(self, thresholds: Sequence[float] | Tensor | None = None) -> None:
        if thresholds is None:
            raise ValueError(
                "The ordinal likelihood has no thresholds. Pass `likelihood=Ordinal([t_0, ..., "
                "t_{K-2}])` with the thresholds that the network was trained with."
            )
        values = torch.as_tensor(thresholds, dtype=torch.float64).detach().cpu().clone()
        is_increasing = values.ndim == 1 and len(values) > 0 and bool((values.diff() > 0).all())
        if not is_increasing or not values.isfinite().all():
            raise ValueError(
                f"`thresholds` are {values.tolist()}. Pass at least one finite number, in "
                "increasing order."
            )
        self.thresholds = values

    def options(self) -> dict[str, Any]:
        """Return the thresholds."""
        return {"thresholds": self.thresholds.tolist()}

    def num_outputs(self, num_targets: int) -> int:
        """Check the number of thresholds, and return the number of outputs, which is 1."""
        if num_targets != self.num_classes:
            raise ValueError(
                f"The data has {counted(num_targets, 'class', 'classes')}, but the likelihood has "
                f"{counted(len(self.thresholds), 'threshold')}, for "
                f"{self.num_classes} classes. Pass {counted(num_targets - 1, 'threshold')}."
            )
        return 1

    @property
    def num_classes(self) -> int:
        """The number of classes K."""
        return len(self.thresholds) + 1

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Require a single output, and class indices `[B]` in `0 … K−1`."""
        if outputs.shape[1] != 1:
            raise ValueError(
                f"An ordinal likelihood needs one output, but the model has {outputs.shape[1]}. "
                'If the model has one output per class, use `likelihood="classification"`.'
            )
        self._check_labels(targets, outputs)

    def check_predicted(self, values: Tensor, targets: Tensor) -> None:
        """Require class indices `[B]` as targets for predicted probabilities `[B, K]`."""
        self._check_labels(targets, values)

    def _check_labels(self, targets: Tensor, outputs: Tensor) -> None:
        """Require one class label per example, `[B]`."""
        if targets.shape != outputs.shape[:1]:
            raise ValueError(
                f"Targets must be one class label per example, of shape ({outputs.shape[0]},), "
                f"got shape {tuple(targets.shape)}. Reshape them, for example with "
                "`targets.squeeze(1)`."
            )
        self.check_targets(targets)

    def check_targets(self, targets: Tensor) -> None:
        """Require class indices in `0 … K−1`."""
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise TypeError(
                f"Class labels must be integers, got {targets.dtype}. Pass class indices, "
                "`targets.long()`."
            )
        num_classes = self.num_classes
        require(
            ((targets >= 0) & (targets < num_classes)).all(),
            lambda: ValueError(
                f"There are {num_classes - 1} thresholds, so class labels must be between "
                f"0 and {num_classes - 1}, got {int(targets.min())} to "
                f"{int(targets.max())}. Pass one threshold for each pair of neighbouring "
                "classes."
            ),
        )

    def nll(self, outputs: Tensor, targets: Tensor) -> Float[Tensor, " batch"]:
        r"""Compute −log p(y | f), without cancellation.

        The method uses $\sigma(a) - \sigma(b) = \sigma(a)\sigma(-b)(1 - e^{b-a})$.
        """
        log_probs = self._log_probs(outputs)
        return -log_probs.gather(1, targets.long().unsqueeze(1)).squeeze(1)

    def _log_probs(
        self, outputs: Float[Tensor, "*batch 1"], scale: Tensor | float = 1.0
    ) -> Float[Tensor, "*batch classes"]:
        """Compute log-probabilities of all classes for a given scale of the logistic function."""
        thresholds = self.thresholds.to(outputs)
        distances = (thresholds - outputs) / scale
        below = F.pad(F.logsigmoid(distances), (0, 1))
        above = F.pad(F.logsigmoid(-distances), (1, 0))
        gaps = F.pad(torch.log(-torch.expm1(-distances.diff(dim=-1))), (1, 1))
        if len(thresholds) == 1:
            gaps = torch.zeros_like(below)
        return below + above + gaps

    def _scores(self, outputs: Float[Tensor, "batch 1"]) -> Float[Tensor, "batch classes"]:
        """Compute the derivative of ℓ in f for each class, 1 − σ(t_k − f) − σ(t_{k−1} − f)."""
        cumulative = (self.thresholds.to(outputs) - outputs).sigmoid()
        upper = F.pad(cumulative, (0, 1), value=1.0)
        lower = F.pad(cumulative, (1, 0), value=0.0)
        return 1 - upper - lower

    def hessian_root(self, outputs: Tensor) -> Float[Tensor, "1 batch 1"]:
        """Compute the square root of the Fisher information; the root has one column."""
        information = (self._log_probs(outputs).exp() * self._scores(outputs).square()).sum(1)
        return information.sqrt().reshape(1, -1, 1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Float[Tensor, "batch 1"]:
        """Compute the derivative of ℓ with respect to f."""
        return self._scores(outputs).gather(1, targets.long().unsqueeze(1))

    def sample(self, outputs: Tensor, uniforms: Tensor) -> Int[Tensor, " batch"]:
        """Draw classes by inversion of the cumulative probabilities."""
        cumulative = (self.thresholds.to(outputs) - outputs).sigmoid()
        return (cumulative <= uniforms.to(cumulative)).sum(-1)

    def predictive(self, mean: Tensor, covariance: Tensor | None) -> CategoricalDistribution:
        """Return the distribution of the class, `[B]`, in the probit approximation."""
        if covariance is None:
            return CategoricalDistribution(logits=self._log_probs(mean))
        is_matrix = covariance.ndim > mean.ndim
        variances = covariance.squeeze(-1) if is_matrix else covariance
        scale = (1 + torch.pi / 8 * variances).sqrt()
        return CategoricalDistribution(logits=self._log_probs(mean, scale))

    def mixture(self, samples: Tensor) -> CategoricalDistribution:
        """Average the class probabilities over the sampled outputs."""
        return CategoricalDistribution(probs=self._log_probs(samples).exp().mean(0))

    def exported(self, mean: Tensor, covariance: Tensor) -> dict[str, Tensor]:
        """Return the class probabilities under the key `"probs"`."""
        scale = (1 + torch.pi / 8 * covariance).sqrt()
        return {"probs": self._log_probs(mean, scale).exp()}
