"""The modes of `Laplace.fit`, by name. This module imports no fitting scheme."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from laplace_debias.laplace.fitting.schemes import Scheme


@dataclass(frozen=True)
class Mode:
    """A mode, which selects the part of a loader to read and the fitting scheme to use.

    Attributes:
        make: A function that makes the scheme from the loader, or from the list of its first
            batches, and the number of folds (None for the default, or if the mode has no folds).
        num_first_batches: How many batches from the start of a loader are passed to `make`; None if
            the loader itself is passed.
        takes_folds: Whether a fit splits its data into folds.
        is_debiased: Whether directions and magnitudes are computed from different data.
    """

    make: Callable[[Any, int | None], "Scheme"]
    num_first_batches: int | None = None
    takes_folds: bool = False
    is_debiased: bool = False


def _scheme(name: str) -> Callable[[Any, int | None], "Scheme"]:
    """Return a function that makes a scheme, and imports the scheme only when it is called."""

    def make(batches: Any, folds: int | None) -> "Scheme":
        module = import_module("laplace_debias.laplace.fitting.mode_schemes")
        return getattr(module, name)(batches, folds)

    return make


MODES = {
    "full": Mode(_scheme("full")),
    "mini": Mode(_scheme("mini"), num_first_batches=1),
    "debiased": Mode(_scheme("debiased"), num_first_batches=2, is_debiased=True),
    "crossfit": Mode(_scheme("crossfit"), num_first_batches=1, takes_folds=True),
    "auto": Mode(_scheme("auto")),
}
"""The modes, keyed by the name that a user passes as `mode`."""

if TYPE_CHECKING:
    ModeName = str
else:
    ModeName = Literal[tuple(MODES)]
"""The type of an option whose value is the name of a mode."""


def check_mode(name: str, folds: int | None) -> None:
    """Require a known mode, and reject `folds` for a mode that does not use them."""
    if name not in MODES:
        raise ValueError(f"Unknown mode={name!r}. Use one of {', '.join(MODES)}.")
    if folds is not None and not MODES[name].takes_folds:
        names = " and ".join(f'"{other}"' for other, mode in MODES.items() if mode.takes_folds)
        raise ValueError(
            f'`folds={folds}` applies only to mode={names}, got `mode="{name}"`. Remove `folds=`.'
        )
