"""A session from end to end: `fit`, `tune`, `predict`, `evaluate` and `report`, file by file.

A command that reads a file must use all that the earlier command wrote to it: every number is that
of one `Laplace` in memory.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
import user_files
from spectra import generator as seeded
from torch import nn

from laplace_debias import Laplace
from laplace_debias.cli import main
from laplace_debias.sources import SourceSettings, load
from laplace_debias.system.shown import plain

NOISE = 0.5
VERBS = {
    "tune": lambda la, x, y: (vars(la.tune([(x, y)])), la.prior_precision, la.likelihood.sigma),
    "tune by evidence": lambda la, x, y: (vars(la.tune(method="marglik")), la.likelihood.sigma),
    "tune by blocks": lambda la, x, y: vars(la.tune(method="marglik", per="block")),
    "functional": lambda la, x, y: la.functional(x),
    "predict": lambda la, x, y: (la.predict(x).mean, la.predict(x).variance),
    "uncertainty": lambda la, x, y: vars(la.uncertainty(x, generator=seeded())),
    "sample": lambda la, x, y: la.sample(3, generator=seeded()),
    "evidence": lambda la, x, y: la.log_marginal_likelihood(),
    "evaluate": lambda la, x, y: la.evaluate([(x, y)]),
    "repr": lambda la, x, y: repr(la),
}


def leaves(value):
    """List the numbers and texts of a result, in order."""
    if isinstance(value, Mapping):
        value = list(value.values())
    value = plain(value)
    if type(value) is list:
        return [leaf for entry in value for leaf in leaves(entry)]
    return [value]


def table(path):
    """Write rows of four numbers, and a target that is a function of them plus noise of 0.5."""
    rng = np.random.default_rng(0)
    path.mkdir()
    for split, rows in (("train", 300), ("val", 150), ("test", 400)):
        x = rng.normal(size=(rows, 4))
        y = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + NOISE * rng.normal(size=rows)
        columns = {f"x{n}": x[:, n] for n in range(4)} | {"y": y}
        pandas.DataFrame(columns).to_csv(path / f"{split}.csv", index=False)


def image_data(folder):
    user_files.image_folder(folder / "data", splits=(("train", 20), ("val", 12), ("test", 12)))
    return {"model": "nets:build"}


def table_data(folder):
    table(folder / "data")
    return {"model": "nets:rows", "model_args": {"outputs": 1}, "target": "y"}


def trained(folder, options):
    """Train the network of the options, save its weights in `net.pt`, and load it with its data."""
    options = options | {"data": "data", "device": "cpu", "progress": False}
    loaded = load(SourceSettings(**options))
    loss = nn.functional.mse_loss if loaded.task == "regression" else nn.functional.cross_entropy
    x, y = user_files.every(loaded.train)
    loaded.model.train()
    optimizer = torch.optim.Adam(loaded.model.parameters(), lr=0.03)
    for _ in range(300):
        optimizer.zero_grad()
        loss(loaded.model(x), y).backward()
        optimizer.step()
    user_files.weights(folder / "net.pt", loaded.model)
    return load(SourceSettings(**options, checkpoint=Path("net.pt")))


@pytest.fixture(params=[image_data, table_data], ids=["classification", "regression"])
def session(request, tmp_path, monkeypatch):
    """A trained network with its data, and the options of a command that name them."""
    user_files.networks(tmp_path, monkeypatch)
    options = request.param(tmp_path)
    loaded = trained(tmp_path, options)
    arguments = [
        f"--model={options['model']}",
        "--data=data",
        "--checkpoint=net.pt",
        "--device=cpu",
    ]
    if loaded.task == "regression":
        arguments += ["--model_args.outputs=1", "--target=y"]
    return loaded, [*arguments, "--progress=false"]


def run_json(capsys, *arguments):
    """Run a command, and read what it prints as JSON."""
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def value_in_row(report, **fields):
    """The value in the only row of a report with these fields."""
    (row,) = (row for row in report["rows"] if fields.items() <= row.items())
    return row["value"]


@pytest.mark.slow
def test_the_commands_end_with_the_numbers_of_one_posterior_in_memory(session, capsys):
    loaded, common = session
    posterior = "--posterior=p.safetensors"
    run_json(capsys, "fit", *common, "--output=p.safetensors")
    tuned = run_json(capsys, "tune", *common, posterior)
    run_json(capsys, "predict", *common, posterior, "--output=p.csv")
    evaluated = run_json(capsys, "evaluate", *common, posterior)
    reported = run_json(capsys, "report", *common, "--output=run")

    la = Laplace(loaded.model, loaded.task, params="last_layer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sigma is assumed, as by the command
        la.fit(loaded.train, num_data=loaded.num_train)
    tuned_in_memory = la.tune(loaded.validation)
    assert tuned["prior_precision"] == pytest.approx(tuned_in_memory.prior_precision, rel=1e-5)
    x, y = user_files.every(loaded.test)
    predictive = la.predict(x)
    columns = pandas.read_csv("p.csv")
    nll = -predictive.log_prob(y).mean().item()
    evaluated_nll = value_in_row(evaluated, method="posterior-p", set="test", metric="nll")
    assert evaluated_nll == pytest.approx(nll, rel=1e-5)
    methods = {row["method"] for row in reported["rows"]}
    if loaded.task == "classification":
        probabilities = columns.filter(like="probability_").to_numpy()
        np.testing.assert_allclose(probabilities, predictive.probs.numpy(), atol=1e-5)
        assert methods >= {"network", "temperature", "last-layer"}
        return
    np.testing.assert_allclose(columns["mean"], predictive.mean[:, 0], rtol=1e-4, atol=1e-5)
    spread = columns["standard_deviation"]
    np.testing.assert_allclose(spread, predictive.variance[:, 0].sqrt(), rtol=1e-4)
    assert tuned["sigma"] == pytest.approx(tuned_in_memory.sigma, rel=1e-5)
    assert tuned["sigma"] == pytest.approx(NOISE, rel=0.1)
    covered = (columns["target"] - columns["mean"]).abs() <= 1.959964 * spread
    assert 0.90 <= covered.mean() <= 0.99
    for answer, method in ((evaluated, "posterior-p"), *((reported, name) for name in methods)):
        coverage = value_in_row(answer, method=method, set="test", metric="coverage")
        assert 0.90 <= coverage <= 0.99, method


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("sigma", [None, 0.7])
def test_a_posterior_from_its_file_answers_as_the_one_in_memory(verb, sigma, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = torch.randn(40, 3).double()
    y = torch.randn(40, 2).double()
    la = Laplace(model, "regression", sigma=sigma, prior_precision=3.0, temperature=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        la.fit([(x, y)])
    la.save(tmp_path / "p.safetensors")
    read = Laplace.load(tmp_path / "p.safetensors", model)
    # They agree up to rounding: a basis that was computed lies in memory by columns, but one from a
    # file by rows.
    in_memory = leaves(VERBS[verb](la, x, y))
    assert leaves(VERBS[verb](read, x, y)) == [
        pytest.approx(leaf, rel=1e-9, abs=1e-12) if isinstance(leaf, float) else leaf
        for leaf in in_memory
    ]
