"""Mutate saved posteriors, load them, and see whether any of them answers differently.

A mutated file is what a disk, a cable or an editor makes of a file: it must be refused with a
`ValueError`, or answer to the last bit as the original does.
"""

import random
import tempfile
from collections import Counter
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
KINDS = ("flip", "set", "zero", "cut off", "append", "insert", "delete", "swap", "length")


@dataclass
class Subject:
    """A saved posterior, its network, and its answers."""

    name: str
    model: nn.Module
    raw: bytes
    x: torch.Tensor
    answers: list[torch.Tensor] = field(default_factory=list)


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


def mutated(raw: bytes, chance: random.Random) -> tuple[str, bytes]:
    """A kind of change, and the changed bytes."""
    kind, found = chance.choice(KINDS), bytearray(raw)
    size, length = chance.choice((1, 2, 4, 8, 16, 64)), int.from_bytes(raw[:8], "little")

    def place() -> int:
        """Half of the time in the header, which is small."""
        return chance.randrange(8 + length if chance.random() < 0.5 else len(raw))

    at, other = place(), place()
    if kind == "flip":
        for where in [at, *(place() for _ in range(chance.choice((0, 0, 20))))]:
            found[where] ^= 1 << chance.randrange(8)
    elif kind == "set":
        found[at] = chance.choice((0, *b' "09[{', 0x7F, 0xFF, chance.randrange(256)))
    elif kind == "zero":
        found[at : at + size] = bytes(len(found[at : at + size]))
    elif kind == "cut off":
        del found[at:]
    elif kind in ("append", "insert"):
        at = len(raw) if kind == "append" else at
        found[at:at] = chance.randbytes(size)
    elif kind == "delete":
        del found[at : at + size]
    elif kind == "swap":
        one, two = found[at : at + size], found[other : other + size]
        found[at : at + size], found[other : other + size] = two, one
    else:
        values = (0, 1, 2**63, 2**64 - 1, length - 1, length + 1, len(raw), chance.getrandbits(64))
        found[:8] = chance.choice(values).to_bytes(8, "little")
    return kind, bytes(found)


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
    is_same = all(map(torch.equal, found, subject.answers))
    return (SAME if is_same else DIFFERENT), ""


def fuzz(
    mutations: int, seed: int, originals: list[Subject]
) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Mutate so many times: how often which kind came to what, and what must not have been."""
    chance, counts, failures = random.Random(seed), Counter(), []
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for number in range(mutations):
            subject = originals[number % len(originals)]
            kind, raw = mutated(subject.raw, chance)
            outcome, told = outcome_of(raw, subject, Path(folder) / "mutated")
            counts[kind, outcome] += 1
            if outcome in (DIFFERENT, CRASHED):
                failures.append(f"{outcome}: {kind}, {subject.name}, number {number}: {told}")
    return counts, failures
