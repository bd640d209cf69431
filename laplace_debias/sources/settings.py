"""The options for the network and the data, which all commands share.

This module does not import torch, so that the command line starts quickly.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from laplace_debias.curvature.losses.likelihoods import LIKELIHOODS, LikelihoodName
from laplace_debias.system.settings import CommandSettings, check_at_least, option

AnySettings = TypeVar("AnySettings", bound="SourceSettings")

BUILT_IN_OOD = ("digits", "patches")
"""Out-of-distribution sets that need no file, as in `--ood.NAME=builtin:digits`."""

NOT_COMPARED = dict.fromkeys(("ood", "ood_examples", "corruptions"), "for `report` and `evaluate`")
"""Data-set options that only `report` and `evaluate` use. In other commands, they have no
effect."""

_LIMITS = ("train_examples", "validation_examples", "test_examples", "ood_examples")


@dataclass(frozen=True, kw_only=True)
class SourceSettings(CommandSettings):
    """Settings that specify a trained network, its data and the device.

    Attributes:
        model: The network as an import path, `my_pkg.models:build`: a callable that makes it or an
            `nn.Module`. The working directory is on the import path. Exactly one of --model, --timm
            and --torchvision is required.
        model_args: Arguments of that callable, of `timm.create_model` or of
            `torchvision.models.get_model`. The option may be repeated.
        timm: A timm architecture, with the number of classes of the data.
        torchvision: A torchvision architecture, with the number of classes of the data.
        pretrained: Download the published weights of timm or torchvision.
        checkpoint: The trained weights, a `.safetensors`, `.pt`, `.pth`, `.ckpt` or `.bin` file.
            Pickled files are loaded with `weights_only=True`.
        data: A folder of images (`train/CLASS/NAME.jpg`, `val/…`, `test/…`; or only class
            folders), a NumPy archive `.npz` (`x_train`, `y_train`, `x_val`, `y_val`, `x_test`,
            `y_test`; or `x` and `y`), a table (`.csv` or `.parquet`, or a folder with `train.csv`,
            `val.csv` and `test.csv`), or an import path `my_pkg.data:make` of a callable that
            returns loaders.
        target: The column of a table that the network predicts.
        features: The columns of a table that are the network's inputs, in this order. By default,
            all columns except the target are used.
        standardise: Standardise a table's features by the mean and standard deviation of its
            training rows.
        task: The likelihood of the outputs: a name, or the import path of your own likelihood, such
            as `my_pkg.likelihoods:Binomial`. By default, it is the task of the saved posterior
            or, without a posterior, the one that the data suggest.
        held_out: If the data is not split, the fraction of the examples, 0 … 0.5, that is held out
            for validation. The same fraction is held out for the test. The seed determines these
            examples.
        ood: Out-of-distribution data, as a name and a path in the form of `data`, or as
            `builtin:digits` or `builtin:patches`. The option may be repeated.
        corruptions: Severities (1 to 5) at which to evaluate corrupted copies of the test images.
        image_size: The height and width in pixels to which images are resized and cropped. By
            default, images are not resized, except for a timm network, which has its own size.
        mean: The mean of each channel, which is subtracted after the pixels are scaled to 0–1. Pass
            one number to use it for all channels. The default is 0, except for a timm network,
            which has its own mean.
        std: The standard deviation of each channel, by which the channel is divided. The default is
            1, except for a timm network, which has its own.
        train_examples: The number of training examples to fit to. The seed determines which ones,
            and the likelihood is scaled to the full training set. By default, all examples are
            used.
        validation_examples: The number of validation examples to use. The seed determines which
            ones. By default, all examples are used.
        test_examples: The number of test examples to use. The seed determines which ones. By
            default, all examples are used.
        ood_examples: The maximum number of examples per out-of-distribution set. By default, all
            examples are used.
        batch_size: The number of examples per batch, 64 by default. Your own loaders keep their
            batch size.
        workers: The number of data-loading worker processes.
        seed: The seed of all random choices.
        device: The device, for example `cpu` or `cuda`. With `auto`, a GPU is used if there is one.
        progress: Show progress bars.
        json: Print only a JSON object to standard output.

    Raises:
        ValueError: If no network or more than one is specified; if a setting is out of range or
            cannot be combined with the others.
    """

    heading: ClassVar = "Data"
    needed_by_most: ClassVar = ("data", "checkpoint")

    model: str | None = field(
        default=None, metadata=option(heading="Network", metavar="MODULE:NAME", is_input=True)
    )
    model_args: dict[str, Any] = field(default_factory=dict, metadata=option(heading="Network"))
    timm: str | None = field(default=None, metadata=option(heading="Network"))
    torchvision: str | None = field(default=None, metadata=option(heading="Network"))
    pretrained: bool = field(default=False, metadata=option(heading="Network"))
    checkpoint: Path | None = field(default=None, metadata=option(heading="Network", is_input=True))
    data: str | Path | None = field(default=None, metadata=option(metavar="PATH", is_input=True))
    target: str | None = field(default=None, metadata=option(metavar="COLUMN"))
    features: tuple[str, ...] | None = field(default=None, metadata=option(metavar="COLUMN,…"))
    standardise: bool = True
    task: LikelihoodName | str | None = None
    held_out: float = 0.2
    ood: dict[str, str] = field(
        default_factory=dict, metadata=option(heading="What to compare", metavar="NAME=PATH")
    )
    corruptions: tuple[int, ...] = field(default=(), metadata=option(heading="What to compare"))
    image_size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    train_examples: int | None = None
    validation_examples: int | None = None
    test_examples: int | None = None
    ood_examples: int | None = field(default=None, metadata=option(heading="What to compare"))
    batch_size: int | None = None
    workers: int = 0
    seed: int = field(default=0, metadata=option(heading="Running"))
    device: str = field(default="auto", metadata=option(heading="Running"))
    progress: bool = field(default=True, metadata=option(heading="Running"))
    json: bool = field(default=False, metadata=option(heading="Output"))

    def __post_init__(self) -> None:
        check_at_least(self, 1, *_LIMITS, "batch_size", "image_size")
        check_at_least(self, 0, "workers", "seed")
        self._check_network()
        if self.task is not None and self.task not in LIKELIHOODS and ":" not in self.task:
            raise ValueError(
                f"task is {self.task}. Use {', '.join(LIKELIHOODS)}, or the import path of a "
                "likelihood, such as my_pkg.likelihoods:Binomial."
            )
        if not 0 < self.held_out < 0.5:
            raise ValueError(f"held_out is {self.held_out}. Pass a fraction between 0 and 0.5.")
        if not set(self.corruptions) <= {1, 2, 3, 4, 5}:
            raise ValueError(f"corruptions is {self.corruptions}. Pass severities from 1 to 5.")
        for name, source in self.ood.items():
            if not re.fullmatch(r"[A-Za-z0-9][\w-]*", name):
                raise ValueError(
                    f"The name {name!r} of an OOD set is not valid. Use only letters, digits, "
                    "'-' and '_'."
                )
            scheme, _, builtin_name = source.partition(":")
            if scheme == "builtin" and builtin_name not in BUILT_IN_OOD:
                raise ValueError(
                    f"The OOD set {name} has the unknown source {source}. Use "
                    f"builtin:{' or builtin:'.join(BUILT_IN_OOD)}, or a path."
                )
        if self.std is not None and not min(self.std, default=0.0) > 0:
            raise ValueError(f"std is {self.std}. Pass positive numbers, one per channel.")

    def _check_network(self) -> None:
        """Check that exactly one network is specified, and only options that apply to it."""
        options = [
            f"--{name}"
            for name in ("model", "timm", "torchvision")
            if getattr(self, name) is not None
        ]
        if len(options) != 1:
            problem = "No network was specified"
            if options:
                problem = f"{' and '.join(options)} cannot be used together"
            raise ValueError(
                f"{problem}. Pass exactly one of --model my_pkg.models:build, --timm NAME and "
                "--torchvision NAME."
            )
        if self.pretrained:
            if self.model is not None:
                raise ValueError(
                    "`pretrained` applies only to --timm and --torchvision. Remove it."
                )
            if self.checkpoint is not None:
                raise ValueError(
                    "`pretrained` and `checkpoint` cannot be used together. Remove one of them."
                )

    def without_comparison(self: AnySettings) -> AnySettings:
        """Return the settings without OOD and corrupted data."""
        return replace(self, ood={}, corruptions=())


def nearest(name: str, names: Sequence[str]) -> str:
    """Return the question "Did you mean …?" for up to three similar names, or ""."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else ""
