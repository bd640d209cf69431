"""A plan of a fit: bytes counted from shapes, one batch measured. Within a factor of 1.5."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field, replace
from math import prod
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laplace_debias.curvature.fits.dense import KEPT_ROWS, sweep_rows
from laplace_debias.curvature.fits.directions import ekfac_magnitudes
from laplace_debias.curvature.fits.factors import (
    few_gradient_rows,
    few_input_rows,
    gradient_factor,
    input_factor,
)
from laplace_debias.curvature.fits.kinds import CurvatureKind
from laplace_debias.curvature.fits.over_ranks import shape_of_A, shape_of_G
from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.fits.sweep import Sweep
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.uses import Masks, Uses
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.inputs import Inputs, move, take
from laplace_debias.curvature.network.last_layer import last_layer_parameters
from laplace_debias.curvature.network.wrappers import unwrapped
from laplace_debias.laplace.prior import Prior
from laplace_debias.laplace.schemes import FOLDS, check_mode
from laplace_debias.laplace.subject import Subject
from laplace_debias.system.available import available_memory
from laplace_debias.system.checks import check_extra
from laplace_debias.system.ranks import alone
from laplace_debias.system.shown import html_table

if TYPE_CHECKING:
    from pandas import DataFrame

# Matrices of a factor's size while it is decomposed, it included.
_OF_EIGH = 5
_LOOK = "a look at two examples"

# How many rows the factors G and A of blocks have; None where they are matrices.
Rows = Mapping[Block, Sequence[int | None]]
_NO_ROWS: Rows = {}


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
        alternatives: Smaller posteriors: arguments of `Laplace`, and the bytes of each.
    """

    curvature: str
    mode: str
    num_parameters: int
    blocks: tuple[BlockBytes, ...]
    stages: Mapping[str, int]
    posterior: int
    seconds: float | None
    available: int | None
    alternatives: Mapping[str, int]

    @property
    def peak(self) -> int:
        """Bytes at most: those of the stage that holds most."""
        return max(self.stages.values())

    def check(self) -> None:
        """Refuse a fit that does not fit.

        Raises:
            ValueError: If more bytes are needed than are available; it names smaller posteriors.
        """
        if self.available is not None and self.peak > self.available:
            what = f"curvature={self.curvature!r}, mode={self.mode!r} takes"
            raise ValueError(_refusal(what, self.peak, self.available, self.alternatives))

    def summary(self) -> dict[str, Any]:
        """The plan of the whole fit, for JSON."""
        said = {**asdict(self), "num_blocks": len(self.blocks), "peak": self.peak}
        del said["blocks"]
        return said

    def to_frame(self) -> "DataFrame":
        """A pandas table with a row for each block.

        Raises:
            ImportError: If pandas is not installed.
        """
        check_extra("cli", "pandas")
        from pandas import DataFrame

        return DataFrame([asdict(block) for block in self.blocks])

    def _rows(self) -> list[tuple[str, str, str, str]]:
        rows = [("block", "factors", "magnitudes", "posterior")]
        return rows + [
            (b.name, _size(b.factors), _size(b.magnitudes), _size(b.posterior)) for b in self.blocks
        ]

    def _repr_html_(self) -> str:
        header, *rows = self._rows()
        return html_table(rows, header)

    def __str__(self) -> str:
        number = f"{len(self.blocks)} blocks" if self.blocks else "one block"
        lines = [f"{self.curvature}, {self.mode}: {self.num_parameters:,} parameters in {number}"]
        if self.blocks:
            lines += ["", *_aligned(self._rows())]
        whole = [("memory at most", _size(self.peak))]
        whole += [(f"  {name}", _size(number)) for name, number in self.stages.items()]
        whole.append(("posterior", _size(self.posterior)))
        if self.available is not None:
            whole.append(("available", _size(self.available)))
        if self.seconds is not None:
            whole.append(("passes over the data", f"{self.seconds:.3g} s"))
        return "\n".join([*lines, "", *_aligned(whole)])


def plan_of(subject: Subject, prior: Prior, loader: Batches, mode: str, folds: int | None) -> Plan:
    """The plan of a fit of this process alone; nothing is fitted.

    Args:
        subject: What would be fitted.
        prior: As a fit takes it.
        loader: As `Laplace.plan` takes it; so are the others.
        mode: The mode.
        folds: Of `"crossfit"`.

    Raises:
        ValueError: As `Laplace.plan`.
        TypeError: For an iterator.
    """
    check_mode(mode, folds)
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
    # The loader's order, and labels that a fit draws, are drawn anew by the fit.
    with alone(), torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        with Tracked() as look:
            problem, _, stream = subject.problem(loader, None, prior)
        ((x, y),) = stream.first
        batch = move(x, problem.device, None), y.to(problem.device)
        return _planned(subject, problem, mode, folds or FOLDS, num_batches, batch, look.peak)


def _planned(
    subject: Subject,
    problem: Problem,
    mode: str,
    folds: int,
    num_batches: int | None,
    batch: tuple[Inputs, Tensor],
    look: int,
) -> Plan:
    kind = subject.settings.kind
    whole = [] if kind.is_dense else [_bytes_of(b, problem, kind, _NO_ROWS) for b in problem.blocks]
    available = available_memory(problem.device)
    # A batch is run where there is room for it beside the blocks.
    held = posterior_bytes(problem, kind) + sum(of.factors + of.magnitudes for of in whole)
    chunk, num_folds = _Chunk(0, 0, 0, None), folds if mode == "crossfit" else 1
    if available is None or held <= available:
        # A pass goes through one fold.
        x, y = batch
        part = slice(0, -(-len(y) // num_folds))
        chunk = _run(problem, kind, (take(x, part), y[part]))
    rows = _NO_ROWS if num_batches is None else _few(chunk.few, num_batches * num_folds)
    blocks = (
        () if kind.is_dense else tuple(_bytes_of(b, problem, kind, rows) for b in problem.blocks)
    )
    seconds = None
    if chunk.seconds is not None and num_batches is not None:
        is_measured_anew = mode == "debiased" and kind.name not in ("diag", "ekfac")
        seconds = chunk.seconds * num_batches * (1 + is_measured_anew) * num_folds
    return Plan(
        kind.name,
        mode,
        sum(block.size for block in problem.blocks),
        blocks,
        {_LOOK: look, **_stages(problem, kind, mode, folds, chunk, num_batches, rows)},
        posterior_bytes(problem, kind, rows),
        seconds,
        available,
        _alternatives(unwrapped(subject.model), problem, kind, batch[0]),
    )


def _few(counts: Rows, times: int) -> Rows:
    """The rows of a pass, of one batch's, where they are few."""

    def of_side(d: int, count: int | None) -> int | None:
        return None if count is None or 2 * times * count > d else times * count

    return {block: [*map(of_side, block.shape, count)] for block, count in counts.items()}


def posterior_bytes(problem: Problem, kind: CurvatureKind, rows: Rows = _NO_ROWS) -> int:
    """Bytes of a fitted posterior, its curvature and its mean."""
    size = sum(block.size for block in problem.blocks)
    if kind.name == "full":
        numbers = size * size + size
    elif kind.num_directions is not None:
        numbers = min(kind.num_directions, size) * (size + 1)
    else:
        numbers = sum(_kept_numbers(block, kind, rows) for block in problem.blocks)
    return problem.dtype.itemsize * (numbers + size)


def check_room(model: nn.Module, problem: Problem, kind: CurvatureKind, x: Inputs | None) -> None:
    """Require memory for the posterior.

    Args:
        model: The user's model, unwrapped.
        problem: The network and its blocks.
        kind: The curvature.
        x: Inputs of the first batch; None where this process has none.

    Raises:
        ValueError: Naming smaller posteriors, with their bytes.
    """
    available, needed = available_memory(problem.device), posterior_bytes(problem, kind)
    if available is not None and needed > available:
        what = f"The posterior of curvature={kind.name!r} takes"
        others = _alternatives(model, problem, kind, x)
        raise ValueError(f"{_refusal(what, needed, available, others)} Nothing was fitted.")


def _alternatives(
    model: nn.Module, problem: Problem, kind: CurvatureKind, x: Inputs | None
) -> dict[str, int]:
    """Smaller posteriors by the arguments of `Laplace` that make them, and the bytes of each."""
    found = {}
    for other in (CurvatureKind("diag"), CurvatureKind("lowrank")):
        found[f'curvature="{other.name}"'] = posterior_bytes(problem, other)
    weights = [block for block in problem.blocks if block.role in ("weight", "table")]
    try:
        last = set(last_layer_parameters(model, x))
    except (ValueError, NotImplementedError):  # A model without one last layer.
        last = set()
    of_last = [block for block in problem.blocks if last.issuperset(block.parameters)]
    for name, blocks in (("weights", weights), ("last_layer", of_last)):
        if blocks:
            found[f'params="{name}"'] = posterior_bytes(replace(problem, blocks=blocks), kind)
    own = posterior_bytes(problem, kind)
    return {name: number for name, number in found.items() if number < own}


def _side(block: Block, side: int, rows: Rows) -> tuple[int, int, int]:
    """Of G or A: numbers of the factor and of its basis, of a work matrix, and of magnitudes."""
    d, count = block.shape[side], rows.get(block, (None, None))[side]
    if count is not None:
        return count * d, count * d, count + 1
    shape = shape_of_A(block) if side else shape_of_G(block)
    is_axes = block.has_diagonal_A or block.is_exact if side else block.has_diagonal_G
    return 0 if shape is None else prod(shape), 0 if is_axes else block.num_groups * d**2, d


def _table(block: Block, rows: Rows) -> int:
    """Numbers of the magnitudes."""
    return block.num_groups * _side(block, 0, rows)[2] * _side(block, 1, rows)[2]


def _kept_numbers(block: Block, kind: CurvatureKind, rows: Rows) -> int:
    """Numbers of a block's posterior: of a diagonal factor no directions are stored."""
    if kind.name == "diag":
        return block.size
    G = 0 if block.has_diagonal_G else _side(block, 0, rows)[0]
    A = 0 if block.has_diagonal_A else _side(block, 1, rows)[0]
    return _table(block, rows) + G + (block.num_groups if block.is_exact else A)


def _bytes_of(block: Block, problem: Problem, kind: CurvatureKind, rows: Rows) -> BlockBytes:
    factors = 0
    if kind.name != "diag":
        factors = _side(block, 0, rows)[0] + _side(block, 1, rows)[0]
    wide = problem.factor_dtype.itemsize
    kept = _kept_numbers(block, kind, rows) * problem.dtype.itemsize
    return BlockBytes(block.name, wide * factors, wide * _table(block, rows), kept)


def _stages(
    problem: Problem,
    kind: CurvatureKind,
    mode: str,
    folds: int,
    chunk: "_Chunk",
    num_batches: int | None,
    rows_of: Rows,
) -> dict[str, int]:
    """Bytes at most in each stage: what is held in it, and what is worked with beside it."""
    wide = problem.factor_dtype.itemsize
    is_crossfit = mode == "crossfit"
    if kind.is_dense:
        size = sum(block.size for block in problem.blocks)
        rows = KEPT_ROWS
        if num_batches is not None:
            rows = min(rows, num_batches * chunk.rows * (folds if is_crossfit else 1))
        if kind.num_directions is None:
            matrix, kept = wide * size**2, rows if is_crossfit else 0
            return {
                "curvature": max(kept, matrix) + chunk.factors,
                "eigendecomposition": kept + (_OF_EIGH + 2 * is_crossfit) * matrix,
            }
        # Rows of several batches are joined; the directions are there twice while they are found,
        # in crossfitting beside those of all data.
        directions = min(wide * size * kind.num_directions, rows)
        # The rows of a single batch are in what it takes already.
        is_single = num_batches == 1 and not is_crossfit
        beside = max(0, chunk.factors - chunk.rows) if is_single else max(chunk.factors, rows)
        return {
            "Jacobian rows": rows + beside,
            "directions": rows * (1 + is_crossfit) + directions * (2 + is_crossfit),
        }
    of_blocks = [_bytes_of(block, problem, kind, rows_of) for block in problem.blocks]
    factors, table = (
        sum(getattr(block, name) for block in of_blocks) for name in ("factors", "magnitudes")
    )
    if kind.name == "diag":
        return {"curvature along the axes": table + chunk.exact}
    sums = folds * factors if is_crossfit else factors
    decomposing = max(
        of.factors + wide * (_OF_EIGH - 1) * max(_side(block, side, rows_of)[1] for side in (0, 1))
        for of, block in zip(of_blocks, problem.blocks, strict=True)
    )
    found = {"factors": sums + chunk.factors, "eigendecompositions": sums + decomposing}
    if kind.name == "ekfac":
        bases = sums + 2 * factors if is_crossfit else factors
        # Directions are turned with in the model's dtype.
        copies = 0 if problem.dtype == problem.factor_dtype else factors * problem.dtype.itemsize
        found["magnitudes"] = bases + copies // wide + table + chunk.exact
    elif mode == "debiased":
        found["magnitudes"] = factors + chunk.factors
    return found


@dataclass(frozen=True)
class _Chunk:
    """Bytes and seconds of a pass over the first batch, beside what it sums.

    Attributes:
        factors: Bytes at most of a pass for factors or Jacobian rows.
        exact: Bytes at most of a pass for exact curvature along directions.
        rows: Bytes of all Jacobian rows of the batch, of a dense curvature.
        seconds: Seconds of the passes that the curvature takes.
        few: The rows of factors that have few.
    """

    factors: int
    exact: int
    rows: int
    seconds: float | None
    few: Rows = field(default_factory=dict)


def _run(problem: Problem, kind: CurvatureKind, batch: tuple[Inputs, Tensor]) -> _Chunk:
    """Run the passes over one batch, and let go of what they give."""
    rows = 0

    def count(of_chunk: Tensor) -> None:
        nonlocal rows
        rows += of_chunk.nbytes

    def along_axes(layer: nn.Module, block: Block, uses: Uses) -> Tensor:
        return ekfac_magnitudes(layer, block, uses, None, None)

    def nothing(*_: Any) -> None:
        pass

    few: dict[Block, list[int | None]] = {block: [0, 0] for block in problem.blocks}

    def counted(block: Block, side: int, rows: Tensor | None) -> Tensor | None:
        before = few[block][side]
        few[block][side] = None if rows is None or before is None else before + len(rows)
        return rows

    def of_gradients(
        layer: nn.Module, block: Block, uses: Uses, masks: Masks | None = None
    ) -> Tensor:
        found = counted(block, 0, few_gradient_rows(layer, block, uses, masks))
        return gradient_factor(layer, block, uses, masks) if found is None else found

    def of_inputs(layer: nn.Module, block: Block, *arguments: Any) -> None:
        if counted(block, 1, few_input_rows(layer, block, *arguments)) is None:
            input_factor(layer, block, *arguments)

    def of_rows() -> object:
        return sweep_rows(problem, [batch], count)

    def of_factors() -> object:
        return Sweep(problem, of_gradients, nothing, of_inputs, additive=True).over([batch])

    def of_exact() -> object:
        return Sweep(problem, along_axes, nothing).over([batch])

    factors, seconds, exact, more = 0, 0.0, 0, 0.0
    if kind.name != "diag":
        factors, seconds = _measured(of_rows if kind.is_dense else of_factors, problem.device)
    if kind.name in ("diag", "ekfac"):
        exact, more = _measured(of_exact, problem.device)
    # The passes were run twice. An exact block has no A.
    found = {
        block: [None if not count else count // 2 for count in counts]
        for block, counts in few.items()
    }
    return _Chunk(factors, exact, rows // 2, seconds + more, found)


def _measured(run: Callable[[], object], device: torch.device) -> tuple[int, float]:
    """Bytes at most and seconds of something that is run twice."""
    with Tracked() as memory:
        run()
    start = perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return memory.peak, perf_counter() - start


class Tracked(TorchDispatchMode):
    """Counts bytes of the tensors that are made within, on any device.

    What an operation uses for itself and gives back is not seen.

    Attributes:
        live: Bytes held now.
        peak: Most bytes held at once.
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


def _refusal(what: str, needed: int, available: int, alternatives: Mapping[str, int]) -> str:
    """The message for what does not fit: what it takes, what there is, what would do."""
    start = f"{what} {_size(needed)} ({needed:,} bytes), and {_size(available)} are available."
    fitting = {name: number for name, number in alternatives.items() if number <= available}
    if not fitting:
        return f"{start} Fewer parameters (params=) or a smaller model are needed."
    listed = "; ".join(f"{name} ({_size(number)})" for name, number in fitting.items())
    return f"{start} Smaller posteriors: {listed}."


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with columns of one width; the first to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _size(num_bytes: float) -> str:
    """A number of bytes with a unit, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"
