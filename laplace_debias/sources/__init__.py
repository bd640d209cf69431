"""Load a trained network and its data, which are given by names and paths."""

from typing import TYPE_CHECKING

from laplace_debias.sources.settings import SourceSettings
from laplace_debias.system.lazy import attributes_from

if TYPE_CHECKING:
    from laplace_debias.sources.loaded import Loaded
    from laplace_debias.sources.loading import load
    from laplace_debias.sources.splits import split_by_seed

__all__ = [
    "Loaded",
    "SourceSettings",
    "load",
    "split_by_seed",
]

__getattr__ = attributes_from(
    __name__,
    {
        "laplace_debias.sources.loaded": ("Loaded",),
        "laplace_debias.sources.loading": ("load",),
        "laplace_debias.sources.splits": ("split_by_seed",),
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
