"""Cross-fitted magnitudes against a slow loop that is written out fold by fold."""

import oracle
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from laplace_debias import Laplace
from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batches import consecutive
from laplace_debias.curvature.fits import crossfit
from laplace_debias.curvature.fits.crossfit import (
    crossfit_magnitudes,
    numerical_rank,
    split_folds,
)
from laplace_debias.curvature.fits.degenerate import resolution
from laplace_debias.curvature.fits.directions import Eigenpairs
from laplace_debias.system.ranks import Ranks

ROUNDING = 1e-10


def close(actual, expected, tolerance=ROUNDING):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(1e-12)


def slow_magnitudes(rows, folds):
    """Average, over the folds, the magnitudes of a fold in the eigenbasis of the other folds.

    Example i belongs to fold i mod K.

    Args:
        rows: Examples, [N, d], or of several positions each, [N, T, d].
        folds: K.
    """
    rows = rows if rows.ndim == 3 else rows[:, None]
    d = rows.shape[2]
    total = torch.zeros(rows.shape[2], dtype=rows.dtype)
    for k in range(folds):
        fold = [example for i, example in enumerate(rows) if i % folds == k]
        other_folds = torch.cat([example for i, example in enumerate(rows) if i % folds != k])
        _, singular, Vt = torch.linalg.svd(other_folds)
        rank = int((singular > 1e-9 * singular[0]).sum())
        curvature = sum(example.T @ example for example in fold) / len(fold)
        along = [v @ curvature @ v for v in Vt[:rank]]
        if rank < d:
            # The mean over the null space of the other folds, whatever its basis.
            mean = sum(v @ curvature @ v for v in Vt[rank:]) / (d - rank)
            along += [mean] * (d - rank)
        total += torch.stack(along) * len(fold) / len(rows)
    return total


def are_eigenvalues_separate(rows, folds):
    """Whether no eigenvalues of the other folds nearly coincide, except in the null space."""
    for k in range(folds):
        other_folds = torch.cat([example for i, example in enumerate(rows) if i % folds != k])
        values = torch.linalg.svdvals(other_folds).square()
        rank = int((values > 1e-18 * values[0]).sum())
        values = torch.cat([values[:rank], values.new_zeros(int(rank < rows.shape[2]))])
        if len(values) > 1 and float(-values.diff().max()) <= resolution(rows.dtype) * values[0]:
            return False
    return True


def factors_by_fold(rows, folds):
    """Factors summed over the examples of each fold, and the folds' sizes."""
    rows = rows if rows.ndim == 3 else rows[:, None]
    factors = []
    sizes = []
    for k in range(folds):
        fold = rows[k::folds]
        factors.append(fold.flatten(0, 1).T @ fold.flatten(0, 1))
        sizes.append(len(fold))
    return torch.stack(factors), sizes


def magnitudes_in_double(factors, sizes):
    """Compute the magnitudes of the factors in double precision."""
    mean_pair = crossfit.descending_eigenpairs(factors.sum(0) / sum(sizes))
    return crossfit_magnitudes(factors.unbind(), sizes, mean_pair, torch.float64)


@settings(max_examples=30, deadline=None)
@given(
    d=st.integers(2, 30),
    examples=st.integers(6, 24),
    positions=st.integers(1, 3),
    folds=st.integers(2, 6),
    seed=st.integers(0, 2**16),
)
def test_magnitudes_equal_a_slow_loop_at_any_rank(d, examples, positions, folds, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(examples, positions, d, generator=generator, dtype=torch.float64)
    rows *= torch.logspace(0, -1, d).double()
    # The magnitudes of nearly equal eigenvalues are averaged, which the loop does not do.
    assume(are_eigenvalues_separate(rows, folds))
    close(magnitudes_in_double(*factors_by_fold(rows, folds)), slow_magnitudes(rows, folds), 1e-10)


@pytest.mark.parametrize(("d", "examples"), [(12, 60), (40, 12)])
def test_the_bases_at_hand_are_made_use_of_to_the_same_result(d, examples):
    factors, sizes = factors_by_fold(torch.randn(examples, d).double(), 4)
    mean_pair = Eigenpairs(*oracle.eigen(factors.sum(0) / examples))
    actual = crossfit_magnitudes(factors.unbind(), sizes, mean_pair, torch.float64)
    close(actual, magnitudes_in_double(factors, sizes))


def test_magnitudes_do_not_depend_on_the_basis_of_a_null_space():
    """A rotation mixes the coordinates that are zero in all examples with the others."""
    rows = torch.cat([torch.randn(10, 8), torch.zeros(10, 22)], dim=1).double()
    rotation = torch.linalg.qr(torch.randn(30, 30).double())[0]
    expected = magnitudes_in_double(*factors_by_fold(rows, 5))
    close(magnitudes_in_double(*factors_by_fold(rows @ rotation, 5)), expected)


def test_null_directions_get_the_mean_of_what_random_bases_of_them_measure():
    factors, sizes = factors_by_fold(torch.randn(8, 20).double(), 4)
    measured = []
    for _ in range(400):
        diagonals = []
        for factor in factors:
            values, U = oracle.eigen(factors.sum(0) - factor)
            null = U[:, values < 1e-9]
            rotation = torch.linalg.qr(torch.randn(null.shape[1], null.shape[1]).double())[0]
            null = null @ rotation
            diagonals.append((null.T @ factor @ null).diagonal())
        measured.append(torch.stack(diagonals).sum(0) / 8)
    measured = torch.stack(measured)
    expected = magnitudes_in_double(factors, sizes)[6:]
    error = measured.std(0) / len(measured) ** 0.5
    assert ((measured.mean(0) - expected).abs() < 4.5 * error).all()


def test_folds_of_a_factor_of_low_rank_are_decomposed_within_its_range(monkeypatch):
    factors, sizes = factors_by_fold(torch.randn(12, 100).double(), 6)
    mean_pair = Eigenpairs(*oracle.eigen(factors.sum(0) / 12))
    sizes_seen = []
    decompose = crossfit.descending_eigenpairs
    monkeypatch.setattr(
        crossfit,
        "descending_eigenpairs",
        lambda factor: sizes_seen.append(len(factor)) or decompose(factor),
    )
    crossfit_magnitudes(factors.unbind(), sizes, mean_pair, torch.float64)
    assert sizes_seen == [12] * 6


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_rounding_is_no_curvature(precision):
    rows = torch.randn(10, 40, dtype=precision)
    values, _ = oracle.eigen((rows.T @ rows).double())
    assert numerical_rank(values, precision) == 10
    assert numerical_rank(torch.zeros(3)) == 0


def test_of_diagonal_factors_the_entries_are_the_magnitudes():
    factors = torch.rand(3, 7).double()
    sizes = [2, 2, 1]
    close(magnitudes_in_double(factors, sizes), factors.sum(0) / 5)


def test_folds_take_turns_and_no_two_examples_share_an_index():
    """With a shared index, the labels of two examples would be drawn with the same numbers."""
    numbers = torch.arange(14)
    batches = [Batch(chunk, chunk) for chunk in numbers.split([5, 2, 7])]
    folds = split_folds(Ranks(), consecutive(batches), 3)
    indices = []
    for fold, fold_batches in enumerate(folds):
        assert torch.cat([batch.inputs for batch in fold_batches]).equal(numbers[fold::3])
        for batch in fold_batches:
            indices += range(batch.first_index, batch.first_index + batch.num_examples)
    assert indices == numbers.tolist()


def wide_network():
    """Factors of lower rank than their size: 12 examples, 40 inputs, 20 hidden units."""
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 20), torch.nn.Tanh(), torch.nn.Linear(20, 2, bias=False)
    )
    return model.double().eval(), torch.randn(12, 40).double(), torch.randn(12, 2).double()


def gradient_rows(model, x, layer):
    """Columns of the loss Hessian's root (the identity) pulled back to a layer, [N, 2, d_out]."""
    with torch.no_grad():
        if layer == "2":
            return torch.eye(2).double().expand(len(x), 2, 2)
        hidden = torch.tanh(model[0](x))
        return model[2].weight * (1 - hidden.square())[:, None, :]


def test_kfac_of_few_examples_equals_the_slow_loop():
    model, x, y = wide_network()
    la = Laplace(model, "regression", sigma=1.0).fit_batches(
        [(x[:7], y[:7]), (x[7:], y[7:])], folds=4
    )
    block = la.posterior.curvature.blocks["0.weight"]
    expected = torch.outer(slow_magnitudes(gradient_rows(model, x, "0"), 4), slow_magnitudes(x, 4))
    close(block.magnitudes, expected)
    assert oracle.diagonalises(block.U_A, x.T @ x / 12)


def test_ekfac_of_few_examples_equals_the_slow_loop():
    """In the null space of each factor, the magnitudes are averaged."""
    model, x, y = wide_network()
    la = Laplace(model, "regression", "ekfac", sigma=1.0).fit_batches([(x, y)], folds=4)
    g = gradient_rows(model, x, "0")
    expected = torch.zeros(20, 40).double()
    for k in range(4):
        is_in_fold = torch.arange(12) % 4 == k
        bases = []
        for rows in (g[~is_in_fold].flatten(0, 1), x[~is_in_fold]):
            _, singular, Vt = torch.linalg.svd(rows)
            bases.append((Vt.T, int((singular > 1e-9 * singular[0]).sum())))
        (U_G, rank_G), (U_A, rank_A) = bases
        squares = torch.zeros(20, 40).double()
        for i in is_in_fold.nonzero().flatten():
            for column in g[i]:
                squares += torch.outer(U_G.T @ column, U_A.T @ x[i]).square() / 12
        squares[rank_G:] = squares[rank_G:].mean(0, keepdim=True)
        squares[:, rank_A:] = squares[:, rank_A:].mean(1, keepdim=True)
        expected += squares
    close(la.posterior.curvature.blocks["0.weight"].magnitudes, expected)


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
def test_folds_of_identical_examples_are_the_mini_batch_at_low_rank(curvature):
    model, x, y = wide_network()
    mini = Laplace(model, "regression", curvature).fit_batches([(x, y)], num_data=100)
    repeated = [(x.repeat_interleave(3, 0), y.repeat_interleave(3, 0))]
    cross = Laplace(model, "regression", curvature).fit_batches(repeated, num_data=100, folds=3)
    for name, block in mini.posterior.curvature.blocks.items():
        close(cross.posterior.curvature.blocks[name].to_dense(), block.to_dense(), 1e-10)
