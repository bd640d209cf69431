"""Laplace approximations of trained networks, debiased for mini-batches."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laplace_debias.laplace import Laplace

__all__ = ["Laplace"]


def __getattr__(name: str) -> Any:
    # The front-end brings the metrics, and they bring torchvision: half a dozen seconds that a
    # user of the operators alone need not wait for.
    if name == "Laplace":
        from laplace_debias.laplace import Laplace

        return Laplace
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
