"""Data sets of the test problems that fit into memory: digits, CIFAR-10 and CIFAR-100."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from laplace_debias.problems.image_folder import find_archive, is_image_folder, read_cached
from laplace_debias.problems.images import ImageDataset

CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)
CIFAR100_CLASSES = tuple(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch
    crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo
    keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain
    mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain
    plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
    television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """.split()  # noqa: SIM905
)
CIFAR100_MEAN = (0.5071, 0.4865, 0.4409)
CIFAR100_STD = (0.2673, 0.2564, 0.2762)


@dataclass(frozen=True)
class DigitsSplit:
    """The digits in three parts.

    Attributes:
        train: 1,000 images to train on.
        val: 297 images to tune on.
        test: 500 images to report on.
    """

    train: ImageDataset
    val: ImageDataset
    test: ImageDataset


def digits(seed: int = 0) -> DigitsSplit:
    """Scikit-learn's handwritten digits: 1,797 grey images of 8 × 8 pixels, in a random split.

    Args:
        seed: Seed of the split.

    Returns:
        Training, validation and test images, [N, 1, 8, 8], the 17 grey levels spread over 0 … 255.

    Raises:
        ImportError: If scikit-learn is missing.

    Reference:
        Alpaydin & Kaynak (1998), Optical Recognition of Handwritten Digits, UCI.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn: pip install 'laplace-debias[cli]'"
        ) from error
    raw = load_digits()
    whole = ImageDataset(
        images=torch.from_numpy(np.rint(raw.images * (255 / 16)).astype(np.uint8))[:, None],
        labels=torch.from_numpy(raw.target.astype(np.int64)),
        mean=(0.3053,),
        std=(0.3760,),
        classes=tuple("0123456789"),
    )
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
    train, val, test = order.split([1000, 297, 500])
    return DigitsSplit(whole.subset(train), whole.subset(val), whole.subset(test))


def cifar10(
    root: str | Path,
    train: bool,
    cache: str | Path | None = None,
    download: bool = False,
    progress: bool = False,
) -> ImageDataset:
    """CIFAR-10: 50,000 training and 10,000 test images of 32 × 32 RGB pixels.

    Images of an image folder, in an archive or not, come in its order: classes by the alphabet,
    then file names; they are decoded once and kept in the cache. Those of torchvision come in its
    own order, so a split by index that was made for one order is wrong for the other.

    Args:
        root: An image folder (`train/<class>/<name>.jpg` or `.png`, `test/…`); a tar archive of
            one; a folder that holds the archive `cifar10.tar.xz`; or a root of
            `torchvision.datasets.CIFAR10`.
        train: Whether the training images are wanted, else the test images.
        cache: Folder for the decoded images; `$LAPLACE_DEBIAS_CACHE`, or else
            `~/.cache/laplace-debias`, by default.
        download: Whether torchvision may download the data to `root` where `root` has none.
        progress: Whether to show a progress bar while images are decoded.

    Returns:
        The images, normalised by `CIFAR10_MEAN` and `CIFAR10_STD`.

    Raises:
        ValueError: If nothing is at `root`, if it has another layout, if a class is missing or
            empty, or if an image is broken or of another size.
        ConnectionError: If the download fails.
        ImportError: If Pillow is missing and images must be decoded.

    Reference:
        Krizhevsky (2009), Learning Multiple Layers of Features from Tiny Images.
    """
    images, labels = _cifar(10, CIFAR10_CLASSES, Path(root), train, cache, download, progress)
    return ImageDataset(images, labels, CIFAR10_MEAN, CIFAR10_STD, CIFAR10_CLASSES)


def cifar100(
    root: str | Path,
    train: bool,
    cache: str | Path | None = None,
    download: bool = False,
    progress: bool = False,
) -> ImageDataset:
    """CIFAR-100: 50,000 training and 10,000 test images of 32 × 32 RGB pixels in 100 fine classes.

    Arguments, errors and the order of the images are those of `cifar10`; the archive is
    `cifar100.tar.*`, torchvision's class `CIFAR100`.

    Returns:
        The images, normalised by `CIFAR100_MEAN` and `CIFAR100_STD`.
    """
    images, labels = _cifar(100, CIFAR100_CLASSES, Path(root), train, cache, download, progress)
    return ImageDataset(images, labels, CIFAR100_MEAN, CIFAR100_STD, CIFAR100_CLASSES)


def random_split(number: int, num_validation: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices to train on and indices held out.

    Args:
        number: How many images there are.
        num_validation: How many of them are held out.
        seed: Seed of the choice.

    Returns:
        The two, int64, disjoint, in random order; together they are 0 … number − 1.

    Raises:
        ValueError: If nothing would be left to train on.
    """
    if not 1 <= num_validation < number:
        raise ValueError(
            f"{num_validation} validation images out of {number}; expected at least one, and at "
            "least one to train on"
        )
    order = torch.randperm(number, generator=torch.Generator().manual_seed(seed))
    return order[num_validation:], order[:num_validation]


def _cifar(
    number: int,
    classes: tuple[str, ...],
    root: Path,
    train: bool,
    cache: str | Path | None,
    download: bool,
    progress: bool,
) -> tuple[UInt8[Tensor, "n 3 32 32"], Int64[Tensor, " n"]]:
    """Images and labels of CIFAR-10 or CIFAR-100 from any of the sources."""
    name, archive = f"CIFAR-{number}", f"cifar{number}"
    batches = "cifar-10-batches-py" if number == 10 else "cifar-100-python"
    if not root.exists() and not download:
        raise ValueError(
            f"nothing is at {root}; expected an image folder, an archive of one or a torchvision "
            f"{name} root: check the path, or allow the download"
        )
    source = find_archive(root, archive) or (root if is_image_folder(root) else None)
    if source is not None:
        return read_cached(source, "train" if train else "test", classes, (32, 32), cache, progress)
    if download or (root / batches).is_dir():
        return _torchvision_cifar(number, root, train, download)
    raise ValueError(
        f"{root} does not hold {name}; expected train/<class>/<name>.jpg and test/…, an archive "
        f"{archive}.tar.xz of these, or {batches}: check the path, or download"
    )


def _torchvision_cifar(
    number: int, root: Path, train: bool, download: bool
) -> tuple[UInt8[Tensor, "n 3 32 32"], Int64[Tensor, " n"]]:
    try:
        from torchvision.datasets import CIFAR10, CIFAR100
    except ImportError as error:
        raise ImportError(
            "torchvision reads this data: pip install 'laplace-debias[cli]'"
        ) from error
    try:
        kind = CIFAR10 if number == 10 else CIFAR100
        data = kind(str(root), train=train, download=download)
    except OSError as error:
        raise ConnectionError(
            f"CIFAR-{number} could not be downloaded to {root} ({error}); "
            "check the network, or give the path of a copy"
        ) from error
    except RuntimeError as error:
        raise ValueError(
            f"the CIFAR-{number} at {root} is damaged ({error}); remove it and download it again"
        ) from error
    images = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor(data.targets)
