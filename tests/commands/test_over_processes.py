"""The commands over several processes: the results of one, said and written once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import bring
import numpy as np
import pandas
import pytest
import torch
from command_tasks import together

from laplace_debias import Laplace
from laplace_debias.cli import main
from laplace_debias.commands.launched import Launched, launched_by
from laplace_debias.report.tables import read_csv
from laplace_debias.sources import SourceSettings, load

# In double precision, so that sums in another order differ by rounding alone; 30 rows in batches of
# 7 divide neither by 2 nor by 3.
NETWORK = """
import os
import signal

import torch
from torch import nn
from torch.utils.data import TensorDataset


def double(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3)).double()


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


def leaving():
    raise SystemExit("the images are not there")


def killed_on_1():
    return parts(1, "kill")
"""
SOURCE = ["--model=nets:double", "--device=cpu", "--progress=false"]
DATA = ["--data=d.npz", "--batch_size=7"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    bring.forget(monkeypatch, "nets")
    bring.archive(tmp_path / "d.npz")
    return tmp_path


def posterior(path, model="nets:double"):
    found = load(SourceSettings(model=model, data="d.npz", device="cpu"))
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


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_session_gives_the_files_and_the_words_of_one_process(here, processes, capsys, num_ranks):
    common = [*SOURCE, *DATA]

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
        ("2.parquet", ["--inputs=d.npz"]),
        ("3.csv", ["--method=nn", "--samples=3"]),
    ):
        read = pandas.read_csv if suffix.endswith("csv") else pandas.read_parquet
        one, several = (read(path) for path in both("predict", saved, *options, suffix=suffix))
        pandas.testing.assert_frame_equal(several, one, check_exact=True)
    assert not list(here.rglob("*.partial"))


@pytest.mark.slow
def test_a_report_and_an_evaluation_say_what_one_process_says(here, processes, capsys):
    # Twice the number of batches that there are processes, and one that is not full.
    common = [*SOURCE, "--data=d.npz", "--batch_size=4", "--num_resamples=20"]
    method = '{"mode": "crossfit", "fit_examples": 9, "fisher": "mc"}'
    report = ["report", *common, "--methods=[temperature,last-layer-temperature]", "--examples=5"]
    report.append(f"--posteriors.mine={method}")
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
        assert several == pytest.approx(one, rel=1e-12, abs=1e-14)
    else:
        assert one == several


def test_a_spectrum(here, processes):
    options = ["--examples=20", "--eigenpairs=3", "--max_matvecs=60", "--tolerance=1e-9"]
    command = ["spectrum", *SOURCE, "--data=d.npz", *options]
    assert main([*command, "--output=one"]) == 0
    assert_once(together(processes, 3, here, *command, "--output=three"))
    for name in ("eigenvalues", "trace", "density"):
        one, several = (read_csv(here / of / f"{name}.csv") for of in ("one", "three"))
        for column in one[0]:
            if column != "residual":
                np.testing.assert_allclose(
                    [row[column] for row in several], [row[column] for row in one], rtol=1e-8
                )
    rows = [*command[:4], "--data=d.npz", "--method=rows", "--output=rows"]
    done = together(processes, 2, here, *rows)
    assert "give --method=lanczos, or start the command without torchrun" in only_line(done)


def only_line(done, speaker=0, status=2):
    """The one line of a command that failed in all processes."""
    assert [one.status for one in done] == [status] * len(done), done
    for rank, one in enumerate(done):
        if rank != speaker:
            assert (one.out, one.err) == ("", "")
    # The first line of a launcher without torchrun tells what is waited for.
    first, *lines = done[0].err.strip().splitlines()
    assert first.startswith("laplace-debias: waiting for")
    (line,) = lines
    assert line.startswith("laplace-debias: error: ")
    return line


@pytest.mark.parametrize("rank", [0, 1])
def test_one_process_that_fails_ends_all_and_is_named(here, processes, rank):
    fit = ["fit", *SOURCE, f"--data=nets:broken_on_{rank}", "--output=p.safetensors"]
    line = only_line(together(processes, 3, here, *fit, "--batch_size=9"))
    named = "rank 0: no image" if rank == 0 else "Rank 1 failed with ValueError: no image"
    assert line.startswith(f"laplace-debias: error: {named}")
    assert not (here / "p.safetensors").exists()


def test_what_all_find_wrong_is_told_once_and_of_no_rank(here, processes):
    done = together(processes, 2, here, "fit", *SOURCE, "--data=no.npz", "--output=p.safetensors")
    told = "nothing is at no.npz, which --data names: check the path"
    assert only_line(done) == f"laplace-debias: error: {told}"
    leaving = ["fit", *SOURCE, "--data=nets:leaving", "--output=p.safetensors"]
    line = only_line(together(processes, 2, here, *leaving), status=1)
    assert line == "laplace-debias: error: the images are not there"
    line = only_line(together(processes, 2, here, "predict", *SOURCE, *DATA, "--outptu=x.csv"))
    assert line.startswith("laplace-debias: error: unrecognized")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_fit_that_broke_off_goes_on_with_any_number_of_processes(here, processes, num_ranks):
    fit = ["fit", *SOURCE, "--batch_size=9", "--curvature=ekfac", "--data=nets:broken_late"]
    only_line(together(processes, 2, here, *fit, "--output=p.safetensors", "--resume=state"))
    assert len(list((here / "state").iterdir())) == 2
    whole = [*fit[:-1], "--data=nets:whole", "--output"]
    assert_once(together(processes, num_ranks, here, *whole, "p.safetensors", "--resume=state"))
    assert not (here / "state").exists()
    assert main([*whole, "one.safetensors"]) == 0
    one, several = (numbers(posterior(here / f"{name}.safetensors")) for name in ("one", "p"))
    for expected, found in zip(one, several, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_commands_of_one_process_say_so_at_once(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    told = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        for command in (["train", "--output=x"], ["demo"], ["experiment", "--list"]):
            assert main(command) == 2
            told.append(capsys.readouterr().err)
    assert told[0] == (
        "laplace-debias: error: train runs in one process, and WORLD_SIZE says 2: start it without "
        "torchrun, or unset WORLD_SIZE\n"
    )
    assert told[3:] == ["", "", ""]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK and MASTER_ADDR and MASTER_PORT are not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment"),
        (
            {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK is 2 and WORLD_SIZE 2",
        ),
    ],
)
def test_what_a_scheduler_leaves_out_is_told(environment, message):
    with pytest.raises(ValueError, match=message) as told:
        launched_by(environment)
    assert "start all processes with torchrun, or unset WORLD_SIZE" in str(told.value)


def test_what_a_launcher_says():
    assert launched_by({}) is None
    assert launched_by({"WORLD_SIZE": "1", "RANK": "0"}) is None
    found = {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert launched_by(found) == Launched(3, 4, None, False)
    torchrun = {**found, "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
    assert launched_by(torchrun) == Launched(3, 4, 1, True)


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
def test_a_process_that_is_killed_is_named_and_what_to_do(here):
    fit = ["fit", *SOURCE, "--data=nets:killed_on_1", "--output=p.safetensors"]
    done, lines = torchrun(here, *fit, "--batch_size=9")
    assert done.returncode != 0
    assert "-9" in done.stderr
    (line,) = lines
    assert line.startswith("laplace-debias: error: rank 1 is gone: its process was killed")
    assert "start fewer processes, or lower --batch_size" in line
    assert not (here / "p.safetensors").exists()


def test_a_fit_in_groups_that_is_written_in_parts(here, processes, capsys):
    fit = ["fit", "--model=nets:wide", *SOURCE[1:], *DATA]
    assert main([*fit, "--output=whole.safetensors"]) == 0
    expected = numbers(posterior("whole.safetensors", "nets:wide"))
    in_parts = [*fit, "--parts", "--memory_bound=300000"]
    capsys.readouterr()
    assert main([*in_parts, "--plan", "--output=one"]) == 0
    assert "groups of blocks under 293.0 KiB: 2" in capsys.readouterr().out
    planned = together(processes, 2, here, *in_parts, "--plan", "--output=two")
    assert "groups of blocks under 293.0 KiB: 2" in planned[0].out, planned
    assert main([*in_parts, "--output=one"]) == 0
    assert_once(together(processes, 2, here, *in_parts, "--output=two"))
    for name in ("one", "two"):
        assert (here / name / "index.json").exists()
        for found, wanted in zip(numbers(posterior(name, "nets:wide")), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


def test_commands_read_posteriors_in_parts(here, processes, capsys):
    assert main(["fit", *SOURCE, *DATA, "--parts", "--output=p"]) == 0
    assert main(["fit", *SOURCE, *DATA, "--output=p.safetensors"]) == 0
    tune = ["tune", *SOURCE, *DATA, "--prior_precisions=[0.1,3.0]"]
    predict = ["predict", *SOURCE, *DATA]
    evaluate = ["evaluate", *SOURCE, "--data=d.npz", "--num_resamples=20", "--json"]
    rows = []
    for name in ("p", "p.safetensors"):
        assert main([*tune, f"--posterior={name}"]) == 0
        assert main([*predict, f"--posterior={name}", f"--output={name}.csv"]) == 0
        capsys.readouterr()
        assert main([*evaluate, f"--posterior={name}"]) == 0
        rows.append(json.loads(capsys.readouterr().out)["rows"])
    assert (here / "p.csv").read_bytes() == (here / "p.safetensors.csv").read_bytes()
    assert rows[0] == rows[1]
    assert len(list((here / "p").glob("blocks-*"))) == 1
    assert posterior("p").prior_precision == posterior("p.safetensors").prior_precision != 1
    assert_once(together(processes, 2, here, *predict, "--posterior=p", "--output=two.csv"))
    assert (here / "two.csv").read_bytes() == (here / "p.csv").read_bytes()
    report = ["report", *SOURCE, "--data=d.npz", "--num_resamples=20", "--methods=[network]"]
    assert main([*report, '--posteriors.mine={"path": "p"}', "--output=run"]) == 0
    values = {
        row["value"]
        for row in [*json.loads((here / "run" / "metrics.json").read_text())["rows"], *rows[0]]
        if row["method"] in ("mine", "posterior-p")
        and (row["set"], row["metric"]) == ("test", "nll")
    }
    assert len(values) == 1


def test_an_output_in_parts_is_not_replaced_unasked(here, capsys):
    (here / "p").mkdir()
    assert main(["fit", *SOURCE, *DATA, "--parts", "--output=p"]) == 2
    assert "p exists; choose another --output, or give --overwrite" in capsys.readouterr().err
    (here / "file").write_text("")
    assert main(["fit", *SOURCE, *DATA, "--parts", "--output=file", "--overwrite"]) == 2
    assert "file is a file: name a folder" in capsys.readouterr().err
