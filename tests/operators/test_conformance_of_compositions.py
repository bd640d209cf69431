"""The conformance suite on inverses and on compositions of networks' operators.

Structures and their compositions are in `test_operators`, the operators of networks in
`test_matrix_free` and `test_kfac_operators`.
"""

import copy
from types import MappingProxyType

import pytest
import torch
from conformance import NetworkConformance, OperatorConformance
from matrices import Opaque, randn
from torch import nn
from torch.func import functional_call, hessian, jacrev

from laplace_debias.curvature import GGN, KFAC, Fisher, Jacobian
from laplace_debias.curvature.losses import Labels, Uniforms, output_loss
from laplace_debias.linalg import inverse
from laplace_debias.operators import Dense, Identity, LowRankPlusDiagonal, assume

TOLERANCE = MappingProxyType({torch.float32: 2e-4, torch.float64: 1e-9})
CASES_BY_CLASS = {}
STOP = {torch.float32: 1e-6, torch.float64: 1e-13}


def definite(n):
    X = randn(n, n)
    return X @ X.T + torch.eye(n, dtype=torch.float64)


def low_rank(like):
    U = randn(5, 2)
    m = randn(2).abs()
    operator = LowRankPlusDiagonal(U.to(like), m.to(like), 0.3)
    return inverse(operator), U @ m.diag() @ U.T + 0.3 * torch.eye(5, dtype=torch.float64)


def by_cg(like, preconditioner=None):
    A = assume(Opaque(definite(4).to(like)), positive_semidefinite=True)
    if preconditioner is not None:
        preconditioner = Dense(preconditioner.to(like))
    return inverse(A, tol=STOP[like.dtype], preconditioner=preconditioner), definite(4)


class Inverse(OperatorConformance):
    tolerance = TOLERANCE

    @pytest.fixture
    def case(self, dtype, device, build):
        operator, dense = build(torch.ones((), dtype=dtype, device=device))
        return operator, torch.linalg.pinv(dense)


@pytest.mark.parametrize(
    "build",
    [by_cg, lambda like: by_cg(like, torch.linalg.inv(1.1 * definite(4)))],
    ids=["cg", "preconditioned"],
)
class TestPositiveInverse(Inverse):
    symmetric = True
    positive_semidefinite = True


@pytest.mark.parametrize("build", [low_rank])
class TestExactInverse(Inverse):
    # The inverse is a diagonal minus a low rank, whose structure does not show that it is positive.
    symmetric, positive_semidefinite = True, False


class OfANetwork(NetworkConformance):
    tolerance = MappingProxyType({torch.float32: 2e-4, torch.float64: 1e-10})

    def problem(self, dtype, device):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).to(device, dtype)
        return net, randn(6, 3).to(device, dtype), torch.tensor([0, 1, 1, 0, 1, 1]).to(device)

    def build_operator(self, net, data, **options):
        raise NotImplementedError

    def dense(self, net, x, y):
        raise NotImplementedError

    def make(self, dtype, device):
        # Once for all tests: recording a network takes longer than they do.
        key = type(self), dtype, device
        if key not in CASES_BY_CLASS:
            net, x, y = self.problem(dtype, device)
            twin = copy.deepcopy(net).double().cpu()
            operator = self.build_operator(net, list(zip(x.split(4), y.split(4), strict=True)))
            CASES_BY_CLASS[key] = net, operator, self.dense(twin, x.double().cpu(), y.cpu())
        self.net, operator, dense = CASES_BY_CLASS[key]
        return operator, dense

    def variants(self, dtype, device):
        net, x, y = self.problem(dtype, device)
        # A recording of a network is slow: few batches, one of which holds a single example.
        batches = list(zip(x.split([1, 5]), y.split([1, 5]), strict=True))
        return [
            self.build_operator(net, [(x, y)], chunk_size=2),
            self.build_operator(net, batches, memory_bound=0),
        ]

    def model(self, operator):
        return self.net


def flat_parameters(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def outputs_of(net, x):
    """Return the outputs `[N, C]` as a function of the flat parameters."""
    named = dict(net.named_parameters())
    sizes = [p.numel() for p in named.values()]

    def function(flat):
        values = {
            name: value.view(parameter.shape)
            for (name, parameter), value in zip(named.items(), flat.split(sizes), strict=True)
        }
        return functional_call(net, values, (x,))

    return function


def dense_ggn(net, loss, x, y):
    f = outputs_of(net, x)
    theta = flat_parameters(net)
    J = jacrev(f)(theta).flatten(0, 1)
    shape = f(theta).shape
    H = hessian(lambda z: loss(z.view(shape), y))(f(theta).flatten())
    return J.T @ H @ J


class TestMonteCarloFisher(OfANetwork):
    symmetric = True
    positive_semidefinite = True

    def build_operator(self, net, data, **options):
        generator = torch.Generator().manual_seed(3)
        return Fisher(
            net,
            nn.CrossEntropyLoss(),
            data,
            fisher="mc",
            mc_samples=2,
            generator=generator,
            **options,
        )

    def dense(self, net, x, y):
        # The labels are drawn by the package; the matrix is computed here.
        seed = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(3)))
        loss = output_loss(nn.CrossEntropyLoss(), None)
        J = jacrev(outputs_of(net, x))(flat_parameters(net))
        total = 0
        for sample in range(2):
            g = loss.drawn_gradient(net(x).detach(), Labels(y), Uniforms(seed, sample, 0))
            rows = torch.einsum("nc,ncd->nd", g, J)
            total = total + rows.T @ rows
        return total / 2 / len(x)


class TestTransposedJacobian(OfANetwork):
    symmetric = False
    positive_semidefinite = False

    def build_operator(self, net, data, **options):
        return Jacobian(net, data, **options).T

    def dense(self, net, x, y):
        return jacrev(outputs_of(net, x))(flat_parameters(net)).flatten(0, 1).T


class TestInverseOfADampedGGN(OfANetwork):
    """Preconditioned by K-FAC."""

    symmetric = True
    positive_semidefinite = True
    tolerance = MappingProxyType({torch.float32: 1e-3, torch.float64: 1e-9})

    def build_operator(self, net, data, **options):
        loss = nn.CrossEntropyLoss()
        A = GGN(net, loss, data, **options)
        shift = 0.5 * Identity(A.shape[0])
        preconditioner = inverse(KFAC(net, loss, data) + shift)
        return inverse(A + shift, tol=STOP[A.dtype], preconditioner=preconditioner)

    def dense(self, net, x, y):
        ggn = dense_ggn(net, nn.CrossEntropyLoss(), x, y)
        return torch.linalg.inv(ggn + 0.5 * torch.eye(len(ggn), dtype=torch.float64))


def test_an_operator_that_is_not_positive_definite_is_named_by_its_inverse():
    matrix = torch.diag(torch.tensor([1.0, -1.0, 2.0, 3.0], dtype=torch.float64))
    A = assume(Opaque(matrix), positive_semidefinite=True)
    with pytest.warns(RuntimeWarning, match=r"(?i)curvature"):
        inverse(A) @ randn(4)


del OfANetwork, Inverse
