"""The modes of `Laplace.fit` by their names, without importing the fitting schemes."""

from typing import TYPE_CHECKING, Literal

from laplace_debias.system.lazy import LazyRegistry

if TYPE_CHECKING:
    from laplace_debias.laplace.fitting.schemes import Scheme

MODES: LazyRegistry["Scheme"] = LazyRegistry(
    "laplace_debias.laplace.fitting",
    {
        "full": "schemes.WholeLoader",
        "mini": "schemes.Mini",
        "debiased": "schemes.Split",
        "crossfit": "schemes.CrossFit",
        "auto": "auto.Auto",
    },
)
"""The fitting scheme of each mode."""

if TYPE_CHECKING:
    ModeName = str
else:
    ModeName = Literal[tuple(MODES)]
"""The type of an option whose value is the name of a mode."""
