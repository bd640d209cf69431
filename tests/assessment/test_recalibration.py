"""Vector scaling, Platt's scaling and isotonic regression recover known distortions."""

import json
from dataclasses import replace

import a_run
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from user_files import every as joined

from laplace_debias.assessment import assess
from laplace_debias.assessment.methods import ISOTONIC, NETWORK, PLATT, VECTOR, check_methods
from laplace_debias.assessment.recalibration import fit_recalibration
from laplace_debias.assessment.temperature import fit_temperature


def classes(n=40_000):
    """True logits, and labels that are drawn from them."""
    g = torch.Generator().manual_seed(0)
    z = 1.5 * torch.randn(n, 3, generator=g, dtype=torch.float64)
    return z, torch.multinomial(z.softmax(1), 1, generator=g)[:, 0]


def yes_no(n=40_000):
    g = torch.Generator().manual_seed(1)
    z = 2 * torch.randn(n, 1, generator=g, dtype=torch.float64)
    return z, (torch.rand(n, 1, generator=g, dtype=torch.float64) < z.sigmoid()).long()


def test_vector_scaling_undoes_factors_and_offsets_of_classes():
    z, y = classes()
    factors = torch.tensor([2.0, 0.5, 1.5])
    offsets = torch.tensor([1.0, -1.0, 0.0])
    distorted = factors * z + offsets
    recalibrated = fit_recalibration("vector", distorted, y)(distorted)
    error = recalibrated.softmax(1) - z.softmax(1)
    assert error.abs().mean() < 0.01
    # At the minimum of NLL plus penalty, the derivatives in factors and offsets are zero.
    errors = recalibrated.softmax(1) - F.one_hot(y, 3)
    recalibration = fit_recalibration("vector", distorted, y)
    offset = recalibration(torch.zeros(1, 3))[0]
    factor = recalibration(torch.ones(1, 3))[0] - offset
    temperature = fit_temperature(distorted, y, "classification")
    assert (errors.sum(0) + offset).abs().max() < 1e-2
    slope = (errors * distorted).sum(0) + factor - 1 / temperature
    assert slope.abs().max() < 1e-2


def platt_targets(y):
    """Targets by Platt (1999): each class has one more example that is right, and one wrong."""
    num_ones = float(y.sum())
    num_zeros = len(y) - num_ones
    return torch.where(y == 1, (num_ones + 1) / (num_ones + 2), 1 / (num_zeros + 2)).double()


def test_platt_scaling_undoes_a_factor_and_an_offset():
    z, y = yes_no()
    distorted = 3 * z - 1
    recalibrate = fit_recalibration("platt", distorted, y)
    errors = recalibrate(distorted).sigmoid() - platt_targets(y)
    assert errors.mean().abs() < 1e-6
    assert (errors * distorted).mean().abs() < 1e-6
    actual = recalibrate(torch.tensor([[-1.0], [2.0]]))
    torch.testing.assert_close(actual, torch.tensor([[0.0], [1.0]]).double(), atol=0.06, rtol=0)


def test_examples_that_are_all_right_have_finite_recalibrations():
    """Without the penalty, factors would be infinite, and so would be the loss of a new mistake."""
    z = torch.linspace(-2, 2, 40, dtype=torch.float64).unsqueeze(1)
    y = (z > 0).long()
    recalibrate = fit_recalibration("platt", z, y)
    errors = recalibrate(z).sigmoid() - platt_targets(y)
    assert errors.mean().abs() < 1e-6
    assert (errors * z).mean().abs() < 1e-6
    assert recalibrate(z).sigmoid().max() < 1 - 1e-4
    logits = torch.cat([-z, z, -5 + 0 * z], 1)
    scaled = fit_recalibration("vector", logits, y)(logits)
    errors = scaled.softmax(1) - F.one_hot(y[:, 0], 3)
    assert scaled.abs().max() < 20
    assert errors[z[:, 0].abs() < 0.1].abs().max() > 0.1


def pooled(values):
    """Fit ordered values by a monotone sequence, by pooling adjacent violators."""
    blocks = []
    for value in values.tolist():
        blocks.append([value, 1])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            mean, size = blocks.pop()
            mean_before, size_before = blocks.pop()
            total = size + size_before
            blocks.append([(mean * size + mean_before * size_before) / total, total])
    return torch.tensor([mean for mean, size in blocks for _ in range(size)]).double()


def test_isotonic_regression_is_the_pooled_mean_and_undoes_a_monotone_map():
    z, y = yes_no(300)
    recalibrated = fit_recalibration("isotonic", z, y)(z).sigmoid()[:, 0]
    order = z[:, 0].argsort()
    expected = pooled(y[order, 0].double()).clamp(0.5 / 300, 1 - 0.5 / 300)
    torch.testing.assert_close(recalibrated[order], expected)
    z, y = yes_no()
    recalibrated = fit_recalibration("isotonic", z**3 + 1, y)(z**3 + 1).sigmoid()
    assert (recalibrated - z.sigmoid()).abs().mean() < 0.02
    z, y = classes()
    probabilities = fit_recalibration("isotonic", 3 * z, y)(3 * z).softmax(1)
    assert (probabilities - z.softmax(1)).abs().mean() < 0.05
    torch.testing.assert_close(probabilities.sum(1), torch.ones(len(z)).double())


class Logits(ClassifierMixin, BaseEstimator):
    """A fitted classifier with two classes, whose inputs are its logits."""

    def __init__(self):
        self.classes_ = np.arange(2)

    def fit(self, X, y):
        raise AssertionError("The logits are there already.")

    def decision_function(self, X):
        return X[:, 0]

    def predict(self, X):
        return self.decision_function(X) > 0


@pytest.mark.parametrize(("name", "method"), [("platt", "sigmoid"), ("isotonic", "isotonic")])
def test_recalibrations_of_two_classes_are_those_of_scikit_learn(name, method):
    z, y = yes_no(300)
    distorted = 3 * z - 1
    theirs = CalibratedClassifierCV(FrozenEstimator(Logits()), method=method)
    theirs.fit(distorted.numpy(), y[:, 0].numpy())
    new, _ = yes_no(301)
    expected = torch.from_numpy(theirs.predict_proba(new.numpy())[:, 1])
    if name == "isotonic":
        # Probabilities of 0 and 1, which have an infinite NLL, are bounded here.
        expected = expected.clamp(0.5 / 300, 1 - 0.5 / 300)
    recalibrated = fit_recalibration(name, distorted, y)(new).sigmoid()[:, 0]
    torch.testing.assert_close(recalibrated, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "task"), [(VECTOR, "classification"), (ISOTONIC, "binary"), (PLATT, "binary")]
)
def test_a_report_fits_them_on_the_validation_examples_only(method, task, tmp_path):
    if task == "classification":
        loaded = a_run.loaded_images(num_test=60)
    else:
        loaded = a_run.loaded_yes_no(num_test=60)
    folder = assess(loaded, tmp_path / "run", (NETWORK, method))
    x, y = joined(loaded.validation)
    fit = fit_recalibration(method.recalibration, loaded.model(x).detach(), y)
    x, y = joined(loaded.test)
    recalibrated = fit(loaded.model(x).detach())
    expected = recalibrated.softmax(1)
    if task == "binary":
        expected = torch.cat([-recalibrated, recalibrated], 1).sigmoid()
    table = pd.read_parquet(folder / f"predictions/{method.key}/test.parquet")
    actual = torch.tensor([list(row) for row in table["probs"]], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    rows = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["rows"]
    assert {row["method"] for row in rows if row["metric"] == "ece"} == {"network", method.key}
    # Other labels of the test examples change no prediction.
    relabelled = replace(loaded, test=[(inputs, labels.flip(0)) for inputs, labels in loaded.test])
    relabelled_folder = assess(relabelled, tmp_path / "other", (NETWORK, method))
    relabelled_table = pd.read_parquet(relabelled_folder / f"predictions/{method.key}/test.parquet")
    assert [list(row) for row in relabelled_table["probs"]] == [list(row) for row in table["probs"]]


def test_what_cannot_be_recalibrated_is_refused():
    rows = a_run.loaded_rows(num_test=20, num_ood=0)
    yes_no_rows = a_run.loaded_yes_no(num_test=20)
    cases = [
        (rows, VECTOR, "need class logits"),
        (a_run.loaded_yes_no("multilabel", num_test=20), ISOTONIC, "need class logits"),
        (replace(yes_no_rows, validation=None), PLATT, "there are none"),
        (yes_no_rows, VECTOR, "Use platt"),
    ]
    for loaded, method, message in cases:
        with pytest.raises(ValueError, match=message):
            check_methods((NETWORK, method), loaded)
    z, y = yes_no(10)
    with pytest.raises(ValueError, match="no validation examples"):
        fit_recalibration("platt", z[:0], y[:0])
    with pytest.raises(ValueError, match="not finite"):
        fit_recalibration("platt", z / 0, y)
    with pytest.raises(ValueError, match="several classes"):
        fit_recalibration("platt", z, torch.ones_like(y))
