"""The layers that are known, by their class."""

from torch import nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
)
LAYERS = (
    nn.Linear,
    *CONVOLUTIONS,
    *TRANSPOSED,
    nn.Embedding,
    *NORMS,
    nn.MultiheadAttention,
)
# Query, key and value, which `nn.MultiheadAttention` packs into one parameter.
PROJECTIONS = ("query", "key", "value")


def is_hugging_face_conv1d(layer: nn.Module) -> bool:
    """Whether a layer is transformers' `Conv1D`: a linear layer with a transposed weight."""
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(layer).__mro__[:1]}
    return "transformers.pytorch_utils.Conv1D" in names
