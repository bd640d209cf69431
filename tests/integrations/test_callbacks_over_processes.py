"""Callbacks in a training run of several processes, and with Weights & Biases as the logger."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from laplace_debias import Laplace

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/support/training_program.py"

pytestmark = pytest.mark.slow


def run(library, folder, num_processes, sampler, mode="full"):
    """Train with a number of processes; return the numbers that each of them wrote."""
    folder.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    completed = subprocess.run(
        [sys.executable, *launcher, str(PROGRAM), library, str(folder), sampler, mode],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    return [
        json.loads((folder / f"numbers-{rank}.json").read_text()) for rank in range(num_processes)
    ]


@pytest.mark.parametrize(("sampler", "num_data"), [("all", 37), ("first", 20), ("weighted", 37)])
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_two_processes_have_the_posterior_of_one(library, sampler, num_data, tmp_path):
    """No posterior contains examples that the sampler of the run leaves out."""
    pytest.importorskip(library)
    (expected,) = run(library, tmp_path / "one", 1, sampler)
    results = run(library, tmp_path / "two", 2, sampler)
    for result in results:
        assert result["num_data"] == expected["num_data"] == num_data
        assert result["prior_precision"] == pytest.approx(expected["prior_precision"], rel=1e-10)
        torch.testing.assert_close(
            torch.tensor(result["precision"]),
            torch.tensor(expected["precision"]),
            rtol=1e-6,
            atol=1e-8,
        )
    assert [len(result["written"]) for result in results] == [1, 0]
    assert len(list((tmp_path / "two").rglob("*posterior.safetensors"))) == 1


@pytest.mark.parametrize(
    ("library", "sampler", "is_first"),
    # Lightning always shuffles the training data of several processes.
    [
        ("lightning", "all", False),
        ("transformers", "all", False),
        ("transformers", "in order", True),
    ],
)
def test_two_processes_fit_the_first_batch_in_the_order_of_the_run(
    library, sampler, is_first, tmp_path
):
    """Without shuffling, the first batch of sorted data contains only examples of one class."""
    pytest.importorskip(library)
    import training_program as program

    batch = program.examples(program.SIZE, 1)[:10]  # two processes with batches of 5
    la = Laplace(program.TextModel().layers, prior_precision=1e-4)
    first = la.fit([batch], num_data=program.SIZE).posterior.precision.to_dense().diagonal()
    for result in run(library, tmp_path / "two", 2, sampler, "mini"):
        diagonal = torch.tensor(result["precision"], dtype=torch.float64).diagonal()
        curvature = diagonal - result["prior_precision"]
        assert torch.allclose(curvature, first - 1e-4, rtol=1e-5) == is_first


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_weights_and_biases_offline_has_the_metrics(library, tmp_path, monkeypatch):
    pytest.importorskip(library)
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    import training_program as program

    prefix = ""
    if library == "lightning":
        la = program.with_lightning(tmp_path, is_logged_by_wandb=True)
    else:
        la = program.with_transformers(tmp_path, is_logged_by_wandb=True)
        prefix = "eval/"
    summary = dict(wandb.run.summary)
    wandb.finish()
    wandb.teardown()
    report = la.evaluate(
        torch.utils.data.DataLoader(program.examples(program.SIZE, 2), batch_size=5)
    )
    assert summary[f"{prefix}laplace_nll"] == pytest.approx(report["nll"].value, rel=1e-5)
    assert summary[f"{prefix}laplace_prior_precision"] == pytest.approx(float(la.prior_precision))
    assert summary[f"{prefix}network_nll"] > 0
    assert list(tmp_path.rglob("offline-run-*/run-*.wandb"))
