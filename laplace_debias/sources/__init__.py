"""Anybody's network and data, from names and paths."""

from laplace_debias.sources.loaded import Loaded, OodData

__all__ = ["Loaded", "OodData"]
