"""Posteriors in folders: saved in parts, and kept there while they are fitted."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laplace_debias.curvature.fits.sharded_blocks import ShardedBlocks
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.laplace.files import posterior_file
from laplace_debias.laplace.files.folder import (
    FolderWriter,
    check_folder,
    check_seen,
    check_space,
)
from laplace_debias.laplace.files.folder_reader import read_checked
from laplace_debias.laplace.files.header import Header, header_of
from laplace_debias.laplace.files.likelihood_json import likelihood_to_json
from laplace_debias.laplace.files.mapped import Mapped, Stamp, stamp_of
from laplace_debias.laplace.files.parts import Part
from laplace_debias.laplace.fitted import Fitted
from laplace_debias.operators import BlockDiagonal, LinearOperator
from laplace_debias.system.ranks import ALONE, Ranks, current


def check_store(folder: Path, likelihood: Likelihood, device: torch.device, needed: int) -> None:
    """Require that a fit can keep its posterior in a folder, before any work.

    Args:
        folder: The folder.
        likelihood: The model's, which the index describes.
        device: Where the model is.
        needed: Bytes of the posterior, of all processes together.

    Raises:
        ValueError: On an accelerator, or without room on the disk; as `likelihood_to_json`.
        OSError: As `check_folder`.
    """
    check_mappable(device, "store=")
    likelihood_to_json(likelihood, own=True)
    check_folder(folder)
    check_space(folder, needed)


def check_mappable(device: torch.device, what: str) -> None:
    """Require a model on the CPU, which can use files as they lie on disk.

    Raises:
        ValueError: Otherwise.
    """
    if device.type != "cpu":
        raise ValueError(
            f"{what} keeps eigenbases in files that the CPU reads as it needs them, and the model "
            f"is on {device}: move it to the CPU, or leave {what} out. A posterior on {device} is "
            "written by la.save(folder, parts=True), and Laplace.load(folder, model) reads it back."
        )


class StoredFit:
    """The posterior of a fit that goes on, whose finished blocks are in a folder.

    Of several processes each writes the blocks that it holds, and none sends any; of blocks that
    all hold rank 0 does.

    Args:
        folder: The folder.
        ranks: The processes that fit together.
    """

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._writer = FolderWriter(folder, ranks)
        self._count = 0
        self._parts: dict[str, Part] = {}
        self._blocks: dict[str, LinearOperator] = {}
        self._stamps: dict[Path, Stamp] = {}

    def __enter__(self) -> "StoredFit":
        """Begin; raises as `FolderWriter`."""
        self._writer.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End; after an exception nothing is left that was not there."""
        self._writer.__exit__(*error)

    def stored(self, curvature: BlockDiagonal) -> BlockDiagonal:
        """Finished blocks, from now on in files."""
        numbers = {name: self._count + k for k, name in enumerate(curvature.blocks)}
        self._count += len(numbers)
        here = _held(curvature)
        part = self._write({numbers[name]: curvature.blocks[name] for name in here}, curvature)
        if part is None:
            return curvature
        path = self._writer.folder / part.file
        self._stamps[path] = stamp_of(path)
        tensors = read_checked(path, part, mapped=True)
        for name in here:
            of_block = {
                key: tensor
                for key, tensor in tensors.items()
                if key.partition(".")[0] == str(numbers[name])
            }
            self._parts[name] = part.of(of_block.keys())
            self._blocks[name] = posterior_file.operator_from(
                {key.partition(".")[2]: tensor for key, tensor in of_block.items()}
            )
        return curvature.map(lambda name, _: self._blocks[name])

    def _write(self, blocks: Mapping[int, LinearOperator], of: BlockDiagonal) -> Part | None:
        """The file of blocks that this process reads from now on; None without blocks."""
        ranks, part = self._writer.ranks, None
        is_whole = not isinstance(of, ShardedBlocks)
        if blocks and (ranks.rank == 0 or not is_whole):
            tensors: dict[str, Tensor] = {}
            for number, block in blocks.items():
                tensors |= posterior_file.of_block(number, block)
            part = self._writer.write("blocks", tensors)
        if is_whole and ranks.size > 1:
            part = ranks.from_rank(part, 0)
            check_seen(self._writer.folder, [part], ranks.rank, 0)
        return part

    def finish(self, fitted: Fitted) -> Fitted:
        """The fit with its files, the index of which is written.

        Raises:
            OSError: If it cannot be written.
        """
        mapped = Mapped(self._stamps, self._writer.folder, self._parts, self._blocks)
        fitted = replace(fitted, mapped=mapped)
        _write(self._writer, fitted, header_of(fitted, own_likelihood=True))
        return fitted


def save(path: Path, fitted: Fitted, own_likelihood: bool, parts: bool) -> None:
    """Save a posterior; all processes call it, and none goes on before the file is there.

    Args:
        path: The file, or with `parts` the folder.
        fitted: The fit.
        own_likelihood: Whether a likelihood of another package may be named.
        parts: Whether to write a folder, into which each process writes the blocks that it holds.

    Raises:
        ValueError: As `posterior_file.save`; if a process does not see the folder.
        OSError: As `posterior_file.save` and `FolderWriter`.
    """
    ranks = current()
    if fitted.posterior.is_sharded or ranks.rank == 0:
        write = save_parts if parts else posterior_file.save
        write(path, fitted, own_likelihood)
    ranks.exchange(None)


def save_parts(folder: Path, fitted: Fitted, own_likelihood: bool) -> None:
    """Save a posterior in parts; blocks that were mapped from the same folder stay as they are.

    All processes that share the blocks of a sharded posterior call it: each writes its own.

    Raises:
        ValueError: As `posterior_file.save`; if a process does not see the folder.
        OSError: As `FolderWriter`.
    """
    header, curvature = header_of(fitted, own_likelihood), fitted.posterior.curvature
    ranks = curvature.ranks() if isinstance(curvature, ShardedBlocks) else ALONE
    with FolderWriter(folder, ranks) as writer:
        _write(writer, fitted, header)


def _write(writer: FolderWriter, fitted: Fitted, header: Header) -> None:
    """Write what is not there yet of a posterior, and the index."""
    posterior, is_first = fitted.posterior, writer.ranks.rank == 0
    curvature = posterior.curvature
    parts: list[Part] = []
    if is_first:
        parts.append(writer.write("mean", posterior_file.of_prior_and_mean(posterior)))
    new: dict[str, Tensor] = {}
    here = _held(curvature) if is_first or isinstance(curvature, ShardedBlocks) else []
    for number, (name, block) in enumerate(curvature.blocks.items()):
        if name not in here:
            continue
        there = fitted.mapped and fitted.mapped.part_of(writer.folder, name, block)
        if there:
            parts.append(there)
        else:
            new |= posterior_file.of_block(number, block)
    if new:
        parts.append(writer.write("blocks", new))
    writer.finish(header, parts)


def _held(curvature: BlockDiagonal) -> list[str]:
    """The blocks that this process holds."""
    if not isinstance(curvature, ShardedBlocks):
        return list(curvature.blocks)
    return [name for name in curvature.blocks if curvature.is_here(name)]
