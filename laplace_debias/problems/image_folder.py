"""Images of `<split>/<class>/<name>`, in a folder or a tar archive, decoded once and cached."""

import hashlib
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor
from tqdm import tqdm

from laplace_debias.problems.pillow import pillow
from laplace_debias.problems.storage import read_tensors, write_tensors

SPLITS = ("train", "test")
SUFFIXES = (".jpg", ".jpeg", ".png")

# The place of an image: split, class, file name.
_Key = tuple[str, str, str]


def is_image_folder(root: Path) -> bool:
    """Whether a folder has one of the splits in it."""
    return any((root / split).is_dir() for split in SPLITS)


def find_archive(root: Path, name: str) -> Path | None:
    """The archive that a path names or, as `<name>.tar` or `<name>.tar.*`, that its folder holds.

    Args:
        root: A file or a folder.
        name: Name of the archive without its suffixes.

    Returns:
        The archive, or `None` where `root` is a folder without one.
    """
    if root.is_file():
        return root
    return next(iter(sorted(root.glob(f"{name}.tar")) + sorted(root.glob(f"{name}.tar.*"))), None)


def read_cached(
    source: Path,
    split: str,
    classes: Sequence[str],
    size: tuple[int, int],
    cache: str | Path | None = None,
    progress: bool = False,
) -> tuple[UInt8[Tensor, "n 3 height width"], Int64[Tensor, " n"]]:
    """Images of one split in the order of classes, then of file names.

    The first call decodes all splits and writes them to a file of the cache. Later calls read it,
    as long as the path, the sizes and the times of the source's files are the same.

    Args:
        source: Image folder, or tar archive of one (compressed or not; folders above the splits do
            not matter).
        split: `"train"` or `"test"`.
        classes: Names of the class folders; their order gives the labels.
        size: Height and width of the images, in pixels.
        cache: Folder of the cache; `$LAPLACE_DEBIAS_CACHE` or else `~/.cache/laplace-debias`.
        progress: Whether to show a progress bar.

    Returns:
        RGB images, uint8 [N, 3, H, W], and labels [N].

    Raises:
        ValueError: If the archive is damaged, the split or a class is missing, empty or unknown, an
            image is broken or of another size, or the cache cannot be written.
        ImportError: If Pillow is missing and images must be decoded.
    """
    folder = Path(
        cache or os.environ.get("LAPLACE_DEBIAS_CACHE") or Path.home() / ".cache/laplace-debias"
    )
    name = f"{source.name.partition('.')[0]}-{_fingerprint(source, classes, size)}"
    file = folder / f"{name}.safetensors"
    tensors = _read_cache(file)
    if tensors is None:
        _check_writable(folder)
        members = dict(_archive_members(source) if source.is_file() else _folder_members(source))
        _check_layout(source, members, classes)
        tensors = _decode(source, members, classes, size, progress)
        write_tensors(file, tensors)
    if f"{split}.images" not in tensors:
        raise ValueError(f"{source} has no {split}/; expected {split}/<class>/<name>.jpg (or .png)")
    return tensors[f"{split}.images"], tensors[f"{split}.labels"]


def _read_cache(file: Path) -> dict[str, Tensor] | None:
    """Content of the cache; None if it is missing or damaged, which means decoding again."""
    try:
        return read_tensors(file)
    except ValueError:
        return None


def _check_writable(folder: Path) -> None:
    """Refuse a cache that could not be written, before the images are decoded."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise ValueError(
            f"cannot write to the cache folder {folder}; name another one, "
            "or set LAPLACE_DEBIAS_CACHE"
        )


def _fingerprint(source: Path, classes: Sequence[str], size: tuple[int, int]) -> str:
    """What the decoded images depend on: settings, and path, size and time of every file."""
    files = [source] if source.is_file() else [path for path, _ in _folder_files(source)]
    digest = hashlib.sha256(repr((str(source.resolve()), tuple(classes), size)).encode())
    for path in files:
        stat = path.stat()
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def _key(path: PurePosixPath) -> _Key | None:
    """Split, class and name of an image's path; `None` for a path of anything else."""
    parts = path.parts[-3:]
    if len(parts) < 3 or parts[0] not in SPLITS or path.name.startswith("."):
        return None
    return (parts[0], parts[1], parts[2]) if path.suffix.lower() in SUFFIXES else None


def _folder_files(source: Path) -> Iterator[tuple[Path, _Key]]:
    for split in SPLITS:
        for path in sorted((source / split).glob("*/*")):
            key = _key(PurePosixPath(split, path.parent.name, path.name))
            if key is not None and path.is_file():
                yield path, key


def _folder_members(source: Path) -> Iterator[tuple[_Key, bytes]]:
    for path, key in _folder_files(source):
        yield key, path.read_bytes()


def _archive_members(source: Path) -> Iterator[tuple[_Key, bytes]]:
    try:
        with tarfile.open(source, "r|*") as archive:
            for member in archive:
                key = _key(PurePosixPath(member.name))
                stream = archive.extractfile(member) if key and member.isfile() else None
                if key is not None and stream is not None:
                    yield key, stream.read()
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        raise ValueError(
            f"{source} is damaged or not a tar archive ({error}); "
            "expected an archive of train/<class>/<name>.jpg and test/…: fetch it again"
        ) from error


def _check_layout(source: Path, members: dict[_Key, bytes], classes: Sequence[str]) -> None:
    """Refuse splits that lack a class or have one too many."""
    if not members:
        raise ValueError(
            f"no images in {source}; expected train/<class>/<name>.jpg (or .png) and test/…"
        )
    for split in sorted({split for split, _, _ in members}):
        found = {name for part, name, _ in members if part == split}
        missing, unknown = sorted(set(classes) - found), sorted(found - set(classes))
        if missing or unknown:
            raise ValueError(
                f"{source}: {split}/ has no images of {missing or 'no class'} and unknown classes "
                f"{unknown}; expected images (.jpg or .png) of {list(classes)}: "
                "complete or rename the class folders"
            )


def _decode(
    source: Path,
    members: dict[_Key, bytes],
    classes: Sequence[str],
    size: tuple[int, int],
    progress: bool,
) -> dict[str, Tensor]:
    """Images and labels of each split, by name."""
    imaging = pillow()
    tensors: dict[str, Tensor] = {}
    with tqdm(total=len(members), desc="decoding", unit="images", disable=not progress) as bar:
        for split in sorted({split for split, _, _ in members}):
            keys = sorted(
                (key for key in members if key[0] == split),
                key=lambda key: (classes.index(key[1]), key[2]),
            )
            images = np.empty((len(keys), *size, 3), dtype=np.uint8)
            for image, key in zip(images, keys, strict=True):
                try:
                    with imaging.open(io.BytesIO(members[key])) as picture:
                        pixels = np.asarray(picture.convert("RGB"))
                # On broken bytes Pillow's decoders raise errors of any type.
                except Exception as error:
                    raise ValueError(
                        f"{source}: {'/'.join(key)} is no readable image ({error}); replace it"
                    ) from error
                if pixels.shape != image.shape:
                    raise ValueError(
                        f"{source}: {'/'.join(key)} has {pixels.shape[0]} × {pixels.shape[1]} "
                        f"pixels; expected {size[0]} × {size[1]}: replace or resize it"
                    )
                image[:] = pixels
                bar.update()
            tensors[f"{split}.images"] = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
            tensors[f"{split}.labels"] = torch.tensor(
                [classes.index(key[1]) for key in keys], dtype=torch.int64
            )
    return tensors
