"""What the command line says when it is stopped, lacks options, or lacks what pictures need."""

import importlib
import signal
import subprocess
import sys

import pytest

from laplace_debias.cli import main
from laplace_debias.commands import COMMANDS
from laplace_debias.curvature.fits import saved_passes
from laplace_debias.problems import get_problem, save_checkpoint

REQUIRED = {
    "evaluate": ["--problem=convnet-digits"],
    "report": ["--problem=convnet-digits"],
    "fit": ["--model=m:b", "--output=x.safetensors"],
    "predict": ["--model=m:b", "--posterior=x.safetensors", "--output=x.csv"],
    "spectrum": ["--model=m:b"],
    "tune": ["--model=m:b", "--posterior=x.safetensors"],
    "train": ["--output=x.safetensors"],
}


def stop(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_ends_with_one_line_that_says_how_to_go_on(command, monkeypatch, capsys):
    module = importlib.import_module(f"laplace_debias.commands.{command}")
    monkeypatch.setattr(module, "run", stop)
    assert main([command, *REQUIRED.get(command, [])]) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("laplace-debias: stopped: ")
    assert "give the same command again" in line
    assert ("--resume" in line) == (command in ("fit", "train", "tune"))


def test_a_resumed_command_is_resumed_in_the_same_way(monkeypatch, capsys):
    from laplace_debias.commands import train

    monkeypatch.setattr(train, "run", stop)
    assert main(["train", "--output=x.safetensors", "--resume"]) == 130
    assert "again, and it goes on" in capsys.readouterr().err


def test_ctrl_c_before_the_command_runs(monkeypatch, capsys):
    monkeypatch.setattr("laplace_debias.cli._run", stop)
    assert main(["demo"]) == 130
    assert "has not begun; give the same command again" in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_that_was_stopped_goes_on(tmp_path, monkeypatch, capsys):
    from laplace_debias.commands import train

    output = tmp_path / "network.safetensors"
    arguments = ["train", "--problem=convnet-digits", f"--output={output}", "--progress=false"]
    monkeypatch.setattr(train, "save_checkpoint", stop)
    assert main(arguments) == 130
    assert "--resume" in capsys.readouterr().err
    monkeypatch.undo()
    assert main([*arguments, "--resume"]) == 0
    assert output.exists()


def stopped(arguments, folder, monkeypatch, capsys):
    """A command once to its end, and once with Ctrl-C at its second batch; how it is given again.

    Args:
        arguments: Those of the command that writes to a file of this name.
        folder: Where its state is.
    """
    assert main(arguments("alone")) == 0
    done, calls = saved_passes._SavedPass.done, []

    def interrupted(self, *seen):
        calls.append(seen)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        done(self, *seen)

    monkeypatch.setattr(saved_passes._SavedPass, "done", interrupted)
    resumed = [*arguments("resumed"), f"--resume={folder}"]
    capsys.readouterr()
    assert main(resumed) == 130
    assert "give the same command again, and it goes on" in capsys.readouterr().err
    return resumed


def test_a_fit_that_was_stopped_goes_on_to_the_same_file(tmp_path, monkeypatch, capsys):
    network = tmp_path / "network.safetensors"
    problem = get_problem("convnet-digits")
    save_checkpoint(problem.initial_model(0).eval(), network, {})

    def arguments(name):
        output = f"--output={tmp_path / name}"
        options = [f"--checkpoint={network}", "--progress=false", "--train_examples=300"]
        return ["fit", "--problem=convnet-digits", "--device=cpu", output, *options]

    folder = tmp_path / "state"
    resumed = stopped(arguments, folder, monkeypatch, capsys)
    assert len(list(folder.iterdir())) == 1
    assert main(resumed) == 0
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "alone").read_bytes()
    assert not folder.exists()


def test_a_search_that_was_stopped_goes_on_to_the_same_file(tmp_path, monkeypatch, capsys):
    network, posterior = tmp_path / "network.safetensors", tmp_path / "posterior.safetensors"
    save_checkpoint(get_problem("convnet-digits").initial_model(0).eval(), network, {})
    problem = ["--problem=convnet-digits", "--device=cpu", f"--checkpoint={network}"]
    few = ["--progress=false", "--batch_size=50"]
    fit = ["fit", *problem, *few, "--mode=mini", f"--output={posterior}"]
    assert main(fit) == 0

    def arguments(name):
        posteriors = [f"--posterior={posterior}", f"--output={tmp_path / name}"]
        return ["tune", *problem, *few, *posteriors]

    folder = tmp_path / "state"
    resumed = stopped(arguments, folder, monkeypatch, capsys)
    assert [path.name for path in folder.iterdir()] == ["pass-1.safetensors"]
    assert main([*resumed, "--metric=ece"]) == 2
    assert "another tuning, which differs in metric" in capsys.readouterr().err
    assert main(resumed) == 0
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "alone").read_bytes()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["fit"], ["--output", "--data", "--checkpoint"]),
        (["tune", "--data=d"], ["--posterior", "--checkpoint"]),
        (["fit", "--output=x.safetensors"], ["no network", "--model", "--timm", "--problem"]),
        (["spectrum", "--problem=B"], ["the checkpoint", "no path to CIFAR-10"]),
    ],
)
def test_everything_that_is_missing_is_told_at_once(
    arguments, missing, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert all(what in error for what in missing)
    given = {argument.partition("=")[0] for argument in arguments}
    assert not any(option in error.split() for option in given if option.startswith("--"))


@pytest.mark.slow
def test_a_fit_and_its_predictions_need_neither_rich_nor_matplotlib(tmp_path):
    code = f"""
import sys
sys.modules["rich"] = sys.modules["matplotlib"] = None
import torch
from laplace_debias import Laplace
from laplace_debias.cli import main
from laplace_debias.problems import get_problem, save_checkpoint
problem = get_problem("convnet-digits")
model = problem.initial_model(0).eval()
save_checkpoint(model, r"{tmp_path}/network.safetensors", {{}})
try:
    main(["--help"])
except SystemExit:
    pass
assert main([
    "fit", "--problem=convnet-digits", r"--checkpoint={tmp_path}/network.safetensors",
    r"--output={tmp_path}/posterior.safetensors", "--mode=mini", "--progress=false",
]) == 0
la = Laplace.load(r"{tmp_path}/posterior.safetensors", model)
print(la.predict(torch.rand(2, 1, 8, 8)).probs.shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([2, 10])" in done.stdout
    assert f"Posterior: {tmp_path}/posterior.safetensors" in done.stdout
