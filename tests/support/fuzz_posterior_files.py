"""Mutate saved posteriors, load them, and see whether any of them answers differently.

    python tests/support/fuzz_posterior_files.py --mutations 100000 --seed 0

A mutated file is what a disk, a cable or an editor makes of a file: it must be refused with a
`ValueError`, or answer to the last bit as the original does.
"""

import argparse
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature.losses.likelihoods import Categorical

CURVATURES = ("kfac", "ekfac", "diag", "lowrank", "full")
LIKELIHOODS = ("classification", "binary", "multilabel", "regression")
UNCHANGED, SAME, REFUSED = "same bytes", "same answer", "refused"
DIFFERENT, CRASHED = "DIFFERENT ANSWER", "OTHER EXCEPTION"
BAD = (DIFFERENT, CRASHED)


@dataclass
class Subject:
    """A saved posterior, its network, and its answers."""

    name: str
    model: nn.Module
    raw: bytes
    x: torch.Tensor
    answers: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Report:
    """How often which mutation came to what, and the mutations that must not have been."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def total(self, outcome: str) -> int:
        return sum(counts[outcome] for counts in self.counts.values())

    def __str__(self) -> str:
        outcomes = (REFUSED, UNCHANGED, SAME, *BAD)
        rows = [("mutation", *outcomes)]
        rows += [
            (kind, *(f"{counts[outcome]:,}" for outcome in outcomes))
            for kind, counts in sorted(self.counts.items())
        ]
        rows.append(("all", *(f"{self.total(outcome):,}" for outcome in outcomes)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([*lines, *self.failures[:20]])


# ----------------------------------------------------------------------------- the originals


def subjects() -> list[Subject]:
    """A posterior of every curvature and likelihood, with other options by turns."""
    found = []
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        path = Path(folder) / "posterior"
        for number, curvature in enumerate(CURVATURES):
            for likelihood in LIKELIHOODS:
                dtype = torch.float64 if (number + len(likelihood)) % 2 else torch.float32
                la, x = _fitted(curvature, likelihood, dtype, joint=number % 2 == 1)
                if curvature == "ekfac":
                    la.thin(x, 0.5)
                la.save(path)
                raw = path.read_bytes()
                name = f"{curvature}, {likelihood}, {dtype}"
                subject = Subject(name, la.model, raw, x)
                # As loaded: what was saved answers alike, which another test holds.
                subject.answers = answers(Laplace.load(path, la.model), x)
                found.append(subject)
    return found


def _fitted(
    curvature: str, likelihood: str, dtype: torch.dtype, joint: bool
) -> tuple[Laplace, torch.Tensor]:
    outputs = {"classification": 3, "binary": 1, "multilabel": 2, "regression": 2}[likelihood]
    model = nn.Sequential(
        nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, outputs), nn.BatchNorm1d(outputs)
    )
    model[4].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    model = model.to(dtype).eval()
    x = torch.randn(9, 1, 3, dtype=dtype)
    y = {
        "classification": torch.randint(3, (9,)),
        "binary": torch.randint(2, (9, 1)).to(dtype),
        "multilabel": torch.randint(2, (9, 2)).to(dtype),
        "regression": torch.randn(9, 2, dtype=dtype),
    }[likelihood]
    la = Laplace(
        *(model, likelihood, curvature),
        joint=joint and curvature in ("kfac", "ekfac"),
        sharing={"0": "reduce"} if curvature == "kfac" else "expand",
        sigma=[0.5, 2.0] if likelihood == "regression" else None,
        rank=4 if curvature == "lowrank" else None,
    )
    la.fit_batches([(x[:5], y[:5])], [(x[5:], y[5:])], num_data=50)
    if curvature in ("kfac", "diag"):
        la.prior_precision = torch.linspace(0.5, 2.0, len(la.block_names))
    return la, x[:2]


def answers(la: Laplace, x: torch.Tensor) -> list[torch.Tensor]:
    """What a loaded posterior says."""
    predictive = la.predict(x)
    # A categorical distribution has no mean.
    moments = ("probs",) if isinstance(la.likelihood, Categorical) else ("mean", "variance")
    return [
        *(getattr(predictive, moment) for moment in moments),
        la.sample(2, torch.Generator().manual_seed(0)),
        la.log_marginal_likelihood(),
        la.prior_precision,
        torch.tensor(la.num_data),
    ]


# ---------------------------------------------------------------------- mutations of any bytes


def flip_bit(raw: bytearray, chance: random.Random) -> None:
    raw[_place(raw, chance)] ^= 1 << chance.randrange(8)


def flip_many_bits(raw: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randint(2, 20)):
        flip_bit(raw, chance)


def set_byte(raw: bytearray, chance: random.Random) -> None:
    values = (0, 0x20, 0x22, 0x30, 0x39, 0x5B, 0x7B, 0x7F, 0xFF, chance.randrange(256))
    raw[_place(raw, chance)] = chance.choice(values)


def zero_a_run(raw: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(raw))
    end = min(len(raw), start + chance.choice((4, 8, 64, 512)))
    raw[start:end] = bytes(end - start)


def cut_off(raw: bytearray, chance: random.Random) -> None:
    del raw[chance.randrange(len(raw)) :]


def append(raw: bytearray, chance: random.Random) -> None:
    raw += chance.randbytes(chance.choice((1, 4, 8, 100)))


def insert(raw: bytearray, chance: random.Random) -> None:
    place = _place(raw, chance)
    raw[place:place] = chance.randbytes(chance.choice((1, 2, 4, 8)))


def delete(raw: bytearray, chance: random.Random) -> None:
    place = _place(raw, chance)
    del raw[place : place + chance.choice((1, 2, 4, 8))]


def swap(raw: bytearray, chance: random.Random) -> None:
    size = chance.choice((1, 4, 8, 16))
    a, b = sorted(chance.randrange(len(raw) - size) for _ in range(2))
    raw[a : a + size], raw[b : b + size] = raw[b : b + size], raw[a : a + size]


def change_length(raw: bytearray, chance: random.Random) -> None:
    length = int.from_bytes(raw[:8], "little")
    values = (0, 1, 2**63, 2**64 - 1, length - 1, length + 1, length * 8, len(raw), len(raw) - 8)
    raw[:8] = chance.choice((*values, chance.getrandbits(64))).to_bytes(8, "little")


def _place(raw: bytearray, chance: random.Random) -> int:
    """Half of the time in the header, which is small."""
    end = 8 + int.from_bytes(raw[:8], "little")
    return chance.randrange(end if chance.random() < 0.5 and end < len(raw) else len(raw))


BYTES: tuple[Callable[[bytearray, random.Random], None], ...] = (
    *(flip_bit, flip_bit, flip_bit, flip_many_bits, set_byte, set_byte, zero_a_run),
    *(cut_off, append, insert, delete, swap, change_length),
)

# ------------------------------------------------------------------------------------ the run


def outcome_of(raw: bytes, subject: Subject, path: Path) -> tuple[str, str]:
    """What comes of a file: one of the outcomes above, and what was said."""
    if raw == subject.raw:
        return UNCHANGED, ""
    path.write_bytes(raw)
    try:
        found = answers(Laplace.load(path, subject.model), subject.x)
    except ValueError as error:
        told = str(error)
        is_told = len(told) < 2000 and str(path) in told
        return (REFUSED, told) if is_told else (CRASHED, f"a message that tells little: {told!r}")
    except Exception as error:
        return CRASHED, repr(error)[:300]
    return (SAME if _alike(found, subject.answers) else DIFFERENT), ""


def _alike(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def fuzz(mutations: int, seed: int, folder: Path, originals: list[Subject] | None = None) -> Report:
    """Mutate so many times.

    Args:
        mutations: How often.
        seed: Of the choices.
        folder: Where the files are written.
        originals: What is mutated; `subjects()` if None.
    """
    chance = random.Random(seed)
    originals = subjects() if originals is None else originals
    report = Report()
    path = folder / "mutated"
    for number in range(mutations):
        subject = originals[number % len(originals)]
        change, changed = chance.choice(BYTES), bytearray(subject.raw)
        change(changed, chance)
        outcome, told = outcome_of(bytes(changed), subject, path)
        kind = change.__name__.replace("_", " ")
        report.counts.setdefault(kind, Counter())[outcome] += 1
        if outcome in BAD:
            report.failures.append(f"{outcome}: {kind}, {subject.name}, number {number}: {told}")
    return report


def main(run: Callable[[int, int, Path], Report], told: str) -> int:
    """Run from the command line; 1 if any mutation did what it must not.

    Args:
        run: Mutates so many times, with a seed, in a folder.
        told: What it does.
    """
    parser = argparse.ArgumentParser(description=told.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        report = run(options.mutations, options.seed, Path(folder))
    print(report)  # noqa: T201
    return 1 if report.failures else 0


if __name__ == "__main__":
    raise SystemExit(main(fuzz, __doc__))
