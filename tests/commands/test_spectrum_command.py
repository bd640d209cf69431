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
from laplace_debias.assessment.spectrum import measure_spectrum
from laplace_debias.cli import main
from laplace_debias.commands import spectrum
from laplace_debias.curvature import GGN, Hessian
from laplace_debias.operators import Dense, Product, assume

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
    """The 30 training images that the seed chooses, and their labels."""
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
    V = result.eigenpairs.vectors
    values = result.eigenpairs.values
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


def test_all_eigenvalues_of_a_small_matrix(tmp_path, capsys, monkeypatch):
    """Nothing remains for a density, so rounding errors must not be shown as one."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    x = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(200) % 3)
    (tmp_path / "small_network.py").write_text(
        "from torch import nn\n\n\n"
        "def build():\n"
        "    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(0)
    layers = [nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)]
    save_file(nn.Sequential(*layers).state_dict(), tmp_path / "net.safetensors")
    options = ["--model=small_network:build", "--data=d.npz", "--checkpoint=net.safetensors"]
    options += ["--examples=100", "--output=out", "--device=cpu", "--progress=false"]
    Path("out").mkdir()
    Path("out/density.csv").write_text("of an earlier run")
    assert main(["spectrum", *options]) == 0
    assert "all other eigenvalues are below the floor of the density" in capsys.readouterr().out
    assert {path.name for path in Path("out").iterdir()} == {"eigenvalues.csv", "spectrum.png"}
    assert Image.open("out/spectrum.png").size[0] > 400


@pytest.fixture
def few_examples(tmp_path, monkeypatch):
    """The options for 60 training examples and a linear network of 12 parameters."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    random = np.random.default_rng(0)
    parts = {}
    for part in ("train", "test"):
        parts[f"x_{part}"] = random.normal(size=(60, 3)).astype(np.float32)
        parts[f"y_{part}"] = np.arange(60) % 3
    np.savez("few.npz", **parts)
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    save_file(layer.state_dict(), "net.safetensors")
    Path("linear_network.py").write_text(
        "import numpy as np\n"
        "import torch\n"
        "from torch import nn\n\n\n"
        "def build():\n    return nn.Linear(3, 3)\n\n\n"
        "def dicts():\n"
        "    few = np.load('few.npz')\n"
        "    x, y = torch.tensor(few['x_train']), torch.tensor(few['y_train'])\n"
        "    batches = [{'x': x, 'labels': y}]\n"
        "    return {'train': batches, 'test': batches}\n"
    )
    return ["--model=linear_network:build", "--checkpoint=net.safetensors", "--device=cpu"]


def test_by_default_few_examples_and_parameters_suffice(few_examples, capsys):
    """Without options, all 60 examples and all 12 eigenvalues are used; the oracle is dense."""
    assert main(["spectrum", *few_examples, "--data=few.npz", "--progress=false"]) == 0
    assert "60 training examples, 12 parameters" in capsys.readouterr().out
    measured = [
        float(row["eigenvalue"]) for row in read_csv(Path("results/spectrum/eigenvalues.csv"))
    ]
    x = torch.tensor(np.load("few.npz")["x_train"]).double()
    torch.manual_seed(0)
    probs = nn.Linear(3, 3).double()(x).softmax(1).detach()
    loss_hessians = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None, :]
    inputs = torch.cat([x, torch.ones(60, 1).double()], 1)
    ggn = torch.einsum("nij,na,nb->iajb", loss_hessians, inputs, inputs).reshape(12, 12) / 60
    expected = torch.linalg.eigvalsh(ggn).flip(0)
    torch.testing.assert_close(torch.tensor(measured).double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data=few.npz", "--examples=61"], "number of training examples. Pass at most 60."),
        (["--data=few.npz", "--eigenpairs=13"], "number of parameters. Pass at most 12."),
        (
            ["--data=linear_network:dicts", "--task=classification"],
            "A spectrum needs batches (inputs, targets) of tensors",
        ),
    ],
)
def test_data_that_do_not_suffice_are_refused(few_examples, options, message, capsys):
    assert main(["spectrum", *few_examples, *options, "--progress=false"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_eigenvalues_that_are_negative_or_many_count_in_the_trace():
    """The leading eigenvalues of an indefinite matrix may end at zero; small ones may add up."""
    options = {
        "tolerance": 1e-6,
        "max_matvecs": 400,
        "trace_matvecs": 60,
        "density_probes": 4,
        "density_steps": 20,
        "density_width": 0.3,
        "density_floor": 1e-5,
    }
    Q = torch.linalg.qr(torch.randn(200, 200, generator=torch.Generator().manual_seed(0))).Q
    Q = Q.double()
    indefinite = torch.cat([torch.ones(5), torch.zeros(45), -torch.ones(150)]).double()
    small = torch.cat([torch.ones(5), torch.full((195,), 7e-6)])
    for values, dtype in ((indefinite, torch.float64), (small, torch.float32)):
        matrix = ((Q * values.double()) @ Q.T).to(dtype)
        A = Dense((matrix + matrix.T) / 2)
        if dtype == torch.float32:
            A = assume(A, symmetric=True, positive_semidefinite=True)
        measured = measure_spectrum(A, eigenpairs=8, **options)
        assert (measured.density is None) == (dtype == torch.float32)
        total = float(values.double().sum())
        assert abs(float(measured.trace.value) - total) < 0.02 * abs(total) + 1e-4


def test_the_density_is_that_of_the_other_eigenvalues():
    """Eigenvalues that are taken out do not count as zeros."""
    values = torch.cat([torch.linspace(50, 10, 40), torch.logspace(0, -2, 60), torch.zeros(20)])
    normal = torch.randn(120, 120, generator=torch.Generator().manual_seed(0))
    Q = torch.linalg.qr(normal.double()).Q
    matrix = (Q * values.double()) @ Q.T
    A = assume(Product((Dense(matrix), Dense(torch.eye(120).double()))), symmetric=True)
    measured = measure_spectrum(
        A,
        eigenpairs=60,
        tolerance=1e-8,
        max_matvecs=1000,
        trace_matvecs=60,
        density_probes=12,
        density_steps=10,
        density_width=0.1,
        density_floor=1e-5,
    )
    remaining = values.double()[60:]
    assert measured.density.null_fraction == pytest.approx(20 / 60)
    positions = remaining[remaining > 0].log10()
    gaussian = torch.distributions.Normal(positions, measured.density.width)
    grid = measured.density.grid.log10()
    truth = gaussian.log_prob(grid[:, None]).exp().sum(dim=1) / 60
    torch.testing.assert_close(measured.density.density, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("operator", "eigenpairs"), [(GGN, 20), (Hessian, 50)])
def test_there_is_no_density_where_all_other_eigenvalues_are_zero(operator, eigenpairs):
    """20 examples of a linear regression have a matrix of rank 20."""
    torch.manual_seed(0)
    model = nn.Linear(100, 1).double()
    data = [(torch.randn(20, 100).double(), torch.randn(20, 1).double())]
    measured = measure_spectrum(
        operator(model, nn.MSELoss(), data),
        eigenpairs=eigenpairs,
        tolerance=1e-6,
        max_matvecs=150,
        trace_matvecs=10,
        density_probes=2,
        density_steps=10,
        density_width=0.1,
        density_floor=1e-5,
    )
    assert measured.density is None
    assert len(measured.eigenpairs.values) == eigenpairs
