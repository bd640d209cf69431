"""Losses as functions of a network's outputs."""

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
