"""A plan of a fit: bytes counted from shapes, one batch measured. Within a factor of 1.5."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.network.batches import Batches, Fold
from laplace_debias.curvature.network.inputs import move, take
from laplace_debias.curvature.structures import CurvatureStructure
from laplace_debias.curvature.structures.base import NO_ROWS, BlockBytes, NumRows, Workload
from laplace_debias.laplace.mode_names import MODES
from laplace_debias.laplace.parameter_blocks import ParameterBlocks
from laplace_debias.laplace.prepared import examine
from laplace_debias.laplace.schemes import FOLDS
from laplace_debias.laplace.state import FittedPosterior, Unfitted
from laplace_debias.system.ranks import alone, current
from laplace_debias.system.shown import aligned

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Plan:
    """The costs of a fit, within a factor of 1.5; `print(plan)` is a table.

    Bytes are those beyond the model and the data, on one process. A dense curvature (`"full"`,
    `"lowrank"`) is not made of blocks, and has none here.

    Attributes:
        curvature: As `Laplace` takes it.
        mode: As `Laplace.fit` takes it.
        num_parameters: D.
        blocks: The bytes of every block.
        stages: Bytes at most in each stage of the fit, in their order.
        posterior: Bytes of the posterior that is kept, its mean included.
        seconds: Of the passes over the data, from one batch, without eigendecompositions; None
            where the number of batches is not known, or nothing was run as the blocks do not fit.
        available: Bytes that the device has left; None where the system does not tell.
    """

    curvature: str
    mode: str
    num_parameters: int
    blocks: tuple[BlockBytes, ...]
    stages: Mapping[str, int]
    posterior: int
    seconds: float | None
    available: int | None

    @property
    def peak(self) -> int:
        """Bytes at most: those of the stage that holds most."""
        return max(self.stages.values())

    def check(self) -> None:
        """Refuse a fit that does not fit.

        Raises:
            ValueError: If more bytes are needed than are available.
        """
        check_room(
            self.peak,
            self.available,
            f"curvature={self.curvature!r}, mode={self.mode!r} takes",
        )

    def summary(self) -> dict[str, Any]:
        """The plan of the whole fit, for JSON."""
        said = {**asdict(self), "num_blocks": len(self.blocks), "peak": self.peak}
        del said["blocks"]
        return said

    def __repr__(self) -> str:
        number = f"{len(self.blocks)} blocks" if self.blocks else "one block"
        lines = [f"{self.curvature}, {self.mode}: {self.num_parameters:,} parameters in {number}"]
        if self.blocks:
            rows = [(name, *map(_size, sizes)) for name, *sizes in map(astuple, self.blocks)]
            lines += ["", aligned([("block", "factors", "magnitudes", "posterior"), *rows])]
        stages = {f"  {name}": number for name, number in self.stages.items()}
        whole = {"memory at most": self.peak, **stages, "posterior": self.posterior}
        whole |= {} if self.available is None else {"available": self.available}
        told = [(name, _size(number)) for name, number in whole.items()]
        if self.seconds is not None:
            told.append(("passes over the data", f"{self.seconds:.3g} s"))
        return "\n".join([*lines, "", aligned(told)])


def plan_of(
    state: Unfitted | FittedPosterior,
    selected: ParameterBlocks | None,
    loader: Batches,
    mode: str,
    folds: int | None,
) -> Plan:
    """The plan of a fit of this process alone; nothing is fitted."""
    if mode == "auto":
        raise ValueError(
            'How much mode="auto" reads it finds out itself: plan mode="crossfit" with folds=4, '
            "which holds as many factors."
        )
    if isinstance(loader, Iterator):
        raise TypeError(
            "A plan reads the first batch, which this iterator would lose for the fit: pass a "
            "DataLoader or a list of batches."
        )
    scheme = MODES[mode]
    num_batches: int | None = 1
    if scheme.num_first_batches is None:
        num_batches = len(loader) if isinstance(loader, Sized) else None
    num_folds = 1
    if scheme.takes_folds:
        num_folds = folds or FOLDS
    num_passes = None if num_batches is None else num_batches * num_folds
    structure = state.config.structure
    is_debiased = scheme.is_split
    trial = _Trial()
    # The loader's order, and labels that a fit draws, are drawn anew by the fit.
    with alone(), torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        fisher = state.config.fisher.seeded(None, current())
        stream = state.spec.fit_stream(loader, state.device)
        _, context = examine(state, selected, [stream], False, fisher)
        ((x, y, *_),) = stream.first
        # A pass goes through one fold.
        part = slice(0, -(-len(y) // num_folds))
        x = move(take(x, part), context.device, None)
        data = Fold.consecutive([(x, y[part].to(context.device))])
        # It is run where there is room for it beside the blocks.
        available = available_memory(context.device)
        blocks = structure.block_bytes(context)
        block_bytes = sum(block.factors + block.magnitudes for block in blocks)
        if available is None or posterior_bytes(context, structure) + block_bytes <= available:
            trial = _run_trial(structure, context, data)
    seconds = None
    num_rows = NO_ROWS
    if num_passes is not None and trial.seconds is not None:
        seconds = trial.seconds * num_passes * structure.num_trials(is_debiased)
        num_rows = _rows_of_all_batches(trial.num_rows, num_passes)
    workload = Workload(
        is_debiased, num_folds, num_passes, trial.working_bytes, trial.row_bytes, num_rows
    )
    return Plan(
        structure.name,
        mode,
        sum(block.size for block in context.blocks),
        tuple(structure.block_bytes(context, num_rows)),
        structure.stage_bytes(context, workload),
        posterior_bytes(context, structure, num_rows),
        seconds,
        available,
    )


def posterior_bytes(
    context: FitContext, structure: CurvatureStructure, num_rows: NumRows = NO_ROWS
) -> int:
    """Bytes of a fitted posterior, its curvature and its mean."""
    size = sum(block.size for block in context.blocks)
    mean_bytes = context.dtype.itemsize * size
    return structure.posterior_bytes(context, num_rows) + mean_bytes


def available_memory(device: torch.device | None = None) -> int | None:
    """Bytes that can still be allocated; None where the system does not tell.

    Of a GPU what is free on it, with what torch's allocator holds and does not use. Of the CPU what
    Linux says is available, and no more than the process's control group (version 2, a container's
    limit) leaves, where cached files are given back if needed.
    """
    if device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + held
    found: list[int] = []
    if device is None or device.type == "cpu":
        with suppress(OSError, LookupError):
            found.append(1024 * int(_MEMINFO.read_text().partition("MemAvailable:")[2].split()[0]))
        # Without a limit it is "max".
        with suppress(OSError, LookupError, ValueError):
            limit = int((_CGROUP / "memory.max").read_text())
            stat = (_CGROUP / "memory.stat").read_text()
            cached = int(stat.partition("inactive_file ")[2].split()[0])
            used = int((_CGROUP / "memory.current").read_text()) - cached
            found.append(max(0, limit - used))
    return min(found, default=None)


def check_room(needed: int, available: int | None, what: str) -> None:
    """Require memory for something; where the system does not tell, there may be enough."""
    if available is not None and needed > available:
        raise ValueError(
            f"{what} {_size(needed)} ({needed:,} bytes), and {_size(available)} are available. "
            'Less take curvature="diag" or "lowrank", params="weights" or "last_layer", or fewer '
            "parameters by name; `plan` counts the bytes of each."
        )


class _Trial(NamedTuple):
    """The costs of the passes over one batch: bytes beside their sums, and seconds."""

    working_bytes: int = 0
    row_bytes: int = 0
    seconds: float | None = None
    num_rows: NumRows = NO_ROWS


def _run_trial(structure: CurvatureStructure, context: FitContext, data: Fold) -> _Trial:
    """Run the passes of a fit over one batch, and drop their results."""
    trial = _Trial(seconds=0.0)
    for run in structure.trial_passes(context, data):
        peak, seconds, result = _measured(run, context.device)
        assert trial.seconds is not None
        trial = _Trial(
            max(trial.working_bytes, peak - result.sum_bytes),
            max(trial.row_bytes, result.row_bytes),
            trial.seconds + seconds,
            {**trial.num_rows, **result.num_rows},
        )
    return trial


def _rows_of_all_batches(num_rows: NumRows, num_passes: int) -> NumRows:
    """The numbers of rows of several batches, where rows are kept of all of them together."""
    total: dict[Block, list[int | None]] = {}
    for block, counts in num_rows.items():
        total[block] = []
        for d, count in zip(block.shape, counts, strict=True):
            if count is None or 2 * num_passes * count > d:
                total[block].append(None)
            else:
                total[block].append(num_passes * count)
    return total


def _measured(run: Callable[[], Any], device: torch.device) -> tuple[int, float, Any]:
    """Bytes at most and seconds of something that is run twice, and what it gives."""
    with Tracked() as memory:
        run()
    start = perf_counter()
    found = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return memory.peak, perf_counter() - start, found


class Tracked(TorchDispatchMode):
    """Counts bytes of the tensors that are made within, on any device.

    What an operation uses for itself and gives back is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and count what it made."""
        for given in tree_leaves((args, kwargs)):
            self._know(given, 0)
        made = func(*args, **(kwargs or {}))
        for new in tree_leaves(made):
            self._know(new, 1)
        self.peak = max(self.peak, self.live)
        return made

    def _know(self, value: Any, counts: int) -> None:
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return
        storage = value.untyped_storage()
        key, size = id(storage), counts * storage.nbytes()
        if key in self._known:
            return

        def free(_: Any) -> None:
            self.live -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, free)
        self.live += size


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.3f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:,.1f} GiB"
