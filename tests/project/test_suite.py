"""Properties that the other tests rely on."""

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
    params = one_axis_at_a_time(*axes)
    for first, second in itertools.combinations(range(3), 2):
        pairs = {(param.values[first], param.values[second]) for param in params}
        values = ["abc", axes[1], [1, 2]]
        assert pairs == set(itertools.product(values[first], values[second]))
    assert len(params) < 12
    assert params[0].id == "a-torch.float32-one"
    daily = {param.id for param in params if not param.marks}
    assert daily == {
        *("a-torch.float32-one", "b-torch.float32-one", "c-torch.float32-one"),
        *("a-torch.float64-one", "a-torch.float32-2"),
    }


def test_every_name_is_defined():
    """Neither ruff nor mypy says so in `make lint`: for them shapes in annotations are names."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "ruff", "check", "--select=F821", "--output-format=json"]
    run = subprocess.run(
        [*command, "laplace_debias", "tests", "benchmarks"],
        check=False,
        cwd=root,
        capture_output=True,
        text=True,
    )
    undefined = []
    for error in json.loads(run.stdout):
        location = error["location"]
        line = Path(error["filename"]).read_text(encoding="utf-8").splitlines()[location["row"] - 1]
        is_in_text = line[: location["column"] - 1].count('"') % 2 == 1
        if not is_in_text:
            undefined.append(f"{error['filename']}:{location['row']}: {error['message']}")
    assert undefined == []


@functools.cache
def trees():
    """The syntax trees of the package, by path."""
    files = (Path(__file__).parents[2] / "laplace_debias").rglob("*.py")
    return {path: ast.parse(path.read_text("utf-8")) for path in files}


def test_docstrings_begin_with_a_verb_or_the_thing():
    vague = ("What ", "Those ", "They ", "It ", "These ", "That ")
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    openings = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, kinds):
                continue
            text = ast.get_docstring(node) or ""
            if text.startswith(vague):
                openings.append(f"{path.name}: {text.splitlines()[0]}")
    assert openings == []
