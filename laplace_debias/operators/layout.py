"""The layout of named parameters in a vector."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class ParameterLayout:
    """The names and shapes of parameters that are flattened and joined into one vector.

    Args:
        names: The names of the parameters, in the order in which they are joined.
        shapes: Their shapes.

    Raises:
        ValueError: If names and shapes differ in number, or a name occurs twice.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes):
            raise ValueError(
                f"There are {len(self.names)} names, but {len(self.shapes)} shapes. Pass one "
                "name per shape."
            )
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"The names {self.names} are not unique. Use different names.")

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> "ParameterLayout":
        """Make the layout of the given parameters, in their order."""
        shapes = tuple(tuple(parameter.shape) for parameter in parameters.values())
        return cls(tuple(parameters), shapes)

    @property
    def sizes(self) -> list[int]:
        """The number of entries of every parameter."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def size(self) -> int:
        """D, the total number of entries of all parameters."""
        return sum(self.sizes)

    def range(self, name: str) -> range:
        """Return the range of a parameter's entries in the vector.

        Raises:
            KeyError: If there is no parameter with this name.
        """
        if name not in self.names:
            raise KeyError(
                f"There is no parameter {name!r}. Use one of the names {list(self.names)}."
            )
        index = self.names.index(name)
        ends = list(accumulate(self.sizes))
        return range(ends[index] - self.sizes[index], ends[index])

    def flatten(
        self, parameters: Mapping[str, Tensor] | Sequence[Tensor]
    ) -> Float[Tensor, " parameters"] | Float[Tensor, "parameters columns"]:
        """Flatten a set of parameters into a vector, or k sets into a matrix of k columns.

        Args:
            parameters: The parameters by name, or in order; all of shape `[*shape]`, or all of
                shape `[*shape, k]`.

        Raises:
            ValueError: If a parameter is missing, unexpected or of the wrong shape, or if dtypes or
                devices differ.
        """
        tensors = self._in_order(parameters)
        columns = tuple(tensors[0].shape[len(self.shapes[0]) :])
        self._check_shapes(tensors, columns)
        if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
            raise ValueError(
                "The tensors of the parameters differ in dtype or device. Convert them with "
                "`.to(...)`."
            )
        sized = zip(tensors, self.sizes, strict=True)
        return torch.cat([tensor.reshape((size, *columns)) for tensor, size in sized])

    def _in_order(self, parameters: Mapping[str, Tensor] | Sequence[Tensor]) -> list[Tensor]:
        """Return one tensor for each parameter, in the order of the layout."""
        if isinstance(parameters, Mapping):
            missing = [name for name in self.names if name not in parameters]
            superfluous = [name for name in parameters if name not in self.names]
            if missing or superfluous:
                raise ValueError(
                    f"The parameters {missing} are missing, and {superfluous} are not in the "
                    f"layout. Pass one tensor for each of {list(self.names)}."
                )
            return [parameters[name] for name in self.names]
        tensors = list(parameters)
        if len(tensors) != len(self.names):
            raise ValueError(
                f"There are {len(tensors)} tensors for {len(self.names)} parameters. Pass "
                f"one for each of {list(self.names)}, in this order."
            )
        return tensors

    def _check_shapes(self, tensors: Sequence[Tensor], columns: tuple[int, ...]) -> None:
        """Check that each tensor has its parameter's shape plus `columns`, which is `()` or `(k,)`.

        The first tensor determines `columns`.
        """
        wrong = [
            f"{name} has shape {tuple(tensor.shape)}, expected {(*shape, *columns)}"
            for name, tensor, shape in zip(self.names, tensors, self.shapes, strict=True)
            if tuple(tensor.shape) != (*shape, *columns)
        ]
        if wrong or len(columns) > 1:
            raise ValueError(
                "The tensors do not have the shapes of their parameters: "
                f"{'; '.join(wrong) or f'they have the extra dimensions {columns}'}. Pass either "
                "all of them in the shape [*shape], "
                "or all of them in the shape [*shape, k] with the same k."
            )

    def unflatten(
        self, tensor: Float[Tensor, " parameters"] | Float[Tensor, "parameters columns"]
    ) -> dict[str, Tensor]:
        """Split a vector `[D]`, or columns `[D, k]`, into parameters by name.

        Raises:
            ValueError: If the tensor does not have D rows.
        """
        if tensor.ndim not in (1, 2) or tensor.shape[0] != self.size:
            raise ValueError(
                f"A tensor of shape {tuple(tensor.shape)} does not contain the parameters. Pass "
                f"a tensor of shape ({self.size},) or ({self.size}, k)."
            )
        rows = tensor.split(self.sizes)
        return {
            name: entries.reshape((*shape, *tensor.shape[1:]))
            for name, shape, entries in zip(self.names, self.shapes, rows, strict=True)
        }
