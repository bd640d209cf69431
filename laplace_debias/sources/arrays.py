"""Data from NumPy archives."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.sources.likelihoods import likelihood_of_array
from laplace_debias.sources.pixels import Pixels
from laplace_debias.sources.settings import SourceSettings, nearest
from laplace_debias.sources.splits import Examples, Splits, split_indices
from laplace_debias.sources.targets import as_targets, check_numbers
from laplace_debias.system.shown import counted

_NAMES = ("x_train", "y_train", "x_val", "y_val", "x_test", "y_test")


def read_archive(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a `.npz` file, keyed by name, without unpickling anything."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, Mapping):
                raise ValueError("it contains one array without a name")
            return dict(archive)
    # Catch every exception, because the readers of zip files and headers may raise errors of any
    # type if the file is damaged.
    except Exception as error:
        if "allow_pickle" in str(error):
            raise ValueError(
                f"{path} contains Python objects, which could run code, so it is not "
                "loaded. Save arrays of numbers with np.savez(path, x_train=..., "
                "y_train=..., x_test=..., y_test=...)."
            ) from error
        raise ValueError(
            f"{path} is damaged, or is not a NumPy archive ({error}). Write it again with np.savez."
        ) from error


def archive_splits(path: Path, settings: SourceSettings, chosen: Likelihood | None) -> Splits:
    """Read the splits of a `.npz` file; if no likelihood was chosen, infer it from the targets.

    The file must contain `x_train`, `y_train`, `x_test`, `y_test` and, optionally, `x_val` and
    `y_val`; or `x` and `y`, which are split at random by the seed. Arrays of bytes `[N, C, H, W]`,
    `[N, H, W, C]` or `[N, H, W]` are images, which are normalised by mean and std. Floats are used
    as they are.
    """
    arrays = read_archive(path)
    was_whole = "x" in arrays and "y" in arrays and "x_train" not in arrays
    notes: tuple[str, ...] = ()
    if was_whole:
        _check_lengths(arrays["x"], arrays["y"], str(path))
        indices, note = split_indices(len(arrays["y"]), settings, str(path), "example")
        pairs = {
            name: (arrays["x"][i.numpy()], arrays["y"][i.numpy()]) for name, i in indices.items()
        }
        notes = (note,)
    else:
        pairs = _separate_splits(arrays, path)
    likelihood = chosen or likelihood_of_array(pairs["train"][1])
    pixels = image_pixels(pairs["train"][0], settings)
    if pixels is None and Pixels.from_settings(settings) is not None:
        raise ValueError(
            f"`mean` and `std` apply only to images, but {path} has inputs of shape "
            f"{list(pairs['train'][0].shape[1:])}. Remove `mean` and `std`."
        )
    examples = {
        name: _examples(x, y, likelihood, pixels, f"{path}, {name}")
        for name, (x, y) in pairs.items()
    }
    train = examples["train"]
    num_targets = train.targets.shape[-1]
    if likelihood.targets == "class":
        num_targets = 1 + max(int(split.targets.max()) for split in examples.values())
    for name, split in examples.items():
        if split.inputs.shape[1:] != train.inputs.shape[1:]:
            raise ValueError(
                f"The inputs of x_{name} in {path} have shape {list(split.inputs.shape[1:])}, "
                f"but the inputs of x_train have {list(train.inputs.shape[1:])}. Use the same "
                "shape for both."
            )
    return Splits(
        train=train,
        validation=examples.get("val"),
        test=examples["test"],
        likelihood=likelihood,
        num_targets=num_targets,
        input_name="example" if pixels is None else "image",
        pixels=pixels,
        was_whole=was_whole,
        notes=notes,
    )


def _separate_splits(
    arrays: Mapping[str, np.ndarray], path: Path
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the inputs and targets of each split from a file with one array per split."""
    splits = ["train", "test"]
    if "x_val" in arrays:
        splits.insert(1, "val")
    needed = [f"{array}_{split}" for split in splits for array in ("x", "y")]
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise ValueError(
            f"{path} has the arrays {', '.join(sorted(arrays))}, but no "
            f"{' and no '.join(missing)}.{nearest(missing[0], list(arrays))} Use the names "
            f"{', '.join(_NAMES)} (x_val and y_val are optional), or x and y."
        )
    return {split: (arrays[f"x_{split}"], arrays[f"y_{split}"]) for split in splits}


def _check_lengths(x: np.ndarray, y: np.ndarray, source: str) -> None:
    """Raise an error unless there are as many inputs as targets, and at least one."""
    if len(x) != len(y) or len(x) == 0:
        raise ValueError(
            f"x in {source} has {counted(len(x), 'row')}, but y has {len(y)}. Use at least one "
            "row, and the same number of rows in x and y."
        )


def _examples(
    x: np.ndarray, y: np.ndarray, likelihood: Likelihood, pixels: Pixels | None, source: str
) -> Examples:
    _check_lengths(x, y, source)
    inputs = as_inputs(x, source)
    targets = as_targets(y, likelihood, f"y of {source}")
    return Examples(inputs, targets, pixels if inputs.dtype == torch.uint8 else None)


def as_inputs(x: np.ndarray, source: str) -> Tensor:
    """Convert inputs to a tensor in the network's form; images stored as bytes stay bytes."""
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        if x.ndim == 3:
            x = x[:, None]
        elif x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
            x = x.transpose(0, 3, 1, 2)
        return torch.from_numpy(np.ascontiguousarray(x))
    check_numbers(x, f"x of {source}")
    if x.dtype.kind in "iu" and x.dtype != np.uint8 and x.ndim == 2:
        # Keep integers, because they may be tokens for an embedding.
        return torch.from_numpy(x.astype(np.int64))
    return torch.from_numpy(x.astype(np.float32))


def image_pixels(x: np.ndarray, settings: SourceSettings) -> Pixels | None:
    """Return the normalisation from pixels to inputs, or None if the inputs are not images."""
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return Pixels.from_settings(settings) or Pixels()
    if x.ndim != 4 or x.shape[1] not in (1, 3) or x.dtype.kind != "f":
        return None
    if Pixels.from_settings(settings) is not None:
        return Pixels.from_settings(settings)
    # The values of black and white are unknown, so use the smallest and the largest value.
    first_images = x[:1000]
    low = float(first_images.min())
    high = float(first_images.max())
    width = max(high - low, 1e-12)
    return Pixels((-low / width,), (1 / width,))
