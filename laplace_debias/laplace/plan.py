"""A plan of a fit: bytes counted from shapes, one batch measured. Within a factor of 1.5."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from functools import partial
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.data_pass import DataPass
from laplace_debias.curvature.fits.dense import KEPT_ROWS, RowAccumulator
from laplace_debias.curvature.fits.directions import GramFactor
from laplace_debias.curvature.fits.factor_sums import factor_sums
from laplace_debias.curvature.fits.kfac import SquaredGradients, coordinate_axes
from laplace_debias.curvature.kinds import CurvatureKind
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.network.batches import Batches, Fold
from laplace_debias.curvature.network.inputs import Inputs, move, take
from laplace_debias.laplace.parameter_blocks import ParameterBlocks
from laplace_debias.laplace.prepared import examine
from laplace_debias.laplace.schemes import FOLDS
from laplace_debias.laplace.state import FittedPosterior, Unfitted
from laplace_debias.system.ranks import alone, current
from laplace_debias.system.shown import aligned

# Matrices of a factor's size while it is decomposed, it included.
_OF_EIGH = 5

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")

# How many rows the factors G and A of blocks have; None where they are matrices.
NumRows = Mapping[Block, Sequence[int | None]]
_NO_ROWS: NumRows = {}


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one block: G and A, which sums and then eigenbases take; magnitudes; what is kept.

    Attributes:
        name: The block.
        factors: G and A, in `factor_dtype`.
        magnitudes: The curvature along every direction, in `factor_dtype`.
        posterior: What is kept of both after the fit, in the model's dtype.
    """

    name: str
    factors: int
    magnitudes: int
    posterior: int


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
    num_batches = 1 if mode != "full" else len(loader) if isinstance(loader, Sized) else None
    num_folds = (folds or FOLDS) if mode == "crossfit" else 1
    passes = None if num_batches is None else num_batches * num_folds
    kind, chunk, seconds, rows = state.config.kind, _Chunk(), None, _NO_ROWS
    # The loader's order, and labels that a fit draws, are drawn anew by the fit.
    with alone(), torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        fisher = state.config.fisher.seeded(None, current())
        stream = state.spec.fit_stream(loader, state.device)
        _, problem = examine(state, selected, stream, fisher)
        ((x, y, *_),) = stream.first
        # A pass goes through one fold.
        part, available = slice(0, -(-len(y) // num_folds)), available_memory(problem.device)
        batch = move(take(x, part), problem.device, None), y[part].to(problem.device)
        # It is run where there is room for it beside the blocks.
        of_blocks = [_of_block(block, problem, kind)[0] for block in problem.blocks]
        held = 0 if kind.is_dense else sum(of.factors + of.magnitudes for of in of_blocks)
        if available is None or posterior_bytes(problem, kind) + held <= available:
            chunk = _run(problem, kind, batch)
    if passes is not None and chunk.seconds is not None:
        is_measured_anew = mode == "debiased" and kind.name not in ("diag", "ekfac")
        seconds = chunk.seconds * passes * (1 + is_measured_anew)
        # Of several batches the rows are few where those of all of them are.
        rows = {
            block: [
                None if count is None or 2 * passes * count > d else passes * count
                for d, count in zip(block.shape, counts, strict=True)
            ]
            for block, counts in chunk.few.items()
        }
    found = [] if kind.is_dense else [_of_block(b, problem, kind, rows) for b in problem.blocks]
    return Plan(
        kind.name,
        mode,
        sum(block.size for block in problem.blocks),
        tuple(of_block for of_block, _ in found),
        _stages(problem, kind, mode, num_folds, passes, chunk, found),
        posterior_bytes(problem, kind, rows),
        seconds,
        available,
    )


def posterior_bytes(problem: FitContext, kind: CurvatureKind, rows: NumRows = _NO_ROWS) -> int:
    """Bytes of a fitted posterior, its curvature and its mean."""
    size = kept = 0
    for block in problem.blocks:
        size += block.size
        kept += 0 if kind.is_dense else _of_block(block, problem, kind, rows)[0].posterior
    if kind.is_dense:
        rank = size if kind.num_directions is None else min(kind.num_directions, size)
        kept = problem.dtype.itemsize * rank * (size + 1)
    return kept + problem.dtype.itemsize * size


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


def _of_block(
    block: Block, problem: FitContext, kind: CurvatureKind, rows: NumRows = _NO_ROWS
) -> tuple[BlockBytes, int]:
    """The bytes of a block, and of the largest matrix that is decomposed for it."""
    wide, narrow = problem.factor_dtype.itemsize, problem.dtype.itemsize
    if kind.name == "diag":
        return BlockBytes(block.name, 0, wide * block.size, narrow * block.size), 0
    factors, directions, largest, table = 0, 0, 0, block.num_groups
    counts, kept_table = rows.get(block, (None, None)), table
    axes = block.has_diagonal_G, block.has_diagonal_A or block.is_exact
    sides = zip(block.shape, axes, block.factor_shapes, strict=True)
    for side, (d, is_axes, shape) in enumerate(sides):
        count = block.most_rows if block.is_streamed[side] else counts[side]
        size = count * d if count is not None else prod(shape) if shape else 0
        factors += size
        table *= d if count is None else count + 1
        kept = d if count is None else count
        if not is_axes:
            largest = max(largest, size)
            kept = kept if block.rank is None or 2 * block.rank >= d else min(kept, block.rank)
            directions += block.num_groups * kept * d
        kept_table *= min(kept + 1, d)
    posterior = narrow * (kept_table + directions)
    return BlockBytes(block.name, wide * factors, wide * table, posterior), wide * largest


def _stages(
    problem: FitContext,
    kind: CurvatureKind,
    mode: str,
    num_folds: int,
    passes: int | None,
    chunk: "_Chunk",
    of_blocks: Sequence[tuple[BlockBytes, int]],
) -> dict[str, int]:
    """Bytes at most in each stage: what is held in it, and what is worked with beside it."""
    wide, narrow = problem.factor_dtype.itemsize, problem.dtype.itemsize
    is_crossfit = mode == "crossfit"
    if kind.is_dense:
        size = sum(block.size for block in problem.blocks)
        rows = KEPT_ROWS if passes is None else min(KEPT_ROWS, passes * chunk.rows)
        if kind.num_directions is None:
            matrix, kept = wide * size**2, rows if is_crossfit else 0
            decomposing = kept + (_OF_EIGH + 2 * is_crossfit) * matrix
            return {
                "curvature": max(kept, matrix) + chunk.beside,
                "eigendecomposition": decomposing,
            }
        # The directions are there twice while they are found, in crossfitting beside those of all
        # data. Rows of several batches are joined.
        directions = min(wide * size * kind.num_directions, rows)
        beside = chunk.beside - chunk.rows if passes == 1 else max(chunk.beside, rows)
        return {
            "Jacobian rows": rows + max(0, beside),
            "directions": rows * (1 + is_crossfit) + directions * (2 + is_crossfit),
        }
    factors = sum(block.factors for block, _ in of_blocks)
    table = sum(block.magnitudes for block, _ in of_blocks)
    if kind.name == "diag":
        return {"curvature along the axes": table + chunk.beside}
    sums = num_folds * factors
    decomposing = max(of.factors + (_OF_EIGH - 1) * largest for of, largest in of_blocks)
    found = {"factors": sums + chunk.beside, "eigendecompositions": sums + decomposing}
    if kind.name == "ekfac":
        bases = sums + 2 * factors if is_crossfit else factors
        # Directions are turned with in the model's dtype.
        copies = 0 if wide == narrow else factors * narrow // wide
        found["magnitudes"] = bases + copies + table + chunk.beside
    elif mode == "debiased":
        found["magnitudes"] = 2 * factors + chunk.beside
    return found


class _Chunk(NamedTuple):
    """A pass over the first batch: its most bytes `beside` what it sums, its seconds.

    The `rows` are bytes of all Jacobian rows of the batch; the `few` those of factors of few rows.
    """

    beside: int = 0
    rows: int = 0
    seconds: float | None = None
    few: NumRows = _NO_ROWS


class _CountedRows(RowAccumulator):
    """Counts the bytes of all Jacobian rows, and keeps none."""

    num_bytes = 0

    def add_rows(self, rows: Tensor) -> None:
        """Count the bytes of rows."""
        self.num_bytes += rows.nbytes


class _DroppedSquares(SquaredGradients):
    """Measures the squares along directions, and adds them to nothing."""

    def add(self, block: Block, measured: Tensor) -> None:
        """Drop the squares."""


def _run(problem: FitContext, kind: CurvatureKind, batch: tuple[Inputs, Tensor]) -> _Chunk:
    """Run the passes over one batch, and drop their results."""
    data = Fold.consecutive([batch])
    if kind.is_dense:
        counted = _CountedRows(problem, None)
        beside, seconds, _ = _measured(partial(DataPass(counted).run, data), problem.device)
        return _Chunk(beside, counted.num_bytes // 2, seconds)  # It ran twice.
    beside, seconds, few = 0, 0.0, {}
    if kind.name != "diag":
        run = partial(factor_sums, problem, data)
        beside, seconds, (sums, _) = _measured(run, problem.device)
        for block, of_block in sums.items():
            few[block] = [
                len(f.rows) if isinstance(f, GramFactor) and f.has_thin_directions else None
                for f in of_block
            ]
            beside -= sum((f.rows if isinstance(f, GramFactor) else f).nbytes for f in of_block)
    if kind.name != "kfac":
        axes = {block: coordinate_axes() for block in problem.blocks}
        exact = DataPass(_DroppedSquares(problem, axes))
        of_pass, more, _ = _measured(partial(exact.run, data), problem.device)
        beside, seconds = max(beside, of_pass), seconds + more
    return _Chunk(beside, 0, seconds, few)


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
