"""The published CIFAR-10-C and CIFAR-100-C."""

import difflib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from laplace_debias.problems.data import (
    CIFAR10_CLASSES,
    CIFAR10_MEAN,
    CIFAR10_STD,
    CIFAR100_CLASSES,
    CIFAR100_MEAN,
    CIFAR100_STD,
    ImageDataset,
)


def cifar_c(
    root: str | Path,
    severity: int,
    kind: str | None = None,
    *,
    num_classes: int = 10,
    kinds: Sequence[str] | None = None,
    seed: int = 0,
) -> ImageDataset:
    """Images of the published CIFAR-10-C or CIFAR-100-C at one severity.

    The folder holds `labels.npy`, [5 N], and for each corruption `<kind>.npy`, uint8
    [5 N, 32, 32, 3]: the N test images (in torchvision's order) at severity 1, then at 2, … .

    Args:
        root: The folder.
        severity: 1 (slight) to 5 (strong).
        kind: A corruption, such as `"fog"`; or `None`: each image comes with one of `kinds`, chosen
            uniformly at random and the same at every severity, as the paper has it.
        num_classes: 10 or 100.
        kinds: Corruptions to choose from; by default all that the folder holds.
        seed: Non-negative seed of the choice.

    Returns:
        N images, normalised as the clean ones are.

    Raises:
        ValueError: If the folder, a corruption or the labels are missing or damaged, or a number is
            out of range.

    Reference:
        Hendrycks & Dietterich (2019), Benchmarking Neural Network Robustness to Common Corruptions
        and Perturbations.
    """
    root = Path(root)
    if num_classes not in (10, 100):
        raise ValueError(f"num_classes {num_classes}; expected 10 or 100")
    if severity not in (1, 2, 3, 4, 5):
        raise ValueError(f"severity {severity}; expected 1, 2, 3, 4 or 5")
    if seed < 0:
        raise ValueError(f"seed {seed}; expected a non-negative number")
    if kind is not None and kinds is not None:
        raise ValueError(f"kind {kind!r} and kinds {list(kinds)}; expected one of them")
    present = sorted(path.stem for path in root.glob("*.npy") if path.stem != "labels")
    if not present or not (root / "labels.npy").is_file():
        raise ValueError(
            f"no CIFAR-{num_classes}-C at {root}; expected labels.npy and <corruption>.npy: check "
            "the path, or corrupt clean images with random_corruption"
        )
    chosen = [kind] if kind is not None else sorted(kinds if kinds is not None else present)
    for name in chosen:
        if name not in present:
            close = difflib.get_close_matches(name, present, n=1, cutoff=0.0)[0]
            raise ValueError(f"no {name}.npy in {root}; did you mean {close!r}? It holds {present}")
    if not chosen:
        raise ValueError("kinds is empty; expected at least one corruption")
    all_labels = _read(root / "labels.npy")
    number, rest = divmod(len(all_labels), 5)
    if all_labels.ndim != 1 or rest:
        raise ValueError(f"{root / 'labels.npy'} is {list(all_labels.shape)}; expected [5 N]")
    part = slice((severity - 1) * number, severity * number)
    which = np.random.default_rng(seed).integers(len(chosen), size=number)
    images = np.empty((number, 32, 32, 3), dtype=np.uint8)
    for n, name in enumerate(chosen):
        pixels = _read(root / f"{name}.npy")
        if pixels.shape != (5 * number, 32, 32, 3) or pixels.dtype != np.uint8:
            raise ValueError(
                f"{root / name}.npy is {pixels.dtype} {list(pixels.shape)}; expected uint8 "
                f"[{5 * number}, 32, 32, 3]: fetch it again"
            )
        images[which == n] = pixels[part][which == n]
    small = num_classes == 10
    return ImageDataset(
        torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(),
        torch.from_numpy(np.array(all_labels[part], dtype=np.int64)),
        CIFAR10_MEAN if small else CIFAR100_MEAN,
        CIFAR10_STD if small else CIFAR100_STD,
        CIFAR10_CLASSES if small else CIFAR100_CLASSES,
    )


def _read(file: Path) -> np.ndarray:
    """An array on disk, mapped rather than read; pickled objects are refused."""
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{file} is damaged or no array ({error}); fetch it again") from error
