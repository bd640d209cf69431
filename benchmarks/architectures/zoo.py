"""All architectures of the libraries that are installed."""

import importlib

from benchmarks.architectures.architecture import Architecture

_MODULES = ("torchvision_networks", "timm_networks", "hugging_face_networks")


def architectures() -> dict[str, Architecture]:
    """Return all architectures by name, in the order of the table."""
    by_name: dict[str, Architecture] = {}
    for module_name in _MODULES:
        try:
            module = importlib.import_module(f"benchmarks.architectures.{module_name}")
        except ModuleNotFoundError as error:
            # Errors in imports of our own modules are raised.
            if error.name is None or error.name.partition(".")[0] == "benchmarks":
                raise
            continue
        for architecture in module.architectures():
            by_name[architecture.name] = architecture
    return by_name
