"""What the documents say runs."""

import doctest
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from laplace_debias.cli import main
from laplace_debias.problems import Recipe

ROOT = Path(__file__).parents[2]


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
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "linear_algebra.md").read_text(), re.DOTALL
    )
    assert len(blocks) == 2
    exec(compile("".join(blocks), "linear_algebra.md", "exec"), {})


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


# Fewer steps of everything, by the examples' own constants.
SHORT = Recipe(batch_size=50, cycles=((2, 0.1),), clip_norm=5.0)
REDUCED = {
    "influence_functions": {"DIGITS_RECIPE": SHORT, "DAMPING": 0.1},
    "matrix_free_posterior": {"NUM_STEPS": 20, "NUM_SAMPLES": 4},
    "newton_step": {"NUM_STEPS": 2, "SHOWN": (0, 1, 2)},
    "pruning": {"DIGITS_RECIPE": SHORT, "NUM_PRODUCTS": 20},
    "quickstart": {"DIGITS_RECIPE": SHORT},
    "spectrum": {"NUM_STEPS": 5, "EVERY": 5, "NUM_PRODUCTS": 20, "NUM_PROBES": 2, "TOL": 0.1},
}
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_every_example_has_a_reduced_size():
    assert set(REDUCED) == {path.stem for path in EXAMPLES}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_at_reduced_size(example, tmp_path, monkeypatch, capsys):
    """Every line of them in a few seconds; the next test runs them as they are."""
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location(example.stem, example)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in REDUCED[example.stem].items():
        monkeypatch.setattr(module, name, value)
    module.main()
    check_example(example, tmp_path, capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(example, tmp_path):
    run = subprocess.run(
        [sys.executable, example], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    check_example(example, tmp_path, run.stdout)


def check_example(example, folder, printed):
    """It printed something, and the pictures that it names are there."""
    assert printed
    pictures = re.findall(r"^Picture: (\S+)$", printed, re.MULTILINE)
    assert pictures or example.stem == "quickstart"
    for picture in pictures:
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
