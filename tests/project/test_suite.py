"""What the other tests rely on."""

import ast
import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch
from cases import one_axis_at_a_time

from laplace_debias import metrics


def test_annotations_of_the_package_are_checked(pytestconfig):
    if not pytestconfig.getoption("jaxtyping_packages", None):
        pytest.skip("annotations are checked by `make test-all`")
    with pytest.raises(jaxtyping.TypeCheckError):
        metrics.nll(torch.ones(2, 3, 4), torch.ones(2))


def test_one_axis_at_a_time_has_every_pair_and_marks_what_differs_in_two_axes():
    axes = ["abc", [torch.float32, torch.float64], [pytest.param(1, id="one"), 2]]
    found = one_axis_at_a_time(*axes)
    for one, two in itertools.combinations(range(3), 2):
        pairs = {(param.values[one], param.values[two]) for param in found}
        values = ["abc", axes[1], [1, 2]]
        assert pairs == set(itertools.product(values[one], values[two]))
    assert len(found) < 12
    assert found[0].id == "a-torch.float32-one"
    daily = {param.id for param in found if not param.marks}
    assert daily == {
        *("a-torch.float32-one", "b-torch.float32-one", "c-torch.float32-one"),
        *("a-torch.float64-one", "a-torch.float32-2"),
    }


def test_every_name_is_defined():
    """Neither ruff nor mypy says so in `make lint`: for them shapes in annotations are names."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "ruff", "check", "--select=F821", "--output-format=json"]
    done = subprocess.run(
        [*command, "laplace_debias", "tests", "benchmarks"],
        check=False,
        cwd=root,
        capture_output=True,
        text=True,
    )
    found = []
    for one in json.loads(done.stdout):
        place = one["location"]
        line = Path(one["filename"]).read_text(encoding="utf-8").splitlines()[place["row"] - 1]
        is_in_text = line[: place["column"] - 1].count('"') % 2 == 1
        if not is_in_text:
            found.append(f"{one['filename']}:{place['row']}: {one['message']}")
    assert found == []


@functools.cache
def trees():
    """The syntax trees of the package, by path."""
    files = (Path(__file__).parents[2] / "laplace_debias").rglob("*.py")
    return {path: ast.parse(path.read_text("utf-8")) for path in files}


def test_docstrings_begin_with_a_verb_or_the_thing():
    vague = ("What ", "Those ", "They ", "It ", "These ", "That ")
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{path.name}: {text.splitlines()[0]}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (text := ast.get_docstring(node) or "").startswith(vague)
    ]
    assert found == []
