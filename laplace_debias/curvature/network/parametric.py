"""A plain function of parameters and inputs in the place of a model."""

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


class ParametricFunction(nn.Module):
    """A function `f(parameters, inputs)` as a model for `GGN`, `Hessian`, `Fisher` and the like.

    It shares the tensors' storage: the operators follow what is written into them. Every parameter
    counts as trainable, but for an `nn.Parameter` with `requires_grad=False`, which is held fixed.
    `KFAC`, `EKFAC` and `Laplace` need layers and cannot use it.

    Args:
        function: Called as `function(parameters, x)` with a `dict` of tensors by name; where inputs
            are several, as `function(parameters, *x)` or `function(parameters, **x)`. A function of
            the parameters alone: it may not look at tensors of its own that change.
        parameters: Floating-point tensors by name; dots group them, as in a `state_dict`.

    Raises:
        TypeError: If the function cannot be called, or a parameter is no floating-point tensor.
        ValueError: If there are no parameters, or a name cannot be an attribute.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias.curvature import GGN, ParametricFunction
        >>> def f(parameters, x):
        ...     return (x @ parameters["W1"]).tanh() @ parameters["W2"]
        >>> parameters = {"W1": torch.randn(2, 4), "W2": torch.randn(4, 3)}
        >>> data = [(torch.randn(8, 2), torch.randint(3, (8,)))]
        >>> GGN(ParametricFunction(f, parameters), nn.CrossEntropyLoss(), data).shape
        (20, 20)
    """

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        if not callable(function):
            raise TypeError(
                f"function must be callable as function(parameters, inputs), got {function!r}."
            )
        if not parameters:
            raise ValueError("parameters holds no tensor: pass those that the function reads.")
        self._function = function
        for name, value in parameters.items():
            if not isinstance(value, Tensor) or not value.is_floating_point():
                found = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(
                    f"parameters[{name!r}] must be a floating-point tensor, got {found}: let the "
                    "function hold what is not a parameter."
                )
            self._place(name, value)
        self._names = tuple(parameters)

    def _place(self, name: str, value: Tensor) -> None:
        is_frozen = isinstance(value, nn.Parameter) and not value.requires_grad
        parameter = nn.Parameter(value.detach(), requires_grad=not is_frozen)
        *groups, last = name.split(".")
        module: nn.Module = self
        try:
            for group in groups:
                if group not in module._modules:
                    module.add_module(group, nn.Module())
                module = module.get_submodule(group)
            module.register_parameter(last, parameter)
        # torch names the attribute that is there already, or the empty name.
        except (KeyError, AttributeError) as error:
            raise ValueError(
                f"{name!r} cannot be a parameter's name beside the others ({error.args[0]}): "
                "rename it."
            ) from error

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """In the order in which they were given, which groups of them would not keep."""
        found = dict(super().named_parameters(prefix, recurse, remove_duplicate))
        names = [f"{prefix}.{name}" if prefix else name for name in self._names]
        return ((name, found[name]) for name in names if name in found)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The function at the module's parameters."""
        values = {name: operator.attrgetter(name)(self) for name in self._names}
        return self._function(values, *args, **kwargs)
