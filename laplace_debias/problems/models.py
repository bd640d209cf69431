"""Networks of the test problems, and their checkpoints."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from laplace_debias.problems.storage import read_tensors


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


def _all_convolutional(convolutions: list[nn.Conv2d]) -> nn.Sequential:
    """Convolutions with ReLUs between them, then the mean over positions."""
    layers: list[nn.Module] = []
    for convolution in convolutions:
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        assert convolution.bias is not None
        nn.init.zeros_(convolution.bias)
        layers += [convolution, nn.ReLU()]
    return nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten())


def load_checkpoint(model: nn.Module, path: str | Path) -> dict[str, Tensor]:
    """Load weights from a safetensors file into a model, strictly and in place.

    Every parameter and buffer of the model must be in the file with its shape; values are cast to
    the model's dtype and device. The model is unchanged where this raises.

    Args:
        model: The model that the weights belong to.
        path: A file as `save_checkpoint` writes it.

    Returns:
        The file's other entries on the CPU, e.g. `split.train` and `split.val`.

    Raises:
        ValueError: If the file is missing or damaged, or if its names or shapes are not the
            model's. An entry that the model lacks counts as a weight, not as an extra one, where
            the last part of its name (`weight`, `bias`, …) is that of one of the model's.
    """
    tensors = read_tensors(path)
    state = model.state_dict()
    missing = [name for name in state if name not in tensors]
    unknown = parameter_like(model, (name for name in tensors if name not in state))
    shapes = [
        f"{name}: {list(tensors[name].shape)} in the file, {list(value.shape)} in the model"
        for name, value in state.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    if missing or unknown or shapes:
        found = "; ".join(
            f"{what}: {', '.join(names[:4])}{', …' if len(names) > 4 else ''}"
            for what, names in (
                ("missing from the file", missing),
                ("unknown to the model", unknown),
                ("of another shape", shapes),
            )
            if names
        )
        raise ValueError(
            f"{path} does not belong to this {type(model).__name__}: {found}; "
            "build the model that the checkpoint was saved from"
        )
    with torch.no_grad():
        for name, value in state.items():
            value.copy_(tensors[name])
    return {name: tensor for name, tensor in tensors.items() if name not in state}


def parameter_like(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of the names that could be a parameter's or a buffer's of such a model.

    Args:
        model: The model.
        names: Names such as `16.weight` or `split.train`.

    Returns:
        The names whose last part is also the last part of one of the model's.
    """
    leaves = {name.rpartition(".")[2] for name in model.state_dict()}
    return [name for name in names if name.rpartition(".")[2] in leaves]
