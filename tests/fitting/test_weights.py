"""Weights of examples: a batch `(x, y, w)` counts each example w times."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Conformal, Laplace

CURVATURES = ("kfac", "ekfac", "diag", "lowrank", "full", "gp")


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 2), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2), nn.Flatten()
    padded = nn.Unflatten(1, (1, 2, 3)), nn.ZeroPad2d(1)
    return nn.Sequential(*padded, *layers, nn.Linear(24, 3)).double().eval()


def data(size: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (size,), generator=generator)


# Examples 2 i and 2 i + 1 count alike, so that repeated ones can stay in their fold of two.
COUNTS = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 1, 1, 2, 2])


def repeated(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat each pair of examples as often as its weight says."""
    order = []
    for start in range(0, 12, 2):
        order += int(COUNTS[start]) * [start, start + 1]
    return x[order], y[order]


def assert_same(la: Laplace, reference: Laplace) -> None:
    x = data(20)[0][12:]
    for actual, expected in zip(la.functional(x), reference.functional(x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    evidence = float(la.log_marginal_likelihood(prior_precision=0.3))
    expected_evidence = float(reference.log_marginal_likelihood(prior_precision=0.3))
    assert evidence == pytest.approx(expected_evidence, rel=1e-10)
    assert la.num_data == reference.num_data


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("mode", ["full", "crossfit", "debiased"])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_whole_weights_are_repeated_examples(curvature: str, mode: str, fisher: str):
    x, y = data()
    w = COUNTS.double()
    fits = []
    for batch in ((x, y, w), repeated(x, y)):
        la = Laplace(perceptron(), curvature=curvature, fisher=fisher)
        if mode == "debiased":
            # The first six examples count as six, the others as twelve.
            first = tuple(tensor[:6] for tensor in batch)
            second = tuple(tensor[6:] for tensor in batch)
            fits.append(la.fit_batches([first], [second]))
        else:
            folds = 2 if mode == "crossfit" else None
            fits.append(la.fit_batches([batch], folds=folds))
    assert_same(*fits)


@pytest.mark.parametrize(
    ("build", "curvature", "backend"),
    [
        *((convolutions, curvature, "hooks") for curvature in ("kfac", "ekfac", "diag")),
        (perceptron, "kfac", "backpack"),
    ],
)
def test_in_batches_of_any_size_and_of_convolutions(build: Callable, curvature: str, backend: str):
    x, y = data()
    loader = DataLoader(TensorDataset(x, y, COUNTS.double()), batch_size=5)
    plain = DataLoader(TensorDataset(*repeated(x, y)), batch_size=4)
    la = Laplace(build(), curvature=curvature, backend=backend).fit(loader, num_data=18)
    assert_same(la, Laplace(build(), curvature=curvature, backend=backend).fit(plain))


def test_reduced_sharing_too():
    x, y = data()
    la = Laplace(convolutions(), sharing="reduce").fit_batches([(x, y, COUNTS.double())])
    assert_same(la, Laplace(convolutions(), sharing="reduce").fit_batches([repeated(x, y)]))


@pytest.mark.parametrize("curvature", ["diag", "full"])
def test_inverse_probabilities_make_draws_unbiased(curvature: str):
    """The mean is over all draws of one of three examples, whose probabilities differ."""
    x, y = data(3)
    chances = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    total: Tensor | float = 0.0
    for n, chance in enumerate(chances):
        la = Laplace(perceptron(), curvature=curvature)
        la.fit_batches([(x[n : n + 1], y[n : n + 1], 1 / chance[None])], num_data=3)
        # Curvature is that of the mean over the weight, which is the inverse of the probability.
        total = total + chance * la.posterior.curvature.to_dense() / chance / 3
    expected = Laplace(perceptron(), curvature=curvature).fit_batches([(x, y)])
    torch.testing.assert_close(total, expected.posterior.curvature.to_dense())


@pytest.mark.parametrize(
    ("weights", "error", "said"),
    [
        (torch.arange(12), TypeError, "floating-point"),
        ("weights", TypeError, "floating-point"),
        (torch.ones(11), ValueError, "shape"),
        (-torch.ones(12), ValueError, "at least 0"),
        (torch.full((12,), torch.nan), ValueError, "finite"),
        (torch.full((12,), torch.inf), ValueError, "finite"),
        (torch.zeros(12), ValueError, "zero"),
        (torch.full((12,), 0.3), ValueError, "num_data"),
    ],
)
def test_bad_weights_are_refused(weights: object, error: type[Exception], said: str):
    x, y = data()
    model = perceptron()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=said):
        Laplace(model).fit_batches([(x, y, weights)])
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)


def test_a_batch_without_weights_counts_once_beside_one_with_weights():
    x, y = data()
    ones = torch.ones(6, dtype=torch.float64)
    options = {"num_data": 12, "folds": 2}
    mixed = Laplace(perceptron()).fit_batches([(x[:6], y[:6]), (x[6:], y[6:], 2 * ones)], **options)
    weighted = [(x[:6], y[:6], ones), (x[6:], y[6:], 2 * ones)]
    assert_same(mixed, Laplace(perceptron()).fit_batches(weighted, **options))


def test_a_fold_without_weight_is_refused():
    x, y = data()
    with pytest.raises(ValueError, match="fold"):
        Laplace(perceptron()).fit_batches([(x, y, torch.tensor([0.0, 1.0] * 6))], folds=2)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
@pytest.mark.parametrize("build", [perceptron, convolutions])
def test_weights_apply_to_joint_blocks(build: Callable, curvature: str, sharing: str):
    x, y = data()
    options = {"curvature": curvature, "sharing": sharing, "joint": True}
    la = Laplace(build(), **options).fit_batches([(x, y, COUNTS.double())])
    assert_same(la, Laplace(build(), **options).fit_batches([repeated(x, y)]))


class PaddedTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, padding_idx=0)
        self.head = nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).tanh().sum(1))


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
def test_weights_apply_to_embeddings(curvature: str):
    torch.manual_seed(0)
    model = PaddedTokens().double().eval()
    tokens = torch.randint(5, (12, 4))
    _, y = data()
    la = Laplace(model, curvature=curvature).fit_batches([(tokens, y, COUNTS.double())])
    reference = Laplace(model, curvature=curvature).fit_batches([repeated(tokens, y)])
    for name, block in la.posterior.curvature.blocks.items():
        expected = reference.posterior.curvature.blocks[name].to_dense()
        torch.testing.assert_close(block.to_dense(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", ["auto", "tune"])
def test_what_takes_no_weights_says_so(method: str):
    x, y = data()
    triples = [(x, y, COUNTS.double())]
    if method == "tune":
        la = Laplace(perceptron()).fit_batches(triples)
        message = "Weights of examples as the third entry are not supported here. Pass pairs"
        with pytest.raises(TypeError, match=message):
            la.tune(triples)
        with pytest.raises(TypeError, match=message):
            Conformal(la).calibrate(triples)
    else:
        with pytest.raises(ValueError, match="weights"):
            Laplace(perceptron()).fit(itertools.cycle(triples), mode="auto", num_data=18)


MODES = ("full", "mini", "debiased", "crossfit")


@pytest.mark.parametrize("mode", MODES)
def test_n_of_a_loader_is_that_of_repeated_examples(mode: str):
    """A fit that reads a part of the data cannot sum all weights, so N must be passed."""
    x, y = data()
    w = COUNTS.double()
    sizes = {"full": (12, 18), "mini": (12, 18), "crossfit": (12, 18), "debiased": (6, 6)}
    weighted = DataLoader(TensorDataset(x, y, w), batch_size=sizes[mode][0])
    plain = DataLoader(TensorDataset(*repeated(x, y)), batch_size=sizes[mode][1])
    la = Laplace(perceptron())
    if mode == "full":
        la.fit(weighted, mode)
    else:
        with pytest.raises(ValueError, match=r"sum of all example weights.*as `num_data="):
            la.fit(weighted, mode)
        la.fit(weighted, mode, num_data=18)
    repeats = Laplace(perceptron()).fit(plain, mode)
    assert la.num_data == repeats.num_data == 18
    if mode != "debiased":  # Its batches of six rows are not the same examples.
        assert_same(la, repeats)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_mean_one_may_be_rounded(dtype: torch.dtype):
    x, y = data()
    weights = torch.rand(12, generator=torch.Generator().manual_seed(5), dtype=dtype)
    weights *= 12 / weights.sum()
    assert weights.double().sum() != 12
    exact = Laplace(perceptron()).fit_batches([(x, y, weights)], num_data=12)
    loader = DataLoader(TensorDataset(x, y, weights), batch_size=5)
    for batches in (loader, list(loader)):
        la = Laplace(perceptron()).fit(batches)
        assert la.num_data == 12
        torch.testing.assert_close(
            la.posterior.precision.to_dense(), exact.posterior.precision.to_dense()
        )


def test_a_fit_in_rounds_asks_for_the_number_that_weights_stand_for():
    x, y = data(400)
    loader = DataLoader(TensorDataset(x, y, torch.ones(400).double()), 40, shuffle=True)
    with pytest.raises(ValueError, match=r'mode="auto".*sum of all example weights'):
        Laplace(perceptron()).fit(loader, mode="auto")


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_an_evaluation_with_whole_weights_is_that_of_repeated_examples(likelihood: str):
    x, y = data()
    if likelihood == "regression":
        y = torch.randn(12, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    la = Laplace(perceptron(), likelihood, sigma=0.5 if likelihood == "regression" else None)
    la.fit_batches([(x, y)])
    triples = [(x[:5], y[:5], COUNTS[:5].double()), (x[5:], y[5:], COUNTS[5:].double())]
    ood = {"shifted": [(x + 3, y)]}
    weighted = la.evaluate(triples, ood=ood)
    expected = la.evaluate([repeated(x, y)], ood=ood)
    assert weighted.keys() == expected.keys()
    for name, value in expected.items():
        assert weighted[name].value == pytest.approx(value.value, rel=1e-10, nan_ok=True)
        assert weighted[name].low == pytest.approx(value.low, rel=1e-10, nan_ok=True)
    with pytest.raises(ValueError, match="have fractions"):
        la.evaluate([(x, y, COUNTS.double() / 2)])
    with pytest.raises(ValueError, match="at least 0"):
        la.evaluate([(x, y, -COUNTS.double())])
    with pytest.raises(ValueError, match="nothing to evaluate"):
        la.evaluate([(x, y, 0 * COUNTS.double())])
