"""Networks too large for the machine at hand: their blocks and positions, from shapes alone."""

import torch
from torch import Tensor, nn

from laplace_debias.curvature.layers.blocks import Block, curvature_blocks
from laplace_debias.problems.models import resnet50

# Of Llama 3 with 8 billion parameters.
_LAYERS, _WIDTH, _HIDDEN, _KEYS, TOKENS = 32, 4096, 14336, 1024, 2048
TOKENS = 2048


class _Layer(nn.Module):
    """The matrices of one layer of a language model of Llama's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.key = nn.Linear(_WIDTH, _KEYS, bias=False)
        self.value = nn.Linear(_WIDTH, _KEYS, bias=False)
        self.out = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.gate = nn.Linear(_WIDTH, _HIDDEN, bias=False)
        self.up = nn.Linear(_WIDTH, _HIDDEN, bias=False)
        self.down = nn.Linear(_HIDDEN, _WIDTH, bias=False)


def resnet() -> dict[Block, int]:
    """ResNet-50's weight blocks and their positions for an image of 224 × 224."""
    with torch.device("meta"):
        model = resnet50().eval()
        x = torch.empty(1, 3, 224, 224)
    names = [
        f"{path}.weight"
        for path, layer in model.named_modules()
        if isinstance(layer, (nn.Conv2d, nn.Linear))
    ]
    positions: dict[str, int] = {}
    for path, layer in model.named_modules():

        def record(_: nn.Module, __: object, z: Tensor, path: str = path) -> None:
            positions[path] = z[0, 0].numel()

        layer.register_forward_hook(record)
    model(x)
    return {block: positions[block.layer] for block in curvature_blocks(model, names)}


def llama() -> dict[Block, int]:
    """The matrices in the layers of an 8-billion-parameter model, for a sequence."""
    with torch.device("meta"):
        model = nn.ModuleList(_Layer() for _ in range(_LAYERS))
    names = [name for name, _ in model.named_parameters()]
    return dict.fromkeys(curvature_blocks(model, names), TOKENS)
