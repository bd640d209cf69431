"""Packages whose public names are imported when they are first used.

The command line reads a command's options without importing torch.
"""

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any


def attributes_from(
    package: str, modules: Mapping[str, Collection[str]], subpackages: Collection[str] = ()
) -> Callable[[str], Any]:
    """Return a package's `__getattr__` (PEP 562).

    Args:
        package: Name of the package.
        modules: Public names by the module that defines them.
        subpackages: Names of subpackages that are attributes of the package without an import.
    """
    module_by_name = {name: module for module, names in modules.items() for name in names}

    def attribute(name: str) -> Any:
        if name in subpackages:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_by_name[name]), name)

    return attribute
