"""Functional variances from dense Jacobians by plain autograd, independent of the package."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Dense:
    """The reference for a fit with `curvature="diag"`.

    Attributes:
        variances: Functional variances `[B, ..., C]`.
        prior_precision: The δ with which the variances were computed.
    """

    variances: Tensor
    prior_precision: float


def outputs_of(model: nn.Module, x: Tensor | Mapping[str, Tensor]) -> Tensor:
    """Compute a network's logits `[B, ..., C]`."""
    outputs = model(x) if isinstance(x, Tensor) else model(**x)
    return outputs if isinstance(outputs, Tensor) else outputs.logits


def dense_variances(model: nn.Module, x: Tensor | Mapping[str, Tensor]) -> Dense:
    r"""Compute functional variances of a classifier with a diagonal precision, fitted to `x`.

    $v_c = \sum_d J_{cd}^2 / (N C_{dd} + δ)$ with $C_{dd}$ the diagonal of
    $\frac1N \sum_n J_n^T H_n J_n$, where $H_n$ is the Hessian of the softmax cross-entropy,
    summed over the positions of an example. δ is the mean of $N C_{dd}$, so that both the curvature
    and the prior have an effect.

    Args:
        model: The network, in double precision.
        x: Inputs of at least two examples, which are run together, because some gradients of torch
            are wrong for a batch of one example.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    outputs = outputs_of(model, x)
    of_examples = outputs.unflatten(0, (len(outputs), 1)).flatten(1, -2)  # [B, T, C]
    p = of_examples.detach().softmax(-1)
    H = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)  # [B, T, C, C]
    total = torch.zeros(sum(q.numel() for q in parameters), dtype=outputs.dtype)
    squares = []
    for of_example, of_hessian in zip(of_examples, H, strict=True):
        rows = [_row(f, parameters) for f in of_example.flatten()]
        J = torch.stack(rows).unflatten(0, of_example.shape)  # [T, C, D]
        total += (J * (of_hessian @ J)).sum((0, 1))
        squares.append(J.square())
    delta = float(total.mean())
    variances = torch.stack([(J / (total + delta)).sum(-1) for J in squares])
    return Dense(variances.reshape(outputs.shape), delta)


def _row(output: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    gradients = torch.autograd.grad(output, parameters, retain_graph=True, allow_unused=True)
    pairs = zip(parameters, gradients, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in pairs])
