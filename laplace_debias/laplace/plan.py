"""A plan of a fit: what it takes of memory, time and messages, before it starts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from laplace_debias.curvature.fits.costs import BlockCosts
from laplace_debias.curvature.fits.working import Working

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Pass:
    """One pass over data.

    Attributes:
        what: What is computed in it.
        num_batches: Batches of it, on this process; None if not known.
        num_examples: Examples of it, on all processes; None if not known.
        flops: Operations for one example.
        seconds: Estimated seconds of this process; None if not timed or not known.
    """

    what: str
    num_batches: int | None
    num_examples: int | None
    flops: int
    seconds: float | None = None


@dataclass(frozen=True)
class Plan:
    """What a fit takes; `print(plan)` is a table.

    Bytes are those beyond the model and the data, on one process. A dense curvature (`"full"`,
    `"lowrank"`) is not made of blocks, and has none here.

    Attributes:
        curvature: As `Laplace` takes it.
        mode: As `Laplace.fit` takes it.
        num_parameters: D.
        blocks: What every block costs.
        working: Working memory of a chunk in the pass that needs most.
        stages: Bytes at most in each stage of the fit, in their order.
        posterior: Bytes of the posterior that is kept, its mean included; of a sharded one those
            of the process with most.
        passes: The passes over data.
        eigh_flops: Operations of all eigendecompositions.
        eigh_seconds: Estimated seconds of those of the rank with most to do; None if not timed.
        num_ranks: How many processes share the fit.
        messages: Bytes that are sent, by collective; empty for one process.
        available: Bytes that the fit may take; None if not known.
        alternatives: What would fit where this does not: arguments of `Laplace` to bytes at most.
        memory_bound: Bytes that the fit may take, as `Laplace.fit` takes it; None for no bound.
        groups: The blocks of each group that is fitted by itself, in passes of its own; one group
            where there is no bound.
    """

    curvature: str
    mode: str
    num_parameters: int
    blocks: tuple[BlockCosts, ...]
    working: Working
    stages: Mapping[str, int]
    posterior: int
    passes: tuple[Pass, ...]
    eigh_flops: int
    eigh_seconds: float | None
    num_ranks: int
    messages: Mapping[str, int]
    available: int | None
    alternatives: Mapping[str, int]
    memory_bound: int | None = None
    groups: tuple[tuple[str, ...], ...] = ()

    @property
    def peak(self) -> int:
        """Bytes at most: those of the stage that holds most."""
        return max(self.stages.values())

    @property
    def seconds(self) -> float | None:
        """Estimated seconds in all; None if not timed, or a pass' batches are not known."""
        found = [of.seconds for of in self.passes] + [self.eigh_seconds]
        known = [seconds for seconds in found if seconds is not None]
        return sum(known) if len(known) == len(found) else None

    def check(self) -> None:
        """Refuse a fit that does not fit.

        Raises:
            ValueError: If more bytes are needed than are available; it names what would do, with
                bytes.
        """
        if self.available is not None and self.peak > self.available:
            what = f"curvature={self.curvature!r}, mode={self.mode!r} takes"
            raise ValueError(refusal(what, self.peak, self.available, self.alternatives))

    def summary(self) -> dict[str, Any]:
        """What the plan says of the whole fit, for JSON."""
        return {
            "curvature": self.curvature,
            "mode": self.mode,
            "num_parameters": self.num_parameters,
            "num_blocks": len(self.blocks),
            "peak_bytes": self.peak,
            "posterior_bytes": self.posterior,
            "stages": dict(self.stages),
            "passes": [asdict(of) for of in self.passes],
            "eigh_flops": self.eigh_flops,
            "seconds": self.seconds,
            "num_ranks": self.num_ranks,
            "messages": dict(self.messages),
            "available_bytes": self.available,
            "alternatives": dict(self.alternatives),
            "memory_bound": self.memory_bound,
            "groups": [list(group) for group in self.groups],
        }

    def to_frame(self) -> "DataFrame":
        """A pandas table with a row for each block.

        Raises:
            ImportError: pandas is not installed.
        """
        from pandas import DataFrame

        return DataFrame([asdict(block) for block in self.blocks])

    def __str__(self) -> str:
        return "\n".join([*self._of_blocks(), *self._of_memory(), *self._of_work()])

    def _of_blocks(self) -> list[str]:
        title = f"{self.curvature}, {self.mode}: {self.num_parameters:,} parameters"
        if not self.blocks:
            return [f"{title} in one block"]
        rows: list[tuple[str, ...]] = [_HEADER]
        for block in self.blocks:
            rows.append(
                (
                    *(block.name, f"{block.positions:,}"),
                    *(size(block.factors), size(block.magnitudes), size(block.posterior)),
                    count(block.factor_flops + block.rotation_flops),
                    *(count(block.eigh_flops), str(block.owner)),
                )
            )
        rows.append(
            (
                *("total", ""),
                *(size(sum(getattr(b, key) for b in self.blocks)) for key in _BYTES),
                count(sum(b.factor_flops + b.rotation_flops for b in self.blocks)),
                *(count(self.eigh_flops), ""),
            )
        )
        if self.num_ranks == 1:
            rows = [row[:-1] for row in rows]
        return [f"{title} in {len(self.blocks)} blocks", "", *aligned(rows), ""]

    def _of_memory(self) -> list[str]:
        working = self.working
        rows = [("memory at most", size(self.peak))]
        rows += [(f"  {name}", size(value)) for name, value in self.stages.items()]
        rows += [
            ("posterior", size(self.posterior)),
            (
                f"a chunk: {working.examples} example(s), {working.at_once} of {working.columns} "
                "cotangent(s) at once",
                size(working.chunk),
            ),
            ("  gradients at layers' outputs", size(working.output_gradients)),
            ("  activations", size(working.activations)),
            ("layers' inputs kept of a batch", size(working.kept)),
        ]
        if self.available is not None:
            rows.append(("available", size(self.available)))
        return aligned(rows)

    def _of_work(self) -> list[str]:
        rows = [("pass over data", "batches", "examples", "FLOPs/example", "seconds")]
        for of in self.passes:
            numbers = (_known(of.num_batches), _known(of.num_examples))
            rows.append((of.what, *numbers, count(of.flops), _seconds(of.seconds)))
        decomposing = ("eigendecompositions", "", "", "", _seconds(self.eigh_seconds))
        lines = ["", *aligned([*rows, decomposing] if self.eigh_flops else rows)]
        if self.memory_bound is not None:
            lines += ["", f"groups of blocks under {size(self.memory_bound)}: {len(self.groups)}"]
            for number, group in enumerate(self.groups, start=1):
                some = group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}"
                lines.append(f"  {number}: {some} ({len(group)})")
        if self.num_ranks > 1:
            loads = [0] * self.num_ranks
            for block in self.blocks:
                loads[block.owner] += block.eigh_flops
            lines += ["", f"{self.num_ranks} processes; eigendecompositions of each, FLOPs:"]
            lines.append("  " + ", ".join(f"{rank}: {count(n)}" for rank, n in enumerate(loads)))
            lines += [f"  sent by {name}: {size(n)}" for name, n in self.messages.items()]
        return lines


_BYTES = ("factors", "magnitudes", "posterior")
_HEADER = ("block", "T", *_BYTES, "FLOPs/example", "eigh FLOPs", "rank")


def refusal(what: str, needed: int, available: int, alternatives: Mapping[str, int]) -> str:
    """The message for what does not fit: what it takes, what there is, what would do.

    Args:
        what: What takes the bytes, with its verb.
        needed: How many.
        available: Bytes that there are.
        alternatives: Arguments of `Laplace` to the bytes that they take.
    """
    fitting = {name: n for name, n in alternatives.items() if n <= available}
    start = f"{what} {size(needed)} ({needed:,} bytes), and {size(available)} are available."
    if not fitting:
        return f"{start} Fewer parameters (params=) or a smaller model are needed."
    listed = "; ".join(f"{name} ({size(n)})" for name, n in fitting.items())
    return f"{start} These would fit: {listed}."


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with columns of one width; the first to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def size(num_bytes: float) -> str:
    """A number of bytes with a unit, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def count(number: float) -> str:
    """A number with a prefix, `1.5 G`."""
    for unit in ("", " k", " M", " G", " T"):
        if number < 1000:
            return f"{number:.0f}" if not unit else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:,.1f} P"


def _known(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _seconds(number: float | None) -> str:
    return "-" if number is None else f"{number:.3g}"
