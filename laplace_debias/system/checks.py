"""Checks of arguments. Each argument is checked only once, in a public function."""

import operator
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def whole(value: Any, name: str, minimum: int = 1, maximum: int = 2**53) -> int:
    """Convert an argument of any integer type except bool to an `int`, and check its range.

    The default `maximum` is 2**53, because float64 represents all integers up to this number.
    """
    number = None
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool
    if not is_bool:
        with suppress(TypeError):
            number = operator.index(value)
    if number is None:
        raise TypeError(
            f"{name} must be a whole number, got {reprlib.repr(value)} of type "
            f"{type(value).__name__}. Pass an int, such as 10**9 instead of 1e9."
        )
    if not minimum <= number <= maximum:
        limit = "2**53" if maximum == 2**53 else maximum
        raise ValueError(
            f"{name} must be at least {minimum} and at most {limit}, got {reprlib.repr(number)}. "
            "Pass a number in this range."
        )
    return number


def real(value: Any, name: str, device: torch.device | None = None) -> Tensor:
    """Convert a real number, or several real numbers, to a float64 tensor."""
    is_complex = "complex" in str(getattr(value, "dtype", ""))
    try:
        if is_complex or isinstance(value, bool):
            raise TypeError
        return torch.as_tensor(value, dtype=torch.float64, device=device)
    except OverflowError as error:
        raise ValueError(f"{name} is too large for float64. Pass a smaller number.") from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be a real number or several real numbers, but is {reprlib.repr(value)}, "
            f"of type {type(value).__name__}. Pass a float or a tensor."
        ) from error


def checked_weights(
    weights: Sequence[float] | Tensor | float | None, name: str
) -> Float[Tensor, " n"] | None:
    """Convert weights to a float64 vector on the CPU; None stays None.

    Weights must be at least 0, and at least one weight must be greater than 0.
    """
    if weights is None:
        return None
    values = torch.as_tensor(weights, dtype=torch.float64).detach().cpu().clone().reshape(-1)
    is_vector = torch.as_tensor(weights).ndim <= 1 and len(values) > 0
    if not is_vector or not (values.isfinite() & (values >= 0)).all() or not values.any():
        raise ValueError(
            f"`{name}` must be finite numbers of at least 0, with at least one "
            f"greater than 0, got {weights}. Pass weights that meet this condition."
        )
    return values


def check_is(value: object, name: str, *kinds: Any) -> None:
    """Require that an argument has one of the given types."""
    if not isinstance(value, kinds):
        allowed = " or ".join("None" if k is type(None) else k.__name__ for k in kinds)
        raise TypeError(
            f"{name} must be {allowed}, got {type(value).__name__}. Convert it, or pass a "
            "different object."
        )


def check_generator(generator: object) -> None:
    """Require a `torch.Generator`, or None."""
    if generator is not None and not isinstance(generator, torch._C.Generator):
        raise TypeError(
            f"`generator` must be a torch.Generator or None, got {type(generator).__name__}. For "
            "a seed, pass torch.Generator().manual_seed(seed)."
        )


def check_no_autocast(device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Raise an error under autocast, which would round numbers to half precision.

    No error is raised for float64, which autocast does not round, nor for the device `meta`, which
    has no autocast.
    """
    if dtype == torch.float64 or device.type == "meta":
        return
    if torch.is_autocast_enabled(device.type):
        raise RuntimeError(
            f"torch.autocast({device.type!r}) is on, but curvature, predictions and products of "
            "operators must be computed in their own dtype. Call this outside the autocast "
            f"context, or within `with torch.autocast({device.type!r}, enabled=False):`."
        )


def check_extra(extra: str, *packages: str) -> None:
    """Raise an error if packages that the given extra installs are missing."""
    for package in packages:
        if find_spec(package) is None:
            raise ImportError(
                f"{package} is not installed. Run pip install 'laplace-debias[{extra}]'."
            )


@contextmanager
def imports_of_extra(extra: str, *packages: str) -> Iterator[None]:
    """Check that the packages of an extra are installed before the block imports them."""
    check_extra(extra, *packages)
    yield
