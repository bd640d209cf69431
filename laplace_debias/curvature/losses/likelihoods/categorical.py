"""Softmax classification."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution

from laplace_debias.curvature.losses.likelihoods.base import (
    Likelihood,
    Weights,
    check_length,
    probit,
)
from laplace_debias.curvature.network.outputs import are_finite, require, warn_of_probabilities
from laplace_debias.system.checks import checked_weights
from laplace_debias.system.shown import counted

# The largest allowed distance of a soft target's sum from 1; half precision allows more rounding.
_ROUNDING = 1e-3
_SEVERAL_LABELS = ' If several labels can apply to an example, use `likelihood="multilabel"`.'


class Categorical(Likelihood):
    r"""Softmax classification with class indices `[B]` or probabilities `[B, C]`.

    With class weights $w$, label smoothing ε, the one-hot or soft target $q$ and
    $t_c = w_c\,\big((1-\varepsilon)\,q_c + \varepsilon/C\big)$, as in `F.cross_entropy`,
    $\ell = -\sum_c t_c \log p_c$. Its gradient is $\omega p - t$, and its Hessian is
    $\omega\,(\mathrm{diag}(p) - pp^\top)$ with $\omega = \sum_c t_c$, which is 1 without weights.

    The loss of N examples is Σ_n ℓ_n, and their mean loss is this sum divided by N, whatever the
    weights. torch's `reduction="mean"` divides by the sum of the targets' weights instead. If the
    network was trained with this reduction, multiply the class weights by N / Σ_n w_{y_n}, so that
    they are 1 on average. The posterior and the training then weight the data against the weight
    decay in the same way.

    With weights, smoothing or soft targets, exp(−ℓ) is not a normalised distribution over labels.
    The posterior is then a generalised (Gibbs) posterior, ∝ exp(−Σ ℓ) times the prior. The marginal
    likelihood is the normaliser of this posterior. It can be used to compare prior precisions, but
    not likelihoods. Predictives and labels drawn for `fisher="mc"` use the softmax, and `evaluate`
    and `tune` score class indices by the softmax, without weights and smoothing.

    Args:
        ignore_index: A target with this value does not count, as in `F.cross_entropy`. A soft
            target does not count if it has this value for every class.
        class_weights: w, one number per class. A target of weight zero does not count.
        label_smoothing: ε, from 0 to 1.

    Raises:
        ValueError: If weights or smoothing are out of range.

    Reference:
        Bissiri, Holmes & Walker (2016), "A general framework for updating belief distributions".
    """

    name = "classification"
    targets = "class"
    activation = "softmax"
    outputs_meaning = "classes"
    variances_suffice = True
    checks_shapes_only = True

    def __init__(
        self,
        ignore_index: int = -100,
        class_weights: Weights | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        if not 0 <= label_smoothing <= 1:
            raise ValueError(
                f"`label_smoothing` must be between 0 and 1, got {label_smoothing}. Pass a "
                "number from 0 to 1."
            )
        self.ignore_index = ignore_index
        self.class_weights = checked_weights(class_weights, "class_weights")
        self.label_smoothing = float(label_smoothing)

    def options(self) -> dict[str, Any]:
        """Return `ignore_index`, and the class weights and label smoothing that were given."""
        options: dict[str, Any] = {"ignore_index": self.ignore_index}
        if self.class_weights is not None:
            options["class_weights"] = self.class_weights.tolist()
        if self.label_smoothing:
            options["label_smoothing"] = self.label_smoothing
        return options

    def for_drawn_targets(self) -> "Categorical":
        """Return the likelihood without ignored labels, class weights and label smoothing."""
        likelihood = copy.copy(self)
        likelihood.ignore_index = -100
        likelihood.class_weights = None
        likelihood.label_smoothing = 0.0
        return likelihood

    def num_outputs(self, num_targets: int) -> int:
        """Return the number of classes."""
        return num_targets

    def training_loss(self) -> tuple[str, nn.Module]:
        """Return the name of the training loss, and the module that computes its mean."""
        return "mean cross-entropy", nn.CrossEntropyLoss()

    def warn_of_outputs(self, network: nn.Module, outputs: Tensor) -> None:
        """Warn if the outputs are probabilities."""
        warn_of_probabilities(outputs)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Require integer labels `[B]` in `0 … C−1`, or probabilities `[B, C]`."""
        num_classes = outputs.shape[1]
        if num_classes < 2:
            raise ValueError(
                "Classification needs at least two outputs, but the model has one. For a "
                'regression, pass `likelihood="regression"`; for a single logit, pass "binary".'
            )
        check_length(self.class_weights, num_classes, "class_weights")
        if _are_soft(targets) and targets.shape == outputs.shape:
            self._check_probabilities(outputs, targets)
            return
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise TypeError(
                f"Class labels must be integers, got {targets.dtype}. Pass class indices, "
                f"`targets.long()`.{_advice_on_columns(outputs, targets)}"
            )
        if targets.shape != outputs.shape[:1]:
            raise ValueError(
                f"Targets must be one class label per example, of shape ({outputs.shape[0]},), got "
                f"shape {tuple(targets.shape)}.{_advice_on_columns(outputs, targets)}"
            )
        if len(targets) == 0:
            return
        # Targets are not indexed by a mask, because the host would have to wait for the device.
        labels = targets.long()
        # Ignored labels are replaced by a label that is in range.
        low, high = labels.masked_fill(labels == self.ignore_index, 0).aminmax()
        require(
            (low >= 0) & (high < num_classes),
            lambda: ValueError(
                f"The model has {counted(num_classes, 'output')}, so class labels must be between "
                f"0 and {num_classes - 1}, got {int(high if high >= num_classes else low)}. "
                "Renumber the classes, or use a model with more outputs."
            ),
        )

    def check_predicted(self, values: Tensor, targets: Tensor) -> None:
        """Require class indices as targets when predictions are scored."""
        if _are_soft(targets) and targets.shape == values.shape:
            raise ValueError(
                "Predictions can only be scored with class indices, but the targets are class "
                "probabilities (soft targets). Pass the labels, or `targets.argmax(-1)`."
            )
        self.check(values, targets)

    def _check_probabilities(self, outputs: Tensor, targets: Tensor) -> None:
        """Require that all targets that are not ignored are class probabilities."""
        probabilities = targets.double()
        sums = probabilities.sum(-1)
        rounding = max(_ROUNDING, torch.finfo(targets.dtype).eps)
        are_right = (probabilities >= 0).all(-1) & ((sums - 1).abs() <= rounding)
        dtype = targets.dtype
        shape = tuple(targets.shape)
        require(
            (are_right | ~self._not_ignored(targets)).all(),
            # One-hot targets are valid probabilities, so the targets here are never one-hot.
            lambda: TypeError(
                f"Class labels must be integers, got {dtype} of shape {shape}. The values "
                "are not class probabilities either, because probabilities must be at "
                "least 0 and sum to 1 for every example. Pass class indices or "
                f"probabilities.{_SEVERAL_LABELS}"
            ),
        )

    def nll(self, outputs: Tensor, targets: Integer[Tensor, " batch"] | Tensor) -> Tensor:
        """Compute the cross-entropy of each example."""
        weights = self.class_weights
        weights = None if weights is None else weights.to(outputs, non_blocking=True)
        if not _are_soft(targets):
            labels = targets.long()
            if labels.device.type != "cpu":
                # Labels are clamped, because on a GPU a label out of range would end the process
                # before `check` raises an error.
                in_range = labels.clamp(0, outputs.shape[-1] - 1)
                labels = in_range.where(labels != self.ignore_index, labels)
            return F.cross_entropy(
                outputs,
                labels,
                weights,
                reduction="none",
                ignore_index=self.ignore_index,
                label_smoothing=self.label_smoothing,
            )
        counted = self._not_ignored(targets)
        probabilities = torch.where(counted.unsqueeze(-1), targets, 0).to(outputs.dtype)
        losses = F.cross_entropy(
            outputs,
            probabilities,
            weights,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )
        # An ignored target is all zeros here, but with smoothing, its loss would not be zero.
        return losses * counted

    def counted(self, targets: Tensor) -> Tensor:
        """Return the mask of targets that are not ignored and have a positive weight."""
        counted = self._not_ignored(targets)
        if self.class_weights is None:
            return counted
        weights = self.curvature_weights(targets)
        if weights is None:
            return counted
        return counted & (weights.reshape(counted.shape) > 0)

    def _not_ignored(self, targets: Tensor) -> Tensor:
        if _are_soft(targets):
            return (targets != self.ignore_index).any(-1)
        # In a small unsigned integer type, −100 would wrap around to the index of a class.
        return targets.long() != self.ignore_index

    def curvature_weights(self, targets: Tensor) -> Tensor | None:
        """Compute the weight ω of each example from the class weights."""
        weights = self.class_weights
        if weights is not None:
            weights = weights.to(targets.device, non_blocking=True)
        if _are_soft(targets):
            q = targets.double()
            if weights is None:
                weights = q.new_ones(q.shape[-1])
            if len(weights) != q.shape[-1]:
                return None  # `check` raises the error.
            target_weights = q @ weights
        elif weights is None:
            return None  # Without class weights, ω is 1 even with smoothing.
        else:
            target_weights = weights[targets.long().clamp(0, len(weights) - 1)]
        smoothing = self.label_smoothing
        omega = (1 - smoothing) * target_weights + smoothing * weights.mean()
        return (omega * self._not_ignored(targets)).unsqueeze(-1)

    def hessian_root(self, outputs: Tensor) -> Tensor:
        r"""Compute the Cholesky factor of $\mathrm{diag}(p) - pp^\top$, with C−1 columns.

        With the tail sums $q_j = \sum_{k>j} p_k$ and $q_{-1} = 1$:
        $L_{jj} = \sqrt{p_j q_j / q_{j-1}}$ and, for $i > j$,
        $L_{ij} = -p_i \sqrt{p_j / (q_{j-1} q_j)}$. The last column is zero and is omitted.

        Reference: Tanabe & Sagae (1992), "An exact Cholesky decomposition and the generalized
        inverse of the variance–covariance matrix of the multinomial distribution".
        """
        p, diagonal, scales = _cholesky(outputs)
        below_diagonal = (-p.unsqueeze(-1) * scales.unsqueeze(-2)).tril(-1)  # [B, C, C−1]
        root = below_diagonal + F.pad(torch.diag_embed(diagonal), (0, 0, 0, 1))
        return root.movedim(-1, 0)

    def signed_root(self, outputs: Tensor, draw_signs: Callable[[int], Tensor]) -> Tensor:
        r"""Multiply the root of the loss Hessian by random signs ε, without forming the root.

        $$\epsilon_i L_{ii} - p_i \sum_{j<i}\epsilon_j\sqrt{p_j / (q_{j-1} q_j)}$$
        See `hessian_root` for the symbols. A cumulative sum replaces the C−1 columns.
        """
        p, diagonal, scales = _cholesky(outputs)
        signs = draw_signs(diagonal.shape[-1]).to(p.dtype)
        sums_before = F.pad((signs * scales).cumsum(-1), (1, 0))
        return F.pad(signs * diagonal, (0, 1)) - p * sums_before

    def hessian_trace(self, outputs: Tensor) -> Tensor:
        """Compute the trace 1 − Σ p² without forming the `[C, C]` matrix."""
        p = outputs.double().softmax(-1)
        return (p * (1 - p)).sum(-1)

    def sample(self, outputs: Tensor, uniforms: Tensor) -> Int[Tensor, " batch"]:
        """Draw class indices from the softmax, using one uniform number per example."""
        return _drawn_labels(outputs.softmax(-1), uniforms)

    def drawn_gradient(self, outputs: Tensor, uniforms: Tensor) -> Tensor:
        """Compute p − e_y for labels y that are drawn from the softmax."""
        p = outputs.softmax(-1)
        labels = _drawn_labels(p, uniforms)
        return p.scatter(-1, labels.unsqueeze(-1), -1.0, reduce="add")

    def predictive(self, mean: Tensor, covariance: Tensor | None) -> CategoricalDistribution:
        r"""Return the categorical distribution of the label in the probit approximation."""
        logits = mean if covariance is None else probit(mean, covariance)
        if not are_finite(logits):
            return CategoricalDistribution(logits=logits)
        return _normalised_distribution(logits.log_softmax(-1))

    def mixture(self, samples: Tensor) -> CategoricalDistribution:
        """Average the class probabilities over the sampled logits."""
        return CategoricalDistribution(probs=samples.softmax(-1).mean(0))


def _normalised_distribution(log_probs: Tensor) -> CategoricalDistribution:
    """Build a distribution from finite log-probabilities, in the same way as its `expand`.

    The constructor would normalise and check the log-probabilities again, which takes longer than a
    small network.
    """
    distribution = CategoricalDistribution.__new__(CategoricalDistribution)
    distribution.logits = log_probs
    distribution._param = log_probs
    distribution._num_events = log_probs.shape[-1]
    Distribution.__init__(distribution, log_probs.shape[:-1], validate_args=False)
    # With this attribute, torch checks only the values at which the distribution is evaluated.
    del distribution._validate_args
    return distribution


def _drawn_labels(
    probabilities: Float[Tensor, "batch classes"], uniforms: Float[Tensor, "batch classes"]
) -> Int[Tensor, " batch"]:
    """Draw class indices by inverting the cumulative distribution at the first uniform number."""
    cumulative = probabilities.cumsum(-1)
    above = uniforms[:, :1].to(cumulative) * cumulative[:, -1:]
    return (cumulative[:, :-1] <= above).sum(-1)


def _are_soft(targets: Tensor) -> bool:
    """Whether targets are meant as class probabilities, that is, have a number for every class."""
    return targets.is_floating_point() and targets.ndim > 1


def _advice_on_columns(outputs: Tensor, targets: Tensor) -> str:
    """Return advice on targets with one column per class, or with a single column of indices."""
    if targets.shape != outputs.shape:
        is_column = targets.shape[1:] == (1,)
        return " Remove the last dimension with `targets.squeeze(1)`." if is_column else ""
    is_one_hot = ((targets == 0) | (targets == 1)).all() and (targets.sum(1) == 1).all()
    if is_one_hot:
        return (
            " Convert one-hot targets with `targets.argmax(1)`, but if several labels can apply to "
            'an example, use `likelihood="multilabel"`.'
        )
    return _SEVERAL_LABELS


class _CholeskyFactor(NamedTuple):
    """The parts of the Cholesky factor in `Categorical.hessian_root`.

    Attributes:
        p: The probabilities.
        diagonal: The diagonal, `[B, C − 1]`.
        scales: For each column j, the entries below the diagonal divided by −p_i, which do not
            depend on the row i, `[B, C − 1]`.
    """

    p: Tensor
    diagonal: Tensor
    scales: Tensor


def _cholesky(outputs: Tensor) -> _CholeskyFactor:
    """Compute the Cholesky factor of the loss Hessian."""
    p = outputs.softmax(-1)
    tiny = torch.finfo(p.dtype).tiny
    # heads[j] = Σ_{k≥j} p_k, summed from the end so that small tails are accurate.
    heads = p.flip(-1).cumsum(-1).flip(-1)
    tail = heads[..., 1:]
    ratio = (p[..., :-1] / heads[..., :-1].clamp_min(tiny)).sqrt()
    return _CholeskyFactor(p, ratio * tail.sqrt(), ratio / tail.clamp_min(tiny).sqrt())
