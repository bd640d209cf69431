"""A plain convolutional network whose depth and width are free."""

from torch import nn


def conv_net(
    depth: int, width: int, num_classes: int = 10, in_channels: int = 3, image_size: int = 32
) -> nn.Sequential:
    """The paper's ConvNet "model depth-width" of test problem (D).

    A first block (convolution, ReLU, max-pooling), `depth` hidden blocks (convolution, ReLU) and a
    last block (max-pooling, flatten, linear). The paper's source does not give the sizes: here
    kernels are 3 × 3 with padding 1, every convolution has `width` output channels, and each
    pooling halves the resolution.

    Args:
        depth: Number of hidden blocks.
        width: Channels of every convolution.
        num_classes: Number of classes, C.
        in_channels: Channels of the images.
        image_size: Height and width of the images, in pixels; a multiple of 4.

    Returns:
        A network from float images [B, in_channels, S, S] to logits [B, C].

    Raises:
        ValueError: If the image size is not a positive multiple of 4, the depth is negative, or
            another number is below 1.

    Reference:
        Debiasing Mini-Batch Quadratics for Applications in Deep Learning, Appendix B.1 (D).
    """
    if image_size < 4 or image_size % 4:
        raise ValueError(f"image_size {image_size}; expected a positive multiple of 4")
    if depth < 0 or min(width, num_classes, in_channels) < 1:
        raise ValueError(
            f"depth {depth}, width {width}, num_classes {num_classes}, in_channels {in_channels}; "
            "expected at least 0, 1, 1 and 1"
        )
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    features = width * (image_size // 4) ** 2
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(features, num_classes))
