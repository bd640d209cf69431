"""Reads a saved posterior, of a file or a folder, for one process or for several together."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from laplace_debias.curvature.fits.kinds import DENSE, WITH_FACTORS
from laplace_debias.curvature.network.fingerprint import changed, fingerprint
from laplace_debias.curvature.network.wrappers import unwrapped
from laplace_debias.laplace.files import posterior_file
from laplace_debias.laplace.files.folder_reader import is_folder, load_folder, parts_by_block
from laplace_debias.laplace.files.header import Header
from laplace_debias.laplace.files.holding import WHOLE, Holding, holding_of
from laplace_debias.laplace.files.mapped import Mapped, stamp_of
from laplace_debias.laplace.fitted import Fitted, Noise
from laplace_debias.laplace.parameters import BayesianParameters
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.laplace.subject import Subject
from laplace_debias.system.ranks import ALONE, Ranks, current, together


@dataclass(frozen=True, eq=False)
class Saved:
    """A posterior as a process reads it from a file or a folder.

    Attributes:
        header: What it says besides the tensors.
        tensors: Its tensors on the CPU, at least those of the blocks that this process holds.
        mapped: The files that they are mapped from; None if they are in memory.
        holding: Which blocks this process holds.
    """

    header: Header
    tensors: Mapping[str, Tensor]
    mapped: Mapped | None
    holding: Holding

    @classmethod
    def read(cls, path: Path, mapped: bool, model: nn.Module, replicate: bool | None) -> "Saved":
        """From a file or a folder.

        Args:
            path: The file or folder.
            mapped: As `read_sealed` takes it.
            model: The model without wrappers, which must have the posterior's parameters where they
                are measured.
            replicate: As `Laplace.load` takes it.

        Raises:
            IsADirectoryError: For a folder without a posterior in parts.
            ValueError: As `load_folder`, `posterior_file.load` and `holding_of`; if it was saved
                for another model; if a process does not see what rank 0 sees.
            OSError: Likewise.
        """
        ranks = current() if _is_shared_out(path, replicate) else ALONE
        _check_same_kind(path, ranks)
        holding = WHOLE

        def checked(header: Header) -> Holding:
            nonlocal holding
            posterior_file.check_names(header, dict(model.named_parameters()))
            posterior_file.check_calls(header, model)
            holding = holding_of(header, model, ranks)
            return holding

        if is_folder(path):
            header, tensors, of_folder = load_folder(
                path, mapped, lambda header: checked(header).is_here, ranks
            )
            return cls(header, tensors, of_folder if mapped else None, holding)
        stamps = {path: stamp_of(path)} if mapped and path.is_file() else {}
        header, tensors = posterior_file.load(path, mapped)
        return cls(header, tensors, Mapped(stamps) if mapped else None, checked(header))

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
        posterior = posterior_file.posterior_from(
            header, self.tensors, parameters, plain, self.holding
        )
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
            mapped=self._mapped_to(posterior),
        )

    def _mapped_to(self, posterior: GaussianPosterior) -> Mapped | None:
        """What a posterior that is made of it is mapped from, with its blocks."""
        if self.mapped is None or self.mapped.folder is None:
            return self.mapped
        blocks = dict(posterior.curvature.blocks)
        parts = parts_by_block(self.mapped, list(blocks))
        return Mapped(self.mapped.stamps, self.mapped.folder, parts, blocks)


@contextmanager
def together_if_shared_out(path: Path, replicate: bool | None) -> Iterator[None]:
    """What all processes do if they share out the blocks of what is read, else this one alone.

    Args:
        path: What is read.
        replicate: As `Laplace.load` takes it.
    """
    if not _is_shared_out(path, replicate):
        yield
        return
    with together("load"):
        yield


def _is_shared_out(path: Path, replicate: bool | None) -> bool:
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
