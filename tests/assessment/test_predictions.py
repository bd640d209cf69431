"""Predictions of methods for a set, compared with the Laplace object and with plain loops."""

import copy
from dataclasses import replace

import a_run
import pytest
import torch
from torch import nn
from user_files import every

from laplace_debias import Laplace, Link
from laplace_debias.assessment.predicting import (
    posterior_classes,
    predict_set,
    selected_batches,
)
from laplace_debias.assessment.prediction_table import prediction_columns
from laplace_debias.assessment.predictions import probabilities


@pytest.fixture(scope="module")
def fitted():
    loaded = a_run.loaded_images(num_test=40, num_ood=0, severities=())
    la = Laplace(loaded.model, params="last_layer", prior_precision=2.0)
    return loaded, la.fit(loaded.train, num_data=loaded.num_train)


def test_probabilities_are_those_of_predict(fitted):
    loaded, la = fitted
    x, _ = loaded.test[0]
    predictions = posterior_classes(la, x)
    torch.testing.assert_close(
        probabilities(predictions.log_probs, la.likelihood).float(), la.predict(x).probs
    )
    scores = la.uncertainty(x).scores
    for name in ("variance", "instability"):
        torch.testing.assert_close(
            predictions.scores[name].float(), scores[name], rtol=1e-3, atol=1e-6
        )
    assert "energy" not in predictions.scores


def test_the_temperature_divides_the_logits_of_every_column(fitted):
    loaded, la = fitted
    x, _ = loaded.test[0]
    mean, covariance = (moment.double() for moment in la.functional(x))
    la.link = Link("pairwise", 4.0, draw_temperature=3.0)
    predictions = posterior_classes(la, x)
    predicted = la.predict(x).probs
    scores = la.uncertainty(x).scores
    la.link = None
    torch.testing.assert_close(
        probabilities(predictions.log_probs, la.likelihood).float(), predicted
    )
    for name in ("variance", "instability"):
        torch.testing.assert_close(
            predictions.scores[name].float(), scores[name], rtol=1e-3, atol=1e-6
        )
    generator = torch.Generator().manual_seed(7)
    aleatoric = []
    for row in range(len(x)):
        root = torch.linalg.cholesky(covariance[row] + 1e-9 * torch.eye(5))
        noise = torch.randn(40_000, 5, generator=generator, dtype=torch.float64)
        p = ((mean[row] + noise @ root.T) / 3).softmax(1)
        aleatoric.append(-(p * p.log()).sum(1).mean())
    torch.testing.assert_close(
        predictions.scores["aleatoric"], torch.stack(aleatoric), rtol=0.02, atol=0
    )


def test_the_mutual_information_is_that_of_many_independent_draws(fitted):
    loaded, la = fitted
    x = loaded.test[0][0][:4]
    predictions = posterior_classes(la, x)
    mean, covariance = la.functional(x)
    generator = torch.Generator().manual_seed(7)
    for row in range(len(x)):
        root = torch.linalg.cholesky(covariance[row].double() + 1e-9 * torch.eye(5))
        noise = torch.randn(40_000, 5, generator=generator, dtype=torch.float64)
        p = (mean[row].double() + noise @ root.T).softmax(1)
        aleatoric = -(p * p.log()).sum(1).mean()
        total = -(p.mean(0) * p.mean(0).log()).sum()
        # 128 points of a Sobol sequence.
        assert predictions.scores["aleatoric"][row] == pytest.approx(
            float(aleatoric), rel=0.1, abs=0.01
        )
        expected = pytest.approx(float(total - aleatoric), rel=0.3, abs=0.01)
        assert predictions.scores["mutual_information"][row] == expected


def test_predictions_do_not_depend_on_the_batches(fitted):
    loaded, la = fitted
    x, labels = every(loaded.test)

    def columns_in_batches_of(size):
        predicted = predict_set(loaded, a_run.batches_of(x, labels, size), la)
        return predicted.predictions.columns(la.likelihood, predicted.targets)

    small_batches = columns_in_batches_of(7)
    one_batch = columns_in_batches_of(40)
    for name in ("probs", "aleatoric", "mutual_information", "variance"):
        torch.testing.assert_close(small_batches[name], one_batch[name], rtol=1e-4, atol=1e-6)


def test_many_outputs_have_variances_alone():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(3, 101).eval()
        x = torch.randn(20, 3)
        y = torch.randint(101, (20,))
    la = Laplace(model).fit([(x, y)], num_data=20)
    predictions = posterior_classes(la, x)
    assert set(predictions.scores) == {"variance"}
    torch.testing.assert_close(
        probabilities(predictions.log_probs, la.likelihood).float(), la.predict(x).probs
    )


@pytest.mark.parametrize("task", ["binary", "multilabel"])
def test_labels_that_apply_or_not(task):
    loaded = a_run.loaded_yes_no(task)
    la = Laplace(loaded.model, task).fit(loaded.train, num_data=loaded.num_train)
    x, _ = loaded.test[0]
    predictions = posterior_classes(la, x)
    predicted = la.predict(x)
    if task == "binary":
        expected = torch.stack([1 - predicted.probs, predicted.probs], 1)
    else:
        expected = predicted.mean
    torch.testing.assert_close(
        probabilities(predictions.log_probs, la.likelihood).float(), expected
    )
    assert (predictions.scores["mutual_information"] >= 0).all()
    assert predictions.scores["mutual_information"].max() > 0.01
    mean, variances = la.functional(x, diagonal=True)
    torch.testing.assert_close(predictions.scores["variance"].float(), variances.mean(1))
    least = torch.special.ndtr(-mean.abs() / variances.sqrt()).amax(1)
    torch.testing.assert_close(predictions.scores["instability"].exp().float(), least)


def test_some_examples_are_chosen_across_batches(fitted):
    loaded, _ = fitted
    positions = torch.tensor([0, 3, 12, 13, 39])
    batches = a_run.batches_of(*every(loaded.test), 10)
    selected = list(selected_batches(loaded.model, batches, positions))
    x, y = loaded.test[0]
    torch.testing.assert_close(torch.cat([batch.inputs for batch in selected]), x[positions])
    assert torch.equal(torch.cat([batch.targets for batch in selected]), y[positions])
    assert [batch.num_examples for batch in selected] == [2, 2, 1]
    assert [batch.first_index for batch in selected] == [0, 2, 4]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_network_on_a_gpu_has_the_table_of_one_on_the_cpu(fitted):
    loaded, la = fitted
    on_cpu = prediction_columns(la, loaded, loaded.test)
    model = copy.deepcopy(loaded.model).cuda()
    la = Laplace(model, params="last_layer", prior_precision=2.0)
    la.fit(loaded.train, num_data=loaded.num_train)
    on_gpu = prediction_columns(la, replace(loaded, model=model), loaded.test)
    assert on_gpu.keys() == on_cpu.keys()
    for name in on_cpu.keys() - {"label", "prediction"}:
        torch.testing.assert_close(on_gpu[name], on_cpu[name], rtol=1e-3, atol=1e-5)


def test_outputs_for_positions_are_refused():
    loaded = a_run.loaded_rows(num_test=10, num_ood=0)
    model = nn.Sequential(loaded.model, nn.Unflatten(1, (1, 1))).eval()
    with pytest.raises(
        ValueError, match=r"outputs of the network have the shape .*one row of outputs"
    ):
        predict_set(replace(loaded, model=model), loaded.test)
