"""The base class of linear operators: products, arithmetic, indexing."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any, TypeVar, overload

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

Operator = TypeVar("Operator", bound="LinearOperator")
Parameters = Mapping[str, Tensor] | Sequence[Tensor]

NUMPY_TYPES = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


class LinearOperator(ABC):
    """A matrix that is given by its products.

    A subclass gives five things: `shape`, `dtype`, `device`, `_matmat` (the product with a matrix)
    and `T` (its adjoint). It may claim three more: that it is symmetric, that it is positive
    semi-definite, and how named parameters lie in its columns. Everything else follows from these,
    or is a free function of the structure (`operators.exact`).

    Sums, products, multiples and sub-matrices of operators are operators. They are lazy,
    except where the structure of the parts has a closed form.

    Example:
        >>> import torch
        >>> from laplace_debias.operators import Diagonal, Identity
        >>> A = Diagonal(torch.tensor([1.0, 2.0])) + 0.5 * Identity(2)
        >>> A @ torch.ones(2)
        tensor([1.5000, 2.5000])
        >>> (A @ A)[0, 0]
        tensor(2.2500)
    """

    # Without this NumPy takes an operator for a scalar and multiplies entry by entry.
    __array_ufunc__ = None

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the entries."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where products are computed."""

    @abstractmethod
    def _matmat(self, matrix: Float[Tensor, "columns k"]) -> Float[Tensor, "rows k"]:
        """Multiply with the columns, k ≥ 1, of a matrix that has been checked."""

    @property
    @abstractmethod
    def T(self) -> "LinearOperator":  # noqa: N802 (numpy's and torch's name)
        """The adjoint."""

    @property
    def is_symmetric(self) -> bool:
        """Whether the operator claims to equal its adjoint; `assume` adds the claim."""
        return False

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether it claims to be symmetric without negative eigenvalues; see `assume`."""
        return False

    @property
    def layout(self) -> ParameterLayout | None:
        """How named parameters lie in the columns; that of the rows is the adjoint's."""
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
            other: `[columns]`; `[columns, k]`; an operator `[columns, k]`; or, if the operator has
                a `layout`, a tensor per parameter, by name or in order, each `[*shape]` or each
                `[*shape, k]`.

        Returns:
            `[rows]`; `[rows, k]`; the product as an operator; or parameters again (by name or in
            order, as they came), but a tensor if the rows belong to no parameters.

        Raises:
            ValueError: If the shape, dtype or device does not fit, or parameters are missing or
                superfluous.
            TypeError: If `other` is none of these, or parameters of an operator without `layout`.
        """
        if isinstance(other, LinearOperator):
            if self.shape[1] != other.shape[0]:
                raise ValueError(
                    f"{type(self).__name__} of shape {self.shape} cannot multiply "
                    f"{type(other).__name__} of shape {other.shape}: the inner sizes differ."
                )
            return multiply(*unify([self, other]))
        if isinstance(other, Mapping | list | tuple):
            return self._multiply_parameters(other)
        if not isinstance(other, Tensor):
            raise TypeError(
                f"{type(self).__name__} cannot multiply {type(other).__name__}: expected a tensor, "
                "a LinearOperator or a dict of parameters. NumPy arrays go with `.to_scipy()`."
            )
        operator = self.adopted(other.dtype, other.device)
        check_operand(operator, other)
        if other.ndim == 1:
            return operator._matmat(other[:, None])[:, 0]
        if other.shape[1] == 0:
            return other.new_zeros(self.shape[0], 0)
        return operator._matmat(other)

    def __rmatmul__(self, other: Tensor) -> Tensor:
        """A row vector `[rows]` or rows `[k, rows]` times the operator."""
        is_matrix = isinstance(other, Tensor) and other.ndim == 2
        return (self.T @ other.mT).mT if is_matrix else self.T @ other

    def _multiply_parameters(self, parameters: Parameters) -> Any:
        if self.layout is None:
            raise TypeError(
                f"{type(self).__name__} has no parameter layout, so named parameters cannot be "
                "multiplied: use a vector or a matrix."
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
                f"{type(self).__name__} and {type(other).__name__} cannot be added: wrap a matrix "
                "as Dense(matrix), a number c as c * Identity(n)."
            )
        if self.shape != other.shape:
            raise ValueError(
                f"{type(self).__name__} of shape {self.shape} and {type(other).__name__} of shape "
                f"{other.shape} cannot be added: the shapes must be equal."
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
        """A sub-matrix `A[rows, columns]`, a row or column as a vector, or an entry.

        Args:
            index: For each side an integer, a slice, integers (a list, tensor or array), booleans,
                or a parameter's name; the columns may be left out.

        Returns:
            An operator; a vector if one side is an integer; a number (0-d) if both are.

        Raises:
            IndexError: If an index is out of range.
            KeyError: If the operator does not know the name.
            TypeError: If an index is of another type.
        """
        pair = isinstance(index, tuple)
        if pair and len(index) != 2:
            raise IndexError(f"An operator has two indices, rows and columns, got {len(index)}.")
        rows, columns = index if pair else (index, slice(None))
        if all(isinstance(side, slice) and side == slice(None) for side in (rows, columns)):
            return self
        row, column = as_integer(rows, self.shape[0]), as_integer(columns, self.shape[1])
        if column is not None:
            vector = self @ self._unit(self.shape[1], column)
            return vector[self._indices(rows, 0) if row is None else row]
        if row is not None:
            return (self.T @ self._unit(self.shape[0], row))[self._indices(columns, 1)]
        return submatrix(self, self._indices(rows, 0), self._indices(columns, 1))

    def _indices(self, index: Any, side: int) -> Tensor:
        if isinstance(index, str):
            of = self if side == 1 else self.T
            if of.layout is None and self.layout is not None:
                raise KeyError(
                    f"The rows of {type(self).__name__} belong to no parameters: choose columns, "
                    f"`A[:, {index!r}]`, or index the rows by numbers."
                )
            index = named_range(of, index)
        return as_indices(index, self.shape[side], self.device)

    def _unit(self, size: int, position: int) -> Tensor:
        vector = torch.zeros(size, dtype=self.dtype, device=self.device)
        vector[position] = 1
        return vector

    def __repr__(self) -> str:
        # A dataclass would print every tensor in it.
        return (
            f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, device={self.device})"
        )

    def to_dense(self) -> Float[Tensor, "rows columns"]:
        """The matrix itself, `[rows, columns]`; costs as many products as columns."""
        return self @ torch.eye(self.shape[1], dtype=self.dtype, device=self.device)

    def to_scipy(self) -> Any:
        """As SciPy's `LinearOperator`: NumPy in and out, products on the operator's own device.

        Arrays of another real dtype are converted to it. Gradients do not flow through.

        Raises:
            TypeError: If NumPy has no such dtype.
        """
        # Slow to import, and few need it.
        from scipy.sparse.linalg import LinearOperator as SciPyOperator

        if self.dtype not in NUMPY_TYPES:
            raise TypeError(
                f"NumPy has no {self.dtype}: convert the operator with `.to(torch.float32)`."
            )

        def product(of: LinearOperator, array: NDArray[Any]) -> NDArray[Any]:
            if np.iscomplexobj(array):
                raise TypeError("The operator is real: multiply real and imaginary part apart.")
            # A copy where SciPy hands out memory that it goes on writing to, or that is read-only.
            tensor = torch.tensor(np.ascontiguousarray(array), dtype=of.dtype, device=of.device)
            return (of @ tensor).detach().cpu().numpy()

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
            TypeError: If the operator is not made of tensors; an operator of a network follows its
                model.
        """
        if not is_dataclass(self):
            raise TypeError(
                f"{type(self).__name__} is not made of tensors: convert what it was built from, "
                "such as the model, and build it again."
            )
        target = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs)
        # The parts fit each other before and after: no constructor has to check them again.
        result = object.__new__(type(self))
        for field in fields(self):
            part = _converted(getattr(self, field.name), target.dtype, target.device)
            object.__setattr__(result, field.name, part)
        return result

    def adopted(self, dtype: torch.dtype, device: torch.device) -> "LinearOperator":
        """The operator itself or, if it was given no dtype or device, the one that has these."""
        return self


def _converted(part: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A part with every tensor in it, at any depth, converted; indices keep their dtype."""
    if isinstance(part, Tensor):
        return part.to(device, dtype) if part.is_floating_point() else part.to(device)
    if isinstance(part, torch.dtype):
        return dtype
    if isinstance(part, torch.device):
        return device
    if isinstance(part, Mapping):
        return {key: _converted(value, dtype, device) for key, value in part.items()}
    if isinstance(part, tuple) and not isinstance(part, torch.Size):
        return tuple(_converted(value, dtype, device) for value in part)
    return part.to(dtype=dtype, device=device) if hasattr(part, "to") else part


def unify(operators: Sequence[LinearOperator]) -> list[LinearOperator]:
    """Give the operators that have no dtype or device of their own those of the others."""
    for reference in operators:
        dtype, device, adopted = reference.dtype, reference.device, []
        for operator in operators:
            adopted.append(operator.adopted(dtype, device))
            if adopted[-1].dtype != dtype or adopted[-1].device != device:
                break
        else:
            return adopted
    kinds = ", ".join(f"{type(o).__name__} is {o.dtype} on {o.device}" for o in operators)
    raise ValueError(
        f"Operators must share one dtype and one device: {kinds}. Convert them with `.to(...)`."
    )


def check_operand(operator: "LinearOperator", tensor: Tensor) -> None:
    """Require a tensor that the operator can multiply."""
    size = operator.shape[1]
    if tensor.ndim not in (1, 2) or tensor.shape[0] != size:
        raise ValueError(
            f"{type(operator).__name__} of shape {operator.shape} cannot multiply a tensor of "
            f"shape {tuple(tensor.shape)}: expected ({size},) or ({size}, k)."
        )
    if tensor.dtype != operator.dtype or tensor.device != operator.device:
        raise ValueError(
            f"{type(operator).__name__} is {operator.dtype} on {operator.device}, the tensor "
            f"{tensor.dtype} on {tensor.device}: convert one of them with `.to(...)`."
        )


def check_square(operator: "LinearOperator", what: str = "this") -> None:
    """Require a square operator for what is asked of it."""
    if operator.shape[0] != operator.shape[1]:
        raise ValueError(
            f"{type(operator).__name__} has shape {operator.shape}: {what} needs a square "
            "operator. Take `A.T @ A` or `A @ A.T`."
        )


def as_scalar(value: Any, operator: "LinearOperator") -> Scalar:
    """A real number, or a real 0-d tensor, through which gradients flow."""
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():
        return value
    if isinstance(value, Real):
        return float(value)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise TypeError(
        f"{type(operator).__name__} can be scaled by a real number only, got {what}: use `@` for "
        "products."
    )


def as_integer(index: Any, size: int) -> int | None:
    """The index as a number from 0 on, None if it is not a single integer."""
    if isinstance(index, Tensor | np.ndarray) and index.ndim == 0:
        index = index.item()
    if isinstance(index, bool | np.bool_) or not isinstance(index, int | np.integer):
        return None
    if not -size <= index < size:
        raise IndexError(f"Index {index} is out of range for size {size}.")
    return int(index) % size


def as_indices(index: Any, size: int, device: torch.device) -> Tensor:
    """A slice, range, list, tensor or array as numbers from 0 on, `[k]`."""
    if isinstance(index, slice):
        index = range(size)[index]
    if isinstance(index, range):
        index = np.arange(index.start, index.stop, index.step)
    if isinstance(index, list | Tensor | np.ndarray):
        # On the CPU, where torch refuses indices that are out of range.
        indices = torch.as_tensor(index).cpu()
        if indices.ndim == 1 and (len(indices) == 0 or not indices.is_floating_point()):
            chosen = indices if indices.dtype == torch.bool else indices.long()
            return torch.arange(size)[chosen].to(device)
    raise TypeError(
        "Rows and columns are chosen by an integer, a slice, one list, tensor or array of integers "
        f"or booleans, or a parameter's name, got {index!r}."
    )


class Composed(LinearOperator):
    """A dataclass whose first field that is not None has its dtype and device.

    It is a tensor, an operator, or several.
    A subclass gives `shape`, `_matmat` and `T`.
    """

    @property
    def parts(self) -> list[Any]:
        """The tensor, the operator or the operators that the first field holds."""
        for part in vars(self).values():
            if part is not None:
                break
        if isinstance(part, Mapping):
            return list(part.values())
        return list(part) if isinstance(part, tuple) else [part]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all parts."""
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of all parts."""
        return self.parts[0].device


class Joined(Composed):
    """A composed operator that claims what all of the operators claim that it is made of."""

    @property
    def is_symmetric(self) -> bool:
        """True if every part is."""
        return all(part.is_symmetric for part in self.parts)

    @property
    def is_positive_semidefinite(self) -> bool:
        """True if every part is."""
        return all(part.is_positive_semidefinite for part in self.parts)


class Symmetric(Composed):
    """A symmetric operator by its structure; a subclass gives `shape` and `_matmat`."""

    is_symmetric = True

    @property
    def T(self: Operator) -> Operator:  # noqa: N802
        """The operator itself."""
        return self
