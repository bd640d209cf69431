"""CIFAR-10 made up with a few images, and the comparison of posteriors at its size."""

from pathlib import Path

import numpy as np
from PIL import Image

from laplace_debias.experiments.posteriors.comparison import ComparisonSettings
from laplace_debias.problems.data import CIFAR10_CLASSES

GRID = (0.1, 3.0, 1000.0)
SETTINGS = ComparisonSettings(
    batch_size=4,
    draws=2,
    prior_precisions=GRID,
    full_examples=40,
    validation_examples=30,
    test_examples=40,
    ood_examples=25,
    severities=(2, 5),
    eval_batch_size=16,
)


def write_image_folder(root: Path) -> Path:
    """Four training and two test images of noise a class; classes differ in their brightness."""
    generator = np.random.default_rng(0)
    for split, number in (("train", 4), ("test", 2)):
        for label, name in enumerate(CIFAR10_CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for n in range(number):
                pixels = generator.integers(20 * label + 40, size=(32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{n:04d}.png")
    return root


def train_arguments(image_folder: Path, output: Path) -> list[str]:
    """Of the command that trains All-CNN-C on them for one epoch."""
    return [
        "train",
        f"--data={image_folder}",
        f"--output={output}",
        f"--cache={image_folder / 'cache'}",
        "--validation_examples=10",
        "--recipe.cycles=[[1, 0.01]]",
        "--device=cpu",
        "--progress=false",
    ]
