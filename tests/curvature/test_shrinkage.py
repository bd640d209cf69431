"""Shrunk eigenvalues: the published formula, synthetic spectra, and correlated rows."""

import math

import oracle
import pytest
import torch
from mpmath import mp

from laplace_debias import Laplace
from laplace_debias.curvature.fits.shrinkage import effective_rows, shrunk_eigenvalues


def close(actual, expected, tolerance=1e-10):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def slow_shrinkage(ascending, n):
    """Equations 4.6 to 4.9 and C.4 of Ledoit and Wolf (2020), number by number, with 60 digits."""
    p = len(ascending)
    kept = [mp.mpf(value) for value in ascending[max(0, p - n) :]]
    h = mp.mpf(n) ** (mp.mpf(-1) / 3)
    root = mp.sqrt(5)
    shrunk = []
    for one in kept:
        density = hilbert = mp.mpf(0)
        for other in kept:
            width = other * h
            x = (one - other) / width
            density += 3 / (4 * root * width) * max(mp.mpf(0), 1 - x * x / 5) / len(kept)
            log = mp.log(abs((root - x) / (root + x)))
            term = -3 * x / (10 * mp.pi) + 3 / (4 * root * mp.pi) * (1 - x * x / 5) * log
            hilbert += term / width / len(kept)
        if p <= n:
            c = mp.mpf(p) / n
            real = 1 - c - mp.pi * c * one * hilbert
            shrunk.append(one / ((mp.pi * c * one * density) ** 2 + real**2))
        else:
            shrunk.append(one / (mp.pi**2 * one**2 * (density**2 + hilbert**2)))
    if p > n:
        log = mp.log((1 + root * h) / (1 - root * h))
        at_zero = 3 / (10 * h**2) + 3 / (4 * root * h) * (1 - 1 / (5 * h**2)) * log
        at_zero *= sum(1 / value for value in kept) / n / mp.pi
        shrunk = [1 / (mp.pi * mp.mpf(p - n) / n * at_zero)] * (p - n) + shrunk
    return torch.tensor([float(value) for value in shrunk], dtype=torch.float64)


def sample(d, n, spectrum):
    rows = torch.randn(n, d).double() * spectrum.sqrt()
    return rows.T @ rows / n


@pytest.mark.parametrize(("d", "n"), [(20, 50), (30, 30), (40, 17)])
def test_the_formula_is_the_published_one(d, n):
    values, _ = oracle.eigen(sample(d, n, torch.logspace(0, -1, d).double()))
    with mp.workdps(60):
        expected = slow_shrinkage(values.clamp_min(0).flip(0).tolist(), n).flip(0)
    close(shrunk_eigenvalues(values.clamp_min(0), float(n)), expected)


@pytest.mark.parametrize(("d", "n"), [(100, 300), (100, 120), (150, 60)])
def test_shrinkage_takes_away_most_of_the_loss_of_the_eigenvalues(d, n):
    """Ledoit and Wolf's population: a fifth of eigenvalues at 1, two fifths at 3 and at 10 each."""
    spectrum = torch.tensor(
        [1.0] * (d // 5) + [3.0] * (2 * d // 5) + [10.0] * (2 * d // 5)
    ).double()
    before = after = 0.0
    for _ in range(5):
        values, U = oracle.eigen(sample(d, n, spectrum))
        truth = (U * (spectrum[:, None] * U)).sum(0)
        before += (values - truth).square().sum()
        after += (shrunk_eigenvalues(values.clamp_min(0), float(n)) - truth).square().sum()
    assert after < 0.1 * before


def test_with_very_many_rows_nothing_shrinks():
    values = torch.logspace(1, -1, 30).double()
    close(shrunk_eigenvalues(values, 1e12), values, 1e-3)
    assert torch.equal(shrunk_eigenvalues(values, math.inf), values)


def test_directions_that_many_rows_do_not_have_stay_without_curvature():
    values = torch.cat([torch.logspace(0, -1, 9).double(), torch.zeros(1).double()])
    assert shrunk_eigenvalues(values, 500.0)[-1] == 0
    assert shrunk_eigenvalues(values, 9.0)[-1] > 0


def test_the_number_of_rows_must_be_positive():
    with pytest.raises(ValueError, match="num_rows is 0"):
        shrunk_eigenvalues(torch.ones(3), 0.0)


def rows_of(examples, folds):
    """`effective_rows` of examples [N, T, d]."""
    total = examples.flatten(0, 1).T @ examples.flatten(0, 1)
    squares = torch.zeros(()).double()
    for k in range(folds):
        part = examples[k::folds].flatten(0, 1)
        squares += (part.T @ part).square().sum() / len(examples[k::folds])
    return effective_rows(total / len(examples), squares, len(examples), folds)


def test_independent_rows_count_one_each_and_repeated_positions_once():
    independent, repeated, halved = [], [], []
    for _ in range(20):
        examples = torch.randn(400, 1, 20).double() * torch.logspace(0, -1, 20).double()
        independent.append(rows_of(examples, 40))
        repeated.append(rows_of(examples.expand(-1, 5, -1), 40))
        # Every other example does not weigh anything.
        halved.append(rows_of(examples * (torch.arange(400) // 40 % 2)[:, None, None], 40))
    for counts, expected in ((independent, 400), (repeated, 400), (halved, 200)):
        counts = torch.tensor(counts)
        assert (counts.mean() - expected).abs() < 4 * counts.std() / len(counts) ** 0.5


def test_groups_that_do_not_differ_are_of_infinitely_many_rows():
    assert rows_of(torch.randn(5, 2, 3).double().repeat_interleave(4, 0), 4) == math.inf


def network():
    model = torch.nn.Sequential(torch.nn.Linear(30, 25), torch.nn.Tanh(), torch.nn.Linear(25, 3))
    return model.double().eval(), torch.randn(40, 30).double(), torch.randint(3, (40,))


def test_a_fit_shrinks_the_factors_eigenvalues():
    model, x, y = network()
    la = Laplace(model).fit_batches([(x[:13], y[:13]), (x[13:], y[13:])], shrinkage=True)
    for layer in ("0", "2"):
        whole = oracle.kfac_factors(model, x, "classification", layer)
        folds = [oracle.kfac_factors(model, x[k::8], "classification", layer) for k in range(8)]
        for side, U_side in (("G", "U_G"), ("A", "U_A")):
            squares = sum(5 * f[side].square().sum() for f in folds)
            values, _ = oracle.eigen(whole[side])
            rows = effective_rows(whole[side], squares, 40, 8)
            expected = shrunk_eigenvalues(values.clamp_min(0), rows)
            block = la.posterior.curvature.blocks[f"{layer}.weight"]
            assert oracle.diagonalises(getattr(block, U_side), whole[side])
            of_side = block.magnitudes.sum(1 if side == "G" else 0)
            close(of_side / of_side.sum(), expected / expected.sum(), 1e-8)


def test_the_mode_takes_the_first_batch():
    model, x, y = network()
    explicit = Laplace(model).fit_batches([(x[:20], y[:20])], num_data=99, shrinkage=True)
    batches = [(x[:20], y[:20]), (x[20:], y[20:])]
    by_mode = Laplace(model).fit(batches, mode="shrinkage", num_data=99)
    for name, block in explicit.posterior.curvature.blocks.items():
        close(by_mode.posterior.curvature.blocks[name].to_dense(), block.to_dense())


def test_identical_groups_are_the_mini_batch():
    model, x, y = network()
    mini = Laplace(model).fit_batches([(x[:5], y[:5])], num_data=99)
    repeated = [(x[:5].repeat_interleave(8, 0), y[:5].repeat_interleave(8, 0))]
    shrunk = Laplace(model).fit_batches(repeated, num_data=99, shrinkage=True)
    for name, block in mini.posterior.curvature.blocks.items():
        close(shrunk.posterior.curvature.blocks[name].to_dense(), block.to_dense(), 1e-9)


@pytest.mark.parametrize(
    ("curvature", "options", "message"),
    [
        ("ekfac", {}, "use curvature=.kfac."),
        ("kfac", {"folds": 2}, "neither magnitudes nor folds"),
        ("kfac", {"magnitudes": []}, "neither magnitudes nor folds"),
    ],
)
def test_shrinkage_that_makes_no_sense_is_refused(curvature, options, message):
    model, x, y = network()
    with pytest.raises(ValueError, match=message):
        Laplace(model, curvature=curvature).fit_batches([(x, y)], shrinkage=True, **options)


def test_one_example_cannot_tell_how_uncertain_it_is():
    model, x, y = network()
    with pytest.raises(ValueError, match="at least 2, got 1"):
        Laplace(model).fit_batches([(x[:1], y[:1])], shrinkage=True)
