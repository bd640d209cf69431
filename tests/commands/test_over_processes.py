"""Commands over several processes give the results of one process, printed and written once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
import user_files
from command_tasks import together
from csv_table import read_csv

from laplace_debias import Laplace
from laplace_debias.cli import main
from laplace_debias.sources import SourceSettings, load

# In double precision, so that sums in another order differ only by rounding; 30 rows in batches of
# 7 divide neither by 2 nor by 3.
NETWORK = """
import os
import signal

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset


def double(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def inputs(part="test"):
    with np.load("d.npz") as file:
        return TensorDataset(*(torch.from_numpy(file[f"{name}_{part}"]) for name in "xy"))


def rows():
    return {"train": inputs("train"), "validation": inputs("val"), "test": inputs()}


class Bad(TensorDataset):
    # Some row cannot be read: in every process, or only in the process of a rank.

    def __init__(self, rank, fault):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(40, 4, generator=generator, dtype=torch.float64)
        super().__init__(x, torch.arange(40) % 3)
        self.rank = rank
        self.fault = fault

    def __getitem__(self, index):
        if self.fault == "late":
            # The row is not in the first batch, which is read before the fit.
            if index == 25:
                raise ValueError(f"no image {index}")
        elif index >= 10 and os.environ.get("RANK") == str(self.rank):
            if self.fault == "raise":
                raise ValueError(f"no image {index}")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def bad_rows(rank, fault):
    held_out = TensorDataset(*(tensor[:9] for tensor in Bad(rank, fault).tensors))
    return {"train": Bad(rank, fault), "validation": held_out, "test": held_out}


def broken_on_1():
    return bad_rows(1, "raise")


def whole():
    return bad_rows(-1, "raise")


def broken_late():
    return bad_rows(-1, "late")


def broken_on_0():
    return bad_rows(0, "raise")


def killed_on_1():
    return bad_rows(1, "kill")
"""
SOURCE = ["--model=nets:double", "--device=cpu", "--progress=false"]
DATA = ["--data=nets:rows", "--batch_size=7"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    user_files.forget(monkeypatch, "nets")
    user_files.archive(tmp_path / "d.npz")
    return tmp_path


def load_posterior(path):
    loaded = load(SourceSettings(model="nets:double", data="nets:rows", device="cpu"))
    return Laplace.load(path, loaded.model)


def results_of(la):
    """Predictive moments at five inputs, the prior precision and the evidence."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [*la.functional(x), la.prior_precision, la.log_marginal_likelihood()]


def assert_only_first_prints(processes, printed=None):
    """All processes succeeded, and only the first printed, if given, this text."""
    assert [process.status for process in processes] == [0] * len(processes), [
        process.err for process in processes
    ]
    assert all((process.out, process.err) == ("", "") for process in processes[1:])
    if printed is not None:
        assert processes[0].out == printed


def test_a_session_gives_the_files_and_the_words_of_one_process(folder, processes, capsys):
    common = [*SOURCE, *DATA]

    def run_in_one_and_three(command, *options, suffix):
        """Run a command in one process and in three, and return the paths of their files."""
        assert main([command, *common, *options, f"--output=o{suffix}"]) == 0
        printed = capsys.readouterr().out
        completed = together(
            processes, 3, folder, command, *common, *options, f"--output=t{suffix}"
        )
        assert_only_first_prints(completed, printed.replace(f"o{suffix}", f"t{suffix}"))
        return folder / f"o{suffix}", folder / f"t{suffix}"

    for mode, fisher in (("full", "mc"), ("debiased", "exact")):
        one_path, three_path = run_in_one_and_three(
            "fit", f"--mode={mode}", f"--fisher={fisher}", suffix=f"-{mode}.safetensors"
        )
        results_of_one = results_of(load_posterior(one_path))
        results_of_three = results_of(load_posterior(three_path))
        for actual, expected in zip(results_of_three, results_of_one, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)
    saved = "--posterior=o-full.safetensors"
    one_path, three_path = run_in_one_and_three(
        "tune", saved, "--prior_precisions=[0.1,1.0,10.0]", suffix="-tuned.safetensors"
    )
    one_tuned = load_posterior(one_path)
    assert one_tuned.prior_precision == load_posterior(three_path).prior_precision
    for suffix, options in (
        ("1.csv", []),
        ("2.parquet", ["--inputs=nets:inputs"]),
        ("3.csv", ["--method=nn", "--samples=3"]),
    ):
        read = pandas.read_csv if suffix.endswith("csv") else pandas.read_parquet
        one_path, three_path = run_in_one_and_three("predict", saved, *options, suffix=suffix)
        pandas.testing.assert_frame_equal(read(three_path), read(one_path), check_exact=True)
    assert not list(folder.rglob("*.partial"))


@pytest.mark.slow
def test_a_report_and_an_evaluation_say_what_one_process_says(folder, processes, capsys):
    # There are more than twice as many batches as processes, and the last batch is not full.
    common = [*SOURCE, "--data=nets:rows", "--batch_size=4"]
    method = '{"params": "all", "mode": "crossfit", "fit_examples": 9, "fisher": "mc"}'
    report = ["report", *common, "--methods=[temperature]", "--examples=5"]
    # Processes read in step, although their data ends at different batches.
    report += [
        f"--posteriors.mine={method}",
        '--posteriors.rounds={"params": "all", "mode": "auto"}',
    ]
    assert main([*report, "--output=one"]) == 0
    alone = capsys.readouterr().out
    assert_only_first_prints(
        together(processes, 3, folder, *report, "--output=three"), alone.replace("one/", "three/")
    )
    assert_same(
        expected=json.loads((folder / "one" / "metrics.json").read_text()),
        actual=json.loads((folder / "three" / "metrics.json").read_text()),
    )
    assert file_names(folder / "one") == file_names(folder / "three")
    # The run is complete, so nothing is fitted or predicted again, and the same text is printed.
    repeated = together(processes, 2, folder, *report, "--output=three")
    assert_only_first_prints(repeated)
    assert "Fitting" not in repeated[0].out
    assert alone.replace("one/", "three/").endswith(repeated[0].out)

    evaluate = ["evaluate", *common, "--posterior=one/posteriors/mine.safetensors", "--json"]
    assert main(evaluate) == 0
    evaluated_by_one = json.loads(capsys.readouterr().out)
    completed = together(processes, 3, folder, *evaluate)
    assert_only_first_prints(completed)
    evaluated_by_three = json.loads(completed[0].out)
    for evaluated in (evaluated_by_one, evaluated_by_three):
        for entry in evaluated["methods"]:
            entry["seconds"] = None
            entry["seconds_per_example"] = None
    assert_same(expected=evaluated_by_one, actual=evaluated_by_three)


def file_names(folder):
    """Paths of all files below a folder, relative to it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def assert_same(expected, actual):
    """Two results are equal; their numbers may differ by rounding."""
    if isinstance(expected, dict):
        assert expected.keys() == actual.keys()
        for key in expected:
            assert_same(expected[key], actual[key])
    elif isinstance(expected, list):
        assert len(expected) == len(actual)
        for expected_entry, actual_entry in zip(expected, actual, strict=True):
            assert_same(expected_entry, actual_entry)
    elif isinstance(expected, float):
        # A difference of two numbers of order one has the rounding errors of these numbers.
        assert actual == pytest.approx(expected, rel=1e-12, abs=1e-13)
    else:
        assert expected == actual


def test_a_spectrum(folder, processes):
    options = ["--examples=20", "--eigenpairs=3", "--max_matvecs=60", "--tolerance=1e-9"]
    options += ["--trace_matvecs=4", "--density_probes=2", "--density_steps=6"]
    command = ["spectrum", *SOURCE, "--data=nets:rows", *options]
    assert main([*command, "--output=one"]) == 0
    assert_only_first_prints(together(processes, 3, folder, *command, "--output=three"))
    for name in ("eigenvalues", "density"):
        expected_rows = read_csv(folder / "one" / f"{name}.csv")
        rows = read_csv(folder / "three" / f"{name}.csv")
        for column in expected_rows[0]:
            if column != "residual":
                np.testing.assert_allclose(
                    [row[column] for row in rows],
                    [row[column] for row in expected_rows],
                    rtol=1e-8,
                )


def only_line(processes):
    """The single line of a command that failed in all processes."""
    assert [process.status for process in processes] == [2] * len(processes), processes
    assert all((process.out, process.err) == ("", "") for process in processes[1:])
    (line,) = processes[0].err.strip().splitlines()
    return line.removeprefix("laplace-debias: error: ")


@pytest.mark.parametrize("rank", [0, 1])
def test_one_process_that_fails_ends_all_and_is_named(folder, processes, rank):
    fit = ["fit", *SOURCE, f"--data=nets:broken_on_{rank}", "--output=p.safetensors"]
    line = only_line(together(processes, 3, folder, *fit, "--batch_size=9"))
    if rank == 0:
        assert line.startswith("no image")
    else:
        assert line.startswith("Rank 1 failed with ValueError: no image")
    assert not (folder / "p.safetensors").exists()


def test_what_all_find_wrong_is_told_once_and_of_no_rank(folder, processes):
    fit = ["fit", *SOURCE, "--data=no.npz", "--output=p.safetensors"]
    assert (
        only_line(together(processes, 2, folder, *fit))
        == "The path no.npz of --data does not exist. Check the path."
    )
    line = only_line(together(processes, 2, folder, "predict", *SOURCE, *DATA, "--outptu=x.csv"))
    assert line.startswith("laplace-debias predict has no option --outptu. Did you mean --output?")


def test_what_a_launcher_leaves_out_is_told(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["fit"]) == 2
    assert "environment variable RANK expected, but not set" in capsys.readouterr().err


def torchrun(folder, *arguments):
    """Run a command in two processes; return the completed process and its error lines."""
    program = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
    completed = subprocess.run(
        [*program, "--nproc-per-node=2", "-m", "laplace_debias", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    lines = [line for line in completed.stderr.splitlines() if line.startswith("laplace-debias")]
    return completed, lines


@pytest.mark.slow
def test_torchrun_starts_a_command(folder):
    fit = ["fit", *SOURCE, *DATA]
    completed, lines = torchrun(folder, *fit, "--output=t.safetensors")
    assert (completed.returncode, lines) == (0, []), completed.stderr
    assert main([*fit, "--output=o.safetensors"]) == 0
    results_of_one = results_of(load_posterior("o.safetensors"))
    results_of_two = results_of(load_posterior("t.safetensors"))
    for actual, expected in zip(results_of_two, results_of_one, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)
    assert completed.stdout.count("Posterior: t.safetensors") == 1


@pytest.mark.slow
def test_torchrun_ends_all_when_one_is_killed(folder):
    fit = ["fit", *SOURCE, "--data=nets:killed_on_1", "--output=p.safetensors"]
    completed, _ = torchrun(folder, *fit, "--batch_size=9")
    assert completed.returncode != 0
    assert "-9" in completed.stderr
    assert not (folder / "p.safetensors").exists()
