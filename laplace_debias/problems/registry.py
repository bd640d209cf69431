"""The paper's test problems (A) to (F), and small relatives that run on data at hand.

Where the paper's source does not give a hyper-parameter, it is that of the model's own paper or of
the benchmark that the problem comes from; comments say which.

Reference:
    Debiasing Mini-Batch Quadratics for Applications in Deep Learning, Appendix B.1.
"""

import difflib
from functools import partial

from laplace_debias.problems.models import (
    all_cnn_c,
    conv_net,
    digits_net,
    resnet50,
    vit_little,
    wide_digits_net,
    wide_resnet,
)
from laplace_debias.problems.problem import TestProblem
from laplace_debias.problems.readers import (
    read_cifar10,
    read_cifar100,
    read_corrupted_digits,
    read_digits,
    read_imagenet,
    read_imagenet_vit,
)
from laplace_debias.problems.recipe import ALLCNNC_CIFAR10_RECIPE, DIGITS_RECIPE, Recipe

CONVNET_DEPTHS = (1, 2, 4)
"""Depths of problem (D). The paper's are not known."""

CONVNET_WIDTHS = (16, 32, 64)
"""Widths of problem (D). The paper's are not known."""


def _conv_net_problem(depth: int, width: int) -> TestProblem:
    return TestProblem(
        name=f"convnet-{depth}-{width}-cifar10",
        letter="D",
        summary=f"ConvNet of depth {depth} and width {width} on CIFAR-10",
        model=partial(conv_net, depth, width),
        read=read_cifar10,
        # Adam as published; batch size and number of epochs are ours.
        recipe=Recipe(batch_size=128, epochs=100, learning_rate=1e-3, optimizer="adam"),
        num_validation=10_000,
    )


PROBLEMS: tuple[TestProblem, ...] = (
    TestProblem(
        name="allcnnc-cifar100",
        letter="A",
        summary="All-CNN-C on CIFAR-100",
        model=partial(all_cnn_c, 100),
        read=read_cifar100,
        # Batch size, epochs and weight decay are DeepOBS's; the learning rate is about the one that
        # Schmidt et al. (2021) tuned.
        recipe=Recipe(
            batch_size=256, epochs=350, learning_rate=0.17, momentum=0.0, weight_decay=5e-4
        ),
        num_validation=10_000,
    ),
    TestProblem(
        name="allcnnc-cifar10",
        letter="B",
        summary="All-CNN-C on CIFAR-10",
        model=partial(all_cnn_c, 10),
        read=read_cifar10,
        # Springenberg et al. (2015); the batch size is ours.
        recipe=Recipe(
            batch_size=128,
            epochs=350,
            learning_rate=0.05,
            milestones=(200, 250, 300),
            weight_decay=1e-3,
        ),
        num_validation=10_000,
    ),
    TestProblem(
        name="wrn404-cifar100",
        letter="C",
        summary="WideResNet 40-4 on CIFAR-100",
        model=partial(wide_resnet, 40, 4, 100),
        read=read_cifar100,
        # Zagoruyko & Komodakis (2016), over DeepOBS's 160 epochs, so there are two of its three
        # drops.
        recipe=Recipe(
            batch_size=128,
            epochs=160,
            learning_rate=0.1,
            milestones=(60, 120),
            decay=0.2,
            weight_decay=5e-4,
            flips=True,
            crops=True,
        ),
        num_validation=10_000,
    ),
    *(_conv_net_problem(depth, width) for depth in CONVNET_DEPTHS for width in CONVNET_WIDTHS),
    TestProblem(
        name="resnet50-imagenet",
        letter="E",
        summary="ResNet-50 on ImageNet",
        model=resnet50,
        published=partial(resnet50, weights="IMAGENET1K_V1"),
        read=read_imagenet,
        # Torchvision's recipe of these weights: 8 × 32 images per step.
        recipe=Recipe(
            batch_size=256,
            epochs=90,
            learning_rate=0.1,
            milestones=(30, 60),
            weight_decay=1e-4,
            flips=True,
            crops=True,
        ),
        num_validation=10_000,
        validates_on_test=True,
    ),
    TestProblem(
        name="vit-little-imagenet",
        letter="F",
        summary="ViT Little on ImageNet",
        model=vit_little,
        published=partial(vit_little, pretrained=True),
        read=read_imagenet_vit,
        # The optimiser of the model card (NAdamW; 8e-4 for 512 images per step, 600 epochs, clipped
        # at 5). Its augmentation (RandAugment, mixup, CutMix, stochastic depth) is not repeated
        # here, so the published weights are what to use.
        recipe=Recipe(
            batch_size=512,
            cycles=((600, 8e-4),),
            optimizer="nadamw",
            weight_decay=0.05,
            clip_norm=5.0,
            flips=True,
            crops=True,
            bfloat16=True,
        ),
        num_validation=10_000,
        validates_on_test=True,
    ),
    TestProblem(
        name="allcnnc-cifar10-one-cycle",
        letter="B",
        summary="All-CNN-C on CIFAR-10, trained in 44 epochs",
        is_reduced=True,
        model=partial(all_cnn_c, 10),
        read=read_cifar10,
        recipe=ALLCNNC_CIFAR10_RECIPE,
        num_validation=5_000,
    ),
    TestProblem(
        name="allcnn-digits",
        letter="B",
        summary="a small all-convolutional network on the digits",
        is_reduced=True,
        model=digits_net,
        read=read_digits,
        recipe=DIGITS_RECIPE,
        num_validation=297,
    ),
    TestProblem(
        name="wide-allcnn-corrupted-digits",
        letter="B",
        summary="a wider all-convolutional network on corrupted digits, soon over-confident",
        is_reduced=True,
        model=wide_digits_net,
        read=read_corrupted_digits,
        recipe=Recipe(batch_size=50, cycles=((10, 0.05),), clip_norm=5.0),
        num_validation=297,
    ),
    TestProblem(
        name="wrn101-cifar10",
        letter="C",
        summary="WideResNet 10-1 on CIFAR-10",
        is_reduced=True,
        model=partial(wide_resnet, 10, 1, 10),
        read=read_cifar10,
        recipe=Recipe(
            batch_size=128, cycles=((15, 0.1),), weight_decay=5e-4, flips=True, crops=True
        ),
        num_validation=5_000,
    ),
    TestProblem(
        name="wrn101-digits",
        letter="C",
        summary="WideResNet 10-1 on the digits",
        is_reduced=True,
        model=partial(wide_resnet, 10, 1, 10, in_channels=1),
        read=read_digits,
        recipe=Recipe(batch_size=50, cycles=((10, 0.1),), weight_decay=5e-4),
        num_validation=297,
    ),
    TestProblem(
        name="convnet-digits",
        letter="D",
        summary="ConvNet of depth 1 and width 16 on the digits",
        is_reduced=True,
        model=partial(conv_net, 1, 16, 10, in_channels=1, image_size=8),
        read=read_digits,
        recipe=Recipe(batch_size=50, epochs=20, learning_rate=1e-3, optimizer="adam"),
        num_validation=297,
    ),
    TestProblem(
        name="resnet-cifar10",
        letter="E",
        summary="a ResNet of one thin bottleneck per group on CIFAR-10",
        is_reduced=True,
        model=partial(resnet50, 10, blocks=(1, 1, 1, 1), width_per_group=8, expansion=1),
        read=read_cifar10,
        recipe=Recipe(batch_size=128, cycles=((10, 0.1),), weight_decay=1e-4, flips=True),
        num_validation=5_000,
    ),
    TestProblem(
        name="vit-cifar10",
        letter="F",
        summary="ViT Little's little relative on CIFAR-10: patches of 4 × 4, 4 blocks",
        is_reduced=True,
        model=partial(
            vit_little, 10, image_size=32, patch_size=4, depth=4, embed_dim=96, num_heads=3
        ),
        read=read_cifar10,
        recipe=Recipe(
            batch_size=128,
            cycles=((15, 2e-3),),
            optimizer="nadamw",
            weight_decay=0.05,
            clip_norm=5.0,
            flips=True,
        ),
        num_validation=5_000,
    ),
)
"""The paper's problems, then their small relatives."""


def get_problem(name: str) -> TestProblem:
    """The test problem of a name.

    Args:
        name: A name of `PROBLEMS`, or the paper's letter, `"A"` … `"F"`, where it has one model.

    Returns:
        The problem.

    Raises:
        ValueError: If no problem, or several, have that name.
    """
    by_name = {problem.name: problem for problem in PROBLEMS}
    if name in by_name:
        return by_name[name]
    lettered = [p for p in PROBLEMS if p.letter == name.upper() and not p.is_reduced]
    if len(lettered) == 1:
        return lettered[0]
    if lettered:
        raise ValueError(
            f"problem {name!r} has {len(lettered)} models; expected one of "
            f"{[problem.name for problem in lettered]}"
        )
    close = difflib.get_close_matches(name.lower(), by_name, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"unknown problem {name!r}; did you mean {close!r}? Expected one of {list(by_name)}, or a "
        "letter A … F"
    )
