"""Losses as functions of a network's outputs."""

from typing import TYPE_CHECKING

from laplace_debias.system.lazy import attributes_from

if TYPE_CHECKING:
    from laplace_debias.curvature.losses.base import (
        Labels,
        Loss,
        LossFunction,
        OutputLoss,
        OutputMap,
        Uniforms,
    )
    from laplace_debias.curvature.losses.torch_losses import output_loss

__all__ = ["Labels", "Loss", "LossFunction", "OutputLoss", "OutputMap", "Uniforms", "output_loss"]

__getattr__ = attributes_from(
    __name__,
    {
        "laplace_debias.curvature.losses.base": (
            "Labels",
            "Loss",
            "LossFunction",
            "OutputLoss",
            "OutputMap",
            "Uniforms",
        ),
        "laplace_debias.curvature.losses.torch_losses": ("output_loss",),
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
