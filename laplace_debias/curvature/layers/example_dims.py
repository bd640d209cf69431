"""Which inputs of layers have a dimension of the examples, as one example and two tell."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from laplace_debias.curvature.network.layer_types import is_hugging_face_conv1d

# Layers that treat whatever stands between examples and features alike.
_WITH_POSITIONS = (nn.Linear, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True)
class ExampleDims:
    """What the layers' inputs for one example and for two tell.

    Attributes:
        common: Paths of embeddings whose input has no dimension for the examples, such as positions
            `[T]`; every example is given a copy.
        merged: Layers whose input has further dimensions merged into that of the examples, behind
            them, such as windows of an image; with their number for each example.
        uncopied: Those of `common` where the forward pass does not let examples have copies.
    """

    common: frozenset[str]
    merged: Mapping[str, int]
    uncopied: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, network: nn.Module, one: Mapping[str, list[int]], two: Mapping[str, list[int]]
    ) -> "ExampleDims":
        """From the leading sizes of all inputs of the layers, for one example and for two."""
        common, merged = set(), {}
        for path in one.keys() & two.keys():
            layer = network.get_submodule(path)
            if isinstance(layer, nn.Embedding):
                if any(n != 1 for n in one[path]) or any(n != 2 for n in two[path]):
                    common.add(path)
            elif isinstance(layer, _WITH_POSITIONS) or is_hugging_face_conv1d(layer):
                sizes = set(one[path])
                if len(sizes) == 1 and two[path] == [2 * n for n in one[path]]:
                    merged[path] = sizes.pop()
        return cls(frozenset(common), {path: n for path, n in merged.items() if n > 1})

    def without_copies(self) -> "ExampleDims":
        """The same, where copies for the examples are not let through."""
        return ExampleDims(frozenset(), self.merged, self.common)
