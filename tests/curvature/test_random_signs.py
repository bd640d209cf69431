"""The Fisher matrix by random signs is unbiased, and in some cases exact."""

import itertools
import warnings

import oracle
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from laplace_debias import Laplace
from laplace_debias.curvature import KFAC, Fisher
from laplace_debias.curvature.losses.base import NegativeLogLikelihood, Uniforms
from laplace_debias.curvature.losses.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    MultiLabel,
    Ordinal,
    Poisson,
    likelihood_from,
)
from laplace_debias.curvature.losses.torch_losses import output_loss

SIGMA = 0.7


class Chosen(Uniforms):
    """Uniform numbers that a test chooses."""

    def __init__(self, numbers):
        self._numbers = torch.tensor(numbers, dtype=torch.float64)

    def __call__(self, like, counted=None):
        return self._numbers.reshape(like.shape)


def every_choice_of_signs(loss, outputs, targets, num_columns):
    """The vectors of one example for all choices of signs, flattened, `[2 ** num_columns, -1]`."""
    labels = loss.labels(targets, outputs.ndim)
    vectors = []
    for numbers in itertools.product((0.25, 0.75), repeat=num_columns):
        vectors.append(loss.signed_root(outputs, labels, Chosen(numbers)).flatten())
    return torch.stack(vectors)


@pytest.mark.parametrize(
    ("name", "num_outputs", "num_columns"),
    [("classification", 4, 3), ("regression", 3, 3), ("binary", 1, 1)],
)
def test_the_mean_over_all_signs_is_the_hessian_of_the_loss(name, num_outputs, num_columns):
    torch.manual_seed(0)
    outputs = torch.randn(1, num_outputs, dtype=torch.float64)
    sigma = SIGMA if name == "regression" else None
    loss = NegativeLogLikelihood(likelihood_from(name, sigma))
    targets = oracle.any_targets(name, outputs)
    vectors = every_choice_of_signs(loss, outputs, targets, num_columns)
    (expected,) = oracle.loss_hessian(name, outputs, sigma)
    oracle.close(vectors.T @ vectors / len(vectors), expected, 1e-12)
    oracle.close(1 + vectors.mean(0), torch.ones(num_outputs, dtype=torch.float64), 1e-12)


class Rescaled(Categorical):
    """A user's own likelihood that changes only the columns."""

    def hessian_root(self, outputs):
        return 2 * super().hessian_root(outputs)


LIKELIHOODS = {
    "categorical": Categorical(),
    "one label": Bernoulli(),
    "several labels": MultiLabel(),
    "gaussian": Gaussian([0.5, 2.0, 0.1, 1.0]),
    "noise as output": HeteroscedasticGaussian(),
    "poisson": Poisson(),
    "ordinal": Ordinal([-1.0, 0.5]),
    "a user's own": Rescaled(),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihoods_add_up_their_columns(name):
    torch.manual_seed(0)
    likelihood = LIKELIHOODS[name]
    outputs = torch.randn(6, 1 if name in ("one label", "ordinal") else 4, dtype=torch.float64)
    # The first example of the categorical case has probabilities of 0.
    outputs[0] = 800.0 * (outputs[0] if name == "categorical" else 0)
    columns = likelihood.hessian_root(outputs)
    signs = torch.randn(6, len(columns)).sign()

    def draw_signs(num_columns):
        assert num_columns == len(columns)
        return signs

    expected = sum(signs[:, k, None] * columns[k] for k in range(len(columns)))
    oracle.close(likelihood.signed_root(outputs, draw_signs), expected, 1e-12)


class LargestTensor(TorchDispatchMode):
    """Records the number of entries of the largest tensor that operations return."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize(
    "loss",
    [
        *("classification", "multilabel", "regression", "poisson"),
        nn.CrossEntropyLoss(),
        nn.MSELoss(),
        nn.BCEWithLogitsLoss(),
    ],
    ids=str,
)
def test_no_matrix_of_all_outputs_is_made(loss):
    """A vocabulary of 50,000 words would have one of 10 GB per position."""
    num_outputs = 300
    outputs = torch.randn(2, num_outputs, dtype=torch.float64)
    targets = torch.zeros_like(outputs)
    if loss == "classification" or isinstance(loss, nn.CrossEntropyLoss):
        targets = torch.zeros(2, dtype=torch.long)
    if isinstance(loss, str):
        sigma = SIGMA if loss == "regression" else None
        outputs_loss = NegativeLogLikelihood(likelihood_from(loss, sigma))
    else:
        outputs_loss = output_loss(loss, None)
    labels = outputs_loss.labels(targets, outputs.ndim)
    with LargestTensor() as largest:
        outputs_loss.signed_root(outputs, labels, Uniforms(0, 0, 0))
    assert largest.numel <= 4 * outputs.numel()


def test_positions_have_signs_of_their_own_and_ignored_ones_none():
    torch.manual_seed(0)
    outputs = torch.randn(1, 3, 3, dtype=torch.float64)
    targets = torch.tensor([[0, -100, 2]])
    loss = NegativeLogLikelihood(likelihood_from("classification", None))
    vectors = every_choice_of_signs(loss, outputs, targets, 6)
    first, _, last = oracle.loss_hessian("classification", outputs[0])
    expected = torch.block_diag(first, torch.zeros(3, 3, dtype=torch.float64), last)
    oracle.close(vectors.T @ vectors / len(vectors), expected, 1e-12)


def test_the_columns_of_a_torch_loss_are_added_up_with_signs():
    torch.manual_seed(0)
    outputs = torch.randn(1, 3, dtype=torch.float64)
    targets = torch.rand(1, 3, dtype=torch.float64)
    weights = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    criterion = nn.BCEWithLogitsLoss(pos_weight=weights, reduction="sum")
    vectors = every_choice_of_signs(output_loss(criterion, None), outputs, targets, 3)
    expected = torch.autograd.functional.hessian(lambda f: criterion(f, targets[0]), outputs[0])
    oracle.close(vectors.T @ vectors / len(vectors), expected, 1e-12)


def network(num_outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, num_outputs)).double()


def data(num_outputs):
    torch.manual_seed(1)
    x = torch.randn(12, 4, dtype=torch.float64)
    if num_outputs == 1:
        return x, torch.randint(2, (12,))
    return x, torch.randint(num_outputs, (12,))


def curvature(model, batches, likelihood="classification", **options):
    generator = torch.Generator().manual_seed(3)
    la = Laplace(model, likelihood, **options)
    la.fit_batches(batches, num_data=12, generator=generator)
    return la.posterior.curvature.to_dense()


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "full"])
def test_for_a_single_output_the_curvature_is_exact(structure):
    model = network(1)
    batch = data(1)
    matrices = [
        curvature(model, [batch], "binary", curvature=structure, fisher=fisher)
        for fisher in ("signs", "exact")
    ]
    oracle.close(matrices[0], matrices[1], 1e-12)


def test_with_many_vectors_the_curvature_is_the_exact_one():
    model = network(3)
    batch = data(3)
    options = {"curvature": "full", "fisher": "signs", "mc_samples": 300}
    names = [name for name, _ in model.named_parameters()]
    expected = oracle.ggn(model, batch[0], "classification", names)
    actual = curvature(model, [batch], **options)
    # Sums of 12 examples with 300 vectors each: the relative deviation is about √(2 / 3600).
    assert float((actual - expected).norm() / expected.norm()) < 0.1


def test_signs_depend_on_the_example_and_not_on_its_batch():
    model = network(3)
    x, y = data(3)
    batches = list(zip(x.split(5), y.split(5), strict=True))
    options = {"curvature": "ekfac", "fisher": "signs"}
    oracle.close(curvature(model, batches, **options), curvature(model, [(x, y)], **options), 1e-9)


def test_a_confident_network_has_less_noise_than_with_sampled_labels():
    model = network(3)
    x, _ = data(3)
    with torch.no_grad():
        model[2].weight *= 8
    batch = x, model(x).argmax(1)
    names = [name for name, _ in model.named_parameters()]
    expected = oracle.ggn(model, x, "classification", names)
    errors = {}
    for fisher in ("signs", "mc"):
        squares = []
        for seed in range(8):
            la = Laplace(model, curvature="full", fisher=fisher)
            la.fit_batches([batch], num_data=12, generator=torch.Generator().manual_seed(seed))
            squares.append((la.posterior.curvature.to_dense() - expected).square().sum())
        errors[fisher] = float(torch.stack(squares).mean().sqrt())
    assert errors["signs"] < 0.7 * errors["mc"]


def test_the_operator_has_the_same_seeds():
    model = network(3)
    x, y = data(3)
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    first, second = (
        KFAC(model, nn.CrossEntropyLoss(), [(x, y)], fisher="signs", generator=generator)
        for generator in generators
    )
    v = torch.randn(first.shape[0], dtype=torch.float64)
    assert torch.equal(first @ v, second @ v)


@pytest.mark.parametrize("weights", [None, torch.linspace(0.5, 2, 12, dtype=torch.float64)])
def test_the_matrix_free_operator_is_exact_for_a_single_output(weights):
    model = network(1)
    x, y = data(1)
    y = y.double().unsqueeze(1)
    batch = (x, y) if weights is None else (x, y, weights)
    names = [name for name, _ in model.named_parameters()]
    examples = torch.stack([oracle.ggn(model, x[n : n + 1], "binary", names) for n in range(12)])
    weights = torch.ones(12, dtype=torch.float64) if weights is None else weights
    expected = torch.einsum("n,nij->ij", weights / weights.sum(), examples)
    operator = Fisher(model, nn.BCEWithLogitsLoss(), [batch], fisher="signs")
    oracle.close(operator.to_dense(), expected, 1e-12)


def test_with_many_vectors_the_matrix_free_operator_is_the_exact_one():
    model = network(3)
    x, y = data(3)
    names = [name for name, _ in model.named_parameters()]
    expected = oracle.ggn(model, x, "classification", names)
    operators = [
        Fisher(
            model,
            nn.CrossEntropyLoss(),
            [(x, y)],
            fisher="signs",
            mc_samples=mc_samples,
            generator=torch.Generator().manual_seed(3),
        )
        for mc_samples in (1, 300)
    ]
    error_of_one_sample, error_of_300_samples = [
        float((operator.to_dense() - expected).norm() / expected.norm()) for operator in operators
    ]
    # Sums of 12 examples with 300 vectors each: the relative deviation is about √(2 / 3600).
    assert error_of_300_samples < 0.1 < error_of_one_sample


def test_several_samples_are_drawn_without_a_warning():
    outputs = torch.zeros(3, 2, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second, third = (Uniforms(2**61, sample, 0)(outputs) for sample in (1, 2))
    assert not torch.equal(second, third)


def test_samples_are_refused_without_randomness():
    with pytest.raises(ValueError, match='applies only to `fisher="mc"` and `"signs"`'):
        Laplace(network(3), fisher="exact", mc_samples=2)
    with pytest.raises(ValueError, match='apply only to `fisher="mc"` and `"signs"`'):
        Fisher(network(3), nn.CrossEntropyLoss(), [data(3)], mc_samples=2)
    with pytest.raises(ValueError, match='Use "exact", "mc" or "signs"'):
        Fisher(network(3), nn.CrossEntropyLoss(), [data(3)], fisher="empirical")
    with pytest.raises(ValueError, match="must draw the same random signs as"):
        Laplace(network(3), fisher="signs").fit([data(3)], resume="folder")
