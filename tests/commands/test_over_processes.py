"""The commands over several processes: the results of one, said and written once."""

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

# In double precision, so that sums in another order differ by rounding alone; 30 rows in batches of
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
    def __init__(self, rank, how):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(40, 4, generator=generator, dtype=torch.float64)
        super().__init__(x, torch.arange(40) % 3)
        self.rank, self.how = rank, how

    def __getitem__(self, index):
        if self.how == "late":
            # It is not in the first batch, which is looked at before the fit.
            if index == 25:
                raise ValueError(f"no image {index}")
        elif index >= 10 and os.environ.get("RANK") == str(self.rank):
            if self.how == "raise":
                raise ValueError(f"no image {index}")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def parts(rank, how):
    held = TensorDataset(*(tensor[:9] for tensor in Bad(rank, how).tensors))
    return {"train": Bad(rank, how), "validation": held, "test": held}


def broken_on_1():
    return parts(1, "raise")


def whole():
    return parts(-1, "raise")


def broken_late():
    return parts(-1, "late")


def broken_on_0():
    return parts(0, "raise")


def killed_on_1():
    return parts(1, "kill")
"""
SOURCE = ["--model=nets:double", "--device=cpu", "--progress=false"]
DATA = ["--data=nets:rows", "--batch_size=7"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    user_files.forget(monkeypatch, "nets")
    user_files.archive(tmp_path / "d.npz")
    return tmp_path


def posterior(path):
    found = load(SourceSettings(model="nets:double", data="nets:rows", device="cpu"))
    return Laplace.load(path, found.model)


def numbers(la):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [*la.functional(x), la.prior_precision, la.log_marginal_likelihood()]


def assert_once(done, expected=None):
    """All went well, and one process has told of it."""
    assert [one.status for one in done] == [0] * len(done), [one.err for one in done]
    assert all((one.out, one.err) == ("", "") for one in done[1:])
    if expected is not None:
        assert done[0].out == expected


def test_a_session_gives_the_files_and_the_words_of_one_process(here, processes, capsys):
    common, num_ranks = [*SOURCE, *DATA], 3

    def both(command, *options, suffix):
        assert main([command, *common, *options, f"--output=o{suffix}"]) == 0
        alone = capsys.readouterr().out
        done = together(
            processes, num_ranks, here, command, *common, *options, f"--output=t{suffix}"
        )
        assert_once(done, alone.replace(f"o{suffix}", f"t{suffix}"))
        return here / f"o{suffix}", here / f"t{suffix}"

    for mode, fisher in (("full", "mc"), ("debiased", "exact")):
        fit = both("fit", f"--mode={mode}", f"--fisher={fisher}", suffix=f"-{mode}.safetensors")
        for one, several in zip(*(numbers(posterior(path)) for path in fit), strict=True):
            torch.testing.assert_close(several, one, rtol=1e-11, atol=1e-13)
    saved = "--posterior=o-full.safetensors"
    tuned = both("tune", saved, "--prior_precisions=[0.1,1.0,10.0]", suffix="-tuned.safetensors")
    assert posterior(tuned[0]).prior_precision == posterior(tuned[1]).prior_precision
    for suffix, options in (
        ("1.csv", []),
        ("2.parquet", ["--inputs=nets:inputs"]),
        ("3.csv", ["--method=nn", "--samples=3"]),
    ):
        read = pandas.read_csv if suffix.endswith("csv") else pandas.read_parquet
        one, several = (read(path) for path in both("predict", saved, *options, suffix=suffix))
        pandas.testing.assert_frame_equal(several, one, check_exact=True)
    assert not list(here.rglob("*.partial"))


@pytest.mark.slow
def test_a_report_and_an_evaluation_say_what_one_process_says(here, processes, capsys):
    # Twice the number of batches that there are processes, and one that is not full.
    common = [*SOURCE, "--data=nets:rows", "--batch_size=4"]
    method = '{"params": "all", "mode": "crossfit", "fit_examples": 9, "fisher": "mc"}'
    report = ["report", *common, "--methods=[temperature]", "--examples=5"]
    # Processes whose data ends at different batches read in step.
    report += [
        f"--posteriors.mine={method}",
        '--posteriors.rounds={"params": "all", "mode": "auto"}',
    ]
    assert main([*report, "--output=one"]) == 0
    alone = capsys.readouterr().out
    assert_once(
        together(processes, 3, here, *report, "--output=three"), alone.replace("one/", "three/")
    )
    assert_same(
        *(json.loads((here / name / "metrics.json").read_text()) for name in ("one", "three"))
    )
    names = [
        sorted(str(path.relative_to(here / name)) for path in (here / name).rglob("*"))
        for name in ("one", "three")
    ]
    assert names[0] == names[1]
    # It is complete: nothing is fitted or predicted again, and the same is told.
    again = together(processes, 2, here, *report, "--output=three")
    assert_once(again)
    assert "Fitting" not in again[0].out
    assert alone.replace("one/", "three/").endswith(again[0].out)

    found = []
    evaluate = ["evaluate", *common, "--posterior=one/posteriors/mine.safetensors", "--json"]
    assert main(evaluate) == 0
    found.append(json.loads(capsys.readouterr().out))
    done = together(processes, 3, here, *evaluate)
    assert_once(done)
    found.append(json.loads(done[0].out))
    for one in found:
        for entry in one["methods"]:
            entry["seconds"] = entry["seconds_per_example"] = None
    assert_same(*found)


def assert_same(one, several):
    """Equal, and numbers up to rounding."""
    if isinstance(one, dict):
        assert one.keys() == several.keys()
        for key in one:
            assert_same(one[key], several[key])
    elif isinstance(one, list):
        assert len(one) == len(several)
        for pair in zip(one, several, strict=True):
            assert_same(*pair)
    elif isinstance(one, float):
        # A difference of two numbers of order one has their rounding, not its own.
        assert several == pytest.approx(one, rel=1e-12, abs=1e-13)
    else:
        assert one == several


def test_a_spectrum(here, processes):
    options = ["--examples=20", "--eigenpairs=3", "--max_matvecs=60", "--tolerance=1e-9"]
    options += ["--trace_matvecs=4", "--density_probes=2", "--density_steps=6"]
    command = ["spectrum", *SOURCE, "--data=nets:rows", *options]
    assert main([*command, "--output=one"]) == 0
    assert_once(together(processes, 3, here, *command, "--output=three"))
    for name in ("eigenvalues", "density"):
        one, several = (read_csv(here / of / f"{name}.csv") for of in ("one", "three"))
        for column in one[0]:
            if column != "residual":
                np.testing.assert_allclose(
                    [row[column] for row in several], [row[column] for row in one], rtol=1e-8
                )


def only_line(done):
    """The one line of a command that failed in all processes."""
    assert [one.status for one in done] == [2] * len(done), done
    assert all((one.out, one.err) == ("", "") for one in done[1:])
    (line,) = done[0].err.strip().splitlines()
    return line.removeprefix("laplace-debias: error: ")


@pytest.mark.parametrize("rank", [0, 1])
def test_one_process_that_fails_ends_all_and_is_named(here, processes, rank):
    fit = ["fit", *SOURCE, f"--data=nets:broken_on_{rank}", "--output=p.safetensors"]
    line = only_line(together(processes, 3, here, *fit, "--batch_size=9"))
    assert line.startswith("no image" if rank == 0 else "Rank 1 failed with ValueError: no image")
    assert not (here / "p.safetensors").exists()


def test_what_all_find_wrong_is_told_once_and_of_no_rank(here, processes):
    done = together(processes, 2, here, "fit", *SOURCE, "--data=no.npz", "--output=p.safetensors")
    assert only_line(done) == "The path no.npz of --data does not exist. Check the path."
    line = only_line(together(processes, 2, here, "predict", *SOURCE, *DATA, "--outptu=x.csv"))
    assert line.startswith("laplace-debias predict has no option --outptu. Did you mean --output?")


def test_what_a_launcher_leaves_out_is_told(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["fit"]) == 2
    assert "environment variable RANK expected, but not set" in capsys.readouterr().err


def torchrun(here, *arguments):
    program = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
    done = subprocess.run(
        [*program, "--nproc-per-node=2", "-m", "laplace_debias", *arguments],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("laplace-debias")]
    return done, lines


@pytest.mark.slow
def test_torchrun_starts_a_command(here):
    fit = ["fit", *SOURCE, *DATA]
    done, lines = torchrun(here, *fit, "--output=t.safetensors")
    assert (done.returncode, lines) == (0, []), done.stderr
    assert main([*fit, "--output=o.safetensors"]) == 0
    one, several = (numbers(posterior(f"{name}.safetensors")) for name in "ot")
    for pair in zip(several, one, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-11, atol=1e-13)
    assert done.stdout.count("Posterior: t.safetensors") == 1


@pytest.mark.slow
def test_torchrun_ends_all_when_one_is_killed(here):
    fit = ["fit", *SOURCE, "--data=nets:killed_on_1", "--output=p.safetensors"]
    done, _ = torchrun(here, *fit, "--batch_size=9")
    assert done.returncode != 0
    assert "-9" in done.stderr
    assert not (here / "p.safetensors").exists()
