"""The networks of the paper's test problems, and smaller versions of them."""

from typing import Any

import timm
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck, ResNet


def all_cnn_c(num_classes: int = 10) -> nn.Sequential:
    """Build All-CNN-C without dropout, for [B, 3, 32, 32]; 1,369,738 parameters for ten classes.

    Reference:
        Springenberg et al. (2015), Striving for Simplicity: The All Convolutional Net.
    """
    return _all_convolutional(
        nn.Conv2d(3, 96, 3, padding=1),
        nn.Conv2d(96, 96, 3, padding=1),
        nn.Conv2d(96, 96, 3, stride=2, padding=1),
        nn.Conv2d(96, 192, 3, padding=1),
        nn.Conv2d(192, 192, 3, padding=1),
        nn.Conv2d(192, 192, 3, stride=2, padding=1),
        nn.Conv2d(192, 192, 3),
        nn.Conv2d(192, 192, 1),
        nn.Conv2d(192, num_classes, 1),
    )


def digits_net(num_classes: int = 10) -> nn.Sequential:
    """Build a small version of All-CNN-C for the digits, [B, 1, 8, 8]; 11,970 parameters."""
    return _all_convolutional(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Conv2d(16, 24, 3, stride=2, padding=1),
        nn.Conv2d(24, 32, 3, padding=1),
        nn.Conv2d(32, 32, 1),
        nn.Conv2d(32, num_classes, 1),
    )


def wide_digits_net(width: int = 24, num_classes: int = 10) -> nn.Sequential:
    """Build a wider net with few positions, [B, 1, 8, 8], for more biased mini-batch curvature."""
    return _all_convolutional(
        nn.Conv2d(1, width, 3, stride=2, padding=1),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.Conv2d(2 * width, 4 * width, 2),
        nn.Conv2d(4 * width, 4 * width, 1),
        nn.Conv2d(4 * width, num_classes, 1),
    )


def _all_convolutional(*convolutions: nn.Conv2d) -> nn.Sequential:
    """Build convolutions with ReLUs between them, followed by the mean over positions."""
    layers: list[nn.Module] = []
    for convolution in convolutions:
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        assert convolution.bias is not None
        nn.init.zeros_(convolution.bias)
        layers += [convolution, nn.ReLU()]
    return nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten())


def conv_net(
    depth: int, width: int, num_classes: int = 10, in_channels: int = 3, image_size: int = 32
) -> nn.Sequential:
    """Build the paper's ConvNet "model depth-width" of test problem (D), Appendix B.1.

    The paper does not state all sizes; we use kernels of 3 × 3, `width` channels and two poolings.
    """
    layers = [nn.Conv2d(in_channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    features = width * (image_size // 4) ** 2
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(features, num_classes))


class _Block(nn.Module):
    """A residual block: (norm → ReLU → 3 × 3 convolution) twice, and a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.shortcut: nn.Module | None = None
        if channels_in != channels_out or stride != 1:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C_in, H, W] to [B, C_out, ⌈H/stride⌉, ⌈W/stride⌉]."""
        activated = self.relu1(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(activated)
        return shortcut + self.conv2(self.relu2(self.norm2(self.conv1(activated))))


def wide_resnet(
    depth: int = 40, width: int = 4, num_classes: int = 100, in_channels: int = 3
) -> nn.Sequential:
    """Build a wide residual network WRN-depth-width, depth 6n + 4; 40-4 has 8,972,340 parameters.

    Reference:
        Zagoruyko & Komodakis (2016), Wide Residual Networks.
    """
    channels = [16, *(16 * width * 2**group for group in range(3))]
    layers: list[nn.Module] = [nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)]
    for group, stride in enumerate((1, 2, 2)):
        channels_in, channels_out = channels[group : group + 2]
        layers.append(_Block(channels_in, channels_out, stride))
        layers += [_Block(channels_out, channels_out, 1) for _ in range((depth - 4) // 6 - 1)]
    layers += [nn.BatchNorm2d(channels[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(channels[-1], num_classes))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def resnet50(
    num_classes: int = 1000,
    *,
    blocks: tuple[int, int, int, int] = (3, 4, 6, 3),
    width_per_group: int = 64,
    expansion: int = 4,
) -> nn.Module:
    """Build torchvision's ResNet-50, or a smaller version with fewer blocks and channels."""
    block = type("Bottleneck", (Bottleneck,), {"expansion": expansion})
    return ResNet(block, list(blocks), num_classes=num_classes, width_per_group=width_per_group)


def vit_little(num_classes: int = 1000, *, image_size: int = 256, **changes: Any) -> nn.Module:
    """Build timm's ViT Little; `depth`, `embed_dim`, `num_heads` etc. give a smaller version."""
    name = "vit_little_patch16_reg4_gap_256"
    return timm.create_model(name, num_classes=num_classes, img_size=image_size, **changes)
