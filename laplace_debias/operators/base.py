"""The base class of linear operators: products, arithmetic and indexing."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from laplace_debias.operators.dispatch import (
    Scalar,
    add,
    multiply,
    named_range,
    scale,
    submatrix,
)
from laplace_debias.operators.layout import ParameterLayout
from laplace_debias.system.checks import check_no_autocast

Operator = TypeVar("Operator", bound="LinearOperator")
Parameters = Mapping[str, Tensor] | Sequence[Tensor]

ADVICE = {
    "adjoint": "A.T",
    "bmm": "A @ matrix, or laplace_debias.linalg.inverse(A) @ matrix",
    "cpu": 'A.to("cpu")',
    "cuda": 'A.to("cuda")',
    "det": "laplace_debias.linalg.logdet(A).value.exp()",
    "diag": "laplace_debias.linalg.diagonal(A).value",
    "diagonal": "laplace_debias.linalg.diagonal(A).value",
    "double": "A.to(torch.float64)",
    "float": "A.to(torch.float32)",
    "frobenius_norm": "laplace_debias.linalg.frobenius_norm(A).value",
    "inv": "laplace_debias.linalg.inverse(A)",
    "inverse": "laplace_debias.linalg.inverse(A)",
    "logdet": "laplace_debias.linalg.logdet(A).value",
    "mT": "A.T",
    "numpy": "A.to_dense().numpy()",
    "size": "A.shape",
    "to_matrix": "A.to_dense()",
    "trace": "laplace_debias.linalg.trace(A).value",
}
"""Code that replaces the names which operators of other libraries and tensors have."""
NUMPY_TYPES = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


class LinearOperator(ABC):
    """A matrix that is defined by its products with vectors.

    A subclass defines `shape`, `dtype`, `device`, `_matmat` (the product with a matrix) and `T`
    (the adjoint). It can also declare that it is symmetric or positive semi-definite, and how its
    columns correspond to named parameters (`layout`). All other methods follow from these. Results
    in closed form are functions in `operators.exact`.

    Sums, products, multiples and sub-matrices of operators are again operators. They are lazy,
    unless the structure of the operands allows a closed form.

    Example:
        >>> import torch
        >>> from laplace_debias.operators import Diagonal, Identity
        >>> A = Diagonal(torch.tensor([1.0, 2.0])) + 0.5 * Identity(2)
        >>> A @ torch.ones(2)
        tensor([1.5000, 2.5000])
        >>> (A @ A)[0, 0]
        tensor(2.2500)
    """

    # Without this attribute, NumPy would mistake an operator for a scalar, and multiply entry by
    # entry.
    __array_ufunc__ = None

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the entries."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device on which products are computed."""

    @abstractmethod
    def _matmat(self, matrix: Float[Tensor, "columns k"]) -> Float[Tensor, "rows k"]:
        """Compute the product with a matrix of k ≥ 1 columns, which has already been checked."""

    @property
    @abstractmethod
    def T(self) -> "LinearOperator":  # noqa: N802 (numpy's and torch's name)
        """The adjoint."""

    @property
    def is_symmetric(self) -> bool:
        """Whether the operator is declared to equal its adjoint; see `assume`."""
        return False

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether the operator is declared to be positive semi-definite; see `assume`."""
        return False

    @property
    def layout(self) -> ParameterLayout | None:
        """The named parameters that the columns correspond to, or None."""
        return None

    @overload
    def __matmul__(self, other: Tensor) -> Tensor: ...
    @overload
    def __matmul__(self, other: "LinearOperator") -> "LinearOperator": ...
    @overload
    def __matmul__(self, other: Parameters) -> Any: ...
    def __matmul__(self, other: Any) -> Any:
        """Multiply with a vector, a matrix, an operator, or named parameters.

        Args:
            other: A vector `[columns]`; a matrix `[columns, k]`; an operator `[columns, k]`; or, if
                this operator has a `layout`, one tensor per parameter, as a mapping or a sequence,
                all of shape `[*shape]` or all of shape `[*shape, k]`.

        Returns:
            A vector `[rows]`; a matrix `[rows, k]`; the product as an operator; or named parameters
            in the form in which they were passed (a tensor if the rows do not correspond to
            parameters).

        Raises:
            ValueError: If the shape, dtype or device does not match, or if parameters are missing
                or unexpected.
            RuntimeError: If autocast is enabled.
            TypeError: If `other` is not an operator, a tensor or parameters, or if parameters are
                passed and the operator has no `layout`.
        """
        if isinstance(other, LinearOperator):
            if self.shape[1] != other.shape[0]:
                raise ValueError(
                    f"{type(self).__name__} of shape {self.shape} cannot multiply "
                    f"{type(other).__name__} of shape {other.shape}, because the inner sizes "
                    "differ. Check their order, or transpose one of them."
                )
            return multiply(*unify([self, other]))
        if isinstance(other, Mapping | list | tuple):
            return self._multiply_parameters(other)
        if not isinstance(other, Tensor):
            raise TypeError(
                f"{type(self).__name__} cannot multiply {type(other).__name__}. Pass a tensor, a "
                "LinearOperator or a dict of parameters. To multiply NumPy arrays, convert the "
                "operator with `.to_scipy()`."
            )
        operator = self.adopted(other.dtype, other.device)
        check_operand(operator, other)
        if other.ndim == 1:
            return operator._matmat(other[:, None])[:, 0]
        if other.shape[1] == 0:
            return other.new_zeros(self.shape[0], 0)
        return operator._matmat(other)

    def __rmatmul__(self, other: Tensor) -> Tensor:
        """Multiply a row vector `[rows]`, or a matrix of rows `[k, rows]`, by the operator."""
        is_matrix = isinstance(other, Tensor) and other.ndim == 2
        return (self.T @ other.mT).mT if is_matrix else self.T @ other

    def _multiply_parameters(self, parameters: Parameters) -> Any:
        """Multiply named parameters; the result is named if the rows correspond to parameters."""
        if self.layout is None:
            raise TypeError(
                f"{type(self).__name__} has no parameter layout, so named parameters cannot be "
                "multiplied. Use a vector or a matrix."
            )
        product = self @ self.layout.flatten(parameters)
        rows = self.T.layout
        if rows is None:
            return product
        named = rows.unflatten(product)
        return named if isinstance(parameters, Mapping) else list(named.values())

    def __add__(self, other: "LinearOperator") -> "LinearOperator":
        if not isinstance(other, LinearOperator):
            raise TypeError(
                f"{type(self).__name__} and {type(other).__name__} cannot be added. To "
                "add a matrix, use Dense(matrix). To add a number c, use c * Identity(n)."
            )
        if self.shape != other.shape:
            raise ValueError(
                f"{type(self).__name__} of shape {self.shape} and {type(other).__name__} of "
                f"shape {other.shape} cannot be added. Use operators of the same shape."
            )
        return add(*unify([self, other]))

    def __radd__(self, other: object) -> "LinearOperator":
        # `sum` starts from 0.
        if isinstance(other, int) and other == 0:
            return self
        return self + other  # type: ignore[operator]

    def __neg__(self) -> "LinearOperator":
        return scale(self, -1.0)

    def __sub__(self, other: "LinearOperator") -> "LinearOperator":
        return self + (-other if isinstance(other, LinearOperator) else other)

    def __rsub__(self, other: object) -> "LinearOperator":
        return -self + other  # type: ignore[operator]

    def __mul__(self, scalar: Scalar) -> "LinearOperator":
        return scale(self, as_scalar(scalar, self))

    def __rmul__(self, scalar: Scalar) -> "LinearOperator":
        return self * scalar

    def __truediv__(self, scalar: Scalar) -> "LinearOperator":
        return scale(self, 1 / as_scalar(scalar, self))

    def __getitem__(self, index: Any) -> Any:
        """Return a sub-matrix `A[rows, columns]`, a row or column as a vector, or an entry.

        Args:
            index: For the rows and for the columns: an integer, a slice, several integers or
                booleans (a list, tensor or array), or the name of a parameter or block. The index
                of the columns can be left out.

        Returns:
            An operator; or a vector if one index is an integer, or a 0-d tensor if both are.

        Raises:
            IndexError: If an index is out of range.
            KeyError: If the operator has no parameter or block with this name.
            TypeError: If an index has a type that is not listed above.
        """
        pair = isinstance(index, tuple)
        if pair and len(index) != 2:
            raise IndexError(
                f"An operator takes two indices, rows and columns, but got {len(index)}. Index it "
                "as `A[rows, columns]`."
            )
        rows, columns = index if pair else (index, slice(None))
        if all(isinstance(side, slice) and side == slice(None) for side in (rows, columns)):
            return self
        row = as_integer(rows, self.shape[0])
        column = as_integer(columns, self.shape[1])
        if column is not None:
            vector = self @ self._unit(self.shape[1], column)
            return vector[self._indices(rows, 0) if row is None else row]
        if row is not None:
            return (self.T @ self._unit(self.shape[0], row))[self._indices(columns, 1)]
        return submatrix(self, self._indices(rows, 0), self._indices(columns, 1))

    def _indices(self, index: Any, side: int) -> Tensor:
        """Return the selected indices of rows (side 0) or columns (side 1)."""
        if isinstance(index, str):
            side_operator = self if side == 1 else self.T
            if side_operator.layout is None and self.layout is not None:
                raise KeyError(
                    f"The rows of {type(self).__name__} do not correspond to parameters, so "
                    f"they cannot be selected by name. Select columns, `A[:, {index!r}]`, or "
                    "index the rows by numbers."
                )
            index = named_range(side_operator, index)
        return as_indices(index, self.shape[side], self.device)

    def _unit(self, size: int, position: int) -> Tensor:
        vector = torch.zeros(size, dtype=self.dtype, device=self.device)
        vector[position] = 1
        return vector

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ADVICE:
                raise AttributeError(
                    f"{type(self).__name__} has no attribute {name!r}. Use {ADVICE[name]}."
                )
            return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        # The default `repr` of a dataclass would print every tensor in the operator.
        return (
            f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, device={self.device})"
        )

    def to_dense(self) -> Float[Tensor, "rows columns"]:
        """Compute the matrix as a tensor, `[rows, columns]`, with one product per column."""
        return self @ torch.eye(self.shape[1], dtype=self.dtype, device=self.device)

    def to_scipy(self) -> Any:
        """Convert to a SciPy `LinearOperator`.

        The SciPy operator accepts and returns NumPy arrays, and computes products on the device of
        this operator. Arrays of other real dtypes are converted. Gradients are not supported.

        Raises:
            TypeError: If NumPy does not support the dtype.
        """
        # Import SciPy only here, because its import is slow and few callers need this method.
        from scipy.sparse.linalg import LinearOperator as SciPyOperator

        if self.dtype not in NUMPY_TYPES:
            raise TypeError(
                f"NumPy has no {self.dtype}. Convert the operator with `.to(torch.float32)`."
            )

        def product(operator: LinearOperator, array: NDArray[Any]) -> NDArray[Any]:
            if np.iscomplexobj(array):
                raise TypeError(
                    "The operator is real, but the vector is complex. Multiply the real and the "
                    "imaginary part separately."
                )
            # Copy the array, because its memory may be read-only, or SciPy may overwrite it later.
            tensor = torch.tensor(
                np.ascontiguousarray(array), dtype=operator.dtype, device=operator.device
            )
            return (operator @ tensor).detach().cpu().numpy()

        return SciPyOperator(
            self.shape,
            matvec=lambda x: product(self, x.reshape(-1)),
            rmatvec=lambda x: product(self.T, x.reshape(-1)),
            matmat=lambda X: product(self, X),
            rmatmat=lambda X: product(self.T, X),
            dtype=NUMPY_TYPES[self.dtype],
        )

    def to(self: Operator, *args: Any, **kwargs: Any) -> Operator:
        """Convert dtype or device as `Tensor.to` does.

        Raises:
            TypeError: If the operator contains no tensors. (The operators of a network have the
                dtype and device of its model.)
        """
        if not is_dataclass(self):
            raise TypeError(
                f"{type(self).__name__} holds no tensors of its own, so it cannot be "
                "converted. Convert the object that it was built from, such as the "
                "model. Then build it again from the converted object."
            )
        target = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs)
        # Copy the operator without calling its constructor, because the converted fields need no
        # check.
        converted = copy(self)
        for field in fields(self):
            value = _convert_field(getattr(self, field.name), target.dtype, target.device)
            setattr(converted, field.name, value)
        return converted

    def adopted(self, dtype: torch.dtype, device: torch.device) -> "LinearOperator":
        """Return the operator; if its dtype or device is open, it adopts the given one."""
        return self


def _convert_field(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Convert all tensors and operators in a field, even nested ones, but not indices."""
    if isinstance(value, Tensor):
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)
    if isinstance(value, Mapping):
        return {key: _convert_field(entry, dtype, device) for key, entry in value.items()}
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(_convert_field(entry, dtype, device) for entry in value)
    return value.to(dtype=dtype, device=device) if hasattr(value, "to") else value


def unify(operators: Sequence[LinearOperator]) -> list[LinearOperator]:
    """Give identities without a dtype or device the dtype and device of the other operators.

    Raises:
        ValueError: If the operators' dtypes or devices differ.
    """
    for reference in operators:
        dtype = reference.dtype
        device = reference.device
        adopted = [operator.adopted(dtype, device) for operator in operators]
        if all(operator.dtype == dtype and operator.device == device for operator in adopted):
            return adopted
    dtypes = ", ".join(f"{type(o).__name__} is {o.dtype} on {o.device}" for o in operators)
    raise ValueError(
        f"Operators must have the same dtype and device, got {dtypes}. Convert them with "
        "`.to(...)`."
    )


def check_operand(operator: "LinearOperator", tensor: Tensor) -> None:
    """Raise an error unless the operator can multiply a tensor."""
    size = operator.shape[1]
    if tensor.ndim not in (1, 2) or tensor.shape[0] != size:
        raise ValueError(
            f"{type(operator).__name__} of shape {operator.shape} cannot multiply a tensor of "
            f"shape {tuple(tensor.shape)}. Pass a tensor of shape ({size},) or ({size}, k)."
        )
    if tensor.dtype != operator.dtype or tensor.device != operator.device:
        raise ValueError(
            f"{type(operator).__name__} is {operator.dtype} on {operator.device}, but the tensor "
            f"is {tensor.dtype} on {tensor.device}. Convert one of them with `.to(...)`."
        )
    check_no_autocast(operator.device, operator.dtype)


def check_square(operator: "LinearOperator", result: str = "this") -> None:
    """Raise an error unless an operator is square; the error names the result that requires it."""
    if operator.shape[0] != operator.shape[1]:
        raise ValueError(
            f"{type(operator).__name__} has shape {operator.shape}, but {result} needs a square "
            "operator. Use `A.T @ A` or `A @ A.T`."
        )


def as_scalar(value: Any, operator: "LinearOperator") -> Scalar:
    """Convert a real number to a float; a real 0-d tensor is kept, so that gradients flow."""
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():
        return value
    if isinstance(value, Real):
        return float(value)
    description = repr(value)
    if isinstance(value, Tensor):
        description = f"a tensor of shape {tuple(value.shape)}"
    raise TypeError(
        f"{type(operator).__name__} can only be scaled by a real number, got {description}. Use "
        "`@` for products."
    )


def as_integer(index: Any, size: int) -> int | None:
    """Convert an index to an int of at least 0, or return None if it is not a single integer."""
    if isinstance(index, Tensor | np.ndarray) and index.ndim == 0:
        index = index.item()
    if isinstance(index, bool | np.bool_) or not isinstance(index, int | np.integer):
        return None
    if not -size <= index < size:
        raise IndexError(
            f"The index {index} is out of range for the size {size}. Use a smaller index."
        )
    return int(index) % size


def as_indices(index: Any, size: int, device: torch.device) -> Tensor:
    """Convert a slice, range, list, tensor or array to indices of at least 0, `[k]`."""
    if isinstance(index, slice):
        index = range(size)[index]
    if isinstance(index, range):
        index = np.arange(index.start, index.stop, index.step)
    if isinstance(index, list | Tensor | np.ndarray):
        # Index on the CPU, because torch raises an ordinary error there if indices are out of
        # range.
        indices = torch.as_tensor(index).cpu()
        if indices.ndim == 1 and (len(indices) == 0 or not indices.is_floating_point()):
            if indices.dtype != torch.bool:
                indices = indices.long()
            return torch.arange(size)[indices].to(device)
    raise TypeError(
        f"Rows and columns cannot be selected by {index!r}. Use an integer, a "
        "slice, the name of a parameter, or a single list, tensor or array of "
        "integers or booleans."
    )


class Composed(LinearOperator):
    """An operator whose dtype and device are those of its first field that is not None.

    A subclass is a dataclass that defines `shape`, `_matmat` and `T`. This first field must be a
    tensor, an operator, or a tuple or mapping of operators.
    """

    @property
    def operands(self) -> list[Any]:
        """The tensor or the operators in the first field that is not None, as a list."""
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        first = next(value for value in values if value is not None)
        if isinstance(first, Mapping):
            return list(first.values())
        return list(first) if isinstance(first, tuple) else [first]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all operands."""
        return self.operands[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of all operands."""
        return self.operands[0].device


class Joined(Composed):
    """A composed operator that is symmetric or positive semi-definite if its operands are."""

    @property
    def is_symmetric(self) -> bool:
        """Whether every operand is declared symmetric."""
        return all(operand.is_symmetric for operand in self.operands)

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether every operand is declared positive semi-definite."""
        return all(operand.is_positive_semidefinite for operand in self.operands)


class Symmetric(Composed):
    """An operator that is symmetric by its structure; a subclass defines `shape` and `_matmat`."""

    is_symmetric = True

    @property
    def T(self: Operator) -> Operator:  # noqa: N802
        """The operator itself."""
        return self
