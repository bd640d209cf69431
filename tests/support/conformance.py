"""Tests of every linear operator, against a dense float64 matrix that is built in another way.

A test class inherits `OperatorConformance` and defines `make`. For the operator of a network, it
inherits `NetworkConformance`, and also defines `variants` and `model`.
"""

import copy

import numpy as np
import pytest
import torch

from laplace_debias.operators import Identity, LinearOperator

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}
# These tests also run in float32 each day; in float32, all others are slow tests.
DAILY_IN_FLOAT32 = ("test_dense", "test_products_with_vector_and_matrix", "test_adjoint")


class OperatorConformance:
    """Tests of one operator.

    A subclass overrides `make`. It also sets the claims that the operator must make, and the
    tolerances if they are larger. Tolerances are relative to the largest entry of the result, or
    to one if this entry is smaller.
    """

    symmetric: bool | None = None
    positive_semidefinite: bool | None = None
    tolerance = TOLERANCE

    def make(self, dtype: torch.dtype, device: str) -> tuple[LinearOperator, torch.Tensor]:
        """Return the operator, and its matrix in float64 on the CPU; the same at every call."""
        raise NotImplementedError

    @pytest.fixture(params=DEVICES)
    def device(self, request):
        return request.param

    @pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
    def dtype(self, request):
        return request.param

    @pytest.fixture
    def case(self, dtype, device):
        operator, dense = self.make(dtype, device)
        assert dense.dtype == torch.float64
        return operator, dense

    def vectors(self, operator, rows, *columns):
        generator = torch.Generator().manual_seed(1)
        vectors = torch.randn(rows, *columns, generator=generator, dtype=torch.float64)
        return vectors.to(operator.device, operator.dtype)

    def close(self, operator, actual, expected):
        """Assert equality up to the tolerance, and the dtype and the device of the operator."""
        assert actual.dtype == operator.dtype
        assert actual.device == operator.device
        atol = self.tolerance[operator.dtype] * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(actual.detach().cpu().double(), expected, rtol=0, atol=atol)

    def test_dense(self, case):
        operator, dense = case
        assert operator.shape == tuple(dense.shape)
        self.close(operator, operator.to_dense(), dense)

    def test_dtype_and_device(self, case, dtype, device):
        operator, _ = case
        assert operator.dtype == dtype
        assert operator.device.type == device
        assert (operator.T.dtype, operator.T.device) == (operator.dtype, operator.device)

    def test_products_with_vector_and_matrix(self, case):
        operator, dense = case
        X = self.vectors(operator, dense.shape[1], 3)
        self.close(operator, operator @ X, dense @ X.cpu().double())
        self.close(operator, operator @ X[:, 1], dense @ X[:, 1].cpu().double())

    def test_row_vectors_from_the_left(self, case):
        operator, dense = case
        X = self.vectors(operator, 3, dense.shape[0])
        self.close(operator, X @ operator, X.cpu().double() @ dense)
        self.close(operator, X[1] @ operator, X[1].cpu().double() @ dense)

    def test_memory_order_does_not_matter(self, case):
        operator, dense = case
        X = self.vectors(operator, 3, dense.shape[1]).T
        self.close(operator, operator @ X, dense @ X.cpu().double())
        wide = self.vectors(operator, dense.shape[1], 4)
        self.close(operator, operator @ wide[:, ::2], dense @ wide[:, ::2].cpu().double())

    def test_linear(self, case):
        operator, dense = case
        x, y = self.vectors(operator, dense.shape[1], 2).unbind(1)
        expected = 2 * (operator @ x) - 3 * (operator @ y)
        self.close(operator, operator @ (2 * x - 3 * y), expected.cpu().double())

    def test_a_vector_is_a_column_of_a_matrix(self, case):
        operator, dense = case
        X = self.vectors(operator, dense.shape[1], 3)
        columns = torch.stack([operator @ x for x in X.unbind(1)], dim=1)
        self.close(operator, operator @ X, columns.cpu().double())

    def test_no_columns_give_no_columns(self, case):
        operator, dense = case
        empty = self.vectors(operator, dense.shape[1], 0)
        product = operator @ empty
        assert product.shape == (dense.shape[0], 0)
        assert (product.dtype, product.device) == (operator.dtype, operator.device)

    def test_adjoint(self, case):
        operator, dense = case
        self.close(operator, operator.T.to_dense(), dense.T)
        v, w = (self.vectors(operator, size, 2)[:, i] for i, size in enumerate(dense.shape[::-1]))
        self.close(operator, (operator @ v) @ w, (v @ (operator.T @ w)).cpu().double())

    def test_adjoint_of_the_adjoint(self, case):
        operator, dense = case
        self.close(operator, operator.T.T.to_dense(), dense)

    def test_claims_hold(self, case):
        operator, dense = case
        if self.symmetric is not None:
            assert operator.is_symmetric == self.symmetric
        if self.positive_semidefinite is not None:
            assert operator.is_positive_semidefinite == self.positive_semidefinite
        for claimant in (operator, operator.T):
            if claimant.is_symmetric or claimant.is_positive_semidefinite:
                torch.testing.assert_close(dense, dense.T, rtol=0, atol=1e-12)
            if claimant.is_positive_semidefinite:
                assert claimant.is_symmetric
                values = torch.linalg.eigvalsh(dense)
                assert values.min() >= -1e-12 * values.abs().max()

    def test_to_scipy(self, case):
        operator, dense = case
        linear = operator.to_scipy()
        matrix = dense.numpy()
        atol = self.tolerance[operator.dtype] * max(1.0, dense.abs().max().item())
        X = self.vectors(operator, dense.shape[1], 3).cpu().numpy()
        Y = self.vectors(operator, dense.shape[0], 3).cpu().numpy()
        assert linear.shape == dense.shape
        for actual, expected in [
            (linear.matmat(X), matrix @ X),
            (linear.rmatmat(Y), matrix.T @ Y),
            (linear.matvec(X[:, 0]), matrix @ X[:, 0]),
            (linear.rmatvec(Y[:, 0]), matrix.T @ Y[:, 0]),
        ]:
            assert actual.dtype == linear.dtype == X.dtype
            np.testing.assert_allclose(actual, expected, rtol=0, atol=atol * 10)

    @pytest.mark.usefixtures("unchecked")
    def test_wrong_operands_are_refused_before_work(self, case):
        operator, dense = case
        n = dense.shape[1]
        name = type(operator).__name__
        other_dtype = torch.float64 if operator.dtype == torch.float32 else torch.float32
        x = self.vectors(operator, n)
        with pytest.raises(
            ValueError, match=rf"{name} of shape .* Pass a tensor of shape \({n},\) or \({n}, k"
        ):
            operator @ self.vectors(operator, n + 1)
        with pytest.raises(ValueError, match="cannot multiply a tensor"):
            operator @ x[:, None, None]
        with pytest.raises(ValueError, match=r"Convert one of them with `.to\(...\)`"):
            operator @ x.to(other_dtype)
        with pytest.raises(ValueError, match=r"meta. Convert one of them with `.to\(...\)`"):
            operator @ x.to("meta")
        with pytest.raises(TypeError, match="to_scipy"):
            operator @ x.cpu().numpy()
        with pytest.raises(ValueError, match="the inner sizes differ"):
            operator @ Identity(n + 1)
        with pytest.raises(ValueError, match=r"have the same dtype.*`.to\(...\)`"):
            operator @ Identity(n, other_dtype)

    def test_nothing_given_is_modified(self, case):
        operator, dense = case
        X = self.vectors(operator, dense.shape[1], 2)
        X_copy = X.clone()
        product = operator @ X
        product_copy = product.clone()
        product.mul_(2)
        assert X.equal(X_copy)
        operator.to_dense().zero_()
        self.close(operator, operator @ X, product_copy.cpu().double())

    def test_compositions(self, case):
        operator, dense = case
        m, n = dense.shape
        X = self.vectors(operator, n, 2)
        x = X.cpu().double()
        gram = operator.T @ operator
        self.close(operator, gram @ X, dense.T @ (dense @ x))
        assert gram.is_symmetric
        assert gram.is_positive_semidefinite
        self.close(operator, (3 * operator - operator / 2) @ X, 2.5 * dense @ x)
        self.close(operator, (-operator) @ X, -dense @ x)
        if m == n:
            shifted = operator + 0.1 * Identity(n)
            self.close(operator, shifted @ X, dense @ x + 0.1 * x)
            assert shifted.is_symmetric == operator.is_symmetric
            self.close(operator, (operator @ operator) @ X, dense @ (dense @ x))

    def test_sub_matrices(self, case):
        operator, dense = case
        m, n = dense.shape
        for index in [
            (slice(1, m), slice(0, n - 1)),
            (slice(None, None, 2), [n - 1, 0, 0]),
            (torch.arange(m).flip(0), slice(None)),
            ([-1], torch.arange(n) % 2 == 0),
        ]:
            rows = dense[index[0]]
            expected = rows[:, index[1]]
            sub_matrix = operator[index]
            assert sub_matrix.shape == tuple(expected.shape)
            self.close(operator, sub_matrix.to_dense(), expected)
            self.close(operator, sub_matrix.T.to_dense(), expected.T)
        self.close(operator, operator[1:3].to_dense(), dense[1:3])
        self.close(operator, operator[-1], dense[-1])
        self.close(operator, operator[:, 1], dense[:, 1])
        self.close(operator, operator[0, n - 1], dense[0, n - 1])
        self.close(operator, operator[0, -n], dense[0, 0])
        for beyond in (m, -m - 1):
            with pytest.raises(IndexError, match="out of range"):
                operator[beyond]
        with pytest.raises(IndexError, match="out of bounds"):
            operator[:, [0, n]]


class NetworkConformance(OperatorConformance):
    """Tests of an operator of a network; a subclass also overrides `variants` and `model`."""

    def variants(self, dtype: torch.dtype, device: str) -> list[LinearOperator]:
        """Return the same operator with other sizes of batches and of chunks of columns."""
        raise NotImplementedError

    def model(self, operator: LinearOperator) -> torch.nn.Module:
        """Return the network that the operator was built from."""
        raise NotImplementedError

    def test_batches_and_chunks_do_not_matter(self, case, dtype, device):
        operator, dense = case
        variants = self.variants(dtype, device)
        assert variants
        X = self.vectors(operator, dense.shape[1], 5)
        for variant in variants:
            self.close(operator, variant @ X, dense @ X.cpu().double())
            self.close(operator, variant @ X[:, 0], dense @ X[:, 0].cpu().double())

    def test_the_model_is_untouched(self, case):
        operator, dense = case
        model = self.model(operator)
        fingerprint_before = fingerprint(model)
        operator @ self.vectors(operator, dense.shape[1], 2)
        operator.T @ self.vectors(operator, dense.shape[0])
        with pytest.raises(ValueError, match="cannot multiply"):
            operator @ self.vectors(operator, dense.shape[1] + 1)
        assert is_same(fingerprint_before, fingerprint(model))


def fingerprint(model: torch.nn.Module) -> dict:
    """Return all of a model that a product could change: entries, gradients, flags and hooks."""
    state = {f"state {k}": v.detach().clone() for k, v in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state[f"identity {name}"] = id(parameter)
        state[f"flag {name}"] = parameter.requires_grad
        state[f"gradient {name}"] = copy.deepcopy(parameter.grad)
    for name, module in model.named_modules():
        state[f"mode {name}"] = module.training
        state[f"attributes {name}"] = sorted(vars(module))
        state[f"hooks {name}"] = [
            len(hooks) for key, hooks in sorted(vars(module).items()) if key.endswith("_hooks")
        ]
    return state


def is_same(first: dict, second: dict) -> bool:
    """Whether two fingerprints are equal."""
    if first.keys() != second.keys():
        return False
    for key, value in first.items():
        other = second[key]
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            if not value.equal(other):
                return False
        elif value is not other and value != other:
            return False
    return True
