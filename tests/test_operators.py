import doctest
import importlib

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import torch
from conformance import NetworkConformance, OperatorConformance
from hypothesis import given, settings
from hypothesis import strategies as st

from laplace_debias.operators import (
    BlockDiagonal,
    Dense,
    Diagonal,
    EigenKronecker,
    Identity,
    Kronecker,
    LinearOperator,
    LowRankPlusDiagonal,
    ParameterLayout,
    Permutation,
    Product,
    Scaled,
    SubMatrix,
    Sum,
    Transpose,
    assume,
    from_scipy,
)


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def rotation(n, seed=0):
    return torch.linalg.qr(randn(n, n, seed=seed)).Q


def as_numpy(*tensors):
    return [tensor.numpy() for tensor in tensors]


class Opaque(LinearOperator):
    """A matrix that shows no structure: what an operator of a network looks like."""

    def __init__(self, matrix, layout=None):
        self.matrix, self._layout = matrix, layout

    shape = property(lambda self: tuple(self.matrix.shape))
    dtype = property(lambda self: self.matrix.dtype)
    device = property(lambda self: self.matrix.device)
    layout = property(lambda self: self._layout)

    def _matmat(self, matrix):
        assert matrix.shape[1] > 0
        return self.matrix @ matrix

    @property
    def T(self):  # noqa: N802
        return Transpose(self, lambda matrix: self.matrix.T @ matrix)


class TestIdentity(OperatorConformance):
    symmetric = positive_semidefinite = True

    def make(self, dtype, device):
        return Identity(5, dtype, device), torch.from_numpy(np.identity(5))


class TestDiagonal(OperatorConformance):
    symmetric, positive_semidefinite = True, False

    def make(self, dtype, device):
        values = randn(6)
        return Diagonal(values.to(device, dtype)), torch.from_numpy(np.diag(values.numpy()))


class TestDense(OperatorConformance):
    symmetric = positive_semidefinite = False

    def make(self, dtype, device):
        matrix = randn(4, 6)
        return Dense(matrix.to(device, dtype)), matrix


class TestKronecker(OperatorConformance):
    symmetric = positive_semidefinite = False

    def make(self, dtype, device):
        A, B, C = randn(2, 3), randn(3, 2), randn(2, 2)
        operator = Kronecker(*(M.to(device, dtype) for M in (A, B)), Dense(C.to(device, dtype)))
        a, b, c = as_numpy(A, B, C)
        return operator, torch.from_numpy(np.kron(np.kron(a, b), c))


class TestKroneckerOfGrams(OperatorConformance):
    symmetric = positive_semidefinite = True

    def make(self, dtype, device):
        X = randn(2, 3)
        factor = Dense(X.to(device, dtype))
        operator = Kronecker(factor.T @ factor, Identity(2))
        return operator, torch.from_numpy(np.kron((X.T @ X).numpy(), np.identity(2)))


@pytest.mark.parametrize("identities", ["", "U_G", "U_A", "U_G U_A"], scope="class")
class TestEigenKronecker(OperatorConformance):
    symmetric = positive_semidefinite = True

    @pytest.fixture
    def case(self, dtype, device, identities):
        self.identities = identities
        return self.make(dtype, device)

    def make(self, dtype, device):
        U_G, U_A = rotation(3), rotation(4)
        magnitudes = randn(3, 4).abs()
        G = torch.eye(3, dtype=torch.float64) if "U_G" in self.identities else U_G
        A = torch.eye(4, dtype=torch.float64) if "U_A" in self.identities else U_A
        operator = EigenKronecker(
            None if "U_G" in self.identities else U_G.to(device, dtype),
            None if "U_A" in self.identities else U_A.to(device, dtype),
            magnitudes.to(device, dtype),
        )
        basis = np.kron(*as_numpy(G, A))
        return operator, torch.from_numpy(basis @ np.diag(magnitudes.numpy().ravel()) @ basis.T)


class TestBlockDiagonal(OperatorConformance):
    symmetric = positive_semidefinite = False

    def make(self, dtype, device):
        A, d, B = randn(2, 2), randn(3), randn(1, 1)
        blocks = {
            "a": Dense(A.to(device, dtype)),
            "b": Diagonal(d.to(device, dtype)),
            "c": Opaque(B.to(device, dtype)),
        }
        dense = scipy.linalg.block_diag(A.numpy(), np.diag(d.numpy()), B.numpy())
        return BlockDiagonal(blocks), torch.from_numpy(dense)


class TestLowRankPlusDiagonal(OperatorConformance):
    symmetric, positive_semidefinite = True, False

    def make(self, dtype, device):
        parts = randn(6, 2), randn(2), randn(6)
        U, m, d = as_numpy(*parts)
        operator = LowRankPlusDiagonal(*(part.to(device, dtype) for part in parts))
        return operator, torch.from_numpy(U @ np.diag(m) @ U.T + np.diag(d))


class TestLowRankPlusNumber(OperatorConformance):
    symmetric = positive_semidefinite = True

    def make(self, dtype, device):
        U, m = randn(5, 2), randn(2).abs()
        operator = LowRankPlusDiagonal(U.to(device, dtype), m.to(device, dtype), 0.3)
        return operator, U @ m.diag() @ U.T + 0.3 * torch.from_numpy(np.identity(5))


class TestPermutation(OperatorConformance):
    symmetric = positive_semidefinite = False

    def make(self, dtype, device):
        index = torch.tensor([2, 0, 3, 1])
        dense = torch.zeros(4, 4, dtype=torch.float64)
        for row, column in enumerate(index.tolist()):
            dense[row, column] = 1
        return Permutation(index.to(device), dtype), dense


class TestFromSciPy(OperatorConformance):
    def make(self, dtype, device):
        matrix = scipy.sparse.random(5, 4, density=0.5, random_state=0, format="csr")
        operator = from_scipy(matrix, dtype, device)
        return operator, torch.from_numpy(matrix.toarray())


class TestOpaque(OperatorConformance):
    symmetric = positive_semidefinite = False

    def make(self, dtype, device):
        matrix = randn(4, 5)
        return Opaque(matrix.to(device, dtype)), matrix


class TestSum(OperatorConformance):
    symmetric = positive_semidefinite = False

    def make(self, dtype, device):
        A, d = randn(5, 5), randn(5)
        operator = Opaque(A.to(device, dtype)) + Diagonal(d.to(device, dtype)) - Identity(5)
        assert isinstance(operator, Sum)
        assert len(operator.terms) == 2
        return operator, A + torch.from_numpy(np.diag(d.numpy() - 1))


class TestSumOfSemidefinite(OperatorConformance):
    symmetric = positive_semidefinite = True

    def make(self, dtype, device):
        X = randn(3, 5)
        J = Opaque(X.to(device, dtype))
        operator = J.T @ J + 2 * Identity(5)
        return operator, X.T @ X + torch.from_numpy(2 * np.identity(5))


class TestScaled(OperatorConformance):
    symmetric = positive_semidefinite = False

    def make(self, dtype, device):
        A = randn(3, 5)
        operator = torch.tensor(-0.5) * Opaque(A.to(device, dtype)) * 3
        assert isinstance(operator, Scaled)
        return operator, -1.5 * A


class TestProduct(OperatorConformance):
    symmetric = positive_semidefinite = False

    def make(self, dtype, device):
        A, B, C = randn(3, 5), randn(5, 2), randn(2, 4)
        operator = Opaque(A.to(device, dtype)) @ Dense(B.to(device, dtype))
        operator = operator @ (2 * Opaque(C.to(device, dtype)))
        return operator, 2 * torch.linalg.multi_dot([A, B, C])


class TestSandwich(OperatorConformance):
    symmetric, positive_semidefinite = True, False

    def make(self, dtype, device):
        A, d = randn(3, 5), torch.tensor([1.0, -2, 3], dtype=torch.float64)
        J = Opaque(A.to(device, dtype))
        return J.T @ Diagonal(d.to(device, dtype)) @ J, A.T @ d.diag() @ A


class TestSubMatrix(OperatorConformance):
    symmetric = positive_semidefinite = False

    def make(self, dtype, device):
        A = randn(6, 7)
        operator = Opaque(A.to(device, dtype))[[4, 0, 0, 5], 1:6][:, ::2]
        assert isinstance(operator, SubMatrix)
        assert isinstance(operator.operator, Opaque)
        return operator, A[[4, 0, 0, 5]][:, [1, 3, 5]]


class TestPrincipalSubMatrix(OperatorConformance):
    symmetric = positive_semidefinite = True

    def make(self, dtype, device):
        X = randn(4, 6)
        J = Opaque(X.to(device, dtype))
        return (J.T @ J)[1:5, 1:5], (X.T @ X)[1:5, 1:5]


class TestAssumed(OperatorConformance):
    symmetric = positive_semidefinite = True

    def make(self, dtype, device):
        X = randn(4, 6)
        G = X.T @ X
        return assume(Opaque(G.to(device, dtype)), positive_semidefinite=True), G


class OfANetwork(LinearOperator):
    """The Jacobian of a network's summed outputs, in batches and chunks of columns."""

    is_symmetric = is_positive_semidefinite = False
    layout = None

    def __init__(self, model, data, batch_size, chunk_size):
        self.model, self.data = model, data
        self.batch_size, self.chunk_size = batch_size, chunk_size

    shape = property(lambda self: (2, self.model.weight.numel()))
    dtype = property(lambda self: self.model.weight.dtype)
    device = property(lambda self: self.model.weight.device)

    def _matmat(self, matrix):
        chunks = []
        for chunk in matrix.split(self.chunk_size, dim=1):
            V = chunk.T.unflatten(1, self.model.weight.shape)
            batches = self.data.split(self.batch_size)
            chunks.append(sum((x @ V.mT).sum(1) for x in batches).T)
        return torch.cat(chunks, dim=1)

    @property
    def T(self):  # noqa: N802
        total = self.data.sum(0)
        return Transpose(self, lambda U: torch.einsum("ok,i->oik", U, total).flatten(0, 1))


class TestNetworkConformance(NetworkConformance):
    symmetric = False

    def build(self, dtype, device, batch_size, chunk_size):
        model = torch.nn.Linear(3, 2, bias=False).to(device, dtype)
        model.weight.grad = torch.ones_like(model.weight)
        return OfANetwork(model, randn(8, 3).to(device, dtype), batch_size, chunk_size)

    def make(self, dtype, device):
        sums = randn(8, 3).sum(0).numpy()
        dense = torch.from_numpy(np.kron(np.identity(2), sums[None]))
        return self.build(dtype, device, 8, 10), dense

    def variants(self, dtype, device):
        return [self.build(dtype, device, 3, 10), self.build(dtype, device, 8, 2)]

    def model(self, operator):
        return operator.model


class Broken(Opaque):
    """An operator with one fault."""

    def __init__(self, fault):
        super().__init__(randn(4, 4))
        self.fault = fault

    is_symmetric = property(lambda self: self.fault == "claim")
    is_positive_semidefinite = is_symmetric

    def _matmat(self, matrix):
        if self.fault == "input":
            return matrix.mul_(2)
        if self.fault == "dtype":
            return (self.matrix @ matrix).float()
        if self.fault == "nonlinear":
            return self.matrix @ matrix + 1
        if self.fault == "columns":
            return self.matrix @ matrix + matrix.flip(1)
        if self.fault == "memory":
            return self.matrix @ matrix.as_strided(matrix.shape, (matrix.shape[1], 1))
        return self.matrix @ matrix

    @property
    def T(self):  # noqa: N802
        matrix = self.matrix if self.fault == "adjoint" else self.matrix.T
        return Transpose(self, lambda columns: matrix @ columns)


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("adjoint", "test_adjoint"),
        ("adjoint", "test_to_scipy"),
        ("adjoint", "test_row_vectors_from_the_left"),
        ("claim", "test_claims_hold"),
        ("columns", "test_a_vector_is_a_column_of_a_matrix"),
        ("columns", "test_dense"),
        ("dtype", "test_products_with_vector_and_matrix"),
        ("input", "test_nothing_given_is_modified"),
        ("memory", "test_memory_order_does_not_matter"),
        ("nonlinear", "test_linear"),
        ("nonlinear", "test_compositions"),
        ("nonlinear", "test_sub_matrices"),
    ],
)
def test_the_conformance_suite_finds_faults(fault, test):
    case = Broken(fault), randn(4, 4)
    getattr(OperatorConformance(), test)((Broken(None), randn(4, 4)))
    with pytest.raises(AssertionError):
        getattr(OperatorConformance(), test)(case)


@pytest.mark.parametrize("change", ["weight", "gradient", "flag", "mode", "hook"])
def test_the_conformance_suite_finds_a_changed_model(change):
    suite = TestNetworkConformance()
    operator, dense = suite.make(torch.float64, "cpu")
    suite.test_the_model_is_untouched((operator, dense))
    product = operator._matmat

    def spoil(matrix):
        model = operator.model
        {
            "weight": lambda: model.weight.data.mul_(2),
            "gradient": lambda: setattr(model.weight, "grad", None),
            "flag": lambda: model.weight.requires_grad_(False),
            "mode": model.eval,
            "hook": lambda: model.register_forward_hook(lambda *_: None),
        }[change]()
        return product(matrix)

    operator._matmat = spoil
    with pytest.raises(AssertionError):
        suite.test_the_model_is_untouched((operator, dense))


# Compositions keep the structure.

SIZE = 6


def eigen_kronecker(seed=0):
    return EigenKronecker(rotation(2), rotation(3), randn(2, 3, seed=seed))


def shared(seed):
    """Two operators with the same directions: the same tensors, not equal ones."""
    first = eigen_kronecker(seed)
    return first, EigenKronecker(first.U_G, first.U_A, randn(2, 3, seed=seed + 1))


STRUCTURED = {
    "identity": lambda: 0.7 * Identity(SIZE, torch.float64),
    "diagonal": lambda: Diagonal(randn(SIZE)),
    "dense": lambda: Dense(randn(SIZE, SIZE)),
    "kronecker": lambda: Kronecker(randn(2, 2), randn(3, 3)),
    "eigen-kronecker": eigen_kronecker,
    "axes": lambda: EigenKronecker(None, None, randn(2, 3)),
    "block-diagonal": lambda: BlockDiagonal(
        {"a": Dense(randn(2, 2)), "b": EigenKronecker(rotation(4), None, randn(4, 1))}
    ),
    "low-rank": lambda: LowRankPlusDiagonal(randn(SIZE, 2), randn(2), randn(SIZE)),
    "low-rank-number": lambda: LowRankPlusDiagonal(randn(SIZE, 2), randn(2), 0.5),
}


@pytest.mark.parametrize("name", [name for name in STRUCTURED if name != "kronecker"])
def test_a_shifted_structure_keeps_its_type(name):
    A = STRUCTURED[name]()
    dense = A.to_dense()
    eye = torch.eye(SIZE, dtype=torch.float64)
    for shifted in (A + 0.1 * Identity(SIZE), 0.1 * Identity(SIZE) + A):
        assert type(shifted) is type(A)
        torch.testing.assert_close(shifted.to_dense(), dense + 0.1 * eye)
    torch.testing.assert_close((A - Identity(SIZE)).to_dense(), dense - eye)
    torch.testing.assert_close((Identity(SIZE) - A).to_dense(), eye - dense)


@pytest.mark.parametrize("name", STRUCTURED)
def test_a_scaled_structure_keeps_its_type_and_its_gradient(name):
    A = STRUCTURED[name]()
    scalar = torch.tensor(-1.5, dtype=torch.float64, requires_grad=True)
    scaled = scalar * A
    assert type(scaled) is type(A)
    torch.testing.assert_close(scaled.to_dense(), -1.5 * A.to_dense())
    (gradient,) = torch.autograd.grad(scaled.to_dense().sum(), scalar)
    torch.testing.assert_close(gradient, A.to_dense().sum())
    torch.testing.assert_close((A / 4).to_dense(), A.to_dense() / 4)


@pytest.mark.parametrize("combine", [torch.add, torch.matmul], ids=["sum", "product"])
@pytest.mark.parametrize(
    "pair",
    [
        lambda: (Diagonal(randn(6)), Diagonal(randn(6, seed=1))),
        lambda: (Diagonal(randn(6)), Dense(randn(6, 6))),
        lambda: (Dense(randn(6, 6)), Diagonal(randn(6))),
        lambda: shared(0),
        lambda: (EigenKronecker(None, None, randn(2, 3)), Diagonal(randn(6))),
        lambda: (Diagonal(randn(6)), EigenKronecker(None, None, randn(2, 3))),
        lambda: tuple(
            BlockDiagonal({"a": Dense(randn(2, 2, seed=s)), "b": Diagonal(randn(3, seed=s))})
            for s in (0, 1)
        ),
    ],
)
def test_pairs_of_a_structure_keep_it(pair, combine):
    left, right = pair()
    both = left + right if combine is torch.add else left @ right
    assert not isinstance(both, Sum | Product)
    torch.testing.assert_close(both.to_dense(), combine(left.to_dense(), right.to_dense()))


def test_sums_with_low_rank_keep_it():
    A, B = STRUCTURED["low-rank"](), STRUCTURED["low-rank-number"]()
    d = Diagonal(randn(SIZE, seed=3))
    for both in (A + B, B + A, A + d, d + B):
        assert isinstance(both, LowRankPlusDiagonal)
    torch.testing.assert_close((A + B).to_dense(), A.to_dense() + B.to_dense())
    torch.testing.assert_close((d + B).to_dense(), d.to_dense() + B.to_dense())


def test_kronecker_products_multiply_factor_by_factor():
    A, B = Kronecker(randn(2, 3), randn(2, 2)), Kronecker(randn(3, 2), randn(2, 4))
    assert isinstance(A @ B, Kronecker)
    torch.testing.assert_close((A @ B).to_dense(), A.to_dense() @ B.to_dense())
    unfit = Kronecker(randn(2, 2), randn(3, 3))
    assert isinstance(A @ unfit, Product)
    torch.testing.assert_close((A @ unfit).to_dense(), A.to_dense() @ unfit.to_dense())


def test_permutations_multiply_into_permutations():
    P, Q = Permutation(torch.tensor([2, 0, 1, 3])), Permutation(torch.tensor([3, 1, 0, 2]))
    M = randn(4, 4)
    assert isinstance(P @ Q, Permutation)
    torch.testing.assert_close((P @ Q).to_dense(), P.to_dense() @ Q.to_dense())
    p = P.to_dense().double()
    torch.testing.assert_close((P @ Dense(M)).to_dense(), p @ M)
    torch.testing.assert_close((Dense(M) @ P).to_dense(), M @ p)
    similar = P @ eigen_kronecker()[:4, :4] @ P.T
    assert similar.is_symmetric


def test_equal_directions_in_other_memory_are_not_taken_for_the_same():
    A = eigen_kronecker()
    B = EigenKronecker(A.U_G.clone(), A.U_A, A.magnitudes)
    assert isinstance(A + B, Sum)
    torch.testing.assert_close((A + B).to_dense(), 2 * A.to_dense())


def test_blocks_under_other_names_are_added_lazily():
    blocks = [Dense(randn(2, 2)), Diagonal(randn(3))]
    A = BlockDiagonal(dict(zip("ab", blocks, strict=True)))
    B = BlockDiagonal(dict(zip("ba", blocks, strict=True)))
    assert isinstance(A + B, Sum)
    torch.testing.assert_close((A + B).to_dense(), 2 * A.to_dense())


def test_an_opaque_operator_takes_one_multiple_of_the_identity():
    A = Opaque(randn(5, 5))
    operator = Identity(5) + A + 0.5 * Identity(5) - 2 * Identity(5)
    assert isinstance(operator, Sum)
    assert len(operator.terms) == 2
    torch.testing.assert_close(operator.to_dense(), A.matrix - 0.5 * torch.eye(5).double())


def test_blocks_of_a_shifted_block_diagonal_are_shifted():
    A = BlockDiagonal({"a": eigen_kronecker(), "b": Opaque(randn(2, 2))})
    shifted = A + 0.3 * Identity(8)
    assert isinstance(shifted.blocks["a"], EigenKronecker)
    torch.testing.assert_close(
        shifted.to_dense(), A.to_dense() + 0.3 * torch.eye(8, dtype=torch.float64)
    )


def test_python_sums_operators():
    A, B = Opaque(randn(3, 3)), Opaque(randn(3, 3, seed=1))
    torch.testing.assert_close(sum([A, B]).to_dense(), A.matrix + B.matrix)


def test_slices_of_structures_keep_them():
    d = Diagonal(randn(5))
    assert isinstance(d[1:4, 1:4], Diagonal)
    assert isinstance(Dense(randn(4, 5))[1:3, [0, 2]], Dense)
    assert isinstance(d[[0, 0], [0, 0]], SubMatrix)
    torch.testing.assert_close(d[[0, 0], [0, 0]].to_dense(), d[0, 0].expand(2, 2))
    A = Opaque(randn(3, 3))
    assert A[:, :] is A


def test_blocks_by_name():
    A = BlockDiagonal({"a": Dense(randn(2, 2)), "b": Diagonal(randn(3))})
    assert A["b", "b"] is A.blocks["b"]
    torch.testing.assert_close(A["a", "b"].to_dense(), torch.zeros(2, 3, dtype=torch.float64))
    torch.testing.assert_close(A["b"].to_dense(), A.to_dense()[2:])
    with pytest.raises(KeyError, match=r"no block 'c': the names are \['a', 'b'\]"):
        A["c", "c"]


# An identity or a permutation without a dtype takes what it meets.


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_an_identity_without_dtype_takes_that_of_the_other(dtype):
    eye = Identity(3)
    P = Permutation(torch.tensor([1, 2, 0]))
    v = torch.arange(3).to(dtype)
    for operator in (eye, 2 * eye, P, P.T, -P):
        assert (operator @ v).dtype == dtype
        assert (operator @ Diagonal(v)).dtype == dtype
        assert (Diagonal(v) + operator).dtype == dtype
        assert (operator - Diagonal(v)).dtype == dtype
    assert Kronecker(eye, Diagonal(v)).dtype == dtype
    assert eye.dtype == torch.get_default_dtype()
    assert eye.to(dtype).dtype == dtype


@pytest.mark.parametrize(
    "operator", [Identity(3, torch.float32), Permutation(torch.arange(3), torch.float32)]
)
def test_a_given_dtype_is_kept(operator):
    with pytest.raises(ValueError, match=r"one dtype.*float32.*float64|float64.*float32"):
        operator + Diagonal(randn(3))
    with pytest.raises(ValueError, match="float32"):
        operator @ randn(3)


@pytest.mark.parametrize("name", STRUCTURED)
def test_conversion(name):
    A = STRUCTURED[name]()
    single = A.to(torch.float32)
    assert type(single) is type(A)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.to_dense(), A.to_dense().float(), rtol=1e-5, atol=1e-5)
    assert A.to("meta").device.type == "meta"
    composed = (A @ Permutation(torch.randperm(SIZE)))[:3].to(torch.float32)
    assert (composed @ torch.ones(SIZE)).dtype == torch.float32


def test_an_operator_that_is_not_made_of_tensors_says_how_it_is_converted():
    with pytest.raises(TypeError, match="convert what it was built from"):
        Opaque(randn(2, 2)).to(torch.float32)


def test_gradients_flow_through_products():
    def product(magnitudes):
        A = 2 * (EigenKronecker(rotation(2), None, magnitudes) + 0.1 * Identity(6))
        return (A @ Opaque(randn(6, 6)) - A) @ randn(6)

    assert torch.autograd.gradcheck(product, randn(2, 3).requires_grad_())


# Named parameters.

SHAPES = {"weight": (2, 3), "bias": (2,), "scale": ()}
LAYOUT = ParameterLayout(tuple(SHAPES), tuple(SHAPES.values()))


def parameters(*columns):
    return {name: randn(*shape, *columns, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}


@pytest.mark.parametrize("columns", [(), (4,), (0,)])
def test_parameters_in_parameters_out(columns):
    A = assume(Opaque(randn(9, 9) + randn(9, 9).T, LAYOUT), symmetric=True)
    named = parameters(*columns)
    flat = torch.cat(
        [
            tensor.flatten(0, len(SHAPES[k]) - 1) if SHAPES[k] else tensor[None]
            for k, tensor in named.items()
        ]
    )
    expected = A.operator.matrix @ flat
    shuffled = dict(reversed(named.items()))
    for operator in (A, A + 0 * Identity(9), A @ A**0, 1.0 * A):
        product = operator @ shuffled
        assert list(product) == list(SHAPES)
        assert all(product[k].shape == (*SHAPES[k], *columns) for k in SHAPES)
        torch.testing.assert_close(product["weight"].flatten(0, 1), expected[:6])
        torch.testing.assert_close(product["bias"], expected[6:8])
        torch.testing.assert_close(product["scale"], expected[8])
    in_order = A @ list(named.values())
    assert isinstance(in_order, list)
    torch.testing.assert_close(in_order[1], product["bias"])


def test_rows_that_belong_to_no_parameters_come_out_as_a_tensor():
    J = Opaque(randn(4, 9), LAYOUT)
    flat = LAYOUT.flatten(parameters())
    torch.testing.assert_close(J @ parameters(), J.matrix @ flat)
    # The rows of JᵀJ are the columns of J.
    gram = LAYOUT.flatten((J.T @ J) @ parameters())
    torch.testing.assert_close(gram, J.matrix.T @ (J.matrix @ flat))


def test_names_are_indices():
    A = Opaque(randn(9, 9), LAYOUT)
    torch.testing.assert_close(A["bias", "weight"].to_dense(), A.matrix[6:8, :6])
    with pytest.raises(KeyError, match="no parameter 'gain': the names are"):
        A["gain", "bias"]
    with pytest.raises(KeyError, match="does not know which entries"):
        Dense(randn(2, 2))["bias", "bias"]


@pytest.mark.usefixtures("unchecked")
def test_wrong_parameters_are_named():
    A = Opaque(randn(9, 9), LAYOUT)
    named = parameters()
    with pytest.raises(ValueError, match=r"\['bias'\] are missing and \['gain'\] superfluous"):
        A @ {"weight": named["weight"], "scale": named["scale"], "gain": named["bias"]}
    with pytest.raises(ValueError, match="Got 2 tensors for 3 parameters"):
        A @ [named["weight"], named["bias"]]
    with pytest.raises(ValueError, match=r"weight \(3, 2\), expected \(2, 3\)"):
        A @ {**named, "weight": named["weight"].T}
    with pytest.raises(ValueError, match="all with one number k"):
        A @ {**parameters(4), "bias": randn(2, 5)}
    with pytest.raises(ValueError, match="differ in dtype or device"):
        A @ {**named, "bias": named["bias"].float()}
    with pytest.raises(TypeError, match="does not know how parameters lie"):
        Dense(randn(9, 9)) @ named


def test_operators_on_other_parameters_cannot_be_added():
    other = ParameterLayout(("a",), ((9,),))
    with pytest.raises(ValueError, match=r"\['weight', 'bias', 'scale'\]"):
        Opaque(randn(9, 9), LAYOUT) + Opaque(randn(9, 9), other)


def test_block_diagonal_with_layout():
    A = BlockDiagonal({"weight": Dense(randn(6, 6)), "rest": Diagonal(randn(3))}, LAYOUT)
    for operator in (A, 2 * A, A + A, A + 0.1 * Identity(9)):
        assert operator.layout == LAYOUT
    product = A @ parameters()
    expected = A.to_dense() @ LAYOUT.flatten(parameters())
    torch.testing.assert_close(LAYOUT.flatten(product), expected)
    with pytest.raises(ValueError, match="does not fit"):
        BlockDiagonal({"a": Diagonal(randn(2))}, LAYOUT)


# Errors.


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Diagonal(randn(2, 2)), ValueError, "a matrix goes into Dense"),
        (lambda: Dense(randn(2)), ValueError, "a vector goes into Diagonal"),
        (lambda: Dense(torch.ones(2, 2).long()), ValueError, "real floating"),
        (lambda: Identity(0), ValueError, "at least one row"),
        (lambda: Identity(2, torch.int64), TypeError, "real floating"),
        (Kronecker, ValueError, "at least one factor"),
        (lambda: Kronecker(randn(2, 2), randn(2, 2).float()), ValueError, "one dtype"),
        (lambda: BlockDiagonal({}), ValueError, "at least one block"),
        (lambda: BlockDiagonal({"a": Dense(randn(2, 3))}), ValueError, "'a' is not square"),
        (
            lambda: BlockDiagonal({"a": Identity(2, torch.float32), "b": Diagonal(randn(2))}),
            ValueError,
            "one dtype",
        ),
        (lambda: EigenKronecker(randn(2, 2), None, randn(3, 2)), ValueError, r"U_G must be \(3, 3"),
        (lambda: EigenKronecker(None, randn(2, 3), randn(3, 3)), ValueError, r"U_A must be \(3, 3"),
        (lambda: EigenKronecker(None, None, randn(3)), ValueError, r"\[d_out, d_in\]"),
        (
            lambda: EigenKronecker(randn(2, 2).float(), None, randn(2, 3)),
            ValueError,
            "share one dtype",
        ),
        (lambda: LowRankPlusDiagonal(randn(3, 2), randn(3), 1.0), ValueError, "do not fit U"),
        (lambda: LowRankPlusDiagonal(randn(3, 2), randn(2), randn(2)), ValueError, "one number or"),
        (
            lambda: LowRankPlusDiagonal(randn(3, 2), randn(2).float(), 1.0),
            ValueError,
            "share one dtype",
        ),
        (lambda: Permutation(torch.tensor([0, 0])), ValueError, "every number from 0 to 1 once"),
        (lambda: Permutation(torch.tensor([0.0, 1])), ValueError, "vector of integers"),
        (lambda: assume(Dense(randn(2, 3)), symmetric=True), ValueError, "square"),
        (lambda: ParameterLayout(("a",), ()), ValueError, "do not fit"),
        (lambda: ParameterLayout(("a", "a"), ((), ())), ValueError, "not unique"),
        (lambda: Dense(randn(2, 3)) ** 2, ValueError, "Only square operators"),
        (lambda: Diagonal(randn(2)) ** -1, ValueError, "a power of the inverse"),
        (lambda: Diagonal(randn(2)) ** 0.5, ValueError, "a function of the spectrum"),
        (lambda: Diagonal(randn(2)) + 0.1, TypeError, r"c \* Identity\(n\)"),
        (lambda: randn(2, 2) + Diagonal(randn(2)), TypeError, r"Dense\(matrix\)"),
        (lambda: randn(2, 2) - Diagonal(randn(2)), TypeError, r"Dense\(matrix\)"),
        (lambda: np.ones((2, 2)) @ Diagonal(randn(2)), TypeError, "to_scipy"),
        (lambda: Diagonal(randn(2)) + Diagonal(randn(3)), ValueError, "shapes must be equal"),
        (lambda: Diagonal(randn(2)) * Diagonal(randn(2)), TypeError, "use `@` for products"),
        (lambda: Diagonal(randn(2)) * randn(2), TypeError, "use `@` for products"),
        (lambda: 1j * Diagonal(randn(2)), TypeError, "real number"),
        (lambda: "a" * Diagonal(randn(2)), TypeError, "real number"),
        (lambda: Diagonal(randn(2))[0, 0, 0], IndexError, "two indices"),
        (lambda: Diagonal(randn(2))[0.5], TypeError, "chosen by an integer"),
        (lambda: Diagonal(randn(2))[[0.5]], TypeError, "must be integers"),
        (lambda: Diagonal(randn(2))[torch.tensor([True])], IndexError, "1 booleans do not fit"),
        (lambda: Diagonal(randn(2))[[[0]]], IndexError, "must be one list"),
        (lambda: from_scipy(np.ones((2, 2)) * 1j), TypeError, "take its real part"),
        (lambda: from_scipy("matrix"), TypeError, "no SciPy operator"),
        (lambda: Diagonal(randn(2).bfloat16()).to_scipy(), TypeError, "torch.float32"),
        (lambda: Diagonal(randn(2)).to_scipy() @ (1j * np.ones(2)), TypeError, "operator is real"),
    ],
)
def test_errors_name_the_remedy(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_operators_print_what_they_are():
    text = repr(0.5 * (Opaque(randn(2, 3))))
    assert text == "Scaled(shape=(2, 3), dtype=torch.float64, device=cpu)"


def test_arrays_become_dense():
    array = np.arange(6).reshape(2, 3)
    operator = from_scipy(array)
    assert isinstance(operator, Dense)
    torch.testing.assert_close(operator.to_dense(), torch.from_numpy(array).double())
    array[0, 0] = 100
    assert operator[0, 0] == 0


def test_scipy_solves_with_an_operator():
    X = randn(6, 4)
    A = Dense(X.T @ X) + Identity(4)
    b = randn(4)
    x, info = scipy.sparse.linalg.cg(A.to_scipy(), b.numpy(), rtol=1e-12)
    assert info == 0
    torch.testing.assert_close(A @ torch.from_numpy(x), b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("module", ["base", "assume"])
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(importlib.import_module(f"laplace_debias.operators.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


# Random compositions.


@st.composite
def compositions(draw):
    """An operator `[SIZE, SIZE]` and its matrix."""

    def leaf():
        operator = STRUCTURED[draw(st.sampled_from(sorted(STRUCTURED)))]()
        return operator, operator.to_dense()

    operator, dense = leaf()
    for _ in range(draw(st.integers(1, 5))):
        step = draw(st.sampled_from(["+", "-", "@", "rev@", "*", "T", "**", "slice", "permute"]))
        if step in ("+", "-"):
            other, matrix = leaf()
            sign = 1 if step == "+" else -1
            operator = operator + other if step == "+" else operator - other
            dense = dense + sign * matrix
        elif step == "@":
            other, matrix = leaf()
            operator, dense = operator @ other, dense @ matrix
        elif step == "rev@":
            other, matrix = leaf()
            operator, dense = other @ operator, matrix @ dense
        elif step == "*":
            scalar = draw(st.floats(-2, 2))
            operator, dense = scalar * operator, scalar * dense
        elif step == "T":
            operator, dense = operator.T, dense.T
        elif step == "**":
            exponent = draw(st.integers(0, 3))
            operator, dense = operator**exponent, torch.linalg.matrix_power(dense, exponent)
        else:
            index = draw(st.permutations(range(SIZE)))
            columns = draw(st.permutations(range(SIZE)))
            if step == "slice":
                operator, dense = operator[index, columns], dense[index][:, columns]
            else:
                operator, dense = Permutation(torch.tensor(index)) @ operator, dense[index]
    return operator, dense


@settings(max_examples=150, deadline=None)
@given(compositions())
def test_random_compositions_equal_their_matrices(composition):
    operator, dense = composition
    scale = max(1.0, dense.abs().max().item())
    close = {"rtol": 0, "atol": 1e-10 * scale}
    torch.testing.assert_close(operator.to_dense(), dense, **close)
    torch.testing.assert_close(operator.T.to_dense(), dense.T, **close)
    if operator.is_symmetric:
        torch.testing.assert_close(dense, dense.T, **close)
    if operator.is_positive_semidefinite:
        assert torch.linalg.eigvalsh((dense + dense.T) / 2).min() > -1e-10 * scale
