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

from laplace_debias.curvature import GGN, KFAC, Fisher, Hessian, Jacobian
from laplace_debias.curvature.losses import Uniforms, output_loss
from laplace_debias.linalg import inverse
from laplace_debias.operators import Dense, Identity, LowRankPlusDiagonal, assume

TOLERANCE = MappingProxyType({torch.float32: 2e-4, torch.float64: 1e-9})
MADE = {}
STOP = {torch.float32: 1e-6, torch.float64: 1e-13}


def definite(n):
    X = randn(n, n)
    return X @ X.T + torch.eye(n, dtype=torch.float64)


class TestExactInverse(OperatorConformance):
    # A diagonal less a low rank: that it is positive its structure does not show.
    symmetric, positive_semidefinite = True, False
    tolerance = TOLERANCE

    def make(self, dtype, device):
        U, m = randn(5, 2), randn(2).abs()
        operator = LowRankPlusDiagonal(U.to(device, dtype), m.to(device, dtype), 0.3)
        dense = U @ m.diag() @ U.T + 0.3 * torch.eye(5, dtype=torch.float64)
        return inverse(operator), torch.linalg.inv(dense)


class TestInverseByCG(OperatorConformance):
    symmetric = positive_semidefinite = True
    tolerance = TOLERANCE

    def make(self, dtype, device):
        matrix = definite(4)
        A = assume(Opaque(matrix.to(device, dtype)), positive_semidefinite=True)
        return inverse(A, "cg", tol=STOP[dtype]), torch.linalg.inv(matrix)


class TestPreconditionedInverseByCG(OperatorConformance):
    symmetric = positive_semidefinite = True
    tolerance = TOLERANCE

    def make(self, dtype, device):
        matrix = definite(4)
        A = assume(Opaque(matrix.to(device, dtype)), positive_semidefinite=True)
        near = Dense(torch.linalg.inv(matrix + 0.1 * definite(4)).to(device, dtype))
        return inverse(A, "cg", tol=STOP[dtype], preconditioner=near), torch.linalg.inv(matrix)


class TestInverseByLSMR(OperatorConformance):
    symmetric = positive_semidefinite = False
    tolerance = TOLERANCE

    def make(self, dtype, device):
        matrix = randn(4, 4) + 3 * torch.eye(4, dtype=torch.float64)
        A = Opaque(matrix.to(device, dtype))
        return inverse(A, "lsmr", tol=STOP[dtype]), torch.linalg.inv(matrix)


class TestPseudoInverseByLSMR(OperatorConformance):
    symmetric = positive_semidefinite = False
    tolerance = TOLERANCE

    def make(self, dtype, device):
        matrix = randn(5, 3)
        return inverse(Opaque(matrix.to(device, dtype)), "lsmr", tol=STOP[dtype]), (
            torch.linalg.pinv(matrix)
        )


class TestInverseByNeumann(OperatorConformance):
    symmetric = positive_semidefinite = False
    tolerance = TOLERANCE

    def make(self, dtype, device):
        matrix = torch.eye(4, dtype=torch.float64) + 0.1 * randn(4, 4)
        A = Opaque(matrix.to(device, dtype))
        return inverse(A, "neumann", num_terms=60, scale=1.0), torch.linalg.inv(matrix)


class OfANetwork(NetworkConformance):
    tolerance = MappingProxyType({torch.float32: 2e-4, torch.float64: 1e-10})

    def problem(self, dtype, device):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).to(device, dtype)
        return net, randn(6, 3).to(device, dtype), torch.tensor([0, 1, 1, 0, 1, 1]).to(device)

    def of(self, net, data, **options):
        raise NotImplementedError

    def dense(self, net, x, y):
        raise NotImplementedError

    def make(self, dtype, device):
        # Once for all tests: recording a network takes longer than they do.
        key = type(self), dtype, device
        if key not in MADE:
            net, x, y = self.problem(dtype, device)
            twin = copy.deepcopy(net).double().cpu()
            operator = self.of(net, list(zip(x.split(4), y.split(4), strict=True)))
            MADE[key] = net, operator, self.dense(twin, x.double().cpu(), y.cpu())
        self.net, operator, dense = MADE[key]
        return operator, dense

    def variants(self, dtype, device):
        net, x, y = self.problem(dtype, device)
        # A recording of a network is slow: few batches, one of which holds a single example.
        parts = list(zip(x.split([1, 5]), y.split([1, 5]), strict=True))
        return [self.of(net, [(x, y)], chunk_size=2), self.of(net, parts, memory_bound=0)]

    def model(self, operator):
        return self.net


def flat_parameters(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def outputs_of(net, x):
    """The outputs `[N, C]` as a function of the flat parameters."""
    named = dict(net.named_parameters())
    sizes = [p.numel() for p in named.values()]

    def function(flat):
        parts = zip(named, flat.split(sizes), strict=True)
        values = {name: part.view(named[name].shape) for name, part in parts}
        return functional_call(net, values, (x,))

    return function


def dense_ggn(net, loss, x, y):
    f, theta = outputs_of(net, x), flat_parameters(net)
    J = jacrev(f)(theta).flatten(0, 1)
    shape = f(theta).shape
    H = hessian(lambda z: loss(z.view(shape), y))(f(theta).flatten())
    return J.T @ H @ J


class TestMonteCarloFisher(OfANetwork):
    symmetric = positive_semidefinite = True

    def of(self, net, data, **options):
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
        # The labels are the package's, what is made of them is not.
        seed = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(3)))
        loss = output_loss(nn.CrossEntropyLoss(), None)
        J = jacrev(outputs_of(net, x))(flat_parameters(net))
        total = 0
        for sample in range(2):
            g = loss.drawn_gradient(net(x).detach(), (y,), Uniforms(seed, sample, 0))
            rows = torch.einsum("nc,ncd->nd", g, J)
            total = total + rows.T @ rows
        return total / 2 / len(x)


class TestTransposedJacobian(OfANetwork):
    symmetric = positive_semidefinite = False

    def of(self, net, data, **options):
        return Jacobian(net, data, **options).T

    def dense(self, net, x, y):
        return jacrev(outputs_of(net, x))(flat_parameters(net)).flatten(0, 1).T


class TestGramOfTheJacobian(OfANetwork):
    symmetric = positive_semidefinite = True

    def of(self, net, data, **options):
        J = Jacobian(net, data, **options)
        return J @ J.T

    def dense(self, net, x, y):
        J = jacrev(outputs_of(net, x))(flat_parameters(net)).flatten(0, 1)
        return J @ J.T


class TestHessianMinusGGN(OfANetwork):
    symmetric, positive_semidefinite = True, False

    def of(self, net, data, **options):
        loss = nn.CrossEntropyLoss()
        return Hessian(net, loss, data, **options) - GGN(net, loss, data, **options)

    def dense(self, net, x, y):
        f, loss = outputs_of(net, x), nn.CrossEntropyLoss()
        return hessian(lambda t: loss(f(t), y))(flat_parameters(net)) - dense_ggn(net, loss, x, y)


class TestDampedGGN(OfANetwork):
    symmetric = positive_semidefinite = True

    def of(self, net, data, **options):
        A = GGN(net, nn.CrossEntropyLoss(), data, **options)
        return 2 * A + 0.1 * Identity(A.shape[0])

    def dense(self, net, x, y):
        ggn = dense_ggn(net, nn.CrossEntropyLoss(), x, y)
        return 2 * ggn + 0.1 * torch.eye(len(ggn), dtype=torch.float64)


class TestInverseOfADampedGGN(OfANetwork):
    """Preconditioned by K-FAC."""

    symmetric = positive_semidefinite = True
    tolerance = MappingProxyType({torch.float32: 1e-3, torch.float64: 1e-9})

    def of(self, net, data, **options):
        loss = nn.CrossEntropyLoss()
        A = GGN(net, loss, data, **options)
        shift = 0.5 * Identity(A.shape[0])
        near = inverse(KFAC(net, loss, data) + shift)
        return inverse(A + shift, "cg", tol=STOP[A.dtype], preconditioner=near)

    def dense(self, net, x, y):
        ggn = dense_ggn(net, nn.CrossEntropyLoss(), x, y)
        return torch.linalg.inv(ggn + 0.5 * torch.eye(len(ggn), dtype=torch.float64))


class TestPartOfAGGN(OfANetwork):
    symmetric = positive_semidefinite = True

    def of(self, net, data, **options):
        A = GGN(net, nn.CrossEntropyLoss(), data, **options)
        return A[2:9, 2:9]

    def dense(self, net, x, y):
        return dense_ggn(net, nn.CrossEntropyLoss(), x, y)[2:9, 2:9]


@pytest.mark.parametrize("method", ["cg", "lsmr"])
def test_an_inverse_that_does_not_converge_says_so(method):
    A = assume(Opaque(definite(6)), positive_semidefinite=True)
    with pytest.warns(RuntimeWarning, match=f"inverse by {method}.*max_iter"):
        inverse(A, method, tol=1e-12, max_iter=2) @ randn(6)


def test_an_operator_that_is_not_positive_definite_is_named_by_its_inverse():
    matrix = torch.diag(torch.tensor([1.0, -1.0, 2.0, 3.0], dtype=torch.float64))
    A = assume(Opaque(matrix), positive_semidefinite=True)
    with pytest.warns(RuntimeWarning, match=r"(?i)curvature"):
        inverse(A, "cg") @ randn(4)


del OfANetwork
