"""Detection of norms that are 0, at which torch's second derivatives are wrong.

A norm has no derivative at 0, but torch uses 0 for both the first and the second derivative. A
Hessian then lacks the contribution of the norm, even where this contribution exists because the
norm is squared or enters a kernel.
"""

from typing import Any

import torch
from torch import Tensor

from laplace_debias.curvature.losses import Labels, OutputLoss
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.operators.network import Network
from laplace_debias.system.graph import graph_nodes

_NORMS = ("LinalgVectorNormBackward", "NormBackward", "DistBackward", "StdBackward")
"""Prefixes of the names of the graph nodes with which torch differentiates norms."""

_PIECEWISE_LINEAR = (0.0, 1.0, float("inf"), -float("inf"))
"""Orders of norms whose second derivative is 0 almost everywhere, as it is for a ReLU."""


def has_norms(network: Network, loss: OutputLoss, inputs: Inputs, labels: Labels) -> bool:
    """Check a batch for norms that are 0, and return whether its loss depends on any norms.

    Raises:
        ValueError: If the loss depends on a norm that is 0 while its vector depends on the
            parameters.
    """
    leaves = tuple(p.detach().requires_grad_() for p in network.parameters)
    with torch.enable_grad(), network.differentiable():
        value = loss.weighted_value(network.outputs(leaves, inputs), labels)
        norms = [node for node in graph_nodes(value) if node.name().startswith(_NORMS)]
        zero_norms = [node for node in norms if _is_zero(node).any()]
        if zero_norms and _is_differentiated(value, leaves, zero_norms):
            raise ValueError(
                "The network computes a norm or a distance that is exactly 0, for example the "
                "distance of an input from an identical prototype. Its second derivative does "
                "not exist, and torch uses 0 instead. Change the parameters slightly. If the "
                "network squares the norm afterwards, sum the squares instead: `(a - "
                "b).square().sum(-1)`."
            )
    return bool(norms)


def _is_zero(node: Any) -> Tensor:
    """Return a mask of the norms of a node that are 0; the mask has the shape of the result."""
    order = getattr(node, "_saved_ord", getattr(node, "_saved_p", 2.0))
    norms = node._saved_result
    if order is not None and float(order) in _PIECEWISE_LINEAR:
        return torch.zeros_like(norms, dtype=torch.bool)
    return norms == 0


def _is_differentiated(value: Tensor, leaves: tuple[Tensor, ...], nodes: list[Any]) -> bool:
    """Whether a loss depends on norms that are 0 and whose vectors depend on the leaves.

    Random numbers are passed back from the vectors of those norms on which the loss depends, and
    zeros from everywhere else. They reach the leaves only if such a vector depends on the leaves.
    """
    used_norms = _used_norms(value, leaves, nodes)
    for node in nodes:
        _inject_at(node, _is_zero(node) & used_norms[node])
    gradients = torch.autograd.grad(value, leaves, torch.zeros_like(value), allow_unused=True)
    return any(bool((gradient != 0).any()) for gradient in gradients if gradient is not None)


def _used_norms(value: Tensor, leaves: tuple[Tensor, ...], nodes: list[Any]) -> dict[Any, Tensor]:
    """Return, for each node, a mask of its norms with a cotangent in a first or second derivative.

    The first derivative of a squared norm is 0 at 0, so only the second derivative reveals it.
    """
    cotangents: dict[Any, list[Tensor]] = {node: [] for node in nodes}
    handles = [
        node.register_prehook(lambda gradients, node=node: cotangents[node].append(gradients[0]))
        for node in nodes
    ]
    torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True)
    # The cotangents of the first derivative that depend on the parameters. The hooks record the
    # cotangents of their derivative too.
    differentiable = [
        cotangent
        for node_cotangents in cotangents.values()
        for cotangent in node_cotangents
        if cotangent.requires_grad
    ]
    if differentiable:
        weights = [_draw_like(cotangent) for cotangent in differentiable]
        torch.autograd.grad(differentiable, leaves, weights, retain_graph=True, allow_unused=True)
    for handle in handles:
        handle.remove()
    used_norms: dict[Any, Tensor] = {}
    for node in nodes:
        used_norms[node] = torch.zeros_like(node._saved_result, dtype=torch.bool)
        for cotangent in cotangents[node]:
            used_norms[node] |= cotangent.detach() != 0
    return used_norms


def _inject_at(node: Any, norms: Tensor) -> None:
    """Make a node pass random numbers back to the vectors of some norms, and 0 to all others."""
    vectors = node._saved_self
    if 0 < norms.ndim < vectors.ndim:
        for dim in sorted(_dimensions(node, vectors.ndim)):
            norms = norms.unsqueeze(dim)
    chosen = norms.expand_as(vectors)

    def inject(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        return tuple(
            None if g is None else torch.where(chosen, _draw_like(g), 0) for g in gradients
        )

    node.register_hook(inject)


def _dimensions(node: Any, ndim: int) -> list[int]:
    """Return the dimensions over which a node's norms are taken."""
    # torch saves negative dimensions as unsigned numbers, which are converted back here.
    return [(dim - 2**64 if dim >= 2**63 else dim) % ndim for dim in node._saved_dim]


def _draw_like(like: Tensor) -> Tensor:
    """Draw random numbers, which do not cancel, in the shape of a tensor."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.shape, generator=generator).to(like)
