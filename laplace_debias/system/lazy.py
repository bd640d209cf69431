"""Packages and registries that import their contents on first use.

This allows the command line to read the options of a command without importing torch.
"""

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

Entry = TypeVar("Entry")


def attributes_from(
    package: str, modules: Mapping[str, Collection[str]], subpackages: Collection[str] = ()
) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package (PEP 562), which imports attributes on first access.

    Args:
        package: Name of the package.
        modules: For each module, the public names that it defines.
        subpackages: Names of subpackages that can be used as attributes of the package without
            importing them.
    """
    module_by_name = {name: module for module, names in modules.items() for name in names}

    def attribute(name: str) -> Any:
        if name in subpackages:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_by_name[name]), name)

    return attribute


class LazyRegistry(MutableMapping[str, type[Entry]]):
    """A mapping from names to classes, which imports each class when it is first looked up.

    Listing the names imports nothing, so the command line can show them quickly.

    Args:
        package: The package that contains the classes.
        paths: For each name, the module within the package and the class, as `module.Class`.
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
