"""Import Python objects by import paths such as `my_pkg.models:build`."""

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laplace_debias.sources.settings import nearest

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_import_path(text: str) -> bool:
    """Whether a string has the form `my_pkg.models:build`, and is not an existing file."""
    return _PATH.fullmatch(text) is not None and not Path(text).exists()


def check_input(value: str | Path, option: str) -> None:
    """Check that a file, a folder or an import path's module exists, without importing it.

    Raises:
        ValueError: If there is no such file, folder or module, or a model is not an import path.
    """
    text = str(value)
    if option == "model" or is_import_path(text):
        _check_form(text, option)
        _check_module(text.partition(":")[0].partition(".")[0], text, option)
    elif not Path(text).exists():
        raise ValueError(f"The path {text} of --{option} does not exist. Check the path.")


def _check_form(path: str, option: str) -> None:
    if _PATH.fullmatch(path) is None:
        raise ValueError(
            f"{option} is {path!r}. Pass an import path module:attribute, for example "
            "my_pkg.models:build."
        )


def _check_module(name: str, path: str, option: str) -> None:
    """Check that a top-level module exists, possibly in the working directory."""
    _make_working_directory_importable()
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        raise ValueError(_no_module(path, option, name))


def _make_working_directory_importable() -> None:
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()


def _no_module(path: str, option: str, module: str) -> str:
    if ".py:" in path:
        return (
            f"{option} {path}: the name of a module does not end with .py. Pass "
            f"{path.replace('.py:', ':')}."
        )
    return (
        f"{option} {path}: there is no module {module}. Run the command in the folder that "
        f"contains {module.replace('.', '/')}.py (this folder is {os.getcwd()}), or install it."
    )


def import_object(path: str, option: str) -> Any:
    """Import the object at `module:attribute`, possibly from the working directory."""
    _check_form(path, option)
    module_name, _, attributes = path.partition(":")
    _make_working_directory_importable()
    try:
        value: Any = importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise ValueError(_no_module(path, option, missing)) from error
        raise ValueError(
            f"{option} {path}: importing {module_name} raised {describe_error(error)}. To see "
            "where, add --traceback."
        ) from error
    for attribute in attributes.split("."):
        if not hasattr(value, attribute):
            names = [name for name in vars(value) if not name.startswith("_")]
            raise ValueError(
                f"{option} {path}: {getattr(value, '__name__', module_name)} has no "
                f"{attribute}.{nearest(attribute, names)}"
            )
        value = getattr(value, attribute)
    return value


def call_function(path: str, function: Any, arguments: Mapping[str, Any], option: str) -> Any:
    """Call a user's function, and return its result; errors name the option and the function."""
    if not callable(function):
        raise ValueError(
            f"{option} {path} is of type {type(function).__name__}, which cannot be called. Pass "
            "the import path of a function."
        )
    try:
        return function(**arguments)
    except Exception as error:
        names = f" with {', '.join(arguments)}" if arguments else " without arguments"
        raise ValueError(
            f"{option}: calling {path}{names} raised {describe_error(error)}. To see where, add "
            "--traceback."
        ) from error


def describe_error(error: BaseException) -> str:
    """Describe an error in one line, by its type and the beginning of its message.

    The message is part of a longer sentence, so its full stop is removed.
    """
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text[:300]}{'…' if len(text) > 300 else ''}"
