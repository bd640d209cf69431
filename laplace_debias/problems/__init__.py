"""Test problems: networks, data sets, corruptions, and the recipes that train them."""

from laplace_debias.problems.corruptions import KINDS, corrupt
from laplace_debias.problems.data import DigitsSplit, ImageDataset, cifar10, digits
from laplace_debias.problems.models import all_cnn_c, digits_net, load_checkpoint
from laplace_debias.problems.training import (
    ALLCNNC_CIFAR10_RECIPE,
    DIGITS_RECIPE,
    Recipe,
    save_checkpoint,
    train,
)

__all__ = [
    "ALLCNNC_CIFAR10_RECIPE",
    "DIGITS_RECIPE",
    "KINDS",
    "DigitsSplit",
    "ImageDataset",
    "Recipe",
    "all_cnn_c",
    "cifar10",
    "corrupt",
    "digits",
    "digits_net",
    "load_checkpoint",
    "save_checkpoint",
    "train",
]
