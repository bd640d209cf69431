"""Losses as functions of a network's outputs."""

from laplace_debias.curvature.losses.base import Labels, Loss, LossFunction, OutputLoss, OutputMap
from laplace_debias.curvature.losses.torch_losses import output_loss
from laplace_debias.curvature.losses.uniforms import Uniforms

__all__ = ["Labels", "Loss", "LossFunction", "OutputLoss", "OutputMap", "Uniforms", "output_loss"]
