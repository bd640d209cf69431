"""Mutate saved posteriors, load them, and see whether any of them answers differently.

    python tests/support/fuzz_posterior_files.py --mutations 100000 --seed 0

Mutations of two families. A *damaged* file is what a disk, a cable or an editor makes of a file: it
must be refused with a `ValueError`, or answer to the last bit as the original does. A *resealed*
file is one whose header or tensors were edited and whose checksum was computed anew: a file of
another version, say, or of another model. It must be refused with a `ValueError`, or load. It then
counts as another posterior, which no check can tell from one that was fitted.
"""

import argparse
import hashlib
import json
import random
import re
import struct
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
UNCHANGED, SAME, REFUSED, OTHER = "same bytes", "same answer", "refused", "another posterior"
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
        outcomes = (REFUSED, UNCHANGED, SAME, OTHER, *BAD)
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

# -------------------------------------------------------------- mutations of header and tensors

VALUES = (
    *("null", "true", "false", "0", "-1", "1.5", "1e999", "-0.0", "NaN", "Infinity", "-Infinity"),
    *("1e308", "9007199254740993", "9" * 30, "9" * 5000, '""', '"a"', '"\\ud800"', '"\\u0000"'),
    *("[]", "{}", "[[]]", '{"name": 3}', '{"a": 1, "a": 2}', "[" * 20_000, '{"a":' * 20_000),
    *("[0, 0]", "[1, -1]", "[9223372036854775807, 9223372036854775807]", "1e-320"),
    *('"kfac"', '"full"', '"lowrank"', '"diag"', '"reduce"', '{"name": "regression", "sigma": 0}'),
    *('{"name": "regression", "sigma": [1, 2, 3]}', '{"name": "binary"}', '{"name": ["binary"]}'),
    *('"0.weight"', '["0.weight"]', '["0.weight", "0.weight"]', '"laplace-debias/3"', '"F16"'),
)
TOKEN = r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|[\[\]{},:]'


def edit_token(text: str, chance: random.Random) -> str:
    """Another value, a deleted or a doubled token."""
    spans = [match.span() for match in re.finditer(TOKEN, text)]
    if not spans:
        return chance.choice(VALUES)
    start, end = chance.choice(spans)
    how = chance.randrange(4)
    if how == 0:
        return text[:start] + text[end:]
    if how == 1:
        return text[:end] + text[start:end] + text[end:]
    return text[:start] + chance.choice(VALUES) + text[end:]


def edit_value(text: str, chance: random.Random) -> str:
    """Another value at a random place of valid JSON, or a field removed, renamed or added."""
    data = json.loads(text)
    parent, key = _somewhere(data, chance)
    if parent is None:
        return chance.choice(VALUES)
    how = chance.randrange(8)
    mark = "\0here"
    if how == 0:
        del parent[key]
    elif how == 1 and isinstance(parent, dict):
        parent[f"{key}x"] = parent.pop(key)
    elif how == 2:
        if isinstance(parent, dict):
            parent["more"] = 1
        else:
            parent.append(parent[key])
    elif how == 3 and isinstance(parent[key], (int, float)) and not isinstance(parent[key], bool):
        parent[key] += chance.choice((-1, 1, 8, 0.5, 2**40, -(2**40)))
    else:
        parent[key] = mark
    return json.dumps(data).replace(json.dumps(mark), chance.choice(VALUES))


def _somewhere(data: object, chance: random.Random):
    places = []

    def visit(node: object) -> None:
        if isinstance(node, (dict, list)):
            for key in node if isinstance(node, dict) else range(len(node)):
                places.append((node, key))
                visit(node[key])

    visit(data)
    return chance.choice(places) if places else (None, None)


def edit_posterior_header(raw: bytes, chance: random.Random) -> bytes:
    return _with_inner(raw, lambda text: chance.choice((edit_token, edit_value))(text, chance))


def edit_file_header(raw: bytes, chance: random.Random) -> bytes:
    text, data = _parts(raw)
    return _joined(chance.choice((edit_token, edit_value))(text, chance), data)


def edit_tensors(raw: bytes, chance: random.Random) -> bytes:
    """Tensors renamed, exchanged, removed, reshaped, moved, or taken for another dtype."""
    text, data = _parts(raw)
    header = json.loads(text)
    names = [name for name in header if name != "__metadata__"]
    a, b = chance.choice(names), chance.choice(names)
    how = chance.randrange(6)
    if how == 0:
        header[a], header[b] = header[b], header[a]
    elif how == 1:
        header[f"{a}{chance.choice(('x', '', '0'))}"] = header.pop(a)
    elif how == 2:
        del header[a]
    elif how == 3:
        header[a]["shape"] = chance.choice(
            (
                header[a]["shape"][::-1],
                [],
                [0],
                [1, *header[a]["shape"]],
                [2**40, 2**40],
                [-1],
                [True],
            )
        )
    elif how == 4:
        start, end = header[a]["data_offsets"]
        moves = ((start, start), (start - 8, end - 8), (start + 8, end + 8), (end, start))
        header[a]["data_offsets"] = list(chance.choice((*moves, header[b]["data_offsets"])))
    else:
        dtypes = ("F16", "F32", "F64", "BF16", "I64", "BOOL", "F8_E4M3", "C64", "F4", "")
        header[a]["dtype"] = chance.choice(dtypes)
    return _joined(json.dumps(header), data)


def edit_numbers(raw: bytes, chance: random.Random) -> bytes:
    """A number of a tensor is negative, zero, huge, tiny, NaN, infinite, or one bit off."""
    text, data = _parts(raw)
    changed = bytearray(data)
    header = json.loads(text)
    # A tensor without a number (a table of no kept direction) has none to change.
    full = [name for name in header if name != "__metadata__" and 0 not in header[name]["shape"]]
    entry = header[chance.choice(full)]
    size, code = {"F32": (4, "<f"), "F64": (8, "<d")}[entry["dtype"]]
    start, end = entry["data_offsets"]
    place = start + size * chance.randrange((end - start) // size)
    (value,) = struct.unpack_from(code, changed, place)
    special = (0.0, -value, 1.01 * value, 3.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"))
    if chance.random() < 0.3:
        changed[place + chance.randrange(size)] ^= 1 << chance.randrange(8)
    else:
        struct.pack_into(code, changed, place, chance.choice(special))
    return _joined(text, bytes(changed))


EDITS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(edit_posterior_header, edit_file_header, edit_tensors, edit_numbers),
)


def _parts(raw: bytes) -> tuple[str, bytes]:
    end = 8 + int.from_bytes(raw[:8], "little")
    return raw[8:end].decode(), raw[end:]


def _joined(text: str, data: bytes) -> bytes:
    header = text.encode(errors="replace")
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data


def _with_inner(raw: bytes, change: Callable[[str], str]) -> bytes:
    text, data = _parts(raw)
    header = json.loads(text)
    header["__metadata__"]["header"] = change(header["__metadata__"]["header"])
    return _joined(json.dumps(header), data)


def resealed(raw: bytes) -> bytes:
    """The file with a checksum of what it holds, where it still says that it has one."""
    try:
        text, data = _parts(raw)
        old = json.loads(text)["__metadata__"]["checksum"]
        assert len(old) == 64
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
        return raw
    blank = raw[: len(raw) - len(data)].replace(old.encode(), b"0" * 64)
    digest = hashlib.blake2b(blank + data, digest_size=32).hexdigest().encode()
    return blank.replace(b"0" * 64, digest) + data


# ------------------------------------------------------------------------------------ the run


def outcome_of(raw: bytes, subject: Subject, path: Path, *, is_damaged: bool) -> tuple[str, str]:
    """What comes of a file: one of the outcomes above, and what was said."""
    if raw == subject.raw:
        return UNCHANGED, ""
    path.write_bytes(raw)
    try:
        la = Laplace.load(path, subject.model)
        if not is_damaged:
            return OTHER, ""
        found = answers(la, subject.x)
    except ValueError as error:
        told = str(error)
        is_told = told and len(told) < 2000 and (str(path) in told or not is_damaged)
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
        family = chance.choices(("damaged", "resealed"), (6, 4))[0]
        change: Callable[..., object]
        if chance.random() < (0.7 if family == "damaged" else 0.1):
            change, changed = chance.choice(BYTES), bytearray(subject.raw)
            change(changed, chance)
            mutated = bytes(changed)
        else:
            change = chance.choice(EDITS)
            mutated = change(subject.raw, chance)
        if family == "resealed":
            mutated = resealed(mutated)
        outcome, told = outcome_of(mutated, subject, path, is_damaged=family == "damaged")
        kind = f"{family}: {change.__name__.replace('_', ' ')}"
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
