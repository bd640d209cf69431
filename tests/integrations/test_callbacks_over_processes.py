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


def run(library, folder, num_processes, samplers, mode="full"):
    """Train with a number of processes, once per sampler.

    The runs share their processes, because each process takes long to import the libraries.

    Returns:
        The numbers that each process wrote, by sampler.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    completed = subprocess.run(
        [sys.executable, *launcher, str(PROGRAM), library, str(folder), mode, *samplers],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    return {
        sampler: [
            json.loads((folder / sampler / f"numbers-{rank}.json").read_text())
            for rank in range(num_processes)
        ]
        for sampler in samplers
    }


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_two_processes_have_the_posterior_of_one(library, tmp_path):
    """No posterior contains examples that the sampler of the run leaves out."""
    pytest.importorskip(library)
    sizes = {"all": 37, "first": 20, "weighted": 37}
    of_one = run(library, tmp_path / "one", 1, sizes)
    of_two = run(library, tmp_path / "two", 2, sizes)
    for sampler, num_data in sizes.items():
        (expected,) = of_one[sampler]
        for result in of_two[sampler]:
            assert result["num_data"] == expected["num_data"] == num_data
            assert result["prior_precision"] == pytest.approx(
                expected["prior_precision"], rel=1e-10
            )
            torch.testing.assert_close(
                torch.tensor(result["precision"]),
                torch.tensor(expected["precision"]),
                rtol=1e-6,
                atol=1e-8,
            )
        assert [len(result["written"]) for result in of_two[sampler]] == [1, 0]
        assert len(list((tmp_path / "two" / sampler).rglob("*posterior.safetensors"))) == 1


@pytest.mark.parametrize(
    ("library", "is_first_by_sampler"),
    # Lightning always shuffles the training data of several processes.
    [("lightning", {"all": False}), ("transformers", {"all": False, "in order": True})],
)
def test_two_processes_fit_the_first_batch_in_the_order_of_the_run(
    library, is_first_by_sampler, tmp_path
):
    """Without shuffling, the first batch of sorted data contains only examples of one class."""
    pytest.importorskip(library)
    import training_program as program

    batch = program.examples(program.SIZE, 1)[:10]  # two processes with batches of 5
    la = Laplace(program.TextModel().layers, prior_precision=1e-4)
    first = la.fit([batch], num_data=program.SIZE).posterior.precision.to_dense().diagonal()
    results = run(library, tmp_path, 2, is_first_by_sampler, "mini")
    for sampler, is_first in is_first_by_sampler.items():
        for result in results[sampler]:
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
