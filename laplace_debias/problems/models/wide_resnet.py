"""Wide residual networks with pre-activation."""

from jaxtyping import Float
from torch import Tensor, nn

_BASE_CHANNELS = 16


class _Block(nn.Module):
    """(norm → ReLU → 3 × 3 convolution) twice, beside a shortcut.

    Where the number of channels or the resolution changes, the shortcut is a 1 × 1 convolution of
    the block's activated input; else it is the block's input itself.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.shortcut = (
            nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)
            if channels_in != channels_out or stride != 1
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, C_in, H, W] to [B, C_out, ⌈H/stride⌉, ⌈W/stride⌉]."""
        activated = self.relu1(self.norm1(x))
        skipped = x if self.shortcut is None else self.shortcut(activated)
        return skipped + self.conv2(self.relu2(self.norm2(self.conv1(activated))))


class WideResNet(nn.Module):
    """A wide residual network; see `wide_resnet`."""

    def __init__(self, depth: int, width: int, num_classes: int, in_channels: int) -> None:
        super().__init__()
        blocks = (depth - 4) // 6
        channels = [_BASE_CHANNELS] + [width * _BASE_CHANNELS * 2**group for group in range(3)]
        self.stem = nn.Conv2d(in_channels, channels[0], 3, padding=1, bias=False)
        self.blocks = nn.Sequential(
            *(
                _Block(
                    channels[group if block == 0 else group + 1],
                    channels[group + 1],
                    stride=2 if block == 0 and group > 0 else 1,
                )
                for group in range(3)
                for block in range(blocks)
            )
        )
        self.norm = nn.BatchNorm2d(channels[-1])
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.head.bias)

    def forward(
        self, x: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch classes"]:
        """Images to logits."""
        features = self.relu(self.norm(self.blocks(self.stem(x))))
        return self.head(self.pool(features).flatten(1))


def wide_resnet(
    depth: int = 40, width: int = 4, num_classes: int = 100, in_channels: int = 3
) -> WideResNet:
    """A wide residual network WRN-depth-width: batch norm, pre-activation, no dropout.

    Three groups of (depth − 4) / 6 blocks of two 3 × 3 convolutions, with 16·width, 32·width and
    64·width channels; the second and the third group halve the resolution. WRN-40-4 has 8,972,340
    parameters for 100 classes. Convolutions have no bias and start from He's normal
    initialisation.

    Args:
        depth: Number of convolutions, 6n + 4.
        width: Multiplier of the number of channels.
        num_classes: Number of classes, C.
        in_channels: Channels of the images.

    Returns:
        A network from float images [B, in_channels, H, W] to logits [B, C].

    Raises:
        ValueError: If the depth is not 6n + 4 with n ≥ 1, or another number is below 1.

    Reference:
        Zagoruyko & Komodakis (2016), Wide Residual Networks.
    """
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(
            f"depth {depth}; expected 6n + 4 with n ≥ 1: 10, 16, 22, 28, 34, 40, … convolutions"
        )
    if min(width, num_classes, in_channels) < 1:
        raise ValueError(
            f"width {width}, num_classes {num_classes}, in_channels {in_channels}; "
            "expected at least 1 each"
        )
    return WideResNet(depth, width, num_classes, in_channels)
