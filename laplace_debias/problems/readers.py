"""How the test problems read their data from a source: (training, test)."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from laplace_debias.problems.corruptions import corrupt
from laplace_debias.problems.data import cifar10, cifar100, digits
from laplace_debias.problems.imagenet import imagenet
from laplace_debias.problems.images import ImageDataset, Images
from laplace_debias.problems.problem import DataSource


def _digits() -> tuple[ImageDataset, ImageDataset]:
    parts = digits()
    training = ImageDataset(
        torch.cat([parts.train.images, parts.val.images]),
        torch.cat([parts.train.labels, parts.val.labels]),
        parts.train.mean,
        parts.train.std,
        parts.train.classes,
    )
    return training, parts.test


def read_digits(source: DataSource) -> tuple[Images, Images]:
    """The digits: the split's training and validation images together, and the test images."""
    return _digits()


def read_corrupted_digits(source: DataSource) -> tuple[Images, Images]:
    """The digits at severity 5, each image with random numbers of its own."""
    training, test = (
        data.with_images(corrupt(data.images, 5, seed=0, offset=offset))
        for data, offset in zip(_digits(), (0, 2000), strict=True)
    )
    return training, test


def _read_cifar(
    load: Callable[..., ImageDataset], name: str, source: DataSource
) -> tuple[Images, Images]:
    root = _root(source, name)
    training, test = (
        load(root, part, source.cache, source.download, source.progress) for part in (True, False)
    )
    return training, test


def read_imagenet(source: DataSource) -> tuple[Images, Images]:
    """ImageNet as torchvision's published networks take it."""
    root = _root(source, "ImageNet")
    return imagenet(root, True), imagenet(root, False)


def read_imagenet_vit(source: DataSource) -> tuple[Images, Images]:
    """ImageNet as the published ViT Little takes it."""
    root = _root(source, "ImageNet")
    half = (0.5, 0.5, 0.5)
    # 256 / 0.95: what the published weights are evaluated with.
    training, test = (
        imagenet(root, part, size=256, resize=269, interpolation="bicubic", mean=half, std=half)
        for part in (True, False)
    )
    return training, test


def _root(source: DataSource, name: str) -> Path:
    if source.root is None:
        raise ValueError(f"there is no path to {name}; give the path of its folder as data")
    return source.root


read_cifar10 = partial(_read_cifar, cifar10, "CIFAR-10")
read_cifar100 = partial(_read_cifar, cifar100, "CIFAR-100")
