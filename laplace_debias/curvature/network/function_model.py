"""A function of parameters and inputs as a network."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from torch import Tensor, nn


class FunctionModel(nn.Module):
    """A module that calls `f(parameters, x)` with a dictionary of parameter tensors.

    Operators and `Laplace` accept it instead of a network. Its parameters have the names of the
    dict and share memory with the tensors of the dict, so an in-place update changes both.

    Args:
        function: A function that maps the parameters by name, and the inputs in the form of the
            data, to outputs `[B, ..., C]` that torch can differentiate. It may use
            `torch.func.functional_call`.
        parameters: Tensors of floating-point numbers, by name.

    Raises:
        TypeError: If `function` is not callable, `parameters` is not a mapping from names to
            tensors, or a tensor does not hold floating-point numbers.
        ValueError: If there are no parameters, or one name is the beginning of another's path, such
            as `"a"` of `"a.b"`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias.curvature import GGN, FunctionModel
        >>> def affine(parameters, x):
        ...     return x @ parameters["W"] + parameters["b"]
        >>> model = FunctionModel(affine, {"W": torch.randn(4, 3), "b": torch.zeros(3)})
        >>> data = [(torch.randn(8, 4), torch.randint(3, (8,)))]
        >>> GGN(model, nn.CrossEntropyLoss(), data).layout.names
        ('W', 'b')
    """

    def __init__(self, function: Callable[..., Tensor], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        if not callable(function):
            raise TypeError(
                f"`function` is a {type(function).__name__}. Pass a function f(parameters, x)."
            )
        _check_parameters(parameters)
        self._function = function
        self._names = tuple(parameters)
        for name, tensor in parameters.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(tensor.detach()))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call the function with the parameters and the inputs."""
        # Read attributes, because within `functional_call` the parameters are plain tensors, which
        # `get_parameter` rejects.
        parameters = {name: attrgetter(name)(self) for name in self._names}
        return self._function(parameters, *args, **kwargs)


def _check_parameters(parameters: object) -> None:
    """Require a dict of floating-point tensors whose names can be the names of parameters."""
    if not isinstance(parameters, Mapping):
        raise TypeError(
            f"`parameters` is a {type(parameters).__name__}. Pass a dict from names to tensors."
        )
    if not parameters:
        raise ValueError("`parameters` is empty. Pass at least one tensor by its name.")
    for name, tensor in parameters.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            shown = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(
                f"The parameter {name!r} is {shown}. Pass every parameter as a tensor of "
                "floating-point numbers, and define constants inside the function."
            )
    names = sorted(map(str, parameters))
    for name in names:
        nested = [longer for longer in names if longer.startswith(f"{name}.")]
        if nested:
            raise ValueError(
                f"{name!r} is the name of a tensor, but also the first part of the name "
                f"{nested[0]!r}. Rename one of them."
            )
