"""Posteriors in folders: saved in parts, and kept there while they are fitted."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.fits.kinds import DENSE, WITH_FACTORS
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.fingerprint import changed, fingerprint
from laplace_debias.curvature.network.wrappers import unwrapped
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
from laplace_debias.laplace.fitted import Fitted, Noise
from laplace_debias.laplace.parameters import BayesianParameters
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.laplace.subject import Subject
from laplace_debias.operators import BlockDiagonal, LinearOperator
from laplace_debias.system.ranks import Ranks, current


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
            "with la.save(folder, parts=True), or fit within `laplace_debias.alone()`."
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


def save(path: Path, fitted: Fitted, own_likelihood: bool, parts: bool) -> None:
    """Save a posterior; all processes call it, and none goes on before the file is there.

    Args:
        path: The file, or with `parts` the folder.
        fitted: The fit.
        own_likelihood: Whether a likelihood of another package may be named.
        parts: Whether to write a folder with a file for each block.

    Raises:
        ValueError: As `posterior_file.save`; for a sharded posterior in parts.
        OSError: As `posterior_file.save` and `FolderWriter`.
    """
    ranks, is_sharded = current(), fitted.posterior.is_sharded
    if parts and is_sharded:
        raise ValueError(
            "A sharded posterior cannot be saved in parts, as each process holds some of its "
            "blocks: save it as one file, or call `la.gather()` on all of them before."
        )
    if ranks.rank == 0 and parts:
        save_parts(path, fitted, own_likelihood)
    elif is_sharded or ranks.rank == 0:
        posterior_file.save(path, fitted, own_likelihood)
    ranks.exchange(None)


def save_parts(folder: Path, fitted: Fitted, own_likelihood: bool) -> None:
    """Save a posterior in parts; blocks that were mapped from the same folder stay as they are.

    Raises:
        ValueError: As `posterior_file.save`.
        OSError: As `FolderWriter`.
    """
    header = header_of(fitted, own_likelihood)
    with FolderWriter(folder) as writer:
        _write(writer, fitted, header)


def _write(writer: FolderWriter, fitted: Fitted, header: Header) -> None:
    """Write what is not there yet of a posterior, and the index."""
    posterior = fitted.posterior
    parts = [writer.write("mean", posterior_file.of_prior_and_mean(posterior))]
    for index, (name, block) in enumerate(posterior.curvature.blocks.items()):
        there = fitted.mapped and fitted.mapped.part_of(writer.folder, name, block)
        tensors = posterior_file.of_block(index, block)
        parts.append(there or writer.write(part_name(index), tensors))
    writer.finish(header, parts)


@dataclass(frozen=True, eq=False)
class Saved:
    """A posterior as a file or a folder has it.

    Attributes:
        header: What it says besides the tensors.
        tensors: Its tensors, on the CPU.
        mapped: The files that they are mapped from; None if they are in memory.
    """

    header: Header
    tensors: dict[str, Tensor]
    mapped: Mapped | None

    @classmethod
    def read(cls, path: Path, mapped: bool) -> "Saved":
        """From a file or a folder.

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
            return cls(header, tensors, of_folder if mapped else None)
        stamps = {path: stamp_of(path)} if mapped and path.is_file() else {}
        header, tensors = posterior_file.load(path, mapped)
        return cls(header, tensors, Mapped(stamps) if mapped else None)

    def check(self, model: nn.Module) -> None:
        """Require that the model has the parameters, where they are measured; raises so."""
        posterior_file.check_names(self.header, dict(model.named_parameters()))
        posterior_file.check_calls(self.header, model)

    def choices(self) -> dict[str, Any]:
        """The arguments of `Laplace` that the posterior was fitted with."""
        header = self.header
        # Files of earlier versions may name what had no effect.
        return {
            "curvature": header.curvature,
            "params": header.param_names,
            "rank": header.rank,
            "joint": header.joint and header.curvature not in DENSE,
            "sharing": header.sharing if header.curvature in WITH_FACTORS else "expand",
            "class_dim": header.class_dim,
        }

    def fitted(self, subject: Subject) -> Fitted:
        """The fit, of the model that it is the posterior of.

        Raises:
            ValueError: If the model is another one, or not as it was at the fit.
        """
        header, plain = self.header, unwrapped(subject.model)
        # It says how the entries are ordered, in one block of all parameters too.
        settings = replace(subject.settings, joint=header.joint)
        parameters = BayesianParameters.of(plain, header.param_names, settings, None, header.calls)
        posterior = posterior_file.posterior_from(header, self.tensors, parameters, plain)
        others = fingerprint(plain, parameters.names)
        if wrong := changed(header.others, others):
            raise ValueError(
                f"The model's {wrong[0]} is not that of the fit: load the checkpoint that the "
                "posterior was fitted on."
            )
        return Fitted(
            subject.model,
            subject.likelihood,
            settings,
            parameters,
            posterior,
            header.nll,
            others,
            header.mode,
            None if header.noise is None else Noise(**header.noise),
            mapped=_with_blocks(self.mapped, posterior),
        )


def _with_blocks(mapped: Mapped | None, posterior: GaussianPosterior) -> Mapped | None:
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
