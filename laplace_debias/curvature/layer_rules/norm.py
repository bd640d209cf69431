"""Normalisations, whose scale and shift are vectors with exact blocks."""

from typing import Any, ClassVar

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.layer_rules.base import (
    Block,
    LayerInputs,
    LayerRule,
    ModuleTypes,
    OutputGradients,
)

_BatchNorm = nn.modules.batchnorm._BatchNorm


class NormRule(LayerRule):
    """A normalisation over features, which are the last dimensions."""

    module_types: ClassVar[ModuleTypes] = (nn.LayerNorm, nn.RMSNorm)
    kind = "normalisation"
    is_entrywise = True
    only_rescales = True
    can_be_joint = False

    def blocks(
        self, layer: nn.Module, path: str, key: str, sharing: str, joint: bool
    ) -> list[Block]:
        """Make the exact block of the scale, or of the shift."""
        name = f"{path}.{key}" if path else key
        return [self.vector_block(name, path, layer.get_parameter(key).numel(), self.kind)]

    def normalise(self, layer: Any, x: LayerInputs) -> Tensor:
        """Normalise the input without scale and shift."""
        normalise = F.layer_norm if isinstance(layer, nn.LayerNorm) else F.rms_norm
        return normalise(x, layer.normalized_shape, eps=layer.eps)

    def jacobian_rows(
        self, layer: nn.Module, block: Block, x: LayerInputs, g: OutputGradients
    ) -> Float[Tensor, "columns batch size"]:
        """Compute `Σ_t g_t ⊙ x̂_t` for the scale, with the normalised input x̂; else `Σ_t g_t`."""
        if block.parameters[0].rpartition(".")[2] == "weight":
            g = g * self.normalise(layer, x)
        return super().jacobian_rows(layer, block, x, g)

    def has_sequence(self, layer: nn.Module) -> bool:
        """Return False, because a normalisation reveals nothing new about the positions."""
        return False

    def inner_layer(self, layer: nn.Module) -> nn.Module | None:
        """Return the activation that some normalisations apply in their own forward pass."""
        return next(layer.children(), None)


class ChannelNormRule(NormRule):
    """A normalisation over channels, which are the second dimension.

    Instance normalisation and synchronised batch normalisation also only rescale, but their
    parameters are measured at operations or calls.
    """

    module_types = (nn.GroupNorm, nn.modules.batchnorm._NormBase)
    channels_first = True

    def owns(self, layer: nn.Module, key: str) -> bool:
        """Return whether the rule applies to a parameter."""
        has_rule = isinstance(layer, (nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
        return has_rule and super().owns(layer, key)

    def normalise(self, layer: Any, x: LayerInputs) -> Tensor:
        """Normalise the input without scale and shift."""
        if isinstance(layer, nn.GroupNorm):
            return F.group_norm(x, layer.num_groups, eps=layer.eps)
        return F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)

    def prepare(self, layer: nn.Module) -> None:
        """For batch normalisation, make the output gradients of a single example contiguous.

        If the output gradient of an example `[1, C, H, W]` has strides `(C, 1, CW, C)`, as can
        happen if tokens `[1, HW, C]` follow the layer, torch's backward pass in eval mode reads the
        numbers in the wrong order (torch 2.15, on the CPU).
        """
        if isinstance(layer, _BatchNorm):
            layer.register_forward_hook(_make_gradients_contiguous, prepend=True)

    def problem(self, layer: nn.Module) -> str | None:
        """Return why batch normalisation mixes the examples of a batch, and what to do."""
        if not isinstance(layer, _BatchNorm):
            return None
        if layer.running_mean is None:
            return (
                "keeps no running statistics, so an example's output depends on the other "
                "examples of its batch. The curvature of one example is therefore not defined. "
                "Train the model with `track_running_stats=True`."
            )
        if layer.training:
            return (
                "is in training mode, so an example's output depends on the other examples of "
                "its batch. Curvature is computed in eval mode. Call `model.eval()` first."
            )
        return None


def _make_gradients_contiguous(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
    if len(output) == 1 and output.requires_grad:
        output.register_hook(Tensor.contiguous)
