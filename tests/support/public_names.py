"""The public names and their docstrings."""

import ast
import importlib
import inspect
from pathlib import Path

# The modules that users import from. Their `__all__` is what is public.
MODULES = (
    "laplace_debias",
    "laplace_debias.operators",
    "laplace_debias.curvature",
    "laplace_debias.linalg",
    "laplace_debias.quadratic",
    "laplace_debias.optim",
    "laplace_debias.training",
    "laplace_debias.metrics",
    "laplace_debias.metrics.modules",
    "laplace_debias.sources",
    "laplace_debias.compat.laplace_torch",
    "laplace_debias.integrations.botorch",
    "laplace_debias.integrations.lightning",
    "laplace_debias.integrations.sklearn",
    "laplace_debias.integrations.transformers",
)


def summary(module, name=None):
    """The first line of a docstring, a module's own or that of a name in it; "" if it has none."""
    doc = documentation(module, name)
    return doc.strip().partition("\n")[0]


def documentation(module, name=None):
    """A docstring; "" if there is none. A constant's is the string that follows it."""
    value = importlib.import_module(module)
    if name is not None:
        value = getattr(value, name)
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            return _after_assignment(module, name)
    return inspect.getdoc(value) or ""


def _after_assignment(module, name):
    """The string that follows a constant's assignment, in the module that defines it."""
    path = Path(importlib.import_module(module).__file__)
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for statement, following in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.ImportFrom):
            if any((alias.asname or alias.name) == name for alias in statement.names):
                return _after_assignment(statement.module, name)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = getattr(statement, "targets", None) or [statement.target]
            if name in [getattr(target, "id", None) for target in targets]:
                value = getattr(following, "value", None)
                is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
                return inspect.cleandoc(value.value) if is_text else ""
    return ""
