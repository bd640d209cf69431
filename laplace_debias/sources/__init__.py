"""Anybody's network and data, from names and paths."""

from laplace_debias.sources.further import Further, Reader
from laplace_debias.sources.loaded import Loaded, OodData, Task
from laplace_debias.sources.loading import load, load_with_reader
from laplace_debias.sources.parts import split_by_seed
from laplace_debias.sources.settings import SourceSettings

__all__ = [
    "Further",
    "Loaded",
    "OodData",
    "Reader",
    "SourceSettings",
    "Task",
    "load",
    "load_with_reader",
    "split_by_seed",
]
