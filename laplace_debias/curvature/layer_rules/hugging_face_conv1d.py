"""The `Conv1D` of transformers, which GPT-2 uses instead of linear layers."""

from jaxtyping import Shaped
from torch import Tensor, nn

from laplace_debias.curvature.layer_rules.base import LayerRule


class HuggingFaceConv1DRule(LayerRule):
    """A linear layer whose weight is stored transposed, `[d_in, d_out]`."""

    # The type is given by its name, because importing transformers takes seconds.
    module_types = ("transformers.pytorch_utils.Conv1D",)
    kind = "linear"

    def matrices(
        self, layer: nn.Module, weight: Shaped[Tensor, "d_in d_out"]
    ) -> Shaped[Tensor, "d_out d_in"]:
        """Transpose the weight."""
        return weight.T
