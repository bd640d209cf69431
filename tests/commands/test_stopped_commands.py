"""Messages of commands that are stopped, or lack options, or lack packages for pictures."""

import importlib
import signal
import subprocess
import sys

import pytest
import user_files

from laplace_debias import Laplace
from laplace_debias.__main__ import main as entry_point
from laplace_debias.cli import main
from laplace_debias.commands import COMMANDS
from laplace_debias.curvature.fits import checkpoint
from laplace_debias.curvature.fits.checkpoint import SavedPass

SOURCE = [
    *("--model=stopped_nets:build", "--data=examples.paper.data:digits_parts"),
    *("--device=cpu", "--progress=false"),
]
NETWORK = """
import torch
from examples.paper.networks import digits_net

def build():
    torch.manual_seed(0)
    return digits_net()
"""
# The required options of each command.
REQUIRED = {
    "evaluate": ["--model=m:b"],
    "report": ["--model=m:b"],
    "fit": ["--model=m:b", "--output=x.safetensors"],
    "predict": ["--model=m:b", "--posterior=x.safetensors", "--output=x.csv"],
    "spectrum": ["--model=m:b"],
    "tune": ["--model=m:b", "--posterior=x.safetensors"],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files that the commands name."""
    (tmp_path / "m.py").touch()
    (tmp_path / "x.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    user_files.forget(monkeypatch, "m")


def stop(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_ends_with_one_line_that_says_how_to_go_on(command, folder, monkeypatch, capsys):
    module = importlib.import_module(f"laplace_debias.commands.{command}")
    monkeypatch.setattr(module, "run", stop)
    assert main([command, *REQUIRED[command]]) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("laplace-debias: stopped: ")
    assert "run the same command" in line
    assert ("--resume" in line) == (command == "fit")


def test_ctrl_c_before_the_command_runs(monkeypatch, capsys):
    monkeypatch.setattr("laplace_debias.cli._run", stop)
    assert main(["fit"]) == 130
    assert "had not started. Run the same command again" in capsys.readouterr().err


def test_ctrl_c_while_a_class_is_created(monkeypatch, capsys):
    class Stopping:
        __set_name__ = stop

    monkeypatch.setattr("laplace_debias.cli._run", lambda _: type("Any", (), {"a": Stopping()}))
    assert main(["fit"]) == 130
    assert "Run the same command again" in capsys.readouterr().err


def test_ctrl_c_while_the_command_line_is_imported(monkeypatch, capsys):
    class Finder:
        find_spec = staticmethod(stop)

    monkeypatch.delitem(sys.modules, "laplace_debias.cli")
    monkeypatch.delattr("laplace_debias.cli")
    monkeypatch.setattr(sys, "meta_path", [Finder()])
    assert entry_point() == 130
    assert "Run the same command again" in capsys.readouterr().err


def test_a_reader_of_the_output_that_ends_early_is_named(folder):
    """With `head -c 0`, for example, a command cannot print any more."""
    program = "import sys; from laplace_debias.cli import main; sys.exit(main(['--help']))"
    command = [sys.executable, "-u", "-c", program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        error = process.stderr.read()
    assert process.returncode == 2
    assert error.startswith("laplace-debias: error: The program that reads the output")
    assert error.count("\n") == 1


def stopped(arguments, folder, monkeypatch, capsys):
    """Run a command to its end, and again with Ctrl-C at its second batch.

    Args:
        arguments: Function from the name of the output file to the arguments of the command.
        folder: The folder for the state of the second run.

    Returns:
        The arguments that resume the second run.
    """
    assert main(arguments("alone")) == 0
    save = SavedPass.save
    calls = []

    def interrupted(self, *arguments):
        save(self, *arguments)
        calls.append(arguments)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(checkpoint, "EVERY", 0.0)
    monkeypatch.setattr(SavedPass, "save", interrupted)
    resumed = [*arguments("resumed"), f"--resume={folder}"]
    capsys.readouterr()
    assert main(resumed) == 130
    assert "To resume, run the same command again" in capsys.readouterr().err
    return resumed


@pytest.mark.usefixtures("batches_apart")
def test_a_fit_that_was_stopped_goes_on_to_the_same_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "stopped_nets.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)

    def arguments(name):
        output = f"--output={tmp_path / name}"
        return ["fit", *SOURCE, output, "--train_examples=300"]

    folder = tmp_path / "state"
    resumed = stopped(arguments, folder, monkeypatch, capsys)
    assert len(list(folder.iterdir())) == 2
    assert main(resumed) == 0
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "alone").read_bytes()
    assert not folder.exists()


@pytest.mark.usefixtures("batches_apart")
def test_a_posterior_that_could_not_be_saved_needs_no_further_pass(tmp_path, monkeypatch, capsys):
    (tmp_path / "stopped_nets.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "EVERY", 0.0)

    def arguments(name):
        return ["fit", *SOURCE, f"--output={tmp_path / name}", "--train_examples=300"]

    def refuse(*_, **__):
        raise OSError("the disk is full")

    assert main(arguments("alone")) == 0
    folder = tmp_path / "state"
    resumed = [*arguments("resumed"), f"--resume={folder}"]
    with monkeypatch.context() as patch:
        patch.setattr(Laplace, "save", refuse)
        assert main(resumed) == 2
    assert "the disk is full" in capsys.readouterr().err
    save = SavedPass.save
    num_saves = 0

    def counted(self, *arguments):
        nonlocal num_saves
        num_saves += 1
        save(self, *arguments)

    monkeypatch.setattr(SavedPass, "save", counted)
    assert main(resumed) == 0
    assert num_saves == 0
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "alone").read_bytes()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["fit"], ["--output", "--data", "--checkpoint"]),
        (["tune", "--data=d"], ["--posterior", "--checkpoint"]),
        (["fit", "--output=x.safetensors"], ["No network", "--model", "--timm", "--torchvision"]),
    ],
)
def test_everything_that_is_missing_is_told_at_once(
    arguments, missing, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert all(text in error for text in missing)
    passed = {argument.partition("=")[0] for argument in arguments}
    assert not any(option in error.split() for option in passed if option.startswith("--"))


@pytest.mark.slow
def test_a_fit_and_its_predictions_need_neither_rich_nor_matplotlib(tmp_path):
    (tmp_path / "stopped_nets.py").write_text(NETWORK)
    code = f"""
import sys
sys.path.insert(0, r"{tmp_path}")
sys.modules["rich"] = sys.modules["matplotlib"] = None
import torch
from laplace_debias import Laplace
from laplace_debias.__main__ import main as entry_point
from laplace_debias.cli import main
from stopped_nets import build
try:
    main(["--help"])
except SystemExit:
    pass
assert main([
    "fit", "--model=stopped_nets:build", "--data=examples.paper.data:digits_parts",
    r"--output={tmp_path}/posterior.safetensors", "--mode=mini", "--progress=false",
]) == 0
la = Laplace.load(r"{tmp_path}/posterior.safetensors", build().eval())
print(la.predict(torch.rand(2, 1, 8, 8)).probs.shape)
"""
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    assert "torch.Size([2, 10])" in completed.stdout
    assert f"Posterior: {tmp_path}/posterior.safetensors" in completed.stdout
