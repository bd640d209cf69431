"""Predictions of a thin posterior, and of the full posterior from which it is made."""

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import lru_cache

import torch
from torch import Tensor

from benchmarks import ours
from benchmarks.prediction import laplace_torch
from benchmarks.report import FASTEST_PEER, Goal
from benchmarks.settings import CHECKPOINT, Settings
from benchmarks.timing import Contender, Row, Run, measure
from examples.paper.data import cifar10_parts
from laplace_debias import Laplace

TITLE = "A thin posterior, `la.thin(error=1e-3)` at δ = 3,000, K-FAC of all parameters"
UNIT = "s per image"
REFERENCES = ("gradient",)
_THIN = "ours, thin"
GOALS = (
    Goal(_THIN, "gradient", at_most=8.0),
    Goal(FASTEST_PEER, _THIN, at_least=14.0),
    Goal(_THIN, at_most=100.0, quantity="megabytes"),
)
DELTA = 3_000.0
_NUM_INPUTS = 64


class ImageSettings(Settings):
    """The settings, with images of CIFAR-10 if environment variables contain their path."""

    @property
    def batch(self) -> int:
        """The number of images of a fit."""
        return 8 if self.quick else 1024

    def data(self, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return images and labels; seeds 0, 1 and 2 stand for test, training and validation."""
        if self.quick or not {CHECKPOINT, "LAPLACE_DEBIAS_DATA"} <= os.environ.keys():
            return super().data(size, seed)
        split = ("test", "train", "validation")[seed]
        images, labels = _images(split, size)
        return images.to(self.device), labels.to(self.device)


@lru_cache
def _images(split: str, size: int) -> tuple[Tensor, Tensor]:
    return cifar10_parts()[split].batch(torch.arange(size))


def compare(settings: Settings) -> list[Row]:
    """The posterior is fitted to 1,024 training images and evaluated on test images.

    `la.thin` compresses it with 64 validation images. Without `LAPLACE_DEBIAS_DATA` and
    `LAPLACE_DEBIAS_CHECKPOINT`, all images are random numbers.
    """
    image_settings = ImageSettings(**asdict(settings))
    full = ours.fitted(image_settings)
    thin = ours.fitted(image_settings)
    full.prior_precision = DELTA
    thin.prior_precision = DELTA
    num_inputs = 4 if settings.quick else _NUM_INPUTS
    inputs, _ = image_settings.data(num_inputs, seed=2)
    report = thin.thin(inputs, error=1e-3)
    contenders = [
        Contender("gradient", ours.gradient(image_settings)),
        Contender("ours, whole", _predict(image_settings, full)),
        Contender(_THIN, _predict(image_settings, thin)),
        Contender("laplace-torch", laplace_torch(settings), is_peer=True, most_rounds=3),
    ]
    rows = measure(contenders, image_settings, settings.images, warm_up=1, per_example=True)
    return [replace(row, note=report.message) if row.contender == _THIN else row for row in rows]


def _predict(settings: Settings, la: Laplace) -> Callable[[], Run]:
    return lambda: lambda size: la.predict(settings.data(size)[0])
