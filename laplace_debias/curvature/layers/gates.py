"""Gates: operations at which the gradient of an example may vanish in a layer.

A layer may be called for examples whose outputs do not depend on it. Then every path from the layer
to the outputs leads through an operation that can remove the example: a product with zero, a
selection of rows, a maximum. In a network without such operations, all examples reach all layers,
and no gradient has to be examined. The graph of a forward pass shows this in microseconds.
"""

from typing import Any

from torch import Tensor

# Nonlinearities whose derivative can vanish at particular values, as the derivative of a dead ReLU.
POINTWISE = frozenset(
    f"{name}Backward{version}"
    for version in (0, 1)
    for name in (
        *("Relu", "Threshold", "Hardtanh", "Hardswish", "Hardsigmoid", "Clamp", "ClampMin"),
        *("ClampMax", "Gelu", "Silu", "Mish", "Elu", "Celu", "Selu", "Softplus", "Sigmoid"),
        *("Tanh", "LogSigmoid", "Softshrink", "Hardshrink"),
    )
)

# A maximum passes some of every example's gradient on. But if tensors are joined before a maximum,
# one of them may have all entries that are maximal.
_MAXIMUM = "MaxPool2DWithIndices"
_JOIN = "Cat"

# Operations that pass some of every example's gradient on to all of their inputs.
_UNGATED = POINTWISE | frozenset(
    f"{name}Backward{version}"
    for version in (0, 1)
    for name in (
        *("Addmm", "Mm", "Convolution", "LeakyRelu", "PreluKernel", "Add", "Sub", "Neg", _JOIN),
        *("NativeBatchNorm", "CudnnBatchNorm", "NativeLayerNorm", "NativeGroupNorm"),
        *("Mean", "Sum", "AvgPool2D", "AdaptiveAvgPool2D", _MAXIMUM),
        *("View", "UnsafeView", "AsStrided", "Transpose", "T", "Permute", "Unsqueeze", "Squeeze"),
        *("ReshapeAlias", "Select", "Clone"),
    )
)


def ungated_nodes(outputs: Tensor) -> set[Any]:
    """Return the nodes of the graph that some path without gates connects to the outputs."""
    nodes: set[Any] = set()
    nodes_before_maximum: set[Any] = set()
    pending: list[tuple[Any, bool]] = [(outputs.grad_fn, False)]
    while pending:
        node, is_before_maximum = pending.pop()
        if node is None or node in nodes or (is_before_maximum and node in nodes_before_maximum):
            continue
        if is_before_maximum:
            nodes_before_maximum.add(node)
        else:
            nodes.add(node)
        operation, _, _ = node.name().partition("Backward")
        if node.name() in _UNGATED and not (is_before_maximum and operation == _JOIN):
            is_before_maximum = is_before_maximum or operation == _MAXIMUM
            pending.extend((following, is_before_maximum) for following, _ in node.next_functions)
    return nodes | nodes_before_maximum
