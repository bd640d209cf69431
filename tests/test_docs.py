"""What the documents say runs."""

import doctest
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from laplace_debias.cli import main

ROOT = Path(__file__).parent.parent


def test_readme_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert (tmp_path / "posterior.safetensors").exists()


def test_readme_commands_run(tmp_path, monkeypatch):
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("laplace-debias ")]
    assert [command[1] for command in commands] == ["train", "fit", "tune"]
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert main([*command[1:], "--progress=false"]) == 0, command


def test_the_tour_of_linear_algebra_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "linear_algebra.md").read_text(), re.DOTALL
    )
    exec(compile(block, "linear_algebra.md", "exec"), {})


def test_readme_links_point_to_files():
    texts = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    assert ROOT / "docs" / "experiments" / "bias.md" in texts
    for text in texts:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", text.read_text()):
            assert (text.parent / target).exists(), f"{text.name} links to {target}"


MODULES_WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "laplace_debias").rglob("*.py"))
    if ">>>" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES_WITH_EXAMPLES)
def test_docstring_examples_run(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("given", [(), ("DATA",), ("DATA", "CHECKPOINT")])
def test_make_tells_which_experiments_it_skips_and_why(given):
    names = {name: f"LAPLACE_DEBIAS_{name}" for name in ("DATA", "CHECKPOINT")}
    variables = {key: value for key, value in os.environ.items() if key not in names.values()}
    variables |= {names[name]: "somewhere" for name in given}
    run = subprocess.run(
        ["make", "-n", "experiments"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = run.stdout.replace("\\\n", " ").splitlines()
    skipped = " ".join(line for line in lines if "Skipped" in line)
    started = " ".join(line for line in lines if "Skipped" not in line)
    for config in (ROOT / "configs" / "experiments").glob("*.yaml"):
        is_run = f"--config configs/experiments/{config.name}" in started
        is_told = re.search(rf"[ \"]{config.stem}[ \"]", skipped) is not None
        assert is_run != is_told, config.stem
    for name, variable in names.items():
        assert (variable in skipped) == (name not in given)


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
