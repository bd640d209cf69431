"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("laplace-debias")
except PackageNotFoundError:  # run from its source
    __version__ = "unknown"
