"""The spectrum of a network's curvature, in one command."""

from pathlib import Path

import numpy as np
import pytest
import torch
from csv_table import read_csv
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from examples.paper.data import digits_parts
from examples.paper.networks import wide_digits_net
from laplace_debias.cli import main
from laplace_debias.commands import spectrum
from laplace_debias.curvature import GGN, Hessian

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = {
    "model": "examples.paper.networks:wide_digits_net",
    "model_args": {"width": 6},
    "data": "examples.paper.data:digits_parts",
    "mean": (0.3053,),
    "std": (0.3760,),
    "examples": 30,
    "batch_size": 20,
    "eigenpairs": 4,
    "trace_matvecs": 4,
    "density_probes": 2,
    "density_steps": 6,
    "device": "cpu",
    "progress": False,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("digits") / "net.safetensors"
    save_file(network().state_dict(), path)
    return path


def network():
    torch.manual_seed(0)
    return wide_digits_net(width=6).eval()


def training_images():
    """Those that the seed chooses."""
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    return digits_parts()["train"].batch(order[:30])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GGN, pytest.param(Hessian, marks=pytest.mark.slow)])
def test_the_spectrum_is_that_of_training_images(checkpoint, tmp_path, kind, capsys):
    settings = spectrum.Settings(
        **SMALL, matrix=kind.__name__.lower(), checkpoint=checkpoint, output=tmp_path
    )
    result = spectrum.run(settings)
    images, labels = training_images()
    A = kind(network(), nn.CrossEntropyLoss(), [(images, labels)])
    V, values = result.eigenpairs.vectors, result.eigenpairs.values
    torch.testing.assert_close(A @ V, V * values, rtol=0, atol=2e-3 * float(values[0]))
    rows = read_csv(tmp_path / "eigenvalues.csv")
    assert [row["eigenvalue"] for row in rows] == pytest.approx(values.tolist())
    exact = float(A.to_dense().trace())
    error = float(result.trace.standard_error)
    assert float(result.trace.value) == pytest.approx(exact, abs=5 * error)
    assert len(read_csv(tmp_path / "density.csv")) == len(result.density.grid)
    with Image.open(tmp_path / "spectrum.png") as picture:
        assert len(np.unique(np.asarray(picture.convert("L")))) > 10
    printed = capsys.readouterr().out
    assert f"{kind.__name__} of the mean cross-entropy of 30 training images" in printed
    assert "Leading 4 eigenvalues" in printed


@pytest.mark.parametrize("name", ["spectrum_allcnnc"])
def test_configs_are_valid(name, capsys):
    assert main(["spectrum", f"--config={CONFIGS / name}.yaml", "--print_config"]) == 0
    assert f"output: results/{name}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"examples": 0}, "examples is 0"),
        ({"eigenpairs": 0}, "eigenpairs is 0"),
        ({"eigenpairs": 20, "max_matvecs": 10}, "max_matvecs is 10. Pass at least 20"),
        ({"trace_matvecs": 1}, "trace_matvecs is 1"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"density_width": -1.0}, "density_width is -1.0"),
        ({"memory_bound": -1}, "memory_bound is -1"),
    ],
)
def test_settings_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        spectrum.Settings(**{**SMALL, **change})
