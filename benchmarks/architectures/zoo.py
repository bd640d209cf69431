"""All architectures, of the libraries that are installed."""

import importlib

from benchmarks.architectures.architecture import Architecture

_MODULES = ("of_torchvision", "of_timm", "of_hugging_face")


def architectures() -> dict[str, Architecture]:
    """Return all architectures by name, in the order of the table."""
    found: dict[str, Architecture] = {}
    for module in _MODULES:
        try:
            of_library = importlib.import_module(f"benchmarks.architectures.{module}")
        except ModuleNotFoundError as error:
            # Errors in imports of our own modules are raised.
            if error.name is None or error.name.partition(".")[0] == "benchmarks":
                raise
            continue
        found |= {one.name: one for one in of_library.architectures()}
    return found
