"""Plans, which estimate the memory and time of a fit from one batch."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batches import Batches, consecutive
from laplace_debias.curvature.fits.chunks import run_example
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.network.inputs import Inputs, move
from laplace_debias.curvature.structures import STRUCTURES, CurvatureStructure
from laplace_debias.curvature.structures.base import (
    NO_ROWS,
    BlockBytes,
    NumRows,
    TrialPass,
    Workload,
)
from laplace_debias.laplace.fitting.modes import MODES
from laplace_debias.laplace.fitting.prepared import examine
from laplace_debias.laplace.fitting.schemes import FOLDS
from laplace_debias.laplace.state.fitted import FitSetup
from laplace_debias.operators.eigh import eigh
from laplace_debias.system.memory import (
    MemoryCounter,
    available_memory,
    check_memory,
    shown_size,
)
from laplace_debias.system.ranks import alone, process_group
from laplace_debias.system.shown import aligned, counted

# The size of the matrix that is decomposed to estimate the time of decompositions.
_TIMED_SIZE = 512


@dataclass(frozen=True)
class Plan:
    """The estimated memory and time of a fit; `print(plan)` shows a table.

    The numbers of bytes are for one process, and do not include the model and the data. A dense
    curvature (`"full"`, `"lowrank"`) does not consist of blocks, so `blocks` is empty.

    Attributes:
        curvature: The argument `curvature` of `Laplace`.
        mode: The argument `mode` of `Laplace.fit`.
        num_parameters: D, the number of Bayesian parameters.
        blocks: The bytes that each block needs.
        stages: The peak number of bytes in each stage of the fit, in the order of the stages.
        posterior: Bytes of the fitted posterior, including its mean.
        seconds: Time of the passes over the data, without eigendecompositions, extrapolated from
            one batch; None if the number of batches is not known, or if no batch was run because
            the blocks need more memory than there is.
        decomposition_seconds: Time of the eigendecompositions, extrapolated from one matrix. A
            matrix shared by several blocks counts once for each of them. If the number of batches
            is not known, every factor is assumed to have full rank. None if no batch was run, and
            for a curvature without Kronecker factors.
        available: Bytes that are free on the device; None if the system does not report them.
    """

    curvature: str
    mode: str
    num_parameters: int
    blocks: tuple[BlockBytes, ...]
    stages: Mapping[str, int]
    posterior: int
    seconds: float | None
    decomposition_seconds: float | None
    available: int | None

    @property
    def peak(self) -> int:
        """The peak memory of the fit in bytes, which is the maximum over its stages."""
        return max(self.stages.values())

    def check(self) -> None:
        """Raise an error if the device does not have enough memory for the fit.

        Raises:
            ValueError: If more bytes are needed than are available.
        """
        subject = f"curvature={self.curvature!r}, mode={self.mode!r} takes"
        less_memory = STRUCTURES[self.curvature].less_memory
        check_memory(self.peak, self.available, subject, less_memory)

    def summary(self) -> dict[str, Any]:
        """Return the plan as a dictionary for JSON, with only the number of blocks."""
        summary = {**asdict(self), "num_blocks": len(self.blocks), "peak": self.peak}
        del summary["blocks"]
        return summary

    def __repr__(self) -> str:
        # A curvature that does not consist of blocks has a single block of all parameters.
        title = (
            f"{self.curvature}, {self.mode}: {counted(self.num_parameters, 'parameter')} in "
            f"{counted(len(self.blocks) or 1, 'block')}"
        )
        tables = [self._totals_table()]
        if self.blocks:
            tables.insert(0, self._blocks_table())
        return "\n\n".join([title, *tables])

    def _blocks_table(self) -> str:
        rows = [("block", "factors", "magnitudes", "posterior")]
        for block in self.blocks:
            factors = shown_size(block.factors)
            magnitudes = shown_size(block.magnitudes)
            rows.append((block.name, factors, magnitudes, shown_size(block.posterior)))
        return aligned(rows)

    def _totals_table(self) -> str:
        rows = [("memory at most", shown_size(self.peak))]
        for name, num_bytes in self.stages.items():
            rows.append((f"  {name}", shown_size(num_bytes)))
        rows.append(("posterior", shown_size(self.posterior)))
        if self.available is not None:
            rows.append(("available", shown_size(self.available)))
        if self.seconds is not None:
            rows.append(("passes over the data", f"{self.seconds:.3g} s"))
        if self.decomposition_seconds is not None:
            rows.append(("eigendecompositions", f"{self.decomposition_seconds:.3g} s"))
        return aligned(rows)


def plan_fit(
    setup: FitSetup,
    loader: Batches,
    mode: str,
    folds: int | None,
) -> Plan:
    """Estimate the memory and time of this process's fit without running it.

    Args:
        setup: The model and the options of the fit.
        loader: The data of the fit.
        mode: The argument `mode` of `Laplace.fit`.
        folds: The argument `folds` of `Laplace.fit`.

    Raises:
        ValueError: For `mode="auto"`.
        TypeError: If the data is an iterator, which would lose its first batch.
    """
    _check_can_plan(mode, loader)
    structure = setup.config.structure
    reads = _Reads.of_mode(mode, folds, loader, structure)
    # The random states are restored afterwards, so that planning changes neither the order of the
    # data nor the labels drawn in the fit.
    with alone(), torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        fisher = setup.config.fisher.seeded(None, process_group())
        stream = setup.spec.training_stream(loader, setup.device)
        parameters, context = examine(setup, [stream], reads_all=False, fisher=fisher)
        setup.prior.for_parameters(parameters)
        structure.check(context)
        batch = stream.first
        assert batch is not None
        if reads.num_batches is not None:
            context = replace(context, num_examples=reads.num_batches * batch.num_examples)
        data = _trial_data(context, batch, reads)
        num_passes = reads.num_passes(len(data))
        available = available_memory(context.device)
        trial = _Trial()
        if _blocks_fit(structure, context, available):
            trial = _run_trial(structure, context, data)
        seconds = None
        num_rows = NO_ROWS
        if num_passes is not None and trial.seconds is not None:
            seconds = trial.seconds * num_passes * structure.num_trials(reads.is_debiased)
            num_rows = _rows_of_all_batches(trial.num_rows, num_passes)
        decomposition_seconds = None
        sizes = structure.decomposed_sizes(context, num_rows)
        if sizes is not None and trial.seconds is not None:
            decomposition_seconds = reads.num_decompositions * _seconds_of_eigh(context, sizes)
    workload = Workload(
        is_debiased=reads.is_debiased,
        num_folds=reads.num_folds,
        num_passes=num_passes,
        working_bytes=trial.working_bytes,
        row_bytes=trial.row_bytes,
        num_rows=num_rows,
    )
    return Plan(
        curvature=structure.name,
        mode=mode,
        num_parameters=sum(block.size for block in context.blocks),
        blocks=tuple(structure.block_bytes(context, num_rows)),
        stages=structure.stage_bytes(context, workload),
        posterior=posterior_bytes(context, structure, num_rows),
        seconds=seconds,
        decomposition_seconds=decomposition_seconds,
        available=available,
    )


def _check_can_plan(mode: str, loader: Batches) -> None:
    """Require a mode whose memory use is known in advance, and data that can be read again."""
    if mode == "auto":
        raise ValueError(
            '`mode="auto"` decides during the fit how many examples it uses, so '
            "`plan` cannot compute its memory in advance. Call `plan` with "
            '`mode="crossfit"` and `folds=4` instead. That fit needs the same amount '
            "of memory."
        )
    if isinstance(loader, Iterator):
        raise TypeError(
            "This iterator can be read only once. `plan` would read its first batch, "
            "and the fit would then miss that batch. Pass a DataLoader or a list of "
            "batches."
        )


@dataclass(frozen=True)
class _Reads:
    """How a fit reads the data.

    Attributes:
        is_debiased: Whether directions and magnitudes come from different batches.
        num_batches: The number of batches; None if it is unknown.
        num_folds: The number of folds, into which every batch is split.
        reads_folds_together: Whether a single pass reads all folds.
    """

    is_debiased: bool
    num_batches: int | None
    num_folds: int
    reads_folds_together: bool

    @classmethod
    def of_mode(
        cls, mode: str, folds: int | None, loader: Batches, structure: CurvatureStructure
    ) -> "_Reads":
        """Determine how a fit in this mode reads a loader."""
        fit_mode = MODES[mode]
        num_batches = None
        if fit_mode.num_first_batches is not None:
            # `"debiased"` reads one batch for the directions and one for the magnitudes, so each of
            # its passes reads one batch.
            num_batches = 1
        elif isinstance(loader, Sized):
            num_batches = len(loader)
        num_folds = 1
        if fit_mode.takes_folds:
            num_folds = folds or FOLDS
        return cls(
            is_debiased=fit_mode.is_debiased,
            num_batches=num_batches,
            num_folds=num_folds,
            reads_folds_together=structure.reads_folds_together,
        )

    @property
    def num_parts(self) -> int | None:
        """The number of parts of batches in one pass over the data, or None if it is unknown."""
        if self.num_batches is None or not self.reads_folds_together:
            return self.num_batches
        return self.num_batches * self.num_folds

    @property
    def num_decompositions(self) -> int:
        """The number of decompositions: one for all folds together, and one per fold left out."""
        return self.num_folds + 1 if self.num_folds > 1 else 1

    def num_passes(self, num_joined: int) -> int | None:
        """Return the number of passes through the network if each pass runs this many parts."""
        if self.num_parts is None:
            return None
        num_reads = 1 if self.reads_folds_together else self.num_folds
        return num_reads * math.ceil(self.num_parts / num_joined)


def posterior_bytes(
    context: FitContext, structure: CurvatureStructure, num_rows: NumRows = NO_ROWS
) -> int:
    """Count the bytes of a fitted posterior, which consists of its curvature and its mean."""
    size = sum(block.size for block in context.blocks)
    mean_bytes = context.dtype.itemsize * size
    return structure.posterior_bytes(context, num_rows) + mean_bytes


def _blocks_fit(structure: CurvatureStructure, context: FitContext, available: int | None) -> bool:
    """Whether the blocks of a fit and its posterior fit into the available memory, if known."""
    if available is None:
        return True
    blocks = structure.block_bytes(context)
    block_bytes = sum(block.factors + block.magnitudes for block in blocks)
    return posterior_bytes(context, structure) + block_bytes <= available


class _Trial(NamedTuple):
    """The cost of the passes over one batch; the default is a trial that was not run.

    Attributes:
        working_bytes: The largest number of bytes during a pass, not counting its sums.
        row_bytes: Bytes of all Jacobian rows of the batch.
        seconds: The time of the passes; None if they were not run.
        num_rows: The numbers of rows of the factors with thin directions.
    """

    working_bytes: int = 0
    row_bytes: int = 0
    seconds: float | None = None
    num_rows: NumRows = NO_ROWS


def _trial_data(context: FitContext, batch: Batch, reads: _Reads) -> list[Batch]:
    """Repeat a batch as many times as the fit joins batches in one pass.

    A pass reads one fold, so every repetition has the size of one fold.
    """
    fold = batch.take(slice(0, math.ceil(batch.num_examples / reads.num_folds)))
    x = move(fold.inputs, context.device, None)
    num_joined = _num_joined_batches(context, x, reads.num_parts)
    return consecutive([Batch(x, fold.targets.to(context.device))] * num_joined)


def _num_joined_batches(context: FitContext, x: Inputs, num_batches: int | None) -> int:
    """Estimate from the inputs of one batch how many batches are joined in one pass."""
    _, num_joined_examples = run_example(context, x)
    if not isinstance(x, Tensor):
        return 1
    num_joined = max(1, num_joined_examples // len(x))
    return num_joined if num_batches is None else min(num_batches, num_joined)


def _run_trial(structure: CurvatureStructure, context: FitContext, data: Sequence[Batch]) -> _Trial:
    """Run the passes of a fit over one batch to measure their cost, and discard the results."""
    working_bytes = 0
    row_bytes = 0
    seconds = 0.0
    num_rows = dict(NO_ROWS)
    for run in structure.trial_passes(context, data):
        cost = _measure(run, context.device)
        sums: TrialPass = cost.result
        working_bytes = max(working_bytes, cost.peak_bytes - sums.sum_bytes)
        row_bytes = max(row_bytes, sums.row_bytes)
        seconds += cost.seconds
        num_rows.update(sums.num_rows)
    return _Trial(working_bytes, row_bytes, seconds, num_rows)


def _rows_of_all_batches(num_rows: NumRows, num_passes: int) -> NumRows:
    """Extrapolate row counts from one batch to all; return None if a full matrix is smaller."""
    total: dict[Block, list[int | None]] = {}
    for block, counts in num_rows.items():
        total[block] = []
        for d, count in zip(block.shape, counts, strict=True):
            if count is None or 2 * num_passes * count > d:
                total[block].append(None)
            else:
                total[block].append(num_passes * count)
    return total


def _seconds_of_eigh(context: FitContext, sizes: Sequence[int]) -> float:
    """Estimate the time to decompose matrices, which grows with the cube of their sizes.

    A single random matrix is timed, with the largest of the sizes but at most `_TIMED_SIZE`.
    """
    if not sizes:
        return 0.0
    timed_size = min(max(sizes), _TIMED_SIZE)
    # The matrix is drawn on the CPU, because only the CPU's random state is restored after a plan.
    columns = torch.randn(timed_size, timed_size, dtype=context.factor_dtype).to(context.device)
    matrix = columns @ columns.mT
    seconds = _measure(partial(eigh, matrix), context.device).seconds
    return seconds * sum((size / timed_size) ** 3 for size in sizes)


class _Cost(NamedTuple):
    """The result of a function, the time it took, and the peak number of bytes of its tensors."""

    peak_bytes: int
    seconds: float
    result: Any


def _measure(run: Callable[[], Any], device: torch.device) -> _Cost:
    """Run a function twice, first to measure its memory and then to measure its time."""
    with MemoryCounter() as memory:
        run()
    start = perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return _Cost(memory.peak, perf_counter() - start, result)
