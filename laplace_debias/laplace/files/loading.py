"""Reads a saved posterior, of a file or a folder, for one process or for several together."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn

from laplace_debias.laplace.files import posterior_file
from laplace_debias.laplace.files.folder_reader import is_folder, load_folder, parts_by_block
from laplace_debias.laplace.files.header import Header
from laplace_debias.laplace.files.mapped import Mapped, stamp_of
from laplace_debias.laplace.files.share import WHOLE, Share, share_of
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.system.ranks import ALONE, Ranks, current, together

P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Saved:
    """A saved posterior, as a process reads it.

    Attributes:
        header: Its header.
        tensors: Its tensors on the CPU, at least those of the blocks that this process holds.
        mapped: The files that they lie in; None where they are in memory.
        share: What this process holds.
    """

    header: Header
    tensors: Mapping[str, Tensor]
    mapped: Mapped | None
    share: Share

    def mapped_to(self, posterior: GaussianPosterior) -> Mapped | None:
        """What a posterior that is made of it is mapped from, with its blocks."""
        if self.mapped is None or self.mapped.folder is None:
            return self.mapped
        blocks = dict(posterior.curvature.blocks)
        parts = parts_by_block(self.mapped, list(blocks))
        return Mapped(self.mapped.stamps, self.mapped.folder, parts, blocks)


def load(path: Path, mapped: bool, model: nn.Module, replicate: bool | None) -> Saved:
    """Read a posterior from a file or a folder.

    Args:
        path: The file or folder.
        mapped: As `read_sealed` takes it.
        model: The model without wrappers.
        replicate: As `Laplace.load` takes it.

    Raises:
        IsADirectoryError: For a folder without a posterior in parts.
        ValueError: As `load_folder`, `posterior_file.load` and `share_of`; if it was saved for
            another model; if a process does not see what rank 0 sees.
        OSError: Likewise.
    """
    ranks = current() if _takes_part(path, replicate) else ALONE
    _check_same_kind(path, ranks)
    share = WHOLE

    def share_among(header: Header) -> Share:
        nonlocal share
        posterior_file.check_names(header, dict(model.named_parameters()))
        posterior_file.check_calls(header, model)
        share = share_of(header, model, ranks)
        return share

    if is_folder(path):
        header, tensors, of_folder = load_folder(
            path, mapped, lambda header: share_among(header).is_here, ranks
        )
        return Saved(header, tensors, of_folder if mapped else None, share)
    stamps = {path: stamp_of(path)} if mapped and path.is_file() else {}
    header, tensors = posterior_file.load(path, mapped)
    return Saved(header, tensors, Mapped(stamps) if mapped else None, share_among(header))


def by_all_that_share(function: Callable[P, Result]) -> Callable[P, Result]:
    """`Laplace.load`, which the processes make together where they share out the blocks."""
    with_all = together("load")(function)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Result:
        path: Any = args[1] if len(args) > 1 else kwargs["path"]
        replicate: Any = kwargs.get("replicate")
        takes_part = _takes_part(Path(path), replicate)
        return with_all(*args, **kwargs) if takes_part else function(*args, **kwargs)

    return called


def _takes_part(path: Path, replicate: bool | None) -> bool:
    """Whether this process reads a posterior together with others.

    What is no file may be a folder that others see.
    """
    is_shared = not path.is_file() if replicate is None else not replicate
    return is_shared and current().size > 1


def _check_same_kind(path: Path, ranks: Ranks) -> None:
    """Require that all processes see a folder, or all a file."""
    kind_here = "a posterior in parts" if is_folder(path) else "a file" if path.is_file() else ""
    for rank, kind in enumerate(said := ranks.exchange(kind_here)):
        if kind != said[0]:
            raise ValueError(
                f"Rank {rank} sees {kind or 'nothing'} at {path}, and rank 0 "
                f"{said[0] or 'nothing'}: name a place on a file system that all processes share, "
                "or copy the posterior to the machine of each."
            )
