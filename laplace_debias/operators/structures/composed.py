"""The base of operators that are made of parts."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import torch

from laplace_debias.operators.base import LinearOperator

Operator = TypeVar("Operator", bound=LinearOperator)


class Composed(LinearOperator):
    """A dataclass whose first part (a tensor, an operator, or several) has its dtype and device.

    A subclass gives `shape`, `_matmat` and `T`.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all parts."""
        return _first_part(self).dtype

    @property
    def device(self) -> torch.device:
        """The device of all parts."""
        return _first_part(self).device


class Symmetric(Composed):
    """A symmetric operator by its structure; a subclass gives `shape` and `_matmat`."""

    is_symmetric = True

    @property
    def T(self: Operator) -> Operator:  # noqa: N802
        """The operator itself."""
        return self


def _first_part(operator: Any) -> Any:
    part = getattr(operator, fields(operator)[0].name)
    if isinstance(part, Mapping):
        return next(iter(part.values()))
    return part[0] if isinstance(part, tuple) else part
