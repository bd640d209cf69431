"""Class weights: a target of weight ω counts like an example of weight ω, in both factors."""

import copy

import pytest
import torch
from torch import Tensor, nn

from laplace_debias import Auto, Bernoulli, Categorical, Laplace
from laplace_debias.curvature import EKFAC, KFAC
from laplace_debias.operators import EigenKronecker
from laplace_debias.training import OnlineCurvature
from tests.support import oracle

CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
HALVES = slice(0, 12), slice(12, 24)


def perceptron(num_outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, num_outputs)).double().eval()


def data(size: int = 24) -> tuple[Tensor, Tensor]:
    """Examples whose inputs are larger in some classes; every six have each class twice."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(size) % 3
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return x * (1 + y[:, None]), y


def assert_same_information(la: Laplace, reference: Laplace) -> None:
    """Compare N times the curvature of the mean loss."""
    for name, block in la.posterior.curvature.blocks.items():
        expected = reference.num_data * reference.posterior.curvature.blocks[name].to_dense()
        torch.testing.assert_close(la.num_data * block.to_dense(), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("mode", ["full", "two batches", "crossfit", "update"])
@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
def test_class_weights_are_weights_of_examples(curvature: str, mode: str, joint: bool):
    x, y = data()
    fits = []
    for likelihood, weights in (
        (Categorical(class_weights=CLASS_WEIGHTS), ()),
        (Categorical(), (CLASS_WEIGHTS[y],)),
    ):
        la = Laplace(perceptron(), likelihood=likelihood, curvature=curvature, joint=joint)
        first, second = ([tuple(tensor[half] for tensor in (x, y, *weights))] for half in HALVES)
        if mode == "two batches":
            la.fit_batches(first, second)
        elif mode == "update":
            la.fit_batches(first).update(second)
        else:
            la.fit_batches([*first, *second], folds=2 if mode == "crossfit" else None)
        fits.append(la)
    assert_same_information(*fits)


def weighted_mean_A(inputs: Tensor, weights: Tensor) -> Tensor:  # noqa: N802
    return torch.einsum("n,ni,nj->ij", weights, inputs, inputs) / weights.sum()


@pytest.mark.parametrize("fisher", ["exact", "mc", "empirical"])
def test_the_input_factor_is_weighted_as_the_gradients_are(fisher: str):
    """A gradient contains the weight, so that the empirical Fisher contains its square."""
    x, y = data()
    likelihood = Categorical(class_weights=CLASS_WEIGHTS, label_smoothing=0.1)
    la = Laplace(perceptron(), likelihood=likelihood, fisher=fisher).fit_batches([(x, y)])
    omega = 0.9 * CLASS_WEIGHTS[y] + 0.1 * CLASS_WEIGHTS.mean()
    expected = weighted_mean_A(x, omega.square() if fisher == "empirical" else omega)
    trace_A = la.posterior.factor_scales["0.weight"].trace_A
    oracle.close(trace_A, expected.trace(), 1e-12)
    block = la.posterior.curvature.blocks["0.weight"]
    oracle.close(input_factor(block, trace_A), expected, 1e-12)


def input_factor(block: EigenKronecker, trace_A: Tensor) -> Tensor:
    """A of a Kronecker product, from its trace."""
    blocks = block.to_dense().unflatten(0, (5, 6)).unflatten(2, (5, 6))
    A = blocks.diagonal(dim1=0, dim2=2).sum(-1)
    return A * trace_A / A.trace()


def test_positive_weights_of_a_single_output():
    x, y = data()
    y = (y == 2).double()
    la = Laplace(perceptron(1), likelihood=Bernoulli(positive_weight=5.0)).fit_batches([(x, y)])
    weights = 1 + 4 * y
    weighted = Laplace(perceptron(1), likelihood=Bernoulli()).fit_batches([(x, y, weights)])
    assert_same_information(la, weighted)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.tanh())


def test_an_example_with_positions_has_the_mean_weight_of_those_that_count():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8, 4, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (8, 4), generator=generator)
    counted = torch.arange(4) < torch.tensor([1, 2, 3, 4, 1, 2, 3, 4])[:, None]
    y[~counted] = -100
    likelihood = Categorical(class_weights=CLASS_WEIGHTS)
    torch.manual_seed(0)
    la = Laplace(Tagger().double().eval(), likelihood=likelihood).fit_batches([(x, y)])
    weights = (CLASS_WEIGHTS[y.clamp_min(0)] * counted).sum(1) / counted.sum(1)
    inputs = x.tanh() * counted[:, :, None]
    expected = torch.einsum("n,nti,ntj->ij", weights, inputs, inputs) / weights.sum()
    oracle.close(la.posterior.factor_scales["head.weight"].trace_A, expected.trace(), 1e-12)


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_operators_of_weighted_cross_entropy(kind):
    x, y = data()
    actual = kind(perceptron(), nn.CrossEntropyLoss(CLASS_WEIGHTS), [(x, y)])
    expected = kind(perceptron(), nn.CrossEntropyLoss(), [(x, y, CLASS_WEIGHTS[y])])
    torch.testing.assert_close(actual.to_dense(), expected.to_dense(), rtol=1e-10, atol=1e-12)


def test_a_weight_of_one_changes_nothing_if_the_positives_of_a_label_weigh_nothing():
    x, y = data()
    y = (torch.stack([y, y + 1, y + 2], 1) % 3 == 0).double()
    pos_weight = torch.tensor([0.0, 1.0, 3.0]).double()
    loss = nn.BCEWithLogitsLoss(pos_weight=pos_weight)
    weighted = nn.BCEWithLogitsLoss(torch.ones(3).double(), pos_weight=pos_weight)
    actual = KFAC(perceptron(), weighted, [(x, y)]).to_dense()
    expected = KFAC(perceptron(), loss, [(x, y)]).to_dense()
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    # The mean over examples of Σ_c T_c p_c (1 − p_c), and of x xᵀ with the weights Σ_c T_c.
    model = nn.Linear(6, 3).double().eval()
    T = 1 + (pos_weight - 1) * y
    p = model(x).sigmoid().detach()
    G = (T * p * (1 - p)).mean(0).diag() / 3
    expected = torch.kron(G, weighted_mean_A(x, T.sum(1)).contiguous())
    operator = KFAC(model, weighted, [(x, y)], params=["weight"])
    torch.testing.assert_close(operator.to_dense(), expected, rtol=1e-10, atol=1e-12)


def test_online_curvature_saves_the_weights_of_the_input_factors():
    x, y = data()
    model = perceptron()
    options = {
        "likelihood": Categorical(class_weights=CLASS_WEIGHTS),
        "curvature": "kfac",
        "every": 1,
    }
    online = OnlineCurvature(model, **options)
    for half in HALVES:
        online.update(x[half], y[half])
    restored = OnlineCurvature(copy.deepcopy(model), **options)
    restored.load_state_dict(online.state_dict())
    for curvature in (online, restored):
        curvature.update(x, y)
    assert_same_information(online.posterior(24), restored.posterior(24))


def test_an_automatic_fit_weights_the_input_factors():
    x, y = data(400)
    la = Laplace(perceptron(), likelihood=Categorical(class_weights=CLASS_WEIGHTS))
    batches = list(zip(x.split(50), y.split(50), strict=True))
    with pytest.warns(UserWarning, match="budget of examples"):
        la.fit(Auto(batches, tolerance=1e-6, examples=100, forward_ratio=1), num_data=400)
    read = slice(16, 16 + la.fit_report.num_read)  # The first inputs are the probes.
    expected = weighted_mean_A(x[read], CLASS_WEIGHTS[y[read]])
    oracle.close(la.posterior.factor_scales["0.weight"].trace_A, expected.trace(), 1e-9)


@pytest.mark.parametrize("joint", [False, True])
def test_an_automatic_fit_supports_joint_blocks_and_embeddings(joint: bool):
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(5, (600, 3), generator=generator)
    y = torch.randint(3, (600,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 3)).double().eval()
    loader = list(zip(tokens.split(20), y.split(20), strict=True))
    scheme = Auto(loader, tolerance=1e-6, examples=400, forward_ratio=1)
    with pytest.warns(UserWarning, match="budget of examples"):
        automatic = Laplace(model, joint=joint).fit(scheme, num_data=600)
    expected = Laplace(model, joint=joint).fit(loader)
    for name, block in automatic.posterior.curvature.blocks.items():
        expected_block = expected.posterior.curvature.blocks[name].to_dense()
        assert abs(block.to_dense().trace() / expected_block.trace() - 1) < 0.1
