"""Test problems: networks, data sets, corruptions, and the recipes that train them."""

from laplace_debias.problems.corruptions import (
    ALL_KINDS,
    BENCHMARK_KINDS,
    KINDS,
    corrupt,
    random_corruption,
)
from laplace_debias.problems.data import DigitsSplit, cifar10, cifar100, digits, random_split
from laplace_debias.problems.imagenet import FolderImages, imagenet
from laplace_debias.problems.images import ImageBatches, ImageDataset, Images
from laplace_debias.problems.models import (
    all_cnn_c,
    conv_net,
    digits_net,
    load_checkpoint,
    resnet50,
    vit_little,
    wide_digits_net,
    wide_resnet,
)
from laplace_debias.problems.problem import DataSource, ProblemData, TestProblem, load_problem
from laplace_debias.problems.recipe import (
    ALLCNNC_CIFAR10_RECIPE,
    DIGITS_RECIPE,
    Recipe,
    log_epochs,
)
from laplace_debias.problems.registry import (
    CONVNET_DEPTHS,
    CONVNET_WIDTHS,
    PROBLEMS,
    get_problem,
)
from laplace_debias.problems.training import save_checkpoint, train

__all__ = [
    "ALLCNNC_CIFAR10_RECIPE",
    "ALL_KINDS",
    "BENCHMARK_KINDS",
    "CONVNET_DEPTHS",
    "CONVNET_WIDTHS",
    "DIGITS_RECIPE",
    "KINDS",
    "PROBLEMS",
    "DataSource",
    "DigitsSplit",
    "FolderImages",
    "ImageBatches",
    "ImageDataset",
    "Images",
    "ProblemData",
    "Recipe",
    "TestProblem",
    "all_cnn_c",
    "cifar10",
    "cifar100",
    "conv_net",
    "corrupt",
    "digits",
    "digits_net",
    "get_problem",
    "imagenet",
    "load_checkpoint",
    "load_problem",
    "log_epochs",
    "random_corruption",
    "random_split",
    "resnet50",
    "save_checkpoint",
    "train",
    "vit_little",
    "wide_digits_net",
    "wide_resnet",
]
