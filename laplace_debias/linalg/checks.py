"""Checks of the arguments of algorithms, which run before any product is computed."""

import difflib
from collections.abc import Collection

import torch
from torch import Tensor

from laplace_debias.operators import base
from laplace_debias.operators.base import LinearOperator
from laplace_debias.system import checks


def check_operator(A: object, generator: torch.Generator | None = None) -> None:
    """Check the type and the dtype of an operator, and that the generator is on its device."""
    if not isinstance(A, LinearOperator):
        raise TypeError(
            f"Expected a LinearOperator, got {type(A).__name__}. Wrap a tensor as "
            "`Dense(matrix)`, or a NumPy array as `Dense(torch.from_numpy(array))`. For a function "
            "or an operator of another library, write a subclass of LinearOperator."
        )
    if A.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{type(A).__name__} is {A.dtype}, but must be float32 or float64. Convert it, or the "
            "parts from which it is built, with `.to(torch.float32)`."
        )
    checks.check_generator(generator)
    if generator is not None and generator.device.type != A.device.type:
        raise ValueError(
            f"`generator` is on {generator.device}, but the operator is on {A.device}. Create it "
            f"with `torch.Generator({str(A.device)!r})`."
        )


def check_square(A: LinearOperator, result: str, generator: torch.Generator | None = None) -> int:
    """Check that an operator is square, and the generator on its device; return its size."""
    check_operator(A, generator)
    base.check_square(A, f"the {result}")
    return A.shape[0]


def check_choice(value: str, choices: Collection[str], name: str) -> None:
    """Check that a string option, such as the name of a method, has one of the allowed values."""
    if value in choices:
        return
    nearest = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"`{name}` is {value!r}. Use {', '.join(map(repr, choices))}.{hint}")


def check_symmetric(
    A: LinearOperator, differences: Tensor, scale: float, tolerated: float = 0.0
) -> None:
    """Raise an error if entries that symmetry requires to be equal differ.

    The absolute `differences` may be up to `tolerated`, or up to a small multiple of `scale`, the
    norm of a product with a unit vector, to allow for rounding errors.
    """
    deviation = float(differences.max()) if differences.numel() else 0.0
    if deviation > max(30 * torch.finfo(A.dtype).eps ** 0.5 * scale, tolerated):
        raise ValueError(
            f"{type(A).__name__} is not symmetric. Entries that must be equal differ "
            f"by {deviation:.3g}, and the norm of a matrix-vector product is {scale:.3g}. Use "
            "its symmetric part, `0.5 * (A + A.T)`. For singular values, use the "
            "eigenvalues of `A.T @ A`. If the operator should be symmetric, check "
            "that it is deterministic: two separate products with the same vector "
            "must be equal."
        )


def check_right_side(A: LinearOperator, b: object, name: str, least_columns: int = 1) -> None:
    """Check the shape, dtype, device and entries of an operator's right-hand side."""
    if not isinstance(b, Tensor):
        raise TypeError(
            f"`{name}` is a {type(b).__name__}. Pass a tensor. For named parameters, "
            "use `inverse(A) @ b`. Or pass them as one vector, "
            "`A.layout.flatten(...)`, and convert `Solution.x` back to named "
            "parameters with `A.layout.unflatten(...)`."
        )
    rows = A.shape[0]
    if b.ndim not in (1, 2) or len(b) != rows or (b.ndim == 2 and b.shape[1] < least_columns):
        raise ValueError(
            f"`{name}` has shape {tuple(b.shape)}, but the operator has shape {A.shape}. Pass a "
            f"tensor of shape ({rows},) or ({rows}, k)."
        )
    if b.dtype != A.dtype or b.device != A.device:
        raise ValueError(
            f"`{name}` is {b.dtype} on {b.device}, but the operator is {A.dtype} on {A.device}. "
            "Convert one of them with `.to(...)`."
        )
    if not b.isfinite().all():
        raise ValueError(f"`{name}` contains NaN or Inf. Pass finite values.")
