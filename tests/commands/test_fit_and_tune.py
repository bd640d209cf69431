"""The commands `fit` and `tune`: a posterior in a file."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.paper.data import digits_parts
from examples.paper.networks import digits_net
from laplace_debias import Laplace
from laplace_debias.cli import main

SOURCE = [
    *("--model=examples.paper.networks:digits_net", "--data=examples.paper.data:digits_parts"),
    *("--device=cpu", "--progress=false"),
]


def network(checkpoint: Path) -> torch.nn.Module:
    model = digits_net().eval()
    model.load_state_dict(load_file(checkpoint))
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A network of random weights."""
    path = tmp_path_factory.mktemp("network") / "net.safetensors"
    torch.manual_seed(0)
    save_file(digits_net().state_dict(), path)
    return path


def command(name: str, checkpoint: Path, *options: str) -> list[str]:
    return [name, *SOURCE, f"--checkpoint={checkpoint}", *options]


@pytest.mark.parametrize(
    ("mode", "options", "ranges"),
    [
        ("debiased", ["--batch_size=6"], [(0, 6), (6, 12)]),
        ("mini", ["--batch_size=9"], [(0, 9)]),
        ("full", ["--batch_size=8", "--train_examples=12"], [(0, 12)]),
    ],
)
def test_fit_saves_what_laplace_fits_to_the_same_images(
    checkpoint, tmp_path, mode, options, ranges, capsys
):
    output = tmp_path / "new folder" / "posterior.safetensors"
    posterior_options = [
        f"--mode={mode}",
        "--params=weights",
        "--curvature=ekfac",
        "--prior_precision=3",
    ]
    arguments = command(
        "fit", checkpoint, f"--output={output}", "--seed=1", *posterior_options, *options
    )
    assert main(arguments) == 0
    model = network(checkpoint)
    data = digits_parts()
    order = torch.randperm(len(data["train"]), generator=torch.Generator().manual_seed(1))
    batches = [[data["train"].batch(order[start:stop])] for start, stop in ranges]
    la = Laplace(model, curvature="ekfac", params="weights", prior_precision=3.0)
    num_data = len(data["train"])
    la.fit_batches(*batches, num_data=num_data)
    x = data["test"].batch(range(4))[0]
    loaded = Laplace.load(output, model)
    assert loaded.num_data == num_data
    torch.testing.assert_close(loaded.predict(x).probs, la.predict(x).probs)
    assert f"N = {num_data:,}" in " ".join(capsys.readouterr().out.split())


def test_fit_takes_a_number_of_inducing_inputs(checkpoint, tmp_path, capsys):
    output = tmp_path / "posterior.safetensors"
    options = [f"--output={output}", "--mode=mini", "--batch_size=6", "--inducing=2"]
    assert main(command("fit", checkpoint, *options)) == 2
    assert "`inducing=2` applies only to `curvature=gp`, got `curvature=kfac`" in " ".join(
        capsys.readouterr().err.split()
    )
    assert main(command("fit", checkpoint, *options, "--curvature=gp")) == 0
    la = Laplace.load(output, network(checkpoint))
    assert len(la.posterior.curvature.blocks["parameters"].U.inducing.inputs) == 2


@pytest.fixture(scope="module")
def posterior(checkpoint, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("posterior") / "posterior.safetensors"
    assert main(command("fit", checkpoint, f"--output={path}", "--mode=mini")) == 0
    return path


@pytest.mark.parametrize("metric", ["nll", "brier"])
def test_tune_saves_the_best_of_the_grid(checkpoint, posterior, tmp_path, metric, capsys):
    content = posterior.read_bytes()
    output = tmp_path / "tuned.safetensors"
    grid = "--prior_precisions=[0.1,10.0,1000.0]"
    options = [f"--posterior={posterior}", f"--output={output}", f"--metric={metric}", grid]
    assert main(command("tune", checkpoint, "--validation_examples=20", *options)) == 0
    model = network(checkpoint)
    data = digits_parts()
    order = torch.randperm(len(data["validation"]), generator=torch.Generator().manual_seed(0))[:20]
    la = Laplace.load(posterior, model)
    tuned = la.tune([data["validation"].batch(order)], metric, [0.1, 10.0, 1000.0])
    assert float(Laplace.load(output, model).prior_precision) == tuned.prior_precision
    assert posterior.read_bytes() == content
    is_at_the_end = tuned.prior_precision != 10.0
    printed = capsys.readouterr().out
    assert ("that was tried" in printed) == is_at_the_end
    # The candidates are a table with one line each, as in Python.
    lines = printed.splitlines()
    for row in tuned.compared:
        (line,) = [
            line for line in lines if line.replace(" *", "  ").startswith(f"{row['name']}  ")
        ]
        assert f"{row[metric]:.4g}" in line
    assert "Scores of the alternatives" not in printed


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fit", ["--mode=full", "--train_examples=0"], "train_examples is 0"),
        ("fit", ["--train_examples=100000"], "train data has only 1,000 examples"),
        ("fit", ["--batch_size=0"], "batch_size is 0"),
        ("fit", ["--mode=ful"], "mode"),
        ("tune", ["--validation_examples=0"], "validation_examples is 0"),
        ("tune", ["--validation_examples=100000"], "validation data has only 297 examples"),
        ("tune", ["--method=marglik", "--metric=brier"], "uses no data"),
        ("tune", ["--prior_precisions=[0.0]"], "positive"),
    ],
)
def test_bad_options_are_told_in_one_line_and_nothing_is_written(
    checkpoint, posterior, tmp_path, name, options, message, capsys
):
    output = tmp_path / "out.safetensors"
    if name == "tune":
        options = [f"--posterior={posterior}", *options]
    assert main(command(name, checkpoint, f"--output={output}", *options)) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert message in printed
    assert not output.exists()


def test_an_existing_posterior_is_kept_unless_told_otherwise(checkpoint, posterior, capsys):
    content = posterior.read_bytes()
    fit_again = command("fit", checkpoint, f"--output={posterior}", "--mode=debiased")
    assert main(fit_again) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert posterior.read_bytes() == content
    assert main([*fit_again, "--overwrite"]) == 0
    assert posterior.read_bytes() != content


def test_tune_keeps_another_file_unless_told_otherwise(checkpoint, posterior, tmp_path, capsys):
    output = tmp_path / "kept"
    output.write_text("mine")
    options = [f"--posterior={posterior}", f"--output={output}", "--method=marglik"]
    assert main(command("tune", checkpoint, *options)) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert output.read_text() == "mine"
    assert main(command("tune", checkpoint, *options, "--overwrite")) == 0
    assert output.read_bytes() != b"mine"
