"""All-convolutional networks: All-CNN-C and small relatives."""

from torch import nn


def all_cnn_c(num_classes: int = 10) -> nn.Sequential:
    """All-CNN-C for images [B, 3, 32, 32], without dropout and without a last ReLU.

    Nine convolutions at the even indices 0, 2, …, 16, each but the last followed by a ReLU; then
    the mean over the 6 × 6 positions. 1,369,738 parameters for ten classes. Weights start from He's
    normal initialisation, biases from zero.

    Args:
        num_classes: Number of classes, C.

    Returns:
        A network from float images [B, 3, 32, 32] to logits [B, C].

    Reference:
        Springenberg et al. (2015), Striving for Simplicity: The All Convolutional Net.
    """
    return _all_convolutional(
        [
            nn.Conv2d(3, 96, 3, padding=1),
            nn.Conv2d(96, 96, 3, padding=1),
            nn.Conv2d(96, 96, 3, stride=2, padding=1),
            nn.Conv2d(96, 192, 3, padding=1),
            nn.Conv2d(192, 192, 3, padding=1),
            nn.Conv2d(192, 192, 3, stride=2, padding=1),
            nn.Conv2d(192, 192, 3),
            nn.Conv2d(192, 192, 1),
            nn.Conv2d(192, num_classes, 1),
        ]
    )


def digits_net(num_classes: int = 10) -> nn.Sequential:
    """A small relative of All-CNN-C for the digits: images [B, 1, 8, 8], 11,970 parameters.

    Args:
        num_classes: Number of classes, C.

    Returns:
        A network from float images [B, 1, 8, 8] to logits [B, C].
    """
    return _all_convolutional(
        [
            nn.Conv2d(1, 16, 3, padding=1),
            nn.Conv2d(16, 24, 3, stride=2, padding=1),
            nn.Conv2d(24, 32, 3, padding=1),
            nn.Conv2d(32, 32, 1),
            nn.Conv2d(32, num_classes, 1),
        ]
    )


def wide_digits_net(width: int = 24, num_classes: int = 10) -> nn.Sequential:
    """A relative of All-CNN-C for images [B, 1, 8, 8], wider than `digits_net`.

    One batch's curvature is biased where it has few examples compared with the inputs of a layer.
    So the network is wide and has few positions: 16, 4, 1, 1 and 1 after its convolutions.

    Args:
        width: Channels of the first convolution; the second has twice, the next two four times as
            many.
        num_classes: Number of classes, C.

    Returns:
        A network from float images [B, 1, 8, 8] to logits [B, C].
    """
    return _all_convolutional(
        [
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.Conv2d(2 * width, 4 * width, 2),
            nn.Conv2d(4 * width, 4 * width, 1),
            nn.Conv2d(4 * width, num_classes, 1),
        ]
    )


def _all_convolutional(convolutions: list[nn.Conv2d]) -> nn.Sequential:
    """Convolutions with ReLUs between them, then the mean over positions."""
    layers: list[nn.Module] = []
    for convolution in convolutions:
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        assert convolution.bias is not None
        nn.init.zeros_(convolution.bias)
        layers += [convolution, nn.ReLU()]
    return nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten())
