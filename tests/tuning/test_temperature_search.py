"""The search over temperatures, against all settings of the grid."""

import itertools
import math
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from laplace_debias import Laplace
from laplace_debias.curvature.data.batch import Batch
from laplace_debias.laplace import links, pairwise
from laplace_debias.laplace.functional.last_layer import recorded_inputs, squared_differences
from laplace_debias.laplace.prediction import predictive
from laplace_debias.laplace.tuning import tune
from laplace_debias.laplace.tuning.grid_metrics import evaluate_grid
from laplace_debias.laplace.tuning.temperature_search import LastLayerBatch, TemperatureSearch


def random_problem(seed, num_data=110, num_classes=None, **options):
    """A last layer's posterior and validation data, of random sizes, noise and temperature."""
    generator = torch.Generator().manual_seed(seed)

    def log_uniform(low, high):
        return low * (high / low) ** float(torch.rand((), generator=generator))

    num_classes = num_classes or int(log_uniform(2, 9))
    num_features = int(log_uniform(3, 20))
    options.setdefault("curvature", ["kfac", "ekfac", "diag"][seed % 3])
    model = nn.Sequential(nn.Linear(4, num_features), nn.Tanh())
    model.append(nn.Linear(num_features, num_classes)).double().eval()
    scale = log_uniform(0.5, 5)
    noise = log_uniform(0.01, 2)
    temperature = log_uniform(0.3, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            shape = parameter.shape
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            parameter.copy_(scale * values / math.sqrt(shape[-1]))

    def draw(num_examples):
        x = torch.randn(num_examples, 4, generator=generator, dtype=torch.float64)
        logits = model(x).detach()
        errors = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        probs = ((logits + noise * errors) / temperature).softmax(1)
        return x, torch.multinomial(probs, 1, generator=generator)[:, 0]

    la = Laplace(model, params="last_layer", fisher="mc", **options)
    num_training = int(log_uniform(10, 2_000))
    labels = torch.Generator().manual_seed(seed)
    la.fit_batches([draw(60)], num_data=num_training, generator=labels)
    return la, draw(num_data)


def tuned_on_full_grid(la, data, metric):
    fitted = la.fitted
    default = links.default_link(fitted.likelihood, fitted.spec.model(data[0]).shape)
    links_tried = tune.links_to_try(default, None)
    table = evaluate_grid(
        partial(predictive.predictives_by_links, fitted),
        [Batch(*data)],
        fitted.likelihood,
        metric,
        prior_precisions=tune.DEFAULT_GRID.tolist(),
        links=links_tried,
        network_links=tune.links_of_network(links_tried),
    )
    return tune.summarise(table, tune.choose(table), metric)


@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))]
)
def test_the_choice_and_its_table_are_those_of_all_settings(seed):
    la, data = random_problem(seed)
    metric = "brier" if seed % 3 == 1 else "nll"
    expected = tuned_on_full_grid(la, data, metric)
    actual = la.tune([data], metric=metric)
    assert actual.prior_precision == expected.prior_precision
    assert actual.link == expected.link
    assert actual.flat == expected.flat
    assert actual.value == pytest.approx(expected.value, rel=1e-12)
    for actual_rows, expected_rows in (
        (actual.table, expected.table),
        (actual.compared, expected.compared),
    ):
        for row, expected_row in zip(actual_rows, expected_rows, strict=True):
            assert row.keys() == expected_row.keys()
            for name, value in expected_row.items():
                is_number = isinstance(value, float)
                expected_value = pytest.approx(value, rel=1e-11, abs=1e-12) if is_number else value
                assert row[name] == expected_value


class NumExponentials(TorchDispatchMode):
    """Counts the entries of the exponentials of pairs of classes."""

    entries = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.overloadpacket is torch.ops.aten.exp2_:
            self.entries += arguments[0].numel()
        return function(*arguments, **(keywords or {}))


def test_a_search_computes_an_eighth_of_the_exponentials_of_all_settings():
    num_classes = 30
    la, data = random_problem(5, num_classes=num_classes)
    with NumExponentials() as exponentials:
        la.tune([data])
    num_settings = len(tune.DEFAULT_GRID) * len(tune.TEMPERATURES)
    all_settings = num_settings * len(data[0]) * num_classes**2
    assert 0 < exponentials.entries <= all_settings / 8


@pytest.mark.parametrize("curvature", ["kfac", "diag"])
@pytest.mark.parametrize("num_classes", [2, 5, 6])
def test_pairs_of_classes_have_the_variances_of_the_dense_covariance(
    num_classes, curvature, monkeypatch
):
    la, (x, _) = random_problem(0, num_data=7, num_classes=num_classes, curvature=curvature)
    delta = 0.3
    precision = la.num_data * la.posterior.curvature.to_dense()
    precision += delta * torch.eye(len(precision), dtype=torch.float64)
    identity = torch.eye(num_classes, dtype=torch.float64)
    inputs = recorded_inputs(la.fitted, x)
    deltas = torch.full((len(inputs.heads),), delta, dtype=torch.float64)
    variances = torch.cat(inputs.eigen_variances(deltas), 1)
    matrix = squared_differences(inputs.heads)
    first, second = pairwise.pairs_of_outputs(num_classes, x.device)
    dense_covariances = []
    for n, phi in enumerate(la.fitted.spec.model[:-1](x).detach()):
        J = torch.cat([torch.kron(identity, phi.unsqueeze(0)), identity], 1)
        dense_covariances.append(J @ torch.linalg.solve(precision, J.T))
        differences = J[first] - J[second]
        dense = differences @ torch.linalg.solve(precision, differences.T)
        torch.testing.assert_close(variances[n] @ matrix, dense.diagonal(), rtol=1e-10, atol=1e-14)
    monkeypatch.setattr(pairwise, "_UNORDERED_PAIRS_AT_ONCE", 50)  # Several blocks of examples.
    for factor in (1, 1e4):  # The exponentials of the second one overflow.
        mean = factor * inputs.mean
        logits = pairwise.pairwise_of_directions(mean, variances, matrix, [0.5, 3.0])
        for T, actual in zip([0.5, 3.0], logits, strict=True):
            for mu, covariance, values in zip(mean, dense_covariances, actual, strict=True):
                diagonal = covariance.diagonal()
                pair_variances = diagonal.unsqueeze(1) + diagonal - 2 * covariance
                roots = (1 + math.pi / 8 * pair_variances / T**2).sqrt()
                exponents = (mu - mu.unsqueeze(1)) / T / roots
                expected = -exponents.logsumexp(1)
                torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("num_outputs", [1, 2, 3, 6, 7])
def test_every_two_outputs_are_paired_once_or_in_both_orders(num_outputs):
    first, second = pairwise.pairs_of_outputs(num_outputs, torch.device("cpu"))
    pairs = list(zip(first.tolist(), second.tolist(), strict=True))
    unordered = {frozenset(pair) for pair in pairs}
    assert unordered == {frozenset(pair) for pair in itertools.combinations(range(num_outputs), 2)}
    assert len(set(pairs)) == len(pairs)
    counts = Counter(frozenset(pair) for pair in pairs)
    for pair, count in counts.items():
        low, high = sorted(pair)
        assert count == (2 if 2 * (high - low) == num_outputs else 1)


class WrittenBatch(LastLayerBatch):
    """Examples whose metric at a setting is written down."""

    def __init__(self, metric):
        self.metric = metric
        self.counts = torch.ones(3, dtype=torch.float64)

    def sums(self, prior_precision, links_used):
        row = [self.metric(prior_precision, link.temperature) for link in links_used]
        return torch.tensor([row] * 3, dtype=torch.float64)


@pytest.mark.parametrize("drift", [-0.6, 0.0, 0.9])
def test_the_best_temperature_may_move_and_a_prior_precision_may_have_none(drift):
    def metric(delta, T):
        if delta < 1e-2:
            return math.inf
        power = 8 if delta == math.inf else math.log10(delta)
        return (math.log2(T) - drift * (power - 3)) ** 2 + 0.1 * (power - 4) ** 2

    deltas = tune.DEFAULT_GRID.tolist()
    tried = tune.links_to_try(links.Link("pairwise"), "pairwise")
    network_links = tune.links_of_network(tried)
    search = TemperatureSearch([WrittenBatch(metric)], deltas, tried, network_links)
    search.run()
    table = search.table()
    for point, delta in enumerate(deltas):
        values = [metric(delta, link.temperature) for link in tried]
        if min(values) < math.inf:
            lowest = table.lowest(range(point, point + 1), range(len(tried)))
            assert values[lowest.link] == min(values)
    assert table.values.isnan().float().mean() > 0.6
