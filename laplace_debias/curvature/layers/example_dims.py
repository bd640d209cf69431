"""The dimension of the examples in the inputs of layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from laplace_debias.curvature.layer_rules import layer_rule


@dataclass
class ExampleDims:
    """The dimension of the examples in the inputs of each layer.

    Attributes:
        shared: Paths of embeddings whose input is the same for all examples, such as positions
            `[T]`, and so has no dimension for the examples; every example receives a copy.
        merged: The number of merged entries per example, for each layer whose input has further
            dimensions, such as windows of an image, merged into the dimension of the examples,
            after the examples.
        uncopied: Embeddings like those in `shared`, but for which the network's forward pass does
            not accept a copy for each example.
        shapes: The shapes of all inputs of the embeddings.
        is_known: Whether the shapes of a batch and of the doubled batch have been compared.
    """

    shared: set[str] = field(default_factory=set)
    merged: dict[str, int] = field(default_factory=dict)
    uncopied: set[str] = field(default_factory=set)
    shapes: dict[str, list[torch.Size]] = field(default_factory=dict)
    is_known: bool = False

    @classmethod
    def compare(
        cls,
        network: nn.Module,
        num_examples: int,
        shapes: Mapping[str, list[torch.Size]],
        doubled_shapes: Mapping[str, list[torch.Size]],
    ) -> "ExampleDims":
        """Compare the shapes of layers' inputs for a batch and for a batch of doubled examples.

        Args:
            network: The network.
            num_examples: The number of examples in the batch.
            shapes: For each layer, by its path, the shapes of its inputs, call by call.
            doubled_shapes: The same for the batch with two copies of each example.
        """
        dims = cls(is_known=True)
        for path in shapes.keys() & doubled_shapes.keys():
            rule = layer_rule(network.get_submodule(path))
            sizes = [shape[0] for shape in shapes[path]]
            doubled_sizes = [shape[0] for shape in doubled_shapes[path]]
            if rule.is_one_hot:
                dims.shapes[path] = shapes[path]
                if set(sizes) != {num_examples} or set(doubled_sizes) != {2 * num_examples}:
                    dims.shared.add(path)
            elif not rule.channels_first:
                # The layer treats all dimensions between examples and features in the same way.
                is_double = doubled_sizes == [2 * size for size in sizes]
                num_merged, remainder = divmod(sizes[0], num_examples)
                if num_merged > 1 and not remainder and len(set(sizes)) == 1 and is_double:
                    dims.merged[path] = num_merged
        return dims

    def is_clear(self, path: str, shape: torch.Size, num_examples: int) -> bool:
        """Return whether the examples of an embedding's input lie in the expected dimension."""
        if path not in self.shapes:
            return True
        dim = None if path in self.shared else 0
        return any(
            has_same_examples_dim(shape, earlier_shape, dim, num_examples)
            for earlier_shape in self.shapes[path]
        )


def has_same_examples_dim(
    shape: torch.Size, earlier_shape: torch.Size, dim: int | None, num_examples: int
) -> bool:
    """Return whether the examples of a tensor certainly lie in the dimension of an earlier tensor.

    Args:
        shape: The tensor's shape.
        earlier_shape: The shape of the earlier tensor.
        dim: The dimension of the examples in the earlier tensor; None if the examples shared it.
        num_examples: The number of examples of the tensor.
    """
    if len(shape) != len(earlier_shape):
        return False
    if dim is not None:
        return shape[dim] == num_examples
    if num_examples == 1:
        return True
    # A tensor that all examples shared may now have an entry for each example.
    sizes = zip(shape, earlier_shape, strict=True)
    return not any(size == num_examples != earlier_size for size, earlier_size in sizes)
