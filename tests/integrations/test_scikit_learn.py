"""`LaplaceClassifier` and `LaplaceRegressor` with scikit-learn's own tools, skorch and MAPIE."""

import math
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pandas
import pytest
import torch
from scipy.stats import betabinom
from sklearn.base import clone
from sklearn.calibration import CalibrationDisplay, calibration_curve
from sklearn.datasets import load_iris, make_classification, make_regression
from sklearn.exceptions import NotFittedError
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

from laplace_debias.integrations.sklearn import LaplaceClassifier, LaplaceRegressor, _targets

ADAM = partial(torch.optim.Adam, lr=2e-2)


def hidden_layer(num_features, num_outputs):
    """A new network in float64, so that results do not depend on the order of rows."""
    layers = nn.Linear(num_features, 10), nn.Tanh(), nn.Linear(10, num_outputs)
    return nn.Sequential(*layers).double()


def trained_here(kind, **options):
    return kind(hidden_layer, optimizer=ADAM, random_state=0, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (LaplaceClassifier, {}),
        (LaplaceRegressor, {}),
        (LaplaceRegressor, {"likelihood": "heteroscedastic"}),
    ],
)
def test_scikit_learns_checks_pass(kind, options, unchecked):
    """One check is skipped by scikit-learn unless its array API is switched on."""
    results = check_estimator(trained_here(kind, **options), on_skip=None)
    without_success = {r["check_name"] for r in results if r["status"] != "passed"}
    assert without_success <= {"check_array_api_input"}
    assert len(results) > 45


def linear_data(num_targets):
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(30, num_targets, generator=generator, dtype=torch.float64)
    return X.numpy(), y.numpy()


def covariance_of_linear_outputs(network, X, X_new, sigma, delta):
    """Covariance of f(x) = Wx + b between all targets of all rows, from the normal equations."""
    columns = np.hstack([X, np.ones((len(X), 1))])
    new_columns = np.hstack([X_new, np.ones((len(X_new), 1))])
    blocks = []
    for target_sigma in sigma:
        precision = columns.T @ columns / target_sigma**2 + delta * np.eye(columns.shape[1])
        blocks.append(new_columns @ np.linalg.inv(precision) @ new_columns.T)
    num_rows = len(X_new)
    num_targets = len(sigma)
    covariance = np.zeros((num_rows, num_targets, num_rows, num_targets))
    for target, block in enumerate(blocks):
        covariance[:, target, :, target] = block
    return covariance.reshape(num_rows * num_targets, -1)


def test_samples_of_many_rows_with_little_noise_have_the_predicted_deviations():
    """In float32, the covariance of 200 rows has no Cholesky decomposition."""
    X = np.linspace(-1, 1, 12)[:, None]
    y = np.sin(3 * X[:, 0])
    X_new = np.linspace(-4, 4, 200)[:, None]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    regressor = LaplaceRegressor(network, curvature="full", prior_precision=0.01, sigma=1e-4)
    mean, deviation = regressor.fit(X, y).predict(X_new, return_std=True)
    samples = regressor.sample_y(X_new, 20_000)
    np.testing.assert_allclose(samples.std(1), deviation, rtol=0.03)
    assert (abs(samples.mean(1) - mean) < 5 * deviation / math.sqrt(20_000)).all()
    # Neighbours are close to each other in the same sample: rows are not drawn independently.
    assert np.corrcoef(samples[-2:])[0, 1] > 0.999


@pytest.mark.parametrize("num_targets", [1, 2])
@pytest.mark.parametrize("sigma", [None, 0.7])
def test_means_and_deviations_are_those_of_the_linear_model(num_targets, sigma):
    X, y = linear_data(num_targets)
    X_new = X[:4] * 2
    network = nn.Linear(3, num_targets).double()
    regressor = LaplaceRegressor(
        network, curvature="full", prior_precision=0.3, sigma=sigma, batch_size=7
    )
    targets = y[:, 0] if num_targets == 1 else y
    mean, deviation = regressor.fit(X, targets).predict(X_new, return_std=True)
    weight, bias = (parameter.detach().numpy() for parameter in network.parameters())
    residuals = X @ weight.T + bias - y
    sigmas = np.full(num_targets, sigma) if sigma else np.sqrt((residuals**2).mean(0))
    covariance = covariance_of_linear_outputs(network, X, X_new, sigmas, 0.3)
    variance = covariance.diagonal().reshape(4, num_targets) + sigmas**2
    expected_mean = X_new @ weight.T + bias
    if num_targets == 1:
        variance = variance[:, 0]
        expected_mean = expected_mean[:, 0]
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-10)
    np.testing.assert_allclose(deviation, np.sqrt(variance), rtol=1e-10)
    np.testing.assert_array_equal(regressor.predict(X_new), mean)


def test_a_weight_multiplies_the_terms_of_an_example_in_the_normal_equations():
    X, y = linear_data(2)
    weights = np.random.default_rng(0).uniform(0, 3, 30)
    weights[4] = 0
    weights *= 40 / weights.sum()
    network = nn.Linear(3, 2).double()
    regressor = LaplaceRegressor(network, curvature="full", prior_precision=0.3, batch_size=7)
    _, deviation = regressor.fit(X, y, sample_weight=weights).predict(X, return_std=True)
    residuals = network(torch.tensor(X)).detach().numpy() - y
    sigmas = np.sqrt((weights[:, None] * residuals**2).sum(0) / 40)
    columns = np.hstack([X, np.ones((30, 1))])
    for target, sigma in enumerate(sigmas):
        precision = (columns.T * weights) @ columns / sigma**2 + 0.3 * np.eye(4)
        variance = np.einsum("ni,ij,nj->n", columns, np.linalg.inv(precision), columns)
        np.testing.assert_allclose(deviation[:, target], np.sqrt(variance + sigma**2), rtol=1e-10)


@pytest.mark.parametrize("kind", [LaplaceClassifier, LaplaceRegressor])
@pytest.mark.parametrize("prior_precision", [1.0, "evidence"])
def test_a_weight_counts_as_that_many_examples(kind, prior_precision):
    X, y = load_iris(return_X_y=True)
    weights = np.random.default_rng(0).integers(0, 4, len(X))
    weights[y == 2] = 1
    probs = []
    for rows, sample_weight in (
        (np.arange(len(X)).repeat(weights), None),
        (np.arange(len(X)), weights),
    ):
        pipeline = make_pipeline(
            trained_here(kind, epochs=20, batch_size=500, prior_precision=prior_precision)
        )
        name = kind.__name__.lower()
        pipeline.fit(X[rows], y[rows], **{f"{name}__sample_weight": sample_weight})
        estimator = pipeline[-1]
        is_classifier = kind is LaplaceClassifier
        outputs = estimator.predict_proba(X) if is_classifier else estimator.predict(X, True)
        probs.append([outputs, estimator.laplace_.log_marginal_likelihood()])
        assert estimator.laplace_.num_data == weights.sum()
    for repeated, weighted in zip(*probs, strict=True):
        np.testing.assert_allclose(weighted, repeated, rtol=1e-6)


def test_a_batch_counts_by_its_weights_in_the_training():
    """A batch whose examples have small weights takes small steps."""
    X, y = linear_data(1)
    weights = np.full(30, 1e-3)
    weights[0] = 1.0
    sgd = partial(torch.optim.SGD, lr=1e-2)
    network = nn.Linear(3, 1).double()
    options = {"optimizer": sgd, "epochs": 1, "batch_size": 1, "random_state": 0}
    regressor = LaplaceRegressor(network, **options).fit(X, y, sample_weight=weights)
    change = regressor.laplace_.model.bias.item() - network.bias.item()
    gradient = 2 * (network(torch.tensor(X[:1])).item() - y[0, 0])
    assert change == pytest.approx(-1e-2 * gradient / weights.mean(), rel=0.2)


def test_an_untrained_skorch_net_takes_no_weights():
    X, y = load_iris(return_X_y=True)
    with pytest.raises(ValueError, match="Train the net before"):
        LaplaceClassifier(skorch_net()).fit(X, y, sample_weight=np.ones(150))
    net = skorch_net().fit(X.astype(np.float32), y)
    plain = LaplaceClassifier(net).fit(X, y)
    weighted = LaplaceClassifier(net).fit(X, y, sample_weight=np.full(150, 2.0))
    assert weighted.laplace_.num_data == 300
    x = torch.tensor(X).float()
    variances = [la.functional(x, diagonal=True)[1] for la in (weighted.laplace_, plain.laplace_)]
    assert (variances[0] < variances[1]).all()


@pytest.mark.parametrize("num_targets", [1, 2])
def test_samples_have_the_joint_moments_of_the_linear_model(num_targets):
    X, y = linear_data(num_targets)
    X_new = X[:3] * 2
    network = nn.Linear(3, num_targets).double()
    regressor = LaplaceRegressor(network, curvature="full", prior_precision=0.3, sigma=0.7)
    regressor.fit(X, y[:, 0] if num_targets == 1 else y)
    samples = regressor.sample_y(X_new, 40_000, random_state=3)
    assert samples.shape == ((3, 40_000) if num_targets == 1 else (3, 2, 40_000))
    rows = samples.reshape(3 * num_targets, -1)
    sigmas = [0.7] * num_targets
    expected = covariance_of_linear_outputs(network, X, X_new, sigmas, 0.3)
    expected = expected + 0.49 * np.eye(len(expected))
    scale = expected.diagonal().max()
    assert abs(np.cov(rows) - expected).max() < 0.03 * scale
    mean = network(torch.tensor(X_new)).detach().numpy().reshape(-1)
    assert abs(rows.mean(1) - mean).max() < 5 * math.sqrt(scale / 40_000)
    np.testing.assert_array_equal(samples, regressor.sample_y(X_new, 40_000, random_state=3))
    assert (samples != regressor.sample_y(X_new, 40_000, random_state=4)).any()


def weighted_least_squares(X, X_new, weights, delta):
    """Covariance of a linear output at new rows, if the rows X have these precisions."""
    columns = np.hstack([X, np.ones((len(X), 1))])
    new_columns = np.hstack([X_new, np.ones((len(X_new), 1))])
    precision = (columns.T * weights) @ columns + delta * np.eye(columns.shape[1])
    return new_columns @ np.linalg.inv(precision) @ new_columns.T


@pytest.mark.parametrize("num_targets", [1, 2])
def test_a_predicted_noise_has_the_moments_of_the_linear_model(num_targets):
    """Each row weighs as its inverse noise variance for a mean, and 1/2 for a log-variance."""
    X, y = linear_data(num_targets)
    X_new = X[:3] * 2
    network = nn.Linear(3, 2 * num_targets).double()
    regressor = LaplaceRegressor(
        network, likelihood="heteroscedastic", curvature="full", prior_precision=0.3, batch_size=7
    )
    regressor.fit(X, y[:, 0] if num_targets == 1 else y)
    outputs = network(torch.tensor(X)).detach().numpy()
    mean, log_variance = np.split(network(torch.tensor(X_new)).detach().numpy(), 2, axis=1)
    covariances = []
    noise = []
    for target in range(num_targets):
        weights = np.exp(-outputs[:, num_targets + target])
        covariances.append(weighted_least_squares(X, X_new, weights, 0.3))
        of_log_variance = weighted_least_squares(X, X_new, 0.5, 0.3).diagonal()
        noise.append(np.exp(log_variance[:, target] + of_log_variance / 2))
    variance = np.stack([c.diagonal() for c in covariances], 1) + np.stack(noise, 1)
    predicted, deviation = regressor.predict(X_new, return_std=True)
    np.testing.assert_allclose(predicted.reshape(mean.shape), mean, rtol=1e-10)
    np.testing.assert_allclose(deviation.reshape(mean.shape), np.sqrt(variance), rtol=1e-10)
    samples = regressor.sample_y(X_new, 80_000)
    assert samples.shape == ((3, 80_000) if num_targets == 1 else (3, 2, 80_000))
    samples = samples.reshape(3, num_targets, -1)
    for target, covariance in enumerate(covariances):
        expected = covariance + np.diag(noise[target])
        scale = expected.diagonal().max()
        assert abs(np.cov(samples[:, target]) - expected).max() < 0.05 * scale
        difference = samples[:, target].mean(1) - mean[:, target]
        assert abs(difference).max() < 5 * math.sqrt(scale / 80_000)


def test_training_with_a_predicted_noise_finds_where_the_noise_is_large():
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (400, 1))
    true_deviation = np.exp(X[:, 0])
    y = 2 * X[:, 0] + true_deviation * rng.normal(size=400)
    regressor = LaplaceRegressor(
        nn.Linear,
        likelihood="heteroscedastic",
        optimizer=partial(torch.optim.Adam, lr=3e-2),
        prior_precision="evidence",
        random_state=0,
    )
    mean, deviation = regressor.fit(X, y).predict(X, return_std=True)
    np.testing.assert_allclose(deviation, true_deviation, rtol=0.15)
    assert np.corrcoef(mean, X[:, 0])[0, 1] > 0.999
    weights = np.where(X[:, 0] < 0, 1.0, 0.0)
    refit = clone(regressor).fit(X, y, sample_weight=weights)
    alone = clone(regressor).fit(X[X[:, 0] < 0], y[X[:, 0] < 0])
    np.testing.assert_allclose(refit.predict(X), alone.predict(X), rtol=1e-6)


def test_probabilities_of_two_labels_are_those_of_the_logistic_model():
    """A single logit: the mean sigmoid by MacKay's formula, from the dense Hessian."""
    X, y = linear_data(1)
    labels = np.where(y[:, 0] > 0, "yes", "no")
    network = nn.Linear(3, 1, bias=False).double()
    classifier = LaplaceClassifier(network, curvature="full", prior_precision=0.3, batch_size=7)
    probs = classifier.fit(X, labels).predict_proba(X)
    logits = X @ network.weight.detach().numpy()[0]
    p = 1 / (1 + np.exp(-logits))
    precision = (X.T * (p * (1 - p))) @ X + 0.3 * np.eye(3)
    variance = np.einsum("ni,ij,nj->n", X, np.linalg.inv(precision), X)
    expected = 1 / (1 + np.exp(-logits / np.sqrt(1 + np.pi * variance / 8)))
    np.testing.assert_allclose(probs, np.stack([1 - expected, expected], 1), rtol=1e-10)
    np.testing.assert_allclose(classifier.predict_log_proba(X), np.log(probs), rtol=1e-10)
    assert classifier.classes_.tolist() == ["no", "yes"]
    np.testing.assert_array_equal(classifier.predict(X) == "yes", expected > 0.5)


def test_a_network_that_is_trained_further_is_not_changed():
    X, y = load_iris(return_X_y=True)
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    pickled = pickle.dumps(network)
    random_state = torch.get_rng_state()
    classifier = LaplaceClassifier(network, optimizer=ADAM, epochs=30, random_state=0).fit(X, y)
    assert pickle.dumps(network) == pickled
    assert network.training
    assert torch.equal(torch.get_rng_state(), random_state)
    assert classifier.score(X, y) > 0.9
    # The same network without training, in training mode: a copy in eval mode is fitted.
    assert LaplaceClassifier(network).fit(X, y).score(X, y) < 0.9
    assert pickle.dumps(network) == pickled


def test_the_random_state_determines_the_network():
    X, y = load_iris(return_X_y=True)

    def probs(seed):
        classifier = LaplaceClassifier(
            hidden_layer, optimizer=ADAM, epochs=2, batch_size=40, random_state=seed
        )
        return classifier.fit(X, y).predict_proba(X)

    np.testing.assert_array_equal(probs(0), probs(0))
    assert abs(probs(0) - probs(1)).max() > 1e-3


def test_the_random_state_determines_networks_that_threads_train():
    """Searches and ensembles of scikit-learn train so with joblib's threads."""
    X, y = make_classification(60, 5, random_state=0)
    estimators = [
        LaplaceClassifier(hidden_layer, optimizer=ADAM, epochs=40, batch_size=10, random_state=seed)
        for seed in range(4)
    ]
    expected = [estimator.fit(X, y).predict_proba(X) for estimator in estimators]
    random_state = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        fitted = list(pool.map(lambda estimator: clone(estimator).fit(X, y), estimators))
    for estimator, probs in zip(fitted, expected, strict=True):
        np.testing.assert_allclose(estimator.predict_proba(X), probs, rtol=1e-12)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_more_epochs_and_larger_batches_have_an_effect():
    X, y = load_iris(return_X_y=True)
    losses = [
        log_loss(y, trained_here(LaplaceClassifier, **options).fit(X, y).predict_proba(X))
        for options in ({"epochs": 1}, {"epochs": 60}, {"epochs": 1, "batch_size": 10})
    ]
    assert losses[0] > losses[2] > losses[1]


def test_images_go_through_a_convolution():
    X = np.random.default_rng(0).normal(size=(20, 1, 6, 6))
    y = (X.mean((1, 2, 3)) > 0).astype(int)
    network = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
    probs = LaplaceClassifier(network, params="last_layer").fit(X, y).predict_proba(X)
    assert probs.shape == (20, 2)
    assert abs(probs.sum(1) - 1).max() < 1e-14


def test_the_evidence_chooses_prior_and_noise():
    X, y = make_regression(60, 4, noise=1.0, random_state=0)
    regressor = trained_here(LaplaceRegressor, prior_precision="evidence").fit(X, y / 50)
    la = regressor.laplace_
    best = la.log_marginal_likelihood()
    for factor in (0.5, 2.0):
        assert la.log_marginal_likelihood(la.prior_precision * factor) < best
    fixed = trained_here(LaplaceRegressor, prior_precision="evidence", sigma=0.5).fit(X, y / 50)
    assert fixed.laplace_.sigma == 0.5
    assert fixed.laplace_.prior_precision != la.prior_precision


def test_a_network_that_predicts_worse_than_the_mean_is_reported():
    """The learning rate does not suit targets far from 0, so the network learned nothing."""
    X, y = make_regression(60, 3, random_state=0)
    y = 500 + y
    with pytest.warns(UserWarning, match=r"worse than their mean does.*Standardise the targets"):
        trained_here(LaplaceRegressor, epochs=2).fit(X, y)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The network predicts")
        trained_here(LaplaceRegressor, epochs=50).fit(X, (y - y.mean()) / y.std())


def test_a_grid_search_over_prior_precision_and_structure_in_a_pipeline():
    X, y = load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), trained_here(LaplaceClassifier, epochs=40))
    folds = StratifiedKFold(3, shuffle=True, random_state=0)
    grid = {
        "laplaceclassifier__prior_precision": [1e-2, 1.0, 100.0],
        "laplaceclassifier__curvature": ["kfac", "diag"],
    }
    search = GridSearchCV(pipeline, grid, scoring="neg_log_loss", cv=folds).fit(X, y)
    scores = search.cv_results_["mean_test_score"]
    assert len(set(scores)) == 6
    assert search.best_score_ == max(scores)
    best = clone(pipeline).set_params(**search.best_params_)
    probs = cross_val_predict(best, X, y, cv=folds, method="predict_proba")
    assert -log_loss(y, probs) == pytest.approx(search.best_score_, abs=1e-9)
    assert search.score(X, y) > -0.5
    np.testing.assert_array_equal(
        best.fit(X, y).predict_proba(X), search.best_estimator_.predict_proba(X)
    )


def test_the_calibration_display_shows_the_probabilities():
    X, y = make_classification(200, 5, random_state=0)
    classifier = trained_here(LaplaceClassifier, epochs=40).fit(X, y)
    display = CalibrationDisplay.from_estimator(classifier, X, y, n_bins=5)
    share, mean = calibration_curve(y, classifier.predict_proba(X)[:, 1], n_bins=5)
    np.testing.assert_array_equal(display.prob_true, share)
    np.testing.assert_array_equal(display.prob_pred, mean)


def test_a_pickled_estimator_predicts_the_same():
    X, y = load_iris(return_X_y=True)
    classifier = trained_here(LaplaceClassifier, epochs=2).fit(X, y)
    unpickled = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(unpickled.predict_proba(X), classifier.predict_proba(X))


def coverage_interval(num_calibration, num_test, num_seeds, level=0.9):
    """The interval that has the mean coverage over seeds with probability 99.9 %.

    If the conformal method is right, the number of covered examples of a seed is beta-binomial
    (Vovk, 2012).
    """
    rank = math.ceil((num_calibration + 1) * level)
    covered = betabinom(num_test, rank, num_calibration + 1 - rank)
    half_width = 3.29 * covered.std() / num_test / math.sqrt(num_seeds)
    return covered.mean() / num_test - half_width, covered.mean() / num_test + half_width


NUM_TRAIN = 60
NUM_CALIBRATION = 99
NUM_TEST = 300
TRAIN = slice(0, NUM_TRAIN)
CALIBRATION = slice(NUM_TRAIN, NUM_TRAIN + NUM_CALIBRATION)
TEST = slice(NUM_TRAIN + NUM_CALIBRATION, None)
NUM_EXAMPLES = NUM_TRAIN + NUM_CALIBRATION + NUM_TEST


@pytest.mark.slow
def test_mapies_conformal_sets_have_their_coverage(unchecked):
    mapie = pytest.importorskip("mapie.classification")
    shares = []
    for seed in range(10):
        X, y = make_classification(
            NUM_EXAMPLES, 5, n_informative=4, n_redundant=0, n_classes=3, random_state=seed
        )
        classifier = LaplaceClassifier(hidden_layer, optimizer=ADAM, random_state=seed)
        classifier.fit(X[TRAIN], y[TRAIN])
        conformal = mapie.SplitConformalClassifier(classifier, confidence_level=0.9)
        conformal.conformalize(X[CALIBRATION], y[CALIBRATION])
        _, sets = conformal.predict_set(X[TEST])
        is_covered = sets[np.arange(NUM_TEST), y[TEST], 0]
        shares.append(is_covered.mean())
    low, high = coverage_interval(NUM_CALIBRATION, NUM_TEST, 10)
    assert low < np.mean(shares) < high


@pytest.mark.slow
def test_mapies_conformal_intervals_have_their_coverage(unchecked):
    mapie = pytest.importorskip("mapie.regression")
    shares = []
    for seed in range(10):
        X, y = make_regression(NUM_EXAMPLES, 5, noise=20.0, random_state=seed)
        regressor = LaplaceRegressor(hidden_layer, optimizer=ADAM, random_state=seed)
        regressor.fit(X[TRAIN], y[TRAIN] / 100)
        conformal = mapie.SplitConformalRegressor(regressor, confidence_level=0.9)
        conformal.conformalize(X[CALIBRATION], y[CALIBRATION] / 100)
        _, intervals = conformal.predict_interval(X[TEST])
        targets = y[TEST] / 100
        is_covered = (intervals[:, 0, 0] <= targets) & (targets <= intervals[:, 1, 0])
        shares.append(is_covered.mean())
    low, high = coverage_interval(NUM_CALIBRATION, NUM_TEST, 10)
    assert low < np.mean(shares) < high


def skorch_net(**options):
    skorch = pytest.importorskip("skorch")
    torch.manual_seed(0)
    return skorch.NeuralNetClassifier(
        nn.Linear,
        module__in_features=4,
        module__out_features=3,
        optimizer=torch.optim.Adam,
        lr=0.2,
        train_split=None,
        verbose=0,
        **{"criterion": nn.CrossEntropyLoss, "max_epochs": 100, **options},
    )


def test_a_trained_skorch_net_keeps_its_weights():
    X, y = load_iris(return_X_y=True)
    net = skorch_net().fit(X.astype(np.float32), y)
    weight = net.module_.weight.clone()
    classifier = LaplaceClassifier(net).fit(X, y)
    assert classifier.laplace_.model is not net.module_
    assert torch.equal(classifier.laplace_.model.weight, weight)
    assert torch.equal(net.module_.weight, weight)
    assert len(net.history) == 100
    assert classifier.score(X, y) > 0.9


def test_a_new_skorch_net_is_trained_by_fit():
    X, y = load_iris(return_X_y=True)
    net = skorch_net()
    assert LaplaceClassifier(net, random_state=0).fit(X, y).score(X, y) > 0.9
    assert not net.initialized_
    probs = [
        LaplaceClassifier(skorch_net(max_epochs=2), random_state=seed).fit(X, y).predict_proba(X)
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(probs[0], probs[1])
    assert (probs[0] != probs[2]).any()


def test_skorch_nets_of_a_regression_and_of_one_logit():
    skorch = pytest.importorskip("skorch")
    X, y = make_regression(60, 3, noise=5.0, random_state=0)
    options = {"lr": 0.1, "max_epochs": 30, "train_split": None, "verbose": 0}
    net = skorch.NeuralNetRegressor(
        nn.Linear, module__in_features=3, module__out_features=1, **options
    )
    assert LaplaceRegressor(net, random_state=0).fit(X, y / 100).score(X, y / 100) > 0.9
    net = skorch.NeuralNetBinaryClassifier(
        nn.Linear, module__in_features=3, module__out_features=1, **options
    )
    classifier = LaplaceClassifier(net, random_state=0).fit(X, y > 0)
    assert classifier.laplace_.likelihood.name == "binary"
    assert classifier.score(X, y > 0) > 0.85


class UntrainedLoss(nn.MSELoss):
    """A mean squared error that must not be used."""

    def forward(self, outputs, targets):
        raise AssertionError("The net was trained.")


class WithoutOutputDimension(nn.Linear):
    """A linear network that returns `[n]`."""

    def forward(self, x):
        return super().forward(x).squeeze(-1)


def test_an_untrained_skorch_net_must_return_outputs_in_the_shape_of_the_targets():
    """Otherwise, the mean squared error would compare each output with the targets of all rows."""
    skorch = pytest.importorskip("skorch")
    X, y = make_regression(60, 3, noise=5.0, random_state=0)
    options = {"module__in_features": 3, "module__out_features": 1, "verbose": 0, "lr": 0.1}
    net = skorch.NeuralNetRegressor(
        WithoutOutputDimension, criterion=UntrainedLoss, train_split=None, **options
    )
    with pytest.raises(ValueError, match=r"shape \(\) for a row.*\(1,\)\. Return outputs \[n, 1\]"):
        LaplaceRegressor(net, random_state=0).fit(X, y)
    net.set_params(module=nn.Linear)
    with pytest.raises(
        ValueError, match=r"shape \(1,\) for a row.*\(2,\)\. Return outputs \[n, 2\]"
    ):
        LaplaceRegressor(net, random_state=0).fit(X, np.stack([y, y], 1))
    # The module itself may return [n].
    y = (y - y.mean()) / y.std()
    module = WithoutOutputDimension(3, 1)
    regressor = LaplaceRegressor(module, optimizer=ADAM, epochs=400, random_state=0)
    coefficients = np.linalg.lstsq(np.c_[X, np.ones(60)], y)[0]
    predictions = regressor.fit(X, y).predict(X)
    np.testing.assert_allclose(predictions, np.c_[X, np.ones(60)] @ coefficients, atol=0.02)


def test_skorch_nets_that_do_not_match_are_rejected():
    X, y = load_iris(return_X_y=True)
    with pytest.raises(ValueError, match=r"criterion NLLLoss. Use nn.CrossEntropyLoss"):
        LaplaceClassifier(skorch_net(criterion=nn.NLLLoss)).fit(X, y)
    with pytest.raises(ValueError, match=r"criterion CrossEntropyLoss. Use nn.MSELoss"):
        LaplaceRegressor(skorch_net()).fit(X, y)
    with pytest.raises(ValueError, match=r"Pass a module together with `optimizer="):
        LaplaceRegressor(skorch_net(), likelihood="heteroscedastic").fit(X, y)
    weights = torch.tensor([1.0, 1.0, 8.0])
    for options in (
        {"criterion__weight": weights},
        {"criterion": nn.CrossEntropyLoss(weight=weights)},
        {"criterion__label_smoothing": 0.1},
        {"criterion": nn.BCEWithLogitsLoss, "criterion__pos_weight": weights[:1]},
    ):
        with pytest.raises(ValueError, match=r"has weights or label smoothing.*Categorical"):
            LaplaceClassifier(skorch_net(**options)).fit(X, y)
    with pytest.raises(ValueError, match=r"has an optimizer\. Remove `optimizer="):
        LaplaceClassifier(skorch_net(), optimizer=ADAM).fit(X, y)


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        (
            LaplaceClassifier,
            {"network": hidden_layer},
            ValueError,
            r"untrained network\. Pass `optimizer=",
        ),
        (LaplaceClassifier, {"network": "mlp"}, TypeError, "skorch net, got str. Pass"),
        (LaplaceClassifier, {"optimizer": "adam"}, TypeError, "torch optimizer, got str. Pass"),
        (
            LaplaceRegressor,
            {"optimizer": torch.optim.Adam([nn.Parameter(torch.zeros(1))])},
            TypeError,
            "torch optimizer, got Adam. Pass",
        ),
        (LaplaceClassifier, {"network": nn.Linear(4, 2)}, ValueError, r"\(2,\), but y has 3 clas"),
        (LaplaceClassifier, {"network": nn.Linear(4, 1)}, ValueError, r"\(1,\), but y has 3 clas"),
        (LaplaceRegressor, {"network": nn.Linear(4, 3)}, ValueError, r"\(3,\), but y has 1 targ"),
        (LaplaceRegressor, {"sigma": -1.0}, ValueError, "`sigma` must be a positive number"),
        (LaplaceRegressor, {"likelihood": "poisson"}, ValueError, "Use 'regression' or 'heteros"),
        (
            LaplaceRegressor,
            {"likelihood": "heteroscedastic"},
            ValueError,
            r"\(1,\), but y has 1 target. Pass a network with 1 means and 1 log-variances",
        ),
        (
            LaplaceRegressor,
            {"likelihood": "heteroscedastic", "sigma": 0.1},
            ValueError,
            r"predicts the noise\. Remove `sigma=`",
        ),
        (LaplaceClassifier, {"epochs": 0}, ValueError, "epochs must be at least 1"),
        (LaplaceClassifier, {"batch_size": 2.5}, TypeError, "batch_size must be a whole number"),
        (LaplaceClassifier, {"prior_precision": "best"}, ValueError, 'number or "evidence"'),
        (LaplaceClassifier, {"curvature": "kronecker"}, ValueError, "kronecker"),
    ],
)
def test_wrong_arguments_are_rejected(kind, options, error, message, unchecked):
    X, y = load_iris(return_X_y=True)
    num_outputs = 1 if kind is LaplaceRegressor else 3
    options = {"network": nn.Linear(4, num_outputs), **options}
    with pytest.raises(error, match=message):
        kind(**options).fit(X, y)


def test_wrong_data_are_rejected(unchecked):
    X, y = load_iris(return_X_y=True)
    classifier = LaplaceClassifier(nn.Linear(4, 3))
    with pytest.raises(NotFittedError):
        classifier.predict(X)
    with pytest.raises(ValueError, match="y has only one class, 0"):
        classifier.fit(X[:50], y[:50])
    with pytest.raises(ValueError, match="Input X contains NaN"):
        classifier.fit(np.where(X > 7, np.nan, X), y)
    categories = pandas.DataFrame(X, columns=list("abcd")).assign(
        city=pandas.Categorical(["Rome", "Oslo"] * 75), month=pandas.date_range("2020", periods=150)
    )
    for columns, kind in ((["a", "city"], "object"), (["month"], "datetime64")):
        with pytest.raises(ValueError, match=rf"X contains values of type {kind}.*OneHotEncoder"):
            classifier.fit(categories[columns], y)
    with pytest.raises(ValueError, match="X has 3 features"):
        classifier.fit(X, y).predict(X[:, :3])
    network = nn.Linear(4, 1).double()
    fitted_exactly = network(torch.tensor(X)).detach().numpy()
    with pytest.raises(ValueError, match=r"on the training data are zero\. Pass `sigma="):
        LaplaceRegressor(network).fit(X, fitted_exactly)
    with pytest.raises(ValueError, match="n_samples must be at least 1"):
        LaplaceRegressor(network).fit(X, y).sample_y(X, 0)


def test_class_indices_are_not_rounded_to_half_precision():
    network = nn.Linear(298, 298).to(torch.bfloat16)
    targets = _targets(np.arange(298), "classification", network)
    assert targets.dtype == torch.long
    assert targets.tolist() == list(range(298))


@pytest.mark.parametrize(("num_rows", "batch_size"), [(993, 32), (7, 3), (64, 64), (5, 8)])
def test_batches_of_a_training_have_nearly_equal_sizes(num_rows, batch_size):
    sizes = []

    class Counted(nn.Linear):
        def forward(self, x):
            if self.training:
                sizes.append(len(x))
            return super().forward(x)

    rng = np.random.default_rng(0)
    X = rng.normal(size=(num_rows, 3))
    y = np.arange(num_rows) % 2
    LaplaceClassifier(
        Counted(3, 2), optimizer=torch.optim.SGD, epochs=1, batch_size=batch_size
    ).fit(X, y)
    assert sum(sizes) == num_rows
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1


def test_logarithms_of_small_probabilities_are_finite():
    X = np.random.default_rng(0).normal(size=(30, 3))
    y = X.argmax(1)
    classifier = LaplaceClassifier(nn.Linear(3, 3).double(), prior_precision=1e12).fit(X, y)
    logarithms = classifier.predict_log_proba(X)
    np.testing.assert_allclose(logarithms, np.log(classifier.predict_proba(X)), rtol=1e-9)
    far = classifier.predict_log_proba(1e4 * X)
    assert (classifier.predict_proba(1e4 * X) == 0).any()
    assert np.isfinite(far).all()
