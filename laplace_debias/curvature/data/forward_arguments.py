"""The parameters of a model's forward pass, and their assignment to the entries of a batch."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from laplace_debias.curvature.data.batch_forms import USE_A_HOOK
from laplace_debias.curvature.network.inputs import Inputs

_ANY = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


@dataclass(frozen=True)
class ForwardArguments:
    """The arguments that a forward pass accepts.

    Attributes:
        parameters: The parameters of the forward pass by name, in the form of `inspect.signature`.
    """

    parameters: Mapping[str, inspect.Parameter]

    @classmethod
    def of(cls, model: nn.Module) -> "ForwardArguments":
        """Inspect a model's forward pass, or the inner model's if PEFT passes all arguments on."""
        parameters = inspect.signature(model.forward).parameters
        base = getattr(model, "get_base_model", None)
        if base is not None and all(p.kind in _ANY for p in parameters.values()):
            parameters = inspect.signature(base().forward).parameters
        return cls(parameters)

    @property
    def takes_any(self) -> bool:
        """Whether the forward pass accepts arguments of any name."""
        return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self.parameters.values())

    def takes(self, name: str) -> bool:
        """Return whether the forward pass accepts an argument of this name."""
        return name in self.parameters or self.takes_any

    def inputs(self, named: dict[str, Any]) -> Inputs:
        """Return the inputs by name, or only the value of a single input with an unknown name.

        Raises:
            ValueError: If there are several inputs and the forward pass does not accept the name of
                one.
        """
        if len(named) == 1 and named.keys().isdisjoint(self.parameters):
            (value,) = named.values()
            return value
        self.check_names(named)
        return named

    def check_names(self, named: dict[str, Any]) -> None:
        """Require that the forward pass accepts an argument of the name of each entry."""
        unknown = [key for key in named if not self.takes(key)]
        if not unknown:
            return
        remedy = f"Remove these entries from the batch, or {USE_A_HOOK}."
        if len(self.parameters) == 1 and len(unknown) == len(named):
            remedy = (
                "If this parameter takes all entries as one mapping, pass pairs "
                "`(OneArgument(inputs), targets)` to a fit, and `OneArgument(inputs)` to a "
                "prediction."
            )
        raise ValueError(
            f"The batch has the entries {unknown}, which are not parameters of the model's "
            f"forward pass. Its parameters are {list(self.parameters)}. {remedy}"
        )
