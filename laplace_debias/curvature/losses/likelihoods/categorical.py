"""Softmax classification."""

import torch
import torch.nn.functional as F
from jaxtyping import Int, Integer
from torch import Tensor
from torch.distributions import Categorical as CategoricalDistribution

from laplace_debias.curvature.losses.likelihoods.base import Likelihood, probit


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
                f"Expected one class label per example, shape ({outputs.shape[0]},), got "
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
        return CategoricalDistribution(logits=probit(mean, covariance))

    def mixture(self, samples: Tensor) -> CategoricalDistribution:
        """The mean of the softmaxes."""
        return CategoricalDistribution(probs=samples.softmax(-1).mean(0))


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
