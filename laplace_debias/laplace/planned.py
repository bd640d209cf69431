"""What is to be fitted, and the bytes that each stage of it takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from laplace_debias.curvature.fits.kinds import CurvatureKind
from laplace_debias.curvature.fits.peak import stages
from laplace_debias.curvature.fits.peak_of_dense import dense_stages
from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.fits.working import Working, working_memory
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.losses.cotangents import FisherType
from laplace_debias.curvature.network.inputs import Inputs, num_examples, take
from laplace_debias.curvature.network.last_layer import last_layer_parameters
from laplace_debias.laplace.schemes import FOLDS, OF_FIRST_BATCHES
from laplace_debias.laplace.settings import FitSettings


@dataclass(frozen=True)
class Planned:
    """What is to be fitted.

    Attributes:
        model: The user's model, unwrapped.
        problem: The network and its blocks.
        settings: The choices of `Laplace`.
        mode: As `Laplace.fit` takes it.
        folds: Of `"crossfit"`.
        batch: The first batch, `(x, y)`.
        num_batches: Batches that a full fit reads on this process; None if not known.
        num_examples: Examples that it reads on all processes; None if not known.
        order: Bytes of the places that the blocks' entries have among the parameters, which are
            held on the CPU all the time; 0 where the two orders are the same.
    """

    model: nn.Module
    problem: Problem
    settings: FitSettings
    mode: str
    folds: int | None
    batch: tuple[Inputs, Tensor]
    num_batches: int | None
    num_examples: int | None
    order: int = 0

    @property
    def batches_read(self) -> int | None:
        """Batches of one pass."""
        first = OF_FIRST_BATCHES.get(self.mode)
        return self.num_batches if first is None else 1

    @property
    def examples_read(self) -> int | None:
        """Examples of one pass."""
        if self.mode not in OF_FIRST_BATCHES:
            return self.num_examples
        return num_examples(self.batch[0]) * self.problem.ranks.size

    def workings(self) -> tuple[Working, Working]:
        """Working memory of a pass for factors or rows, and of one for exact curvature."""
        x, y = self.batch
        if self.mode == "crossfit":
            # A pass goes through one fold.
            x = take(x, slice(0, -(-num_examples(x) // (self.folds or FOLDS))))
        kind, problem = self.settings.kind, self.problem
        exact = working_memory(problem, x, y, additive=False, extra_bytes=_row_bytes(problem, kind))
        if kind.name not in ("kfac", "ekfac"):
            return exact, exact
        return working_memory(problem, x, y, additive=True), exact

    def stages(self, workings: tuple[Working, Working]) -> dict[str, int]:
        """Bytes at most in each stage."""
        kind, examples = self.settings.kind, self.examples_read
        if examples is None and self.batches_read is not None:
            # As many as there can be, where only the number of batches is known.
            examples = self.batches_read * num_examples(self.batch[0])
        problem, folds = self.problem, self.folds or FOLDS
        if kind.is_dense:
            found = dense_stages(
                *(problem, kind.num_directions, self.mode, workings[1]),
                *(examples, self.batches_read, folds),
            )
        else:
            found = stages(problem, kind.name, self.mode, *workings, self.batches_read, folds)
        held = self.order if problem.device.type == "cpu" else 0
        return {name: held + value for name, value in found.items()}

    def of_group(self, blocks: Sequence[Block]) -> "Planned":
        """The same of some of the blocks."""
        return replace(self, problem=self.problem.of_group(blocks))

    def alternatives(self) -> dict[str, int]:
        """Other choices, and the bytes at most of a fit with each."""
        found = {}
        for name, other in self._others():
            try:
                found[name] = max(other.stages(other.workings()).values())
            except ValueError:  # One example alone takes more than the chunk's bound.
                continue
        return found

    def _others(self) -> list[tuple[str, "Planned"]]:
        settings, problem = self.settings, self.problem
        others = []
        cotangents = replace(problem.cotangents, fisher=FisherType("mc"))
        if problem.cotangents.fisher.kind == "exact":
            sampled = replace(problem, cotangents=cotangents)
            others.append(('fisher="mc"', replace(self, problem=sampled)))
        for kind in (CurvatureKind("diag"), CurvatureKind("lowrank")):
            if kind.name != settings.kind.name:
                chosen = replace(settings, kind=kind)
                others.append((f'curvature="{kind.name}"', replace(self, settings=chosen)))
        for name, blocks in fewer_blocks(self.model, problem.blocks, self.batch[0]):
            others.append((name, replace(self, problem=replace(problem, blocks=blocks))))
        return others


def fewer_blocks(
    model: nn.Module, blocks: Sequence[Block], x: Inputs | None
) -> list[tuple[str, list[Block]]]:
    """Smaller choices of parameters, as `params=`, with their blocks."""
    found = []
    weights = [block for block in blocks if block.role in ("weight", "table")]
    if 0 < len(weights) < len(blocks):
        found.append(('params="weights"', weights))
    try:
        last = set(last_layer_parameters(model, x))
    except (ValueError, NotImplementedError):  # A model without one last layer.
        last = set()
    of_last = [block for block in blocks if last.issuperset(block.parameters)]
    if 0 < len(of_last) < len(blocks):
        found.append(('params="last_layer"', of_last))
    return found


def _row_bytes(problem: Problem, kind: CurvatureKind) -> int:
    if not kind.is_dense:
        return 0
    return sum(block.size for block in problem.blocks) * problem.dtype.itemsize
