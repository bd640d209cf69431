"""What the documents say runs."""

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_readme_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert (tmp_path / "posterior.safetensors").exists()


def test_the_tour_of_linear_algebra_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "linear_algebra.md").read_text(), re.DOTALL
    )
    exec(compile(block, "linear_algebra.md", "exec"), {})


def test_readme_links_point_to_files():
    for text in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", text.read_text()):
            assert (text.parent / target).exists(), f"{text.name} links to {target}"


@pytest.mark.parametrize(
    "module",
    [
        "laplace",
        "curvature.kfac_operators",
        "linalg.inverse",
        "linalg.quadrature",
        "linalg.square_root",
    ],
)
def test_docstring_examples_run(module):
    result = doctest.testmod(importlib.import_module(f"laplace_debias.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_run(example, tmp_path):
    run = subprocess.run(
        [sys.executable, example], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout
    pictures = re.findall(r"^Picture: (\S+)$", run.stdout, re.MULTILINE)
    assert pictures or example.stem == "quickstart"
    for picture in pictures:
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
