"""The rows `ensemble` and `mixture` of several checkpoints, against loops over their members."""

import copy
from dataclasses import replace

import a_run
import pandas as pd
import pytest
import torch

from laplace_debias import Laplace, Mixture
from laplace_debias.assessment import assess
from laplace_debias.assessment.methods import ENSEMBLE, MIXTURE, NETWORK
from laplace_debias.runs.folder import read_json

METHODS = (NETWORK, ENSEMBLE, MIXTURE)


def data_of(task):
    options = {"num_test": 30, "num_ood": 10}
    if task == "classification":
        return a_run.loaded_images(**options, severities=())
    if task == "regression":
        return a_run.loaded_rows(**options)
    return a_run.loaded_yes_no(task, 30)


def with_further_models(loaded, number):
    """Add a number of copies of the network, with their weights moved a little."""
    models = [copy.deepcopy(loaded.model) for _ in range(number)]
    generator = torch.Generator().manual_seed(0)
    for model in models:
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return replace(loaded, further_models=tuple(models))


def column(folder, method, name):
    """A column of the predictions of a method for the test set."""
    values = pd.read_parquet(folder / "predictions" / method / "test.parquet")[name]
    return torch.tensor(values.tolist(), dtype=torch.float64)


def probs_of(predictive):
    """Probabilities of the classes or labels, `[n, C]`; a binary predictive has two classes."""
    probs = getattr(predictive, "base_dist", predictive).probs.double()
    if probs.ndim == 1:
        return torch.stack([1 - probs, probs], -1)
    return probs


def entropies(probs, task):
    """The entropy of each example; for labels that may apply at once, the sum over labels."""
    terms = torch.special.entr(probs)
    if task == "multilabel":
        terms = terms + torch.special.entr(1 - probs)
    return terms.sum(-1)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("task", ["classification", "binary", "multilabel", "regression"])
def test_the_rows_are_the_means_of_their_members(task, tmp_path):
    loaded = with_further_models(data_of(task), 2)
    folder = assess(loaded, tmp_path / "run", METHODS)
    x = torch.cat([x for x, _ in loaded.test])
    models = [loaded.model, *loaded.further_models]
    paths = [folder / f"posteriors/mixture-{number}.safetensors" for number in (1, 2, 3)]
    mixture = Mixture(
        [Laplace.load(path, model) for path, model in zip(paths, models, strict=True)]
    )
    predicted = mixture.predict(x)
    outputs = [model(x).detach().double() for model in models]
    if task == "regression":
        mean = torch.stack(outputs).mean(0)[:, 0]
        torch.testing.assert_close(column(folder, "ensemble", "mean"), mean)
        sigma = read_json(folder / "run.json")["sigma"]
        second_moment = sum(output[:, 0].square() + sigma**2 for output in outputs) / 3
        spread = column(folder, "ensemble", "standard_deviation")
        torch.testing.assert_close(spread, (second_moment - mean.square()).sqrt())
        spread = column(folder, "mixture", "standard_deviation")
        expected = predicted.variance[:, 0].double().sqrt()
        torch.testing.assert_close(spread, expected, rtol=1e-4, atol=0)
        expected = mixture.uncertainty(x).epistemic[:, 0].double().sqrt()
        torch.testing.assert_close(
            column(folder, "mixture", "epistemic"), expected, rtol=1e-4, atol=0
        )
        return
    probs = {
        "classification": [z.softmax(1) for z in outputs],
        "binary": [torch.cat([1 - z.sigmoid(), z.sigmoid()], 1) for z in outputs],
        "multilabel": [z.sigmoid() for z in outputs],
    }[task]
    mean = sum(probs) / 3
    tolerances = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(column(folder, "ensemble", "probs"), mean, **tolerances)
    torch.testing.assert_close(
        column(folder, "mixture", "probs"), probs_of(predicted), **tolerances
    )
    disagreement = entropies(mean, task) - sum(entropies(p, task) for p in probs) / 3
    ensemble_information = column(folder, "ensemble", "mutual_information")
    torch.testing.assert_close(ensemble_information, disagreement, rtol=1e-4, atol=1e-6)
    mixture_information = column(folder, "mixture", "mutual_information")
    probs = [probs_of(la.predict(x)) for la in mixture.members]
    expected = entropies(sum(probs) / 3, task) - sum(entropies(p, task) for p in probs) / 3
    for seed, la in enumerate(mixture.members):
        generator = torch.Generator().manual_seed(seed)
        drawn = la.uncertainty(x, samples=5000, generator=generator).epistemic
        expected += drawn.double() / 3
    torch.testing.assert_close(mixture_information, expected, rtol=0.1, atol=0.01)
    rows = read_json(folder / "metrics.json")["rows"]
    assert {row["method"] for row in rows} == {"network", "ensemble", "mixture"}


@pytest.mark.usefixtures("unchecked")
def test_one_checkpoint_is_itself(tmp_path):
    loaded = data_of("classification")
    folder = assess(loaded, tmp_path / "run", (*a_run.methods_for(loaded)[:3], ENSEMBLE, MIXTURE))
    for method, member in (("ensemble", "network"), ("mixture", "last-layer")):
        for name in ("probs", "entropy"):
            torch.testing.assert_close(column(folder, method, name), column(folder, member, name))
    assert column(folder, "ensemble", "mutual_information").abs().max() < 1e-9
    names = ("posteriors/mixture-1.safetensors", "posteriors/last-layer.safetensors")
    assert len({(folder / name).read_bytes() for name in names}) == 1


@pytest.mark.usefixtures("unchecked")
def test_a_run_of_other_checkpoints_is_another_run_and_one_goes_on_with_its_own(tmp_path):
    loaded = with_further_models(data_of("classification"), 1)
    folder = assess(loaded, tmp_path / "run", METHODS)
    metrics = (folder / "metrics.json").read_bytes()
    (folder / "predictions/mixture/test.parquet").unlink()
    fitted = (folder / "posteriors/mixture-2.safetensors").stat().st_mtime_ns
    assess(loaded, folder, METHODS)
    assert (folder / "metrics.json").read_bytes() == metrics
    assert (folder / "posteriors/mixture-2.safetensors").stat().st_mtime_ns == fitted
    with pytest.raises(FileExistsError, match="others"):
        assess(with_further_models(loaded, 2), folder, METHODS)
