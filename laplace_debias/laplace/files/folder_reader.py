"""Reads a posterior in a folder: all of it, or the blocks that a process holds."""

from collections.abc import Callable, Collection
from pathlib import Path

from torch import Tensor

from laplace_debias.laplace.files.header import Header
from laplace_debias.laplace.files.index import INDEX, SealedPart, parsed_index
from laplace_debias.laplace.files.layout import DamagedFileError, UnknownFormatError
from laplace_debias.laplace.files.mapped import Mapped, Stamp, stamp_of
from laplace_debias.laplace.files.parts import Part, read_part
from laplace_debias.laplace.files.plain_data import shown
from laplace_debias.laplace.files.sealed import read_sealed
from laplace_debias.system.ranks import ALONE, Ranks

# Of each block's number whether this process reads it.
Wanted = Callable[[int], bool]
_PART_OF_A_BLOCK = "laplace-debias part/1"
_MAX_INDEX = 100_000_000


def is_folder(path: Path) -> bool:
    """Whether a posterior lies there in parts."""
    return (path / INDEX).is_file()


def load_folder(
    folder: Path,
    mapped: bool,
    wanted_of: Callable[[Header], Wanted] = lambda _: lambda _: True,
    ranks: Ranks = ALONE,
) -> tuple[Header, dict[str, Tensor], Mapped]:
    """Read an index, the mean, and the blocks that are wanted.

    Several processes read together: rank 0 the index, and each its blocks.

    Args:
        folder: The folder.
        mapped: As `read_sealed` takes it.
        wanted_of: From the header to what this process reads.
        ranks: The processes that read together.

    Returns:
        The header, the tensors, and the files; their `parts` are by the blocks' numbers.

    Raises:
        ValueError: If the index or a part is damaged, missing, or of another save.
        OSError: If they cannot be read.
    """
    raw = _index_of(folder, ranks)
    while True:
        missing: str | None = None
        try:
            found = _load(folder, raw, mapped, wanted_of)
        except FileNotFoundError as error:
            missing = str(error)
        said = ranks.exchange(missing)
        told = {rank: of_rank for rank, of_rank in enumerate(said) if of_rank is not None}
        if not told:
            return found
        # Somebody may have saved another posterior since the index was read.
        again = _index_of(folder, ranks)
        if again == raw:
            rank, what = next(iter(told.items()))
            where = f" for rank {rank}" if ranks.size > 1 else ""
            remedy = ", or name a folder that all processes share" if ranks.size > 1 else ""
            raise ValueError(
                f"A file that {folder / INDEX} names is missing{where} ({what}): save the "
                f"posterior again{remedy}."
            )
        raw = again


def _load(
    folder: Path, raw: bytes, mapped: bool, wanted_of: Callable[[Header], Wanted]
) -> tuple[Header, dict[str, Tensor], Mapped]:
    header, parts = parsed_index(folder / INDEX, raw)
    wanted = wanted_of(header)
    tensors: dict[str, Tensor] = {}
    stamps: dict[Path, Stamp] = {}
    places: dict[str, Part] = {}
    for part in parts:
        asked: Part | SealedPart = part
        if isinstance(part, Part):
            by_block = _by_block(part, wanted)
            asked = part.of({name for names in by_block.values() for name in names})
            places |= {block: part.of(names) for block, names in by_block.items()}
        elif part.block is not None and not wanted(part.block):
            continue
        if isinstance(asked, SealedPart) or asked.tensors:
            path = folder / part.file
            stamps[path] = stamp_of(path)
            tensors.update(read_checked(path, asked, mapped))
    return header, tensors, Mapped(stamps, folder, places)


def _by_block(part: Part, wanted: Wanted) -> dict[str, set[str]]:
    """The tensors that are read, by their block; under no name those that all need."""
    found: dict[str, set[str]] = {}
    for name in part.tensors:
        block, dot, _ = name.partition(".")
        block = block if dot and block.isdecimal() else ""
        if not block or wanted(int(block)):
            found.setdefault(block, set()).add(name)
    return found


def read_checked(path: Path, part: Part | SealedPart, mapped: bool) -> dict[str, Tensor]:
    """The tensors of a part.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, or not the one that was written with the index.
    """
    try:
        if isinstance(part, Part):
            return read_part(path, part, mapped)
        formats = {_PART_OF_A_BLOCK: True}
        return read_sealed(path, formats, expected=part.checksum, mapped=mapped)[1]
    except UnknownFormatError as error:
        raise ValueError(
            f"{path} is of format {shown(error.args[0])}, and no part of a posterior: save it "
            "again."
        ) from error
    except DamagedFileError as error:
        raise ValueError(
            f"{path} is damaged ({error}): save the posterior again, or copy the whole folder."
        ) from error


def _index_of(folder: Path, ranks: Ranks) -> bytes:
    """The index, as rank 0 reads it."""
    raw = b""
    if ranks.rank == 0:
        with (folder / INDEX).open("rb") as file:
            raw = file.read(_MAX_INDEX)
    return ranks.from_rank(raw, 0)


def parts_by_block(found: Mapped, names: Collection[str]) -> dict[str, Part]:
    """Where each block is, by its name.

    Args:
        found: As `load_folder` gives it.
        names: The names of all blocks, in order.
    """
    places = {name: found.parts.get(str(number)) for number, name in enumerate(names)}
    return {name: part for name, part in places.items() if part is not None}
