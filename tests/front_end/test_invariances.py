"""A posterior is a function of its data: not of their order, the batches, threads or memory.

The networks are random and the batches smaller than the layers are wide, so that factors have null
spaces and eigenvalues that coincide: there LAPACK may return any basis.
"""

import pytest
import torch
from cases import others_slow
from torch import nn

from laplace_debias import Laplace

CURVATURES = ("kfac", "ekfac", "diag", "lowrank", "full")
MODES = ("full", "mini", "debiased", "crossfit")
NUM_DATA = 100
FOLDS = 3


class Pooled(nn.Module):
    """Tokens through two linear layers and attention, averaged over positions."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        h = self.embed(x)
        return self.head((h + self.attend(h, h, h, need_weights=False)[0]).tanh().mean(1))


def mlp(generator):
    model = nn.Sequential(nn.Linear(30, 12), nn.ReLU(), nn.Linear(12, 4))
    return model, torch.randn(12, 30, generator=generator, dtype=torch.float64), 4


def twins(generator):
    """Inputs that come twice and units that are copies: eigenvalues that coincide."""
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    with torch.no_grad():
        model[0].weight[3:] = model[0].weight[:3]
        model[0].bias[3:] = model[0].bias[:3]
    half = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    return model, torch.cat([half, half], dim=1), 4


def conv(generator):
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, stride=2, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    return model, torch.randn(12, 2, 6, 6, generator=generator, dtype=torch.float64), 3


def tokens(generator):
    return Pooled(), torch.randint(11, (12, 5), generator=generator), 3


NETWORKS = {"mlp": mlp, "twins": twins, "conv": conv, "tokens": tokens}
CASES = []
for network in NETWORKS:
    for structure in CURVATURES:
        CASES.append((network, structure, "expand"))
        # `sharing` has an effect on Kronecker factors of layers that have several positions.
        if network in ("conv", "tokens") and structure in ("kfac", "ekfac"):
            CASES.append((network, structure, "reduce"))


def in_every_mode():
    """All cases in all modes.

    Fast are all cases of the first network, where modes and curvatures act on each other. A case
    of another network is fast in one mode; the modes take turns.
    """
    params = []
    for number, (name, curvature, sharing) in enumerate(CASES):
        for turn, mode in enumerate(MODES):
            is_fast = name == "mlp" or number % len(MODES) == turn
            marks = () if is_fast else pytest.mark.slow
            params.append(pytest.param(name, curvature, sharing, mode, marks=marks))
    return params


def case(name, seed):
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, x, classes = NETWORKS[name](generator)
    y = torch.randint(classes, (len(x),), generator=generator)
    return model.double().eval(), x, y


def fit(model, x, y, mode, permutation, sizes, **options):
    """A fit on the first half (`mini`), two halves (`debiased`) or all examples.

    Args:
        permutation: A new order of the examples within each half (and within each fold).
        sizes: How the examples of a half are cut into batches.
    """
    if mode in ("full", "crossfit"):
        subsets = [torch.arange(len(x))]
    elif mode == "mini":
        subsets = [torch.arange(6)]
    else:
        subsets = [torch.arange(6), torch.arange(6, 12)]
    loaders = []
    for subset in subsets:
        indices = subset[permutation(len(subset))]
        loaders.append([(x[i], y[i]) for i in indices.split(sizes)])
    la = Laplace(model, **options)
    folds = FOLDS if mode == "crossfit" else None
    return la.fit_batches(*loaders, num_data=NUM_DATA, folds=folds)


def in_order(n):
    return torch.arange(n)


def within_folds(n):
    """An order that exchanges examples within each fold, i mod K, so that the folds stay equal."""
    order = torch.arange(n)
    for k in range(FOLDS):
        order[k::FOLDS] = order[k::FOLDS].flip(0)
    return order


def assert_same(actual, expected, x, tolerance):
    """The precisions and the functional covariances of two fits agree."""
    precision = actual.posterior.precision.to_dense()
    difference = precision - expected.posterior.precision.to_dense()
    assert difference.abs().max() <= tolerance * precision.abs().max()
    covariance = actual.functional(x)[1]
    difference = covariance - expected.functional(x)[1]
    assert difference.abs().max() <= tolerance * covariance.abs().max()


@pytest.mark.parametrize(("name", "curvature", "sharing", "mode"), in_every_mode())
def test_order_batches_threads_and_memory_change_nothing(name, curvature, sharing, mode):
    model, x, y = case(name, seed=MODES.index(mode))
    options = {"curvature": curvature, "sharing": sharing}
    expected = fit(model, x, y, mode, in_order, 12, **options)
    torch.set_num_threads(2)
    try:
        actual = fit(model, x, y, mode, within_folds, 5, memory_bound=2**15, **options)
    finally:
        torch.set_num_threads(1)
    assert_same(actual, expected, x, 1e-8)


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "full"])
@pytest.mark.parametrize("seed", others_slow(range(8), 0, 1))
def test_a_shuffled_first_batch_gives_the_same_debiased_posterior(curvature, seed):
    """Eight examples of a layer with forty inputs: most directions have no curvature."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 5)).double().eval()
    if curvature == "full":
        model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 5)).double().eval()
    x = torch.randn(16, model[0].in_features).double()
    y = torch.randint(5, (16,))
    fits = []
    for order in (torch.arange(8), torch.randperm(8)):
        la = Laplace(model, curvature=curvature)
        la.fit_batches([(x[order], y[order])], [(x[8:], y[8:])], num_data=NUM_DATA)
        fits.append(la)
    assert_same(*fits, x, 1e-8)


@pytest.mark.parametrize("mode", ["full", "mini", "debiased", "crossfit"])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_single_precision_is_double_precision_to_its_accuracy(curvature, mode):
    """Null spaces in double precision are not taken for noise in single precision.

    The bound is on the variances of the outputs, as a share of the largest.
    """
    model, x, y = case("mlp", seed=1)
    double = fit(model, x, y, mode, in_order, 12, curvature=curvature).functional(x)[1]
    single = fit(model.float(), x.float(), y, mode, in_order, 12, curvature=curvature)
    difference = (single.functional(x.float())[1].double() - double).abs().max()
    assert difference <= 1e-4 * double.abs().max()
