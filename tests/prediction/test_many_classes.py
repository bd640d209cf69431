"""Links of many classes: temperatures that share a covariance, in blocks of few examples."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laplace_debias import Laplace, Link, Mixture
from laplace_debias.laplace import links
from laplace_debias.laplace.functional import linearised
from laplace_debias.laplace.functional.linear_head import LinearHead
from laplace_debias.laplace.links import tempered_probit
from laplace_debias.laplace.pairwise import _PAIRS_AT_ONCE, pairwise
from laplace_debias.laplace.prediction.predictive import FitWithLink, PredictionMethod
from laplace_debias.laplace.tuning import tune

TEMPERATURES = [0.5, 1.0, 1.7, 4.0]


def moments(num_classes, batch, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    mean = 3 * torch.randn(*batch, num_classes, generator=generator, dtype=torch.float64)
    root = torch.randn(*batch, num_classes, 4, generator=generator, dtype=torch.float64)
    covariance = root @ root.mT + 50.0  # A large common variance cancels.
    return mean.to(dtype), covariance.to(dtype)


def dense_pairwise(mean, covariance, temperature):
    """The formula, one pair of classes after the other."""
    mu = mean.double() / temperature
    sigma = covariance.double() / temperature**2
    log_probs = torch.empty_like(mu)
    for k in range(len(mu)):
        exponents = []
        for i in range(len(mu)):
            variance = sigma[k, k] + sigma[i, i] - 2 * sigma[k, i]
            exponents.append((mu[i] - mu[k]) / math.sqrt(1 + math.pi / 8 * float(variance)))
        log_probs[k] = -torch.logsumexp(torch.stack(exponents), 0)
    return log_probs


@pytest.mark.parametrize("pairs_at_once", [1, 50, 2**20])
@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
def test_every_temperature_is_that_of_the_formula_in_any_blocks(batch, pairs_at_once, monkeypatch):
    monkeypatch.setitem(_PAIRS_AT_ONCE, "cpu", pairs_at_once)
    mean, covariance = moments(6, batch)
    logits = pairwise(mean, covariance, TEMPERATURES)
    assert logits.shape == (len(TEMPERATURES), *mean.shape)
    rows = mean.reshape(-1, 6)
    matrices = covariance.reshape(-1, 6, 6)
    for temperature, values in zip(TEMPERATURES, logits, strict=True):
        for row, matrix, actual in zip(rows, matrices, values.reshape(-1, 6), strict=True):
            expected = dense_pairwise(row, matrix, temperature)
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pairwise(mean, covariance, [1.0])[0], logits[1], rtol=0, atol=0)


@pytest.mark.parametrize("factor", [1e2, 1e4])  # Only the second one's exponentials overflow.
def test_logits_that_differ_by_any_amount_keep_every_class(factor):
    mean, covariance = moments(6, (3,))
    logits = pairwise(factor * mean, covariance, TEMPERATURES)
    for temperature, values in zip(TEMPERATURES, logits, strict=True):
        for row, matrix, actual in zip(factor * mean, covariance, values, strict=True):
            expected = dense_pairwise(row, matrix, temperature)
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("is_matrix", [False, True])
def test_the_probit_of_every_temperature_is_that_of_the_divided_logits(is_matrix):
    mean, covariance = moments(6, (5,))
    variances = covariance.diagonal(dim1=-2, dim2=-1)
    logits = tempered_probit(mean, covariance if is_matrix else variances, TEMPERATURES)
    for T, actual in zip(TEMPERATURES, logits, strict=True):
        expected = mean / T / (1 + math.pi / 8 * variances / T**2).sqrt()
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=0)


def test_single_precision_keeps_its_digits_beside_a_large_common_variance():
    mean, covariance = moments(6, (5,), torch.float32)
    logits = pairwise(mean, covariance, TEMPERATURES)
    assert logits.dtype == torch.float32
    for temperature, values in zip(TEMPERATURES, logits, strict=True):
        for row, matrix, actual in zip(mean, covariance, values, strict=True):
            expected = dense_pairwise(row, matrix, temperature)
            torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=2e-6)


def test_the_weights_of_a_last_layer_are_computed_once_for_all_chunks_of_inputs(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 40)).double().eval()
    x = torch.randn(30, 4, dtype=torch.float64)
    y = torch.randint(40, (30,))
    in_one_chunk = Laplace(model, params="last_layer").fit_batches([(x, y)], num_data=30)
    in_chunks = Laplace(model, params="last_layer", memory_bound=2_000)
    in_chunks.fit_batches([(x, y)], num_data=30)
    num_passes = []
    model[0].register_forward_hook(lambda *_: num_passes.append(1))
    num_calls = []
    compute = LinearHead.variances

    def counted(self, *arguments):
        num_calls.append(1)
        return compute(self, *arguments)

    monkeypatch.setattr(LinearHead, "variances", counted)
    _, covariance = in_chunks.functional(x)
    assert len(num_passes) > 3
    assert len(num_calls) == 2  # The weight's and the bias's.
    torch.testing.assert_close(covariance, in_one_chunk.functional(x)[1], rtol=1e-12, atol=1e-15)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of entries that the result of an operation has."""

    entries = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                # An expanded tensor takes only the memory of its storage.
                storage = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.entries = max(self.entries, min(tensor.numel(), storage))
        return result


def classifier(num_classes, num_features=16, num_data=12, seed=0, **options):
    """A last layer's posterior in float64, its network, and inputs."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, num_features), nn.Tanh())
    model.append(nn.Linear(num_features, num_classes)).double().eval()
    x = torch.randn(num_data, 4, dtype=torch.float64)
    y = torch.randint(num_classes, (num_data,))
    options = {"params": "last_layer", "fisher": "mc", **options}
    la = Laplace(model, **options).fit_batches([(x, y)], num_data=100)
    return la, model, x, y


def test_the_variances_of_many_classes_need_one_forward_pass_of_all_examples():
    la, model, x, y = classifier(num_classes=400)
    batch_sizes = []
    model[0].register_forward_hook(lambda layer, inputs, output: batch_sizes.append(len(output)))
    la.fit_batches([(x, y)], num_data=100)
    batch_sizes.clear()
    la.functional(x, diagonal=True)
    assert batch_sizes == [len(x)]


def test_no_tensor_of_a_search_has_pairs_of_classes_by_example_or_weights_by_prior_precision():
    num_classes = 1_000
    num_features = 128
    la, _, x, y = classifier(num_classes, num_features)
    deltas = torch.logspace(-2, 4, 9).tolist()
    with LargestTensor() as largest:
        la.predict(x)
        la.tune([(x, y)], grid=deltas)
    directions = num_classes * (num_classes + len(x))  # directions of G, and orthogonal ones
    logits = len(tune.TEMPERATURES) * len(x) * num_classes
    assert largest.entries <= max(directions, num_classes * num_features, logits)


def dense_covariances(la, model, x, delta):
    """J P⁻¹ Jᵀ of a last layer's weight and bias, `[B, C, C]`, with all matrices written out."""
    features = model[:-1](x).detach()
    identity = torch.eye(len(model[-1].bias), dtype=torch.float64)
    precision = la.num_data * la.posterior.curvature.to_dense()
    precision += delta * torch.eye(len(precision), dtype=torch.float64)
    covariances = []
    for phi in features:
        J = torch.cat([torch.kron(identity, phi.unsqueeze(0)), identity], 1)
        covariances.append(J @ torch.linalg.solve(precision, J.T))
    return torch.stack(covariances)


@pytest.mark.parametrize("curvature", ["kfac", "diag"])
@pytest.mark.parametrize("outputs", [None, [5, 0, 5]])
def test_variances_at_several_prior_precisions_are_those_of_the_dense_posterior(curvature, outputs):
    la, model, x, _ = classifier(num_classes=7, curvature=curvature)
    deltas = torch.tensor([0.1, 3.0], dtype=torch.float64)
    choice = None
    indices = range(7)
    if outputs is not None:
        choice = torch.tensor(outputs).expand(len(x), -1)
        indices = outputs
    _, variances = linearised.moments(la.fitted, x, deltas, kind="variances", outputs=choice)
    for delta, actual in zip(deltas, variances, strict=True):
        dense = dense_covariances(la, model, x, delta).diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(actual, dense[:, list(indices)], rtol=1e-10, atol=1e-14)


def test_a_search_by_two_links_divides_no_covariance_by_the_temperatures():
    num_classes = 20
    la, _, x, y = classifier(num_classes)
    deltas = [0.1, 10.0]
    with LargestTensor() as largest:
        la.tune([(x, y)], grid=deltas)
    covariances = len(deltas) * len(x) * num_classes**2
    logits_of_network = len(tune.NETWORK_TEMPERATURES) * len(x) * num_classes
    assert largest.entries <= max(covariances, logits_of_network)


def test_the_uncertainty_of_many_classes_needs_no_matrix_of_classes_per_example():
    num_classes = 300
    la, _, x, _ = classifier(num_classes)
    num_samples = 5
    with LargestTensor() as largest:
        la.uncertainty(x, samples=num_samples)
        la.predict(x, samples=num_samples)
    directions = num_classes * (num_classes + len(x))
    assert largest.entries <= directions < len(x) * num_classes**2


@pytest.mark.parametrize("curvature", ["kfac", "diag"])
@pytest.mark.parametrize("num_members", [1, 2])
def test_the_scores_of_many_classes_are_those_of_the_dense_covariance(
    curvature, num_members, monkeypatch
):
    """Against the matrices of all classes, which the package uses up to 100 classes."""
    monkeypatch.setattr(links, "MOST_CLASSES", 4)
    num_classes = 7
    posteriors = [classifier(num_classes, seed=seed, curvature=curvature) for seed in (0, 1)]
    posteriors = posteriors[:num_members]
    x = posteriors[0][2]
    means = []
    covariances = []
    for member, model, _, _ in posteriors:
        delta = float(member.prior_precision)
        means.append(model(x).detach() / 2)
        covariances.append(dense_covariances(member, model, x, delta) / 4)
        member.link = Link("probit", 2.0)
    scores = Mixture([la for la, *_ in posteriors]).uncertainty(x).scores
    mean = torch.stack(means)
    between = mean - mean.mean(0)
    covariance = torch.stack(covariances).mean(0)
    covariance = covariance + torch.einsum("mbi,mbj->bij", between, between) / num_members
    centring = torch.eye(num_classes, dtype=torch.float64) - 1 / num_classes
    variance = (centring @ covariance @ centring).diagonal(dim1=1, dim2=2).mean(1)
    torch.testing.assert_close(scores["variance"], variance, rtol=1e-10, atol=0)
    for n in range(len(x)):
        first, second = mean.mean(0)[n].topk(2).indices.tolist()
        log_probs = []
        for m, matrix in zip(mean, covariances, strict=True):
            spread = matrix[n, first, first] + matrix[n, second, second]
            spread = (spread - 2 * matrix[n, first, second]).sqrt()
            log_probs.append(torch.special.log_ndtr((m[n, second] - m[n, first]) / spread))
        expected = torch.stack(log_probs).logsumexp(0) - math.log(num_members)
        torch.testing.assert_close(scores["instability"][n], expected, rtol=1e-9, atol=0)
    probs = torch.zeros_like(means[0])
    for m, matrix in zip(mean, covariances, strict=True):
        variances = matrix.diagonal(dim1=1, dim2=2)
        probs += (m / (1 + math.pi / 8 * variances).sqrt()).softmax(1) / num_members
    entropy = -(probs * probs.log()).sum(1)
    torch.testing.assert_close(scores["entropy"], entropy, rtol=1e-10, atol=0)


@pytest.mark.parametrize("curvature", ["kfac", "diag"])
def test_draws_of_many_classes_have_the_moments_of_the_dense_posterior(curvature, monkeypatch):
    monkeypatch.setattr(links, "MOST_CLASSES", 2)
    la, model, x, _ = classifier(num_classes=4, curvature=curvature)
    x = x[:2]
    num_samples = 40_000
    fit = FitWithLink(la.fitted, Link("probit"))
    generator = torch.Generator().manual_seed(0)
    draws = fit.draws(x, PredictionMethod(samples=num_samples, generator=generator))
    covariance = dense_covariances(la, model, x, float(la.prior_precision))
    residuals = draws - model(x).detach()
    scale = covariance.diagonal(dim1=1, dim2=2).sqrt()
    errors = residuals.mean(0) / scale * math.sqrt(num_samples)
    assert errors.abs().max() < 4.5
    products = residuals.unsqueeze(-1) * residuals.unsqueeze(-2)
    standard_errors = products.std(0) / math.sqrt(num_samples)
    assert ((products.mean(0) - covariance) / standard_errors).abs().max() < 4.5


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("diagonal", [False, True])
def test_a_linear_layer_at_one_position_has_no_jacobian_per_output(rank, diagonal):
    """All parameters of an MLP, against Jacobians by automatic differentiation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 4)).double().eval()
    x = torch.randn(20, 20, dtype=torch.float64)
    la = Laplace(model, rank=rank).fit_batches([(x, torch.randint(4, (20,)))], num_data=20)
    deltas = torch.logspace(-2, 2, 5, dtype=torch.float64)
    with LargestTensor() as largest:
        kind = "variances" if diagonal else "covariance"
        _, actual = linearised.moments(la.fitted, x, deltas, kind=kind)
    # The Jacobians of 20 examples and four outputs would have 80 times 12 × 20 entries.
    assert largest.entries <= 20 * 12 * 20
    curvature = la.posterior.curvature.to_dense()
    identity = torch.eye(len(curvature), dtype=torch.float64)
    for n in range(3):
        rows = []
        for output in model(x[n]):
            gradients = torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
            rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
        J = torch.stack(rows)
        for delta, covariances in zip(deltas, actual, strict=True):
            dense = J @ torch.linalg.solve(20 * curvature + delta * identity, J.T)
            expected = dense.diagonal() if diagonal else dense
            torch.testing.assert_close(covariances[n], expected, rtol=1e-9, atol=1e-12)
