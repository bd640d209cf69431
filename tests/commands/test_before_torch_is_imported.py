"""Help, mistyped options and files that do not exist are answered before torch is imported.

The processes of these tests import a module instead of torch, which fails or takes forever.
"""

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from laplace_debias.cli import main
from laplace_debias.commands import COMMANDS
from laplace_debias.commands.options import CommandLine
from laplace_debias.sources.settings import SourceSettings

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "pandas", "matplotlib", "PIL", "pyarrow", "jaxtyping", "safetensors")


def environment(folder, source):
    """Environment variables with which modules that import slowly are replaced by a source."""
    for name in HEAVY:
        (folder / f"{name}.py").write_text(source)
    return os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


ANSWERED = [
    (["--help"], 0, "usage: laplace-debias"),
    (["--version"], 0, "."),
    *(([command, "--help"], 0, f"usage: laplace-debias {command}") for command in COMMANDS),
    (["reprot"], 2, "Did you mean report?"),
    ([], 2, "No command was specified"),
    (["fit", "--model=m:b"], 2, "--output is required"),
    (["fit", "--batch_szie=3"], 2, "Did you mean --batch_size?"),
    (
        ["fit", "--output=p", "--batch_size=x"],
        2,
        "--batch_size: expected a whole number, got 'x'. Use --batch_size N.",
    ),
    (["fit", "--output=p"], 2, "No network was specified"),
    (["fit", "--output=p", "--model=m:b"], 2, "no module m"),
    (["fit", "--output=p", "--model=folder"], 2, "model is 'folder'. Pass an import path"),
    (["fit", "--output=p", "--model=mine:b", "--data=d.npz"], 2, "d.npz of --data"),
    (
        ["fit", "--output=p", "--model=mine:b", "--checkpoint=c"],
        2,
        "The path c of --checkpoint does not exist",
    ),
    (
        ["fit", "--output=p", "--model=mine:b", "--mode=auto", "--resume=s"],
        2,
        "A fit with `mode=auto` cannot be resumed. Remove --resume.",
    ),
    (["tune", "--model=mine:b", "--posterior=p"], 2, "The path p of --posterior does not exist"),
    (
        ["evaluate", "--model=mine:b", "--posterior=p"],
        2,
        "The path p of --posterior does not exist",
    ),
    (["report", "--from=run"], 2, "The path run of --from does not exist"),
    (
        ["report", "--model=mine:b", "--config=c.yaml"],
        2,
        "The file of --config, c.yaml, does not exist",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        pytest.param(*case, marks=pytest.mark.slow if number > 3 else ())
        for number, case in enumerate(ANSWERED)
    ],
)
def test_these_need_no_torch(arguments, status, text, tmp_path):
    (tmp_path / "mine.py").touch()
    completed = subprocess.run(
        [sys.executable, "-m", "laplace_debias", *arguments],
        cwd=tmp_path,
        env=environment(tmp_path, "raise RuntimeError('imported too early')\n"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == status, completed.stderr
    assert text in (completed.stderr if status else completed.stdout)
    assert "Traceback" not in completed.stderr


def test_ctrl_c_while_torch_is_imported_ends_in_one_line(tmp_path):
    (tmp_path / "mine.py").touch()
    waiting = "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    process = subprocess.Popen(
        [sys.executable, "-m", "laplace_debias", "fit", "--output=p", "--model=mine:b"],
        cwd=tmp_path,
        env=environment(tmp_path, waiting),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert error.strip().startswith("laplace-debias: stopped: ")
    assert "Traceback" not in error


def help_of(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    assert main([command, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_no_types_of_the_implementation(command, capsys, monkeypatch):
    text = help_of(command, capsys, monkeypatch)
    assert not re.search(r"Union|Optional|Literal|<class|null|type:|None", text)
    assert "from_run" not in text
    assert "more_checkpoints" not in text
    assert "\nExamples:\n" in text
    module = importlib.import_module(f"laplace_debias.commands.{command}")
    if issubclass(module.Settings, SourceSettings):
        for heading in ("Network:", "Data:", "Output:", "Running:"):
            assert f"\n{heading}\n" in text
    assert all(len(line) <= 90 for line in text.splitlines())


UNUSED = {
    "fit": ["ood", "ood_examples", "corruptions", "validation_examples", "test_examples"],
    "tune": ["ood", "ood_examples", "corruptions", "train_examples", "test_examples"],
    "predict": ["ood", "ood_examples", "corruptions", "train_examples", "validation_examples"],
    "spectrum": ["ood", "ood_examples", "corruptions", "validation_examples", "test_examples"],
}


@pytest.mark.parametrize("command", UNUSED)
def test_help_leaves_out_options_without_effect(command, capsys, monkeypatch):
    text = help_of(command, capsys, monkeypatch)
    assert "--train_examples" in text or "--validation_examples" in text or command == "predict"
    for option in UNUSED[command]:
        assert f"--{option} " not in text
        assert main([command, f"--{option}=3", "--model=m:b", *REQUIRED[command]]) == 2
        assert capsys.readouterr().err.strip()


REQUIRED = {
    "fit": ["--output=p"],
    "tune": ["--posterior=p"],
    "predict": ["--posterior=p", "--output=p.csv"],
    "spectrum": [],
}


def test_help_of_a_report(capsys, monkeypatch):
    text = help_of("report", capsys, monkeypatch)
    assert "\nWhat to compare:\n" in text
    assert "--from RUN" in text
    assert "--ood NAME=PATH" in text
    examples = text.partition("\nExamples:\n")[2]
    assert examples.count("laplace-debias report ") == 2
    # The command accepts the options of the examples.
    for example in examples.replace("\\\n", " ").strip().splitlines():
        _, command, *options = example.split()
        assert main([command, *options, "--print_config"]) == 0
    capsys.readouterr()


def test_help_of_tune_tells_the_grid_that_it_has(capsys, monkeypatch):
    from laplace_debias.laplace.tuning import tune

    text = " ".join(help_of("tune", capsys, monkeypatch).split())
    grid = tune.DEFAULT_GRID
    assert f"it has {len(grid)} values, four per decade from 1e-4 to 1e8" in text
    assert (float(grid[0]), float(grid[-1])) == pytest.approx((1e-4, 1e8))
    assert float(grid[4] / grid[0]) == pytest.approx(10)


def test_a_checkpoint_that_is_given_again_is_a_further_one():
    from laplace_debias.commands.report import Settings

    line = CommandLine(Settings, "report", "")
    words = ["--model=m:b", "--checkpoint=a.pt", "--checkpoint", "b.pt", "--checkpoint=c.pt"]
    settings, _ = line.settings(words)
    assert settings.checkpoint == Path("a.pt")
    assert settings.more_checkpoints == [Path("b.pt"), Path("c.pt")]
