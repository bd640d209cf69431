"""The paper's test problems (A) to (F), smaller versions of them, and their training.

Hyper-parameters that the paper does not state are taken from the model's own paper or from DeepOBS.

Reference:
    Debiasing Mini-Batch Quadratics for Applications in Deep Learning, Appendix B.1.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torchvision import datasets, models
from tqdm import tqdm

from examples.paper.data import FolderImages, Images, cifar, corrupted_digits, digits
from examples.paper.networks import (
    all_cnn_c,
    conv_net,
    digits_net,
    resnet50,
    vit_little,
    wide_digits_net,
    wide_resnet,
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a classifier is trained on the mean cross-entropy.

    Attributes:
        batch_size: Examples per step.
        epochs: Passes over the data at `learning_rate`, which is multiplied by `decay` after each
            of the `milestones`; without effect if there are cycles.
        cycles: The (epochs, peak learning rate) of one-cycle schedules (Smith & Topin, 2018): the
            rate increases from 1/25 of the peak during the first 30 %, and then decreases to zero,
            along cosines.
        optimizer: `sgd`, `adam` or `nadamw`, whose weight decay is decoupled.
        momentum: The momentum of SGD, or β₁ of Adam.
        nesterov: Whether SGD uses Nesterov momentum.
        weight_decay: β of ½ β ‖W‖², for parameters with more than one dimension.
        clip_norm: Largest norm of the gradient.
        augmented: Whether images are mirrored and shifted by up to 4 pixels at random.
    """

    batch_size: int
    epochs: int = 0
    learning_rate: float = 0.1
    milestones: tuple[int, ...] = ()
    decay: float = 0.1
    cycles: tuple[tuple[int, float], ...] = ()
    optimizer: str = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_norm: float = math.inf
    augmented: bool = False

    @property
    def penalty(self) -> float:
        """β of the training loss (Eq. 1); 0 for decoupled decay, which is not in the loss."""
        if self.optimizer == "nadamw":
            return 0.0
        return self.weight_decay

    @property
    def num_epochs(self) -> int:
        """The total number of passes over the data."""
        if self.cycles:
            return sum(epochs for epochs, _ in self.cycles)
        return self.epochs

    def rates(self, steps_per_epoch: int) -> Iterator[float]:
        """Yield the learning rate of every step."""
        if self.cycles:
            for epochs, peak in self.cycles:
                num_steps = epochs * steps_per_epoch
                for step in range(1, num_steps + 1):
                    yield peak * _one_cycle(step / num_steps)
        else:
            for epoch in range(self.epochs):
                num_decays = sum(epoch >= milestone for milestone in self.milestones)
                yield from [self.learning_rate * self.decay**num_decays] * steps_per_epoch


def _one_cycle(progress: float) -> float:
    """Compute the rate of a one-cycle schedule, relative to its peak.

    Args:
        progress: The part of the schedule that is over, in (0, 1].
    """
    if progress < 0.3:
        lowest = 0.04
        half_turns = progress / 0.3
    else:
        lowest = 4e-6
        half_turns = 1 + (progress - 0.3) / 0.7
    return lowest + (1 - lowest) * (1 - math.cos(math.pi * half_turns)) / 2


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return an optimizer's non-empty groups: weights with decay, other parameters without."""
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def train(
    model: nn.Module,
    data: Images,
    recipe: Recipe,
    seed: int = 0,
    progress: bool = False,
    on_epoch: Callable[[int, nn.Module], None] | None = None,
) -> nn.Module:
    """Train a model in place, on its device; return the model in evaluation mode.

    Args:
        model: A model from images [B, C, H, W] to logits [B, classes].
        data: Images to train on.
        recipe: How the model is trained.
        seed: The seed of the order and the augmentation.
        progress: Whether to show a progress bar.
        on_epoch: Called after each epoch with the number of the epoch, starting at 1, and the
            model in evaluation mode.
    """
    device = next(model.parameters()).device
    optimizer = _new_optimizer(model, recipe)
    generator = torch.Generator().manual_seed(seed)
    rates = recipe.rates(math.ceil(len(data) / recipe.batch_size))
    for epoch in tqdm(range(1, recipe.num_epochs + 1), "training", disable=not progress):
        model.train()
        for indices in torch.randperm(len(data), generator=generator).split(recipe.batch_size):
            x, y = data.batch(indices)
            if recipe.augmented:
                x = _augmented(x, generator)
            rate = next(rates)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
            optimizer.step()
        if not loss.isfinite():
            raise FloatingPointError(f"the loss is {loss} in epoch {epoch}: lower the rate")
        if on_epoch is not None:
            on_epoch(epoch, model.eval())
    optimizer.zero_grad()
    return model.eval()


def _new_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe; its learning rate is set before every step."""
    groups = decay_groups(model.parameters(), recipe.weight_decay)
    betas = (recipe.momentum, 0.999)
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, 1.0, recipe.momentum, nesterov=recipe.nesterov)
    if recipe.optimizer == "adam":
        return torch.optim.Adam(groups, betas=betas)
    return torch.optim.NAdam(groups, betas=betas, decoupled_weight_decay=True)


def _augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image at random, and shift all images of a batch by the same few pixels."""
    mirrored = torch.rand(len(x), generator=generator) < 0.5
    x = torch.where(mirrored[:, None, None, None], x.flip(3), x)
    down, right = torch.randint(9, (2,), generator=generator).tolist()
    padded = nn.functional.pad(x, [4] * 4, mode="reflect")
    return padded[:, :, down : down + x.shape[2], right : right + x.shape[3]]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A network, its data and how it is trained.

    Attributes:
        name: The name by which settings refer to the problem.
        summary: A description, with the paper's letter of the problem.
        model: A function that makes the network, with random weights from torch's global generator.
        data: A function from a path to the images for training and tuning, and the test images.
        recipe: How the network is trained.
        num_validation: The number of images for training and tuning that are held out for tuning.
        is_reduced: Whether this is a smaller version of a problem of the paper.
        published: A function that makes the network with published weights, which were trained on
            all training images.
    """

    name: str
    summary: str
    model: Callable[[], nn.Module]
    data: Callable[[Path | None], tuple[Images, Images]]
    recipe: Recipe
    num_validation: int
    is_reduced: bool = False
    published: Callable[[], nn.Module] | None = None

    def initial_model(self, seed: int) -> nn.Module:
        """Return the network with the random weights of a seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model()


def _imagenet(new_transform: Callable[[], Any], root: Path | None) -> tuple[Any, Any]:
    """Return ImageNet's training and validation images, in the form for the published network."""
    if root is None:
        raise ValueError("there is no path to ImageNet's train/ and val/; give it as --data")
    train_files = datasets.ImageFolder(root / "train", new_transform())
    validation_files = datasets.ImageFolder(root / "val", new_transform())
    return (
        FolderImages(train_files, torch.arange(len(train_files))),
        FolderImages(validation_files, torch.arange(len(validation_files))),
    )


def _vit_transform() -> Any:
    """Return the transform from images to the inputs of the published ViT."""
    config = timm.data.resolve_data_config(model=_VIT(), pretrained_cfg={})
    return timm.data.create_transform(**config)


_RESNET = models.ResNet50_Weights.IMAGENET1K_V1
_VIT = partial(timm.create_model, "vit_little_patch16_reg4_gap_256.sbb_in1k")
_CIFAR10 = partial(cifar, 10)
_CIFAR100 = partial(cifar, 100)
_ADAM = Recipe(batch_size=128, epochs=100, learning_rate=1e-3, optimizer="adam")
_NADAMW = Recipe(batch_size=128, optimizer="nadamw", weight_decay=0.05, clip_norm=5.0)

PROBLEMS: tuple[Problem, ...] = (
    Problem(
        name="allcnnc-cifar100",
        summary="(A) All-CNN-C on CIFAR-100",
        model=partial(all_cnn_c, 100),
        data=_CIFAR100,
        recipe=Recipe(
            batch_size=256, epochs=350, learning_rate=0.17, momentum=0.0, weight_decay=5e-4
        ),
        num_validation=10_000,
    ),
    Problem(
        name="allcnnc-cifar10",
        summary="(B) All-CNN-C on CIFAR-10",
        model=all_cnn_c,
        data=_CIFAR10,
        recipe=Recipe(
            batch_size=128,
            epochs=350,
            learning_rate=0.05,
            milestones=(200, 250, 300),
            weight_decay=1e-3,
        ),
        num_validation=10_000,
    ),
    Problem(
        name="wrn404-cifar100",
        summary="(C) WideResNet 40-4 on CIFAR-100",
        model=wide_resnet,
        data=_CIFAR100,
        recipe=Recipe(
            batch_size=128,
            epochs=160,
            milestones=(60, 120),
            decay=0.2,
            weight_decay=5e-4,
            augmented=True,
        ),
        num_validation=10_000,
    ),
    *(
        Problem(
            name=f"convnet-{depth}-{width}-cifar10",
            summary=f"(D) ConvNet of depth {depth} and width {width} on CIFAR-10",
            model=partial(conv_net, depth, width),
            data=_CIFAR10,
            recipe=_ADAM,
            num_validation=10_000,
        )
        for depth in (1, 2, 4)
        for width in (16, 32, 64)
    ),
    Problem(
        name="resnet50-imagenet",
        summary="(E) ResNet-50 on ImageNet",
        model=resnet50,
        published=partial(models.resnet50, weights=_RESNET),
        data=partial(_imagenet, _RESNET.transforms),
        recipe=Recipe(batch_size=256, epochs=90, milestones=(30, 60), weight_decay=1e-4),
        num_validation=10_000,
    ),
    Problem(
        name="vit-little-imagenet",
        summary="(F) ViT Little on ImageNet",
        model=vit_little,
        published=partial(_VIT, pretrained=True),
        data=partial(_imagenet, _vit_transform),
        recipe=_NADAMW,
        num_validation=10_000,
    ),
    Problem(
        name="allcnnc-cifar10-one-cycle",
        summary="(B) All-CNN-C on CIFAR-10, trained in 44 epochs",
        is_reduced=True,
        model=all_cnn_c,
        data=_CIFAR10,
        recipe=Recipe(
            batch_size=128,
            cycles=((16, 0.04), (28, 0.05)),
            nesterov=True,
            weight_decay=1e-3,
            clip_norm=5.0,
            augmented=True,
        ),
        num_validation=5_000,
    ),
    Problem(
        name="allcnn-digits",
        summary="(B) a small all-convolutional network on the digits, over-confident",
        is_reduced=True,
        model=digits_net,
        data=digits,
        recipe=Recipe(batch_size=50, cycles=((40, 0.1),), clip_norm=5.0),
        num_validation=297,
    ),
    Problem(
        name="wide-allcnn-corrupted-digits",
        summary="(B) a wider one on corrupted digits, soon over-confident",
        is_reduced=True,
        model=wide_digits_net,
        data=corrupted_digits,
        recipe=Recipe(batch_size=50, cycles=((10, 0.05),), clip_norm=5.0),
        num_validation=297,
    ),
    Problem(
        name="wrn101-cifar10",
        summary="(C) WideResNet 10-1 on CIFAR-10",
        is_reduced=True,
        model=partial(wide_resnet, 10, 1, 10),
        data=_CIFAR10,
        recipe=Recipe(batch_size=128, cycles=((15, 0.1),), weight_decay=5e-4, augmented=True),
        num_validation=5_000,
    ),
    Problem(
        name="wrn101-digits",
        summary="(C) WideResNet 10-1 on the digits",
        is_reduced=True,
        model=partial(wide_resnet, 10, 1, 10, in_channels=1),
        data=digits,
        recipe=Recipe(batch_size=50, cycles=((10, 0.1),), weight_decay=5e-4),
        num_validation=297,
    ),
    Problem(
        name="convnet-digits",
        summary="(D) ConvNet of depth 1 and width 16 on the digits",
        is_reduced=True,
        model=partial(conv_net, 1, 16, 10, in_channels=1, image_size=8),
        data=digits,
        recipe=Recipe(batch_size=50, epochs=20, learning_rate=1e-3, optimizer="adam"),
        num_validation=297,
    ),
    Problem(
        name="resnet-cifar10",
        summary="(E) a ResNet of one thin bottleneck per group on CIFAR-10",
        is_reduced=True,
        model=partial(resnet50, 10, blocks=(1, 1, 1, 1), width_per_group=8, expansion=1),
        data=_CIFAR10,
        recipe=Recipe(batch_size=128, cycles=((10, 0.1),), weight_decay=1e-4, augmented=True),
        num_validation=5_000,
    ),
    Problem(
        name="vit-cifar10",
        summary="(F) ViT Little's relative on CIFAR-10: patches of 4 × 4, 4 blocks",
        is_reduced=True,
        model=partial(
            vit_little, 10, image_size=32, patch_size=4, depth=4, embed_dim=96, num_heads=3
        ),
        data=_CIFAR10,
        recipe=Recipe(
            batch_size=128,
            cycles=((15, 2e-3),),
            optimizer="nadamw",
            weight_decay=0.05,
            clip_norm=5.0,
            augmented=True,
        ),
        num_validation=5_000,
    ),
)
"""The problems of the paper, followed by their smaller versions."""


def get_problem(name: str) -> Problem:
    """Return the test problem of a name."""
    by_name = {problem.name: problem for problem in PROBLEMS}
    if name not in by_name:
        raise ValueError(f"unknown problem {name!r}; expected one of {', '.join(by_name)}")
    return by_name[name]
