"""Runs of regressions, of labels that apply or not, and of data without some of the sets."""

import json
import math
from dataclasses import replace

import a_run
import pandas as pd
import pytest
import torch
from user_files import every as joined

from laplace_debias import Laplace
from laplace_debias.assessment import Method, PosteriorChoice, assess
from laplace_debias.assessment.methods import LAST_LAYER, NETWORK, TEMPERATURE
from laplace_debias.curvature.losses.likelihoods import HeteroscedasticGaussian
from laplace_debias.report.page import write_page


def read(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_a_regression(num_outputs, tmp_path):
    loaded = a_run.loaded_rows(num_test=50, num_ood=20, num_outputs=num_outputs)
    folder = assess(loaded, tmp_path / "run", (NETWORK, LAST_LAYER))
    run = read(folder, "run.json")
    x, y = joined(loaded.validation)
    residuals = (y - loaded.model(x).detach()).double()
    # The maximum-likelihood noise of the validation residuals.
    sigmas = residuals.square().mean(0).sqrt()
    assert isinstance(run["sigma"], float if num_outputs == 1 else list)
    assert torch.tensor(run["sigma"]).tolist() == pytest.approx(sigmas.squeeze().tolist(), rel=1e-6)
    noise = torch.tensor(run["sigma"], dtype=torch.float64)
    x, y = joined(loaded.test)
    network, last = (
        pd.read_parquet(folder / f"predictions/{k}/test.parquet") for k in ("network", "last-layer")
    )

    def column(table, name):
        return torch.tensor(table[name].tolist(), dtype=torch.float64).reshape(len(y), -1)

    torch.testing.assert_close(column(network, "target"), y.double())
    outputs = loaded.model(x).detach().double()
    torch.testing.assert_close(column(network, "mean"), outputs, rtol=1e-5, atol=1e-6)
    assert (column(network, "standard_deviation") == noise).all()
    la = Laplace.load(folder / "posteriors/last-layer.safetensors", loaded.model)
    variance = la.predict(x).variance.double()
    torch.testing.assert_close(
        column(last, "standard_deviation").square(), variance, rtol=1e-4, atol=1e-6
    )
    sigma = la.likelihood.sigma.double()
    torch.testing.assert_close(
        column(last, "epistemic").square() + sigma.square(), variance, rtol=1e-4, atol=1e-6
    )
    rows = {
        (r["method"], r["metric"]): r["value"]
        for r in read(folder, "metrics.json")["rows"]
        if r["set"] == "test"
    }
    error = y.double() - loaded.model(x).detach().double()
    z = error / noise
    nll = (0.5 * z.square() + noise.log() + 0.5 * math.log(2 * math.pi)).sum(1).mean()
    assert rows["network", "nll"] == pytest.approx(float(nll), rel=1e-5)
    assert rows["network", "rmse"] == pytest.approx(float(error.square().mean().sqrt()), rel=1e-5)
    examples = read(folder, "examples.json")["most_confidently_wrong"]
    largest = z.abs().amax(1).argsort(descending=True)[:12]
    assert [e["index"] for e in examples] == largest.tolist()
    first = examples[0]
    assert len(first["inputs"]) == 4
    assert set(first["predictions"]) == {"network", "last-layer"}
    ood = {(r["method"], r["score"]) for r in read(folder, "metrics.json")["rows"] if "score" in r}
    assert ood == {("last-layer", "variance")}  # The network's is constant.


def test_outputs_of_several_scales_have_a_noise_each(tmp_path):
    """The same noise for both would be wrong by a factor of a hundred for the first output."""
    rows = a_run.loaded_rows(num_test=50, num_ood=0, num_outputs=2)
    scales = torch.tensor([0.01, 10.0])
    noise = torch.Generator().manual_seed(0)

    def rescaled(batches):
        return [
            (x, rows.model(x).detach() + scales * torch.randn(len(x), 2, generator=noise))
            for x, _ in batches
        ]

    loaded = replace(
        rows,
        train=rescaled(rows.train),
        validation=rescaled(rows.validation),
        test=rescaled(rows.test),
    )
    folder = assess(loaded, tmp_path / "run", (NETWORK, LAST_LAYER))
    assert read(folder, "run.json")["sigma"] == pytest.approx(scales.tolist(), rel=0.25)
    tuned = read(folder, "sweeps/last-layer.json")["sigma"]
    assert tuned == pytest.approx(scales.tolist(), rel=0.25)
    for key in ("network", "last-layer"):
        table = pd.read_parquet(folder / f"predictions/{key}/test.parquet")
        target, mean, deviation = (
            torch.tensor(table[name].tolist(), dtype=torch.float64)
            for name in ("target", "mean", "standard_deviation")
        )
        standardised = ((target - mean) / deviation).square().mean(0).sqrt()
        assert standardised.tolist() == pytest.approx([1, 1], rel=0.25)
    page = write_page(folder).read_text()
    assert "noise of the outputs from" in page


def test_an_output_that_is_predicted_exactly_is_named(tmp_path):
    rows = a_run.loaded_rows(num_test=20, num_ood=0, num_outputs=2)

    def exact_second(batches):
        outputs = [(x, y, rows.model(x).detach()) for x, y in batches]
        return [(x, torch.stack([y[:, 0], z[:, 1]], 1)) for x, y, z in outputs]

    loaded = replace(rows, validation=exact_second(rows.validation))
    with pytest.raises(ValueError, match="every target of output 2 of 2 exactly"):
        assess(loaded, tmp_path / "run", (NETWORK,))


def test_a_regression_whose_network_predicts_the_noise(tmp_path):
    """The network predicts the noise of each input, so none is fitted to the residuals."""
    rows = a_run.loaded_rows(num_test=50, num_ood=20)
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 2)
    model = torch.nn.Sequential(head).eval()
    loaded = replace(rows, model=model, likelihood=HeteroscedasticGaussian())
    folder = assess(loaded, tmp_path / "run", (NETWORK, LAST_LAYER))
    assert read(folder, "run.json")["sigma"] is None
    x, y = joined(loaded.test)
    outputs = model(x).detach().double()
    mean = outputs[:, 0]
    deviation = (outputs[:, 1] / 2).exp()
    table = pd.read_parquet(folder / "predictions/network/test.parquet")
    torch.testing.assert_close(torch.tensor(table["mean"].to_numpy()), mean)
    torch.testing.assert_close(torch.tensor(table["standard_deviation"].to_numpy()), deviation)
    z = (y[:, 0].double() - mean) / deviation
    nll = (0.5 * z.square() + deviation.log() + 0.5 * math.log(2 * math.pi)).mean()
    (value,) = (
        row["value"]
        for row in read(folder, "metrics.json")["rows"]
        if (row["method"], row["set"], row["metric"]) == ("network", "test", "nll")
    )
    assert value == pytest.approx(float(nll), rel=1e-5)
    page = write_page(folder).read_text()
    assert "Do the intervals contain as many targets" in page


@pytest.mark.parametrize("task", ["binary", "multilabel"])
def test_labels_that_apply_or_not(task, tmp_path):
    loaded = a_run.loaded_yes_no(task, num_test=50)
    methods = (NETWORK, TEMPERATURE, LAST_LAYER)
    folder = assess(loaded, tmp_path / "run", methods)
    run = {method["key"]: method for method in read(folder, "run.json")["methods"]}
    assert not read(folder, "run.json")["conclusion"][0].startswith("First check")
    x, y = joined(loaded.test)
    z = loaded.model(x).detach().double() / run["temperature"]["temperature"]
    p = z.sigmoid()
    expected = torch.cat([1 - p, p], 1) if task == "binary" else p
    table = pd.read_parquet(folder / "predictions/temperature/test.parquet")
    probs = torch.tensor(table["probs"].tolist(), dtype=torch.float64)
    torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-7)
    assert torch.tensor(table["label"].tolist()).equal(y.long())
    rows = read(folder, "metrics.json")["rows"]
    (value,) = (
        r["value"]
        for r in rows
        if (r["method"], r["set"], r["metric"]) == ("temperature", "test", "nll")
    )
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        z, y.double().reshape(z.shape), reduction="none"
    )
    per_example = loss.sum(1).mean()
    assert value == pytest.approx(float(per_example), rel=1e-4) or value == pytest.approx(
        float(loss.mean()), rel=1e-4
    )


def test_without_validation_the_prior_is_tuned_by_the_evidence(tmp_path):
    loaded = a_run.loaded_images(num_test=30, num_ood=0, has_validation=False, severities=())
    folder = assess(loaded, tmp_path / "run", (NETWORK, LAST_LAYER))
    sweep = read(folder, "sweeps/last-layer.json")
    assert sweep["metric"] == "log_marginal_likelihood"
    values = [row["value"] for row in sweep["rows"]]
    value_by_precision = {row["prior_precision"]: row["value"] for row in sweep["rows"]}
    assert value_by_precision[sweep["chosen"]] == pytest.approx(max(values), abs=1e-3)
    with pytest.raises(
        ValueError, match="There are no validation examples for fitting the temperature of"
    ):
        assess(loaded, tmp_path / "other", (NETWORK, TEMPERATURE))
    assert not (tmp_path / "other").exists()


def test_a_regression_without_validation_takes_its_noise_from_the_evidence(tmp_path):
    loaded = a_run.loaded_rows(num_test=30, num_ood=0, has_validation=False)
    folder = assess(loaded, tmp_path / "run", (NETWORK, LAST_LAYER))
    x, y = joined(loaded.train)
    residuals = (y - loaded.model(x).detach()).double()
    sigma = read(folder, "run.json")["sigma"]
    assert sigma == pytest.approx(float(residuals.square().mean().sqrt()), rel=1e-6)
    assert read(folder, "sweeps/last-layer.json")["sigma"] == pytest.approx(sigma, rel=0.2)


def test_a_posterior_from_a_file_is_used_as_it_is(tmp_path):
    loaded = a_run.loaded_images(num_test=30, num_ood=0, severities=())
    la = Laplace(loaded.model, params="last_layer", prior_precision=3.5)
    la.fit(loaded.train, num_data=loaded.num_train).save(tmp_path / "mine.safetensors")
    path = tmp_path / "mine.safetensors"
    method = Method(key="mine", label="Mine", describes="", posterior=path)
    folder = assess(loaded, tmp_path / "run", (NETWORK, method))
    entry = read(folder, "run.json")["methods"][1]
    assert entry["prior_precision"] == 3.5
    x, _ = joined(loaded.test)
    table = pd.read_parquet(folder / "predictions/mine/test.parquet")
    probs = torch.tensor(table["probs"].tolist(), dtype=torch.float64)
    torch.testing.assert_close(probs, la.predict(x).probs.double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "fit_examples", "num_read"),
    [("full", 70, 70), ("mini", 70, 70), ("crossfit", 70, 70), ("crossfit", 512, 200)],
)
def test_fits_see_the_first_examples(mode, fit_examples, num_read, tmp_path):
    loaded = a_run.loaded_images(num_test=30, num_ood=0, severities=())
    choice = PosteriorChoice(mode=mode, fit_examples=fit_examples)
    method = Method(key="mine", label="Mine", describes="", posterior=choice)
    folder = assess(loaded, tmp_path / "run", (NETWORK, method))
    x, y = joined(loaded.train)
    expected = Laplace(loaded.model, params="last_layer")
    expected.fit([(x[:num_read], y[:num_read])], mode=mode, num_data=200)
    la = Laplace.load(folder / "posteriors/mine.safetensors", loaded.model)
    for block, expected_block in zip(
        la.posterior.curvature.blocks.values(),
        expected.posterior.curvature.blocks.values(),
        strict=True,
    ):
        torch.testing.assert_close(
            block.to_dense(), expected_block.to_dense(), rtol=1e-3, atol=1e-6
        )


def test_names_of_ood_sets_must_name_files(tmp_path):
    loaded = a_run.loaded_images(num_test=30, num_ood=0, severities=())
    data = loaded.test
    for name in ("test", "../x", ""):
        with pytest.raises(ValueError, match="cannot be used for a file"):
            assess(replace(loaded, ood={name: data}), tmp_path / "run", (NETWORK,))
    assert not (tmp_path / "run").exists()


def test_an_empty_set_is_refused(tmp_path):
    loaded = a_run.loaded_images(num_test=30, num_ood=0, severities=())
    with pytest.raises(ValueError, match="has no example"):
        assess(replace(loaded, ood={"none": []}), tmp_path / "run", (NETWORK,))


@pytest.mark.parametrize(
    ("task", "change"),
    [
        ("binary", lambda y: y.unsqueeze(1)),
        ("multilabel", lambda y: y[:, :1]),
        ("multilabel", lambda y: y[:, 0]),
    ],
    ids=["binary [n, 1]", "one label [n, 1]", "one label [n]"],
)
def test_targets_have_the_shapes_that_the_likelihood_takes(task, change, tmp_path):
    loaded = with_targets(a_run.loaded_yes_no(task), change)
    if task == "multilabel":
        network = loaded.model[:-1]
        head = loaded.model[-1]
        one_label = torch.nn.Linear(head.in_features, 1)
        one_label.weight.data = head.weight.data[:1].clone()
        one_label.bias.data = head.bias.data[:1].clone()
        loaded = replace(loaded, model=torch.nn.Sequential(*network, one_label).eval())
    folder = assess(loaded, tmp_path / "run", (NETWORK, LAST_LAYER))
    la = Laplace.load(folder / "posteriors/last-layer.safetensors", loaded.model)
    report = la.evaluate(loaded.test)
    rows = {
        row["metric"]: row["value"]
        for row in read(folder, "metrics.json")["rows"]
        if row["method"] == "last-layer" and row["set"] == "test"
    }
    for name in ("accuracy", "nll", "brier"):
        assert rows[name] == pytest.approx(report[name], rel=1e-5), name


def with_targets(loaded, change):
    """Copy the data, with a function of its targets as targets."""

    def changed(batches):
        return None if batches is None else [(x, change(y)) for x, y in batches]

    return replace(
        loaded,
        train=changed(loaded.train),
        validation=changed(loaded.validation),
        test=changed(loaded.test),
    )


def test_a_target_may_be_constant(tmp_path):
    """The first training examples may all be zero in one of the targets."""
    loaded = a_run.loaded_rows(num_test=50, num_ood=0, num_outputs=2)
    loaded = with_targets(loaded, lambda y: y * torch.tensor([1.0, 0.0]))
    folder = assess(loaded, tmp_path / "run", (NETWORK, LAST_LAYER))
    (explained,) = read(folder, "run.json")["training"]["rows"]
    x, y = joined(loaded.train)
    residuals = (y - loaded.model(x).detach())[:1000, 0].double()
    expected = 1 - residuals.square().mean() / y[:1000, 0].double().var(unbiased=False)
    assert explained["value"] == pytest.approx(float(expected), rel=1e-5)
    repeated = assess(loaded, folder, (NETWORK, LAST_LAYER))
    assert read(repeated, "run.json")["status"] == "complete"
