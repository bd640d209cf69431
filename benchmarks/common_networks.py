"""Networks of tutorials and of common sizes, each with the shape of its inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class CommonNetwork:
    """A network, and the form of its inputs.

    Attributes:
        build: A function that builds the network.
        input_shape: The shape of one input.
        num_classes: The number of outputs.
        size: The number of examples of a fit.
    """

    build: Callable[[], nn.Sequential]
    input_shape: tuple[int, ...]
    num_classes: int = 10
    size: int = 256


class Residual(nn.Sequential):
    """A block whose outputs are added to its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute outputs `[B, C, H, W]`."""
        return torch.relu(x + super().forward(x))


def lenet() -> nn.Sequential:
    """LeNet-5 with ReLU and max-pooling."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *perceptron(256, 120, 84, 10),
    )


def small_cnn() -> nn.Sequential:
    """Build two 3 × 3 convolutions: the "Simple MNIST convnet" of Keras."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1600, 10),
    )


def stem_cnn() -> nn.Sequential:
    """A 7 × 7 stem and two 3 × 3 convolutions."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 7, 2, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def small_resnet() -> nn.Sequential:
    """Three residual blocks of 16 channels, without normalisation."""
    blocks = [
        Residual(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
        for _ in range(3)
    ]
    stem = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(256, 10))


def perceptron(*sizes: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in pairwise(sizes):
        layers += [nn.Linear(num_inputs, num_outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cifar_tutorial() -> nn.Sequential:
    """The network of torch's tutorial "Training a classifier"."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *perceptron(400, 120, 84, 10),
    )


def cnn_tutorial() -> nn.Sequential:
    """The network of TensorFlow's tutorial "Convolutional neural network"."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        *perceptron(1024, 64, 10),
    )


NETWORKS = {
    "LeNet, 28 × 28": CommonNetwork(lenet, (1, 28, 28)),
    "3 × 3 CNN, 28 × 28": CommonNetwork(small_cnn, (1, 28, 28)),
    "7 × 7 stem, 64 × 64": CommonNetwork(stem_cnn, (3, 64, 64), size=128),
    "small ResNet, 32 × 32": CommonNetwork(small_resnet, (3, 32, 32), size=128),
    "MLP 784-256-256-10": CommonNetwork(lambda: perceptron(784, 256, 256, 10), (784,), size=1024),
    "MLP 20-50-50-3": CommonNetwork(lambda: perceptron(20, 50, 50, 3), (20,), 3, size=1024),
    "MLP 8-50-2": CommonNetwork(lambda: perceptron(8, 50, 2), (8,), 2, size=1024),
}
"""The networks on which the speed of the package was tuned."""

FURTHER_NETWORKS = {
    "torch, quickstart": CommonNetwork(lambda: perceptron(784, 512, 512, 10), (784,), size=1024),
    "torch, CIFAR tutorial": CommonNetwork(cifar_tutorial, (3, 32, 32)),
    "Keras, CNN tutorial": CommonNetwork(cnn_tutorial, (3, 32, 32), size=128),
    "Keras, credit card fraud": CommonNetwork(
        lambda: perceptron(30, 256, 256, 256, 2), (30,), 2, size=1024
    ),
    "scikit-learn, digits": CommonNetwork(lambda: perceptron(64, 100, 10), (64,), size=1024),
}
"""Networks of tutorials that were not used for tuning, chosen before they were measured."""


def random_examples(
    network: CommonNetwork, size: int, seed: int, device: str
) -> tuple[Tensor, Tensor]:
    """Return random inputs and labels for a network."""
    generator = torch.Generator().manual_seed(seed)
    shape: Sequence[int] = (size, *network.input_shape)
    inputs = torch.randn(shape, generator=generator)
    labels = torch.randint(network.num_classes, (size,), generator=generator)
    return inputs.to(device), labels.to(device)
