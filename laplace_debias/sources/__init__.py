"""Anybody's network and data, from names and paths."""

from laplace_debias.sources.loaded import Loaded, Task
from laplace_debias.sources.loading import load
from laplace_debias.sources.parts import split_by_seed
from laplace_debias.sources.settings import SourceSettings

__all__ = [
    "Loaded",
    "SourceSettings",
    "Task",
    "load",
    "split_by_seed",
]
