"""Packages, functions and registries whose contents are imported when they are first used.

Because of this module, the command line can read the options of a command without importing torch.
"""

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

Entry = TypeVar("Entry")


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


def function_from(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a module, which is imported when the function is first called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call


class LazyRegistry(MutableMapping[str, type[Entry]]):
    """Classes by their names; each class is imported when it is first looked up.

    The names can be listed without an import, as the options of the command line require.

    Args:
        package: The package that has the classes.
        paths: The module within the package and the class, `module.Class`, by name.
    """

    def __init__(self, package: str, paths: Mapping[str, str]) -> None:
        self._package = package
        self._entries: dict[str, str | type[Entry]] = dict(paths)

    def __getitem__(self, name: str) -> type[Entry]:
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, class_name = entry.rpartition(".")
            entry = getattr(importlib.import_module(f"{self._package}.{module}"), class_name)
            assert isinstance(entry, type)
            self._entries[name] = entry
        return entry

    def __setitem__(self, name: str, entry: type[Entry]) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
