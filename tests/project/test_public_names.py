"""The names that users may import: the public ones, and those that the documents import."""

import ast
import importlib
import importlib.metadata
import re
from pathlib import Path

import public_names
import pytest

import laplace_debias

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PUBLIC = [
    (module, name)
    for module in public_names.MODULES
    for name in importlib.import_module(module).__all__
]


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_public_names_exist_and_have_a_docstring(module, name):
    assert hasattr(importlib.import_module(module), name)
    assert public_names.summary(module, name).endswith(".")


@pytest.mark.parametrize("module", public_names.MODULES)
def test_public_names_are_listed_once(module):
    names = importlib.import_module(module).__all__
    assert len(set(names)) == len(names)
    assert set(names) <= set(dir(importlib.import_module(module)))


def test_the_top_level_has_what_a_first_session_needs():
    names = {name for module, name in PUBLIC if module == "laplace_debias"}
    assert names >= {
        *("Laplace", "Likelihood", "Categorical", "Bernoulli", "MultiLabel", "Gaussian"),
        "Quadratic",
    }


def test_the_version_is_an_attribute():
    assert laplace_debias.__version__ == importlib.metadata.version("laplace-debias")
    assert "__version__" in dir(laplace_debias)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_imports_on_a_page_exist(page):
    text = page.read_text(encoding="utf-8")
    for module, name in imports_in(text):
        assert hasattr(importlib.import_module(module), name), f"from {module} import {name}"
        if module in public_names.MODULES:
            assert (module, name) in PUBLIC, f"{module} has no public {name}"
    for dotted in re.findall(r"\blaplace_debias(?:\.[A-Za-z_]\w*)+", text):
        assert dotted.endswith(".md") or exists(dotted), dotted


def imports_in(text):
    """(module, name) of every import of this package, in blocks of code and between backticks."""
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`(from laplace_debias[^`\n]*)`", text)
    return [
        (node.module, alias.name)
        for code in [*blocks, *inline]
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("laplace_debias")
        for alias in node.names
    ]


def exists(dotted):
    """Whether a dotted name is a module, or an attribute of one."""
    try:
        importlib.import_module(dotted)
    except ModuleNotFoundError:
        module, _, name = dotted.rpartition(".")
        return hasattr(importlib.import_module(module), name)
    return True


def test_what_the_checks_find():
    assert imports_in("see `from laplace_debias.linalg import cg, eigsh`") == [
        ("laplace_debias.linalg", "cg"),
        ("laplace_debias.linalg", "eigsh"),
    ]
    assert exists("laplace_debias.linalg.cg")
    assert not exists("laplace_debias.linalg.nothing")
