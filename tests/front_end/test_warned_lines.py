"""A warning names the line of the user's code that led to it, whatever lies in between."""

import pytest
import torch
from spectra import Matrix
from torch import nn

from laplace_debias import Laplace
from laplace_debias.linalg import eigsh, inverse

X = torch.randn(12, 4)
Y = torch.randn(12, 2)


class Unused(nn.Linear):
    """A layer beside which another one has no effect."""

    def __init__(self):
        super().__init__(4, 2)
        self.beside = nn.Linear(4, 2)


def only_one(caught, says):
    (warning,) = caught
    assert says in str(warning.message)
    return warning.filename


def test_those_of_a_fit():
    assumed = Laplace(nn.Linear(4, 2).eval(), "regression")
    with pytest.warns() as caught:
        assumed.fit([(X, Y)])
    assert only_one(caught, "estimated from the residuals") == __file__
    with pytest.warns() as caught:
        assumed.fit_batches([(X, Y)])
    assert only_one(caught, "estimated from the residuals") == __file__
    with pytest.warns() as caught:
        Laplace(Unused().eval(), "regression", sigma=0.1).fit([(X, Y)], mode="mini", num_data=12)
    assert only_one(caught, "do not depend on ['beside.weight'") == __file__


def test_those_of_algorithms():
    A = Matrix(torch.linspace(1, 100, 64).double().diag(), is_positive_semidefinite=True)
    with pytest.warns() as caught:
        inverse(A, max_iter=2) @ torch.ones(64, dtype=torch.float64)
    assert only_one(caught, "inverse by cg") == __file__
    with pytest.warns() as caught:
        eigsh(Matrix(torch.linspace(1, 100, 64).diag()), k=3, max_matvecs=20)
    assert only_one(caught, "eigenpairs converged in") == __file__
