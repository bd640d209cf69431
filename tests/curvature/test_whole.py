"""Full and low-rank curvature against dense float64 linear algebra."""

import oracle
import pytest
import torch
from networks_of_tokens import Attention, Bag, randomised

from laplace_debias import Laplace
from laplace_debias.curvature.fits import dense

NUM_DATA, DELTA = 30, 0.6


def conv2d():
    model, x, y, _, _ = oracle.SMALL_MODELS["conv2d"]()
    return model, x, y


def bag():
    x = torch.tensor([[0, 2, 2, 5], [1, 1, 1, 2], [4, 0, 5, 0], [3, 3, 1, 0]])
    return randomised(Bag()), x, torch.tensor([0, 2, 1, 1])


def attention():
    torch.manual_seed(3)
    return randomised(Attention()), torch.randn(4, 5, 4).double(), torch.tensor([0, 2, 1, 1])


CASES = {"conv2d": conv2d, "bag": bag, "attention": attention}


def ggn(la, x):
    return oracle.ggn(la.model, x, "classification", la.param_names)


def precision_from(U, along):
    """The precision N·C + δ, where C = U diag(along) Uᵀ."""
    return NUM_DATA * (U * along) @ U.T + DELTA * torch.eye(len(U)).double()


def assert_posterior(la, x, precision):
    torch.testing.assert_close(la.posterior.precision.to_dense(), precision, rtol=1e-8, atol=1e-9)
    covariance = torch.linalg.inv(precision)
    J = oracle.flat_jacobian(la.model, x, la.param_names)
    expected = J @ covariance @ J.mT
    torch.testing.assert_close(la.functional(x)[1], expected, rtol=1e-7, atol=1e-10)
    variances = la.functional(x, diagonal=True)[1]
    torch.testing.assert_close(variances, expected.diagonal(dim1=1, dim2=2), rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(la.posterior.log_det_precision(), torch.logdet(precision))
    root = la.posterior.scale.to_dense()
    torch.testing.assert_close(root @ root.T, covariance, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_full_is_the_ggn(name):
    model, x, y = CASES[name]()
    la = Laplace(model, curvature="full", prior_precision=DELTA)
    la.fit_batches([(x[:2], y[:2]), (x[2:], y[2:])], num_data=NUM_DATA)
    C = ggn(la, x)
    assert_posterior(la, x, NUM_DATA * C + DELTA * torch.eye(len(C)).double())


@pytest.mark.parametrize("name", CASES)
def test_debiased_full_measures_the_second_data_along_the_first_eigenvectors(name):
    model, x, y = CASES[name]()
    la = Laplace(model, curvature="full", prior_precision=DELTA)
    la.fit_batches([(x[:2], y[:2])], [(x[2:], y[2:])], num_data=NUM_DATA)
    second = ggn(la, x[2:])
    C = torch.zeros_like(second)
    for P in oracle.eigenprojectors(ggn(la, x[:2])):
        C += P * (P * second).sum() / P.trace()
    assert_posterior(la, x, NUM_DATA * C + DELTA * torch.eye(len(C)).double())


@pytest.mark.parametrize("name", CASES)
def test_crossfit_full_measures_folds_along_the_eigenvectors_of_the_others(name):
    """The null space of the other fold, which is most of the space here, gets the mean."""
    model, x, y = CASES[name]()
    la = Laplace(model, curvature="full", prior_precision=DELTA)
    la.fit_batches([(x, y)], num_data=NUM_DATA, folds=2)
    U = oracle.eigen(ggn(la, x))[1]
    along = torch.zeros(len(U)).double()
    for fold, other_fold in ((x[0::2], x[1::2]), (x[1::2], x[0::2])):
        C = ggn(la, fold)
        measured = [
            (P * C).sum() / P.trace()
            for P in oracle.eigenprojectors(ggn(la, other_fold))
            for _ in range(round(float(P.trace())))
        ]
        along += torch.stack(measured) * len(fold) / len(x)
    rank = torch.linalg.matrix_rank(ggn(la, x))
    along[rank:] = along[rank:].mean()
    assert_posterior(la, x, precision_from(U, along))


@pytest.mark.parametrize("mode", ["mini", "debiased", "crossfit"])
@pytest.mark.parametrize("name", CASES)
def test_low_rank_is_the_leading_part_of_the_ggn(name, mode):
    model, x, y = CASES[name]()
    rank = 3
    la = Laplace(model, curvature="lowrank", rank=rank, prior_precision=DELTA)
    first = x if mode == "crossfit" else x[:2]
    if mode == "debiased":
        la.fit_batches([(x[:2], y[:2])], [(x[2:], y[2:])], num_data=NUM_DATA)
    else:
        folds = 2 if mode == "crossfit" else None
        la.fit_batches([(first, y[: len(first)])], num_data=NUM_DATA, folds=folds)
    values, vectors = torch.linalg.eigh(ggn(la, first))
    U = vectors.flip(1)[:, :rank]
    along = values.flip(0)[:rank]
    if mode == "debiased":
        along = (U.T @ ggn(la, x[2:]) @ U).diagonal()
    if mode == "crossfit":
        along = torch.zeros(rank).double()
        for fold, other_fold in ((x[0::2], x[1::2]), (x[1::2], x[0::2])):
            basis = torch.linalg.eigh(ggn(la, other_fold))[1].flip(1)[:, :rank]
            along += (basis.T @ ggn(la, fold) @ basis).diagonal() * len(fold) / len(x)
    assert_posterior(la, x, precision_from(U, along))


def test_compressed_rows_have_the_same_leading_directions(monkeypatch):
    """The many rows have no more directions than the number of rows that are kept."""
    model, x, y = conv2d()
    few = [(x[:4], y[:4]), (x[4:6], y[4:6])]
    fits = []
    for num_kept_rows in (dense.KEPT_ROWS, 0):
        monkeypatch.setattr(dense, "KEPT_ROWS", num_kept_rows)
        la = Laplace(model, curvature="lowrank", rank=3).fit_batches(4 * few)
        fits.append(la.posterior.precision.to_dense())
    torch.testing.assert_close(fits[0], fits[1], rtol=1e-10, atol=1e-10)


def test_there_are_no_more_directions_than_jacobian_rows():
    model, x, y = conv2d()
    la = Laplace(model, curvature="lowrank", rank=50).fit_batches([(x[:1], y[:1])])
    assert la.posterior.curvature.blocks[dense.DENSE_BLOCK].U.shape[1] == 2  # C − 1 columns


def test_a_rank_belongs_to_low_rank_and_factors():
    model, _, _ = conv2d()
    with pytest.raises(
        ValueError, match='`rank` applies only to curvature="kfac", "ekfac" and "lowrank"'
    ):
        Laplace(model, curvature="full", rank=3)
    with pytest.raises(ValueError, match="rank must be at least 1"):
        Laplace(model, curvature="lowrank", rank=0)


def rows_of_spectrum(num_rows, eigenvalues):
    """Rows R `[num_rows, 900]` such that RᵀR has these eigenvalues, and the eigenvectors."""
    torch.manual_seed(4)
    size = len(eigenvalues)
    V = torch.linalg.qr(torch.randn(num_rows, size, dtype=torch.float64)).Q
    U = torch.linalg.qr(torch.randn(900, size, dtype=torch.float64)).Q
    return (V * eigenvalues.sqrt()) @ U.T, U


def test_the_leading_pairs_of_many_rows_come_without_all_others(monkeypatch):
    """A triple eigenvalue comes three times."""
    eigenvalues = torch.logspace(0, -4, 60, dtype=torch.float64)
    eigenvalues[4:7] = eigenvalues[4]
    rows, U = rows_of_spectrum(800, eigenvalues)
    sizes = []
    decompose = dense.descending_eigenpairs
    monkeypatch.setattr(
        dense,
        "descending_eigenpairs",
        lambda A, name: sizes.append(len(A)) or decompose(A, name),
    )
    values, vectors = dense.leading_pairs(rows, 20, torch.float64)
    assert not sizes
    torch.testing.assert_close(values, eigenvalues[:20], rtol=1e-11, atol=0)
    expected = (U[:, :20] * eigenvalues[:20]) @ U[:, :20].T
    torch.testing.assert_close((vectors * values) @ vectors.T, expected, rtol=0, atol=1e-12)


def test_all_pairs_of_few_rows_are_those_of_their_matrix(monkeypatch):
    """The matrix `[D, D]` is not decomposed, and the eigenvectors are a complete basis."""
    eigenvalues = torch.logspace(0, -6, 30, dtype=torch.float64)
    rows, U = rows_of_spectrum(30, eigenvalues)
    monkeypatch.setattr(dense, "gram", None)
    values, vectors = dense.leading_pairs(rows, None, torch.float64)
    assert values.shape == (900,)
    torch.testing.assert_close(values[:30], eigenvalues, rtol=1e-9, atol=0)
    assert (values[30:] == 0).all()
    expected = (U * eigenvalues) @ U.T
    torch.testing.assert_close((vectors * values) @ vectors.T, expected, rtol=0, atol=1e-13)
    identity = torch.eye(900, dtype=torch.float64)
    torch.testing.assert_close(vectors.T @ vectors, identity, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_passes", [1, 9])
def test_full_keeps_few_rows_and_multiplies_out_more(num_passes):
    """Either way the posterior is that of the GGN of all examples."""
    model, x, y = conv2d()
    num_rows = 2 * len(x)  # C − 1 columns each
    num_parameters = sum(p.numel() for p in model.parameters())
    assert (3 * num_rows * num_passes > 2 * num_parameters) == (num_passes > 1)
    la = Laplace(model, curvature="full", prior_precision=DELTA)
    la.fit_batches(num_passes * [(x, y)], num_data=NUM_DATA)
    assert_posterior(la, x, NUM_DATA * ggn(la, x) + DELTA * torch.eye(num_parameters).double())
