"""Images in folders, which are decoded only when they are needed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from PIL import ImageOps
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from laplace_debias.sources.pixels import Pixels
from laplace_debias.sources.settings import SourceSettings
from laplace_debias.system.shown import counted

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_GREY = ("1", "L", "LA")
"""Pillow's modes with one channel, apart from transparency."""


@dataclass(frozen=True)
class View:
    """How a picture is converted to a network's input.

    `resized` is a function of Pillow images. If `any_size` is true, it gives all pictures the same
    size.
    """

    resized: Callable[[Any], Any]
    pixels: Pixels
    is_grey: bool = False
    any_size: bool = False

    def resized_to(self, height: int, width: int) -> "View":
        """Return a view that instead resizes and crops to a height and a width in pixels."""
        fit = partial(ImageOps.fit, size=(width, height), method=PIL.Image.Resampling.BILINEAR)
        return replace(self, resized=fit, any_size=True)


def unchanged(image: Any) -> Any:
    """Return the picture unchanged.

    Unlike a lambda, this function can be pickled for the worker processes of a `DataLoader`.
    """
    return image


@dataclass(frozen=True, eq=False)
class ImageFiles(Dataset[tuple[Tensor, Tensor]]):
    """A data set of labelled images on disk, which are decoded when they are fetched."""

    files: tuple[tuple[Path, int], ...]
    view: View

    def __len__(self) -> int:
        """The number of images."""
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a normalised image, float32 [C, H, W], and its label."""
        file, label = self.files[index]
        image = decode_picture(file, self.view.is_grey)
        if not self.view.any_size and index:
            first_file, _ = self.files[0]
            size, _ = header(first_file)
            if image.size != size:
                raise ValueError(
                    f"{file} has {image.size[1]} × {image.size[0]} pixels, but others have "
                    f"{size[1]} × {size[0]}. Pass --image_size to resize all images."
                )
        pixels = torch.from_numpy(np.array(self.view.resized(image)))
        pixels = pixels[None] if self.view.is_grey else pixels.permute(2, 0, 1)
        return self.view.pixels.inputs(pixels), torch.tensor(label)


def files_of(batches: Any) -> list[tuple[Path, int]] | None:
    """Return the image files and labels that a loader reads, or None if it reads other data."""
    subset = getattr(batches, "dataset", None)
    if not isinstance(subset, Subset) or not isinstance(subset.dataset, ImageFiles):
        return None
    return [subset.dataset.files[index] for index in subset.indices]


def decode_picture(file: Path, is_grey: bool = False) -> Any:
    """Decode a picture to RGB, or to one channel if `is_grey` is true."""
    try:
        with PIL.Image.open(file) as picture:
            # When it converts such a picture, Pillow would clip values of more than 8 bits.
            if picture.mode[0] in "IF":
                raise ValueError("more than 8 bits per pixel")
            return picture.convert("L" if is_grey else "RGB")
    # Catch every exception, because Pillow's decoders may raise errors of any type if the file is
    # damaged.
    except Exception as error:
        raise _unreadable(file, error) from error


def header(file: Path) -> tuple[tuple[int, int], str]:
    """Read a picture's width, height and Pillow mode without decoding the picture."""
    try:
        with PIL.Image.open(file) as picture:
            return picture.size, picture.mode
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file} is not a readable image ({error}). Replace it.")


def images_below(folder: Path) -> list[Path]:
    """List all images in a folder and its subfolders, sorted by path.

    Hidden files and folders, such as `.ipynb_checkpoints`, are left out.
    """
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _input_channels(model: nn.Module) -> int | None:
    """Return the number of channels that the first convolution takes; None without convolutions."""
    return next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), None)


def _is_grey(settings: SourceSettings, model: nn.Module, files: Iterable[Path]) -> bool:
    """Whether the network expects one channel, judging by its layers, mean and std, or files."""
    channels = _input_channels(model)
    if channels in (1, 3):
        return channels == 1
    counts = [len(numbers) for numbers in (settings.mean, settings.std) if numbers is not None]
    if counts:
        return 1 in counts
    return all(header(file)[1] in _GREY for file in files)


def view_of(
    settings: SourceSettings, model: nn.Module, files: Iterable[Path]
) -> tuple[View, tuple[str, ...]]:
    """Return how pictures are converted to inputs of a network, and notes for the reader.

    timm's networks and torchvision's published weights have a configuration for this
    (`timm.data.resolve_data_config`). The settings `image_size`, `mean` and `std` override it.
    `files` may be read to find out whether the images are grey.
    """
    overrides: dict[str, Any] = {}
    if settings.image_size is not None:
        # The setting is the size of the inputs, so do not cut off a border.
        overrides = {"img_size": settings.image_size, "crop_pct": 1.0}
    for name in ("mean", "std"):
        if getattr(settings, name) is not None:
            overrides[name] = getattr(settings, name)
    if hasattr(model, "pretrained_cfg"):
        return _timm_view(model, overrides, files)
    if settings.torchvision is not None and settings.pretrained and not overrides:
        return _torchvision_view(settings.torchvision), ()
    pixels = Pixels.from_settings(settings) or Pixels()
    notes: tuple[str, ...] = ()
    if Pixels.from_settings(settings) is None:
        notes = (
            "--mean and --std were not specified, so the pixels are only divided by 255. If the "
            "network was trained with normalised images, pass both.",
        )
    is_grey = _is_grey(settings, model, files)
    _check_pixels(pixels.mean, pixels.std, 1 if is_grey else 3)
    view = View(unchanged, pixels, is_grey)
    size = settings.image_size
    if size is not None:
        view = view.resized_to(size, size)
    return view, notes


def _check_pixels(mean: Sequence[float], std: Sequence[float], channels: int) -> None:
    """Raise an error unless there is one number per channel, or one number for all channels."""
    counts = {len(mean), len(std)}
    if not counts <= {1, channels}:
        raise ValueError(
            f"--mean and --std have {counted(max(counts), 'number')}, but the network takes "
            f"{counted(channels, 'channel')}. Pass one number per channel, or one for all channels."
        )


def _timm_view(
    model: nn.Module, overrides: dict[str, Any], files: Iterable[Path]
) -> tuple[View, tuple[str, ...]]:
    """Return the view that timm uses to evaluate the network, and notes for the reader."""
    from timm.data import create_transform, resolve_data_config
    from torchvision.transforms import Compose

    is_grey = _input_channels(model) == 1
    # timm's configuration of a network with `in_chans=1` is that of images with three channels.
    if is_grey and not {"mean", "std"} <= set(overrides):
        raise ValueError(
            "The network takes images with 1 channel, for which timm has no mean and standard "
            "deviation. Pass the numbers that it was trained with as --mean and --std."
        )
    channels = 1 if is_grey else 3
    _check_pixels(overrides.get("mean", (0.0,)), overrides.get("std", (1.0,)), channels)
    config = resolve_data_config({**overrides, "in_chans": channels}, model=model)
    # `use_prefetcher` omits the normalisation, which is done separately because the pixels are also
    # needed as bytes.
    transform: Any = create_transform(**config, is_training=False, use_prefetcher=True)
    resized = Compose(transform.transforms[:-1])
    pixels = Pixels(tuple(config["mean"]), tuple(config["std"]))
    view = View(resized, pixels, is_grey, any_size=True)
    (width, height), _ = header(next(iter(files)))
    _, input_height, input_width = config["input_size"]
    notes: tuple[str, ...] = ()
    if "img_size" not in overrides and (height, width) != (input_height, input_width):
        notes = (
            f"Images of {height} × {width} pixels are resized to {input_height} × {input_width}, "
            "the size in timm's configuration of the network. If the network was trained with "
            "images of another size, pass --image_size.",
        )
    return view, notes


def _torchvision_view(name: str) -> View:
    """Return the view that torchvision uses to evaluate the published weights of a network."""
    from torchvision.models import get_model_weights
    from torchvision.transforms import v2

    preset: Any = get_model_weights(name).DEFAULT.transforms()
    resized = v2.Compose(
        [v2.Resize(preset.resize_size, preset.interpolation), v2.CenterCrop(preset.crop_size)]
    )
    return View(resized, Pixels(tuple(preset.mean), tuple(preset.std)), any_size=True)
