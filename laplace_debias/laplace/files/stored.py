"""Posteriors in folders: saved in parts, and kept there while they are fitted."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.laplace.files import posterior_file
from laplace_debias.laplace.files.folder import (
    FolderWriter,
    check_folder,
    check_space,
    is_folder,
    load_folder,
    part_name,
    read_part,
)
from laplace_debias.laplace.files.header import Header, header_of
from laplace_debias.laplace.files.likelihood_json import likelihood_to_json
from laplace_debias.laplace.files.mapped import Mapped, Part, Stamp, stamp_of
from laplace_debias.laplace.files.sent_tensors import SentTensors
from laplace_debias.laplace.fitted import Fitted
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.operators import BlockDiagonal, LinearOperator
from laplace_debias.system.ranks import Ranks


def check_store(
    folder: Path, likelihood: Likelihood, device: torch.device, ranks: Ranks, needed: int
) -> None:
    """Require that a fit can keep its posterior in a folder, before any work.

    Args:
        folder: The folder.
        likelihood: The model's, which the index describes.
        device: Where the model is.
        ranks: The processes.
        needed: Bytes of the posterior.

    Raises:
        ValueError: On an accelerator, in a process group, or without room on the disk; as
            `likelihood_to_json`.
        OSError: As `check_folder`.
    """
    check_mappable(device, "store=")
    if ranks.size > 1:
        raise ValueError(
            f"store= is for one process, and this is one of {ranks.size}: leave it out and save "
            "with la.save(folder, parts=True), which all of them call, or fit within "
            "`laplace_debias.alone()`."
        )
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
            f"is on {device}: move it to the CPU, or leave {what} out."
        )


class StoredFit:
    """The posterior of a fit that goes on, whose finished blocks are in a folder.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._writer = FolderWriter(folder)
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
        for name, block in curvature.blocks.items():
            index = len(self._blocks)
            part = self._writer.write(part_name(index), posterior_file.of_block(index, block))
            path = self._writer.folder / part.file
            self._parts[name], self._stamps[path] = part, stamp_of(path)
            self._blocks[name] = posterior_file.operator_from(
                {
                    key.partition(".")[2]: tensor
                    for key, tensor in read_part(path, part, mapped=True).items()
                }
            )
        return BlockDiagonal({name: self._blocks[name] for name in curvature.blocks})

    def finish(self, fitted: Fitted) -> Fitted:
        """The fit with its files, the index of which is written.

        Raises:
            OSError: If it cannot be written.
        """
        mapped = Mapped(self._stamps, self._writer.folder, self._parts, self._blocks)
        fitted = replace(fitted, mapped=mapped)
        _write(self._writer, fitted, header_of(fitted, own_likelihood=True))
        return fitted


def save_parts(folder: Path, fitted: Fitted, own_likelihood: bool) -> None:
    """Save a posterior in parts; blocks that were mapped from the same folder stay as they are.

    All processes that share the blocks of a sharded posterior call it: rank 0 writes, and gets from
    the others one tensor after the other.

    Raises:
        ValueError: As `posterior_file.save`.
        OSError: As `FolderWriter`.
    """
    header = header_of(fitted, own_likelihood)
    tensors = posterior_file.tensors_of_fit(fitted.posterior)
    sent = posterior_file.sent_tensors(fitted, header, tensors)
    if sent is not None and sent.ranks.rank > 0:
        for index in range(len(fitted.posterior.curvature.blocks)):
            sent.send(sent.of_block(index))
        return
    with FolderWriter(folder) as writer:
        _write(writer, fitted, header, sent)


def _write(
    writer: FolderWriter, fitted: Fitted, header: Header, sent: SentTensors | None = None
) -> None:
    """Write what is not there yet of a posterior, and the index."""
    posterior = fitted.posterior
    parts = [writer.write("mean", posterior_file.of_prior_and_mean(posterior))]
    for index, (name, block) in enumerate(posterior.curvature.blocks.items()):
        there = fitted.mapped and fitted.mapped.part_of(writer.folder, name, block)
        tensors = posterior_file.of_block(index, block) if sent is None else sent.of_block(index)
        fetch = None if sent is None else sent.fetch
        parts.append(there or writer.write(part_name(index), tensors, fetch))
    writer.finish(header, parts)


def load(path: Path, mapped: bool) -> tuple[Header, dict[str, Tensor], Mapped | None]:
    """Read a posterior's header and tensors (on the CPU), from a file or a folder.

    Args:
        path: The file or folder.
        mapped: As `read_sealed` takes it.

    Raises:
        IsADirectoryError: For a folder without a posterior in parts.
        ValueError: As `load_folder` and `posterior_file.load`.
        OSError: Likewise.
    """
    if is_folder(path):
        header, tensors, of_folder = load_folder(path, mapped)
        return header, tensors, of_folder if mapped else None
    stamps = {path: stamp_of(path)} if mapped and path.is_file() else {}
    header, tensors = posterior_file.load(path, mapped)
    return header, tensors, Mapped(stamps) if mapped else None


def with_blocks(mapped: Mapped | None, posterior: GaussianPosterior) -> Mapped | None:
    """What a posterior is mapped from, with its blocks."""
    if mapped is None or mapped.folder is None:
        return mapped
    by_place: Mapping[str, Part] = {
        name.rpartition("-")[0]: part for name, part in mapped.parts.items()
    }
    names = list(posterior.curvature.blocks)
    found = {name: by_place.get(part_name(index)) for index, name in enumerate(names)}
    parts = {name: part for name, part in found.items() if part is not None}
    return Mapped(mapped.stamps, mapped.folder, parts, dict(posterior.curvature.blocks))
