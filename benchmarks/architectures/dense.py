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


def compute_logits(model: nn.Module, x: Tensor | Mapping[str, Tensor]) -> Tensor:
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
    outputs = compute_logits(model, x)
    logits = outputs.unflatten(0, (len(outputs), 1)).flatten(1, -2)  # [B, T, C]
    p = logits.detach().softmax(-1)
    hessians = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)  # [B, T, C, C]
    num_parameters = sum(parameter.numel() for parameter in parameters)
    curvature = torch.zeros(num_parameters, dtype=outputs.dtype)  # N C_dd
    squared_jacobians = []
    for example_logits, H in zip(logits, hessians, strict=True):
        rows = [_gradient(output, parameters) for output in example_logits.flatten()]
        J = torch.stack(rows).unflatten(0, example_logits.shape)  # [T, C, D]
        curvature += (J * (H @ J)).sum((0, 1))
        squared_jacobians.append(J.square())
    delta = float(curvature.mean())
    variances = [(squares / (curvature + delta)).sum(-1) for squares in squared_jacobians]
    return Dense(torch.stack(variances).reshape(outputs.shape), delta)


def _gradient(output: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    """Compute the gradient of one output, `[D]`, which is zero for unused parameters."""
    gradients = torch.autograd.grad(output, parameters, retain_graph=True, allow_unused=True)
    entries = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        entries.append(gradient.flatten())
    return torch.cat(entries)
