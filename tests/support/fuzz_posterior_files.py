"""Mutate saved posteriors, load them, and check that none of them gives different results.

A mutated file stands for a file that a disk, a cable or an editor has damaged. Loading it must
raise a `ValueError`, or the posterior must give the results of the original to the last bit.
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
UNCHANGED = "same bytes"
SAME = "same answer"
REFUSED = "refused"
DIFFERENT = "DIFFERENT ANSWER"
CRASHED = "OTHER EXCEPTION"
KINDS = ("flip", "set", "zero", "cut off", "append", "insert", "delete", "swap", "length")


@dataclass
class Subject:
    """A saved posterior: its network, the bytes of its file, inputs, and the results for them."""

    name: str
    model: nn.Module
    raw: bytes
    x: torch.Tensor
    answers: list[torch.Tensor] = field(default_factory=list)


def subjects() -> list[Subject]:
    """Save a posterior of every curvature and likelihood; further options alternate."""
    saved = []
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
                # Another test checks that a loaded posterior has the results of the saved one.
                subject.answers = answers(Laplace.load(path, la.model), x)
                saved.append(subject)
    return saved


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
        model,
        likelihood,
        curvature,
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
    """Return the results of a posterior: a prediction, samples, the evidence and the prior."""
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
    """Change a file at random; return the kind of the change, and the changed bytes."""
    kind = chance.choice(KINDS)
    changed = bytearray(raw)
    size = chance.choice((1, 2, 4, 8, 16, 64))
    header_size = int.from_bytes(raw[:8], "little")

    def draw_offset() -> int:
        """Draw an offset; half of the draws are in the header, which is small."""
        return chance.randrange(8 + header_size if chance.random() < 0.5 else len(raw))

    offset = draw_offset()
    second_offset = draw_offset()
    span = slice(offset, offset + size)
    if kind == "flip":
        further_offsets = [draw_offset() for _ in range(chance.choice((0, 0, 20)))]
        for flipped in [offset, *further_offsets]:
            changed[flipped] ^= 1 << chance.randrange(8)
    elif kind == "set":
        changed[offset] = chance.choice((0, *b' "09[{', 0x7F, 0xFF, chance.randrange(256)))
    elif kind == "zero":
        changed[span] = bytes(len(changed[span]))
    elif kind == "cut off":
        del changed[offset:]
    elif kind == "append":
        changed += chance.randbytes(size)
    elif kind == "insert":
        changed[offset:offset] = chance.randbytes(size)
    elif kind == "delete":
        del changed[span]
    elif kind == "swap":
        second_span = slice(second_offset, second_offset + size)
        first_bytes = changed[span]
        second_bytes = changed[second_span]
        changed[span] = second_bytes
        changed[second_span] = first_bytes
    else:
        random_size = chance.getrandbits(64)
        sizes = (0, 1, 2**63, 2**64 - 1, header_size - 1, header_size + 1, len(raw), random_size)
        changed[:8] = chance.choice(sizes).to_bytes(8, "little")
    return kind, bytes(changed)


def outcome_of(raw: bytes, subject: Subject, path: Path) -> tuple[str, str]:
    """Load a changed file; return one of the outcomes above, and the message of an error."""
    if raw == subject.raw:
        return UNCHANGED, ""
    path.write_bytes(raw)
    try:
        results = answers(Laplace.load(path, subject.model), subject.x)
    except ValueError as error:
        message = str(error)
        if len(message) >= 2000 or str(path) not in message:
            return CRASHED, f"a message that is too long or lacks the path: {message!r}"
        return REFUSED, message
    except Exception as error:
        return CRASHED, repr(error)[:300]
    if all(map(torch.equal, results, subject.answers)):
        return SAME, ""
    return DIFFERENT, ""


def fuzz(
    mutations: int, seed: int, originals: list[Subject]
) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Mutate the files in turn, and load them.

    Args:
        mutations: The number of mutations.
        seed: The seed of the mutations.
        originals: The saved posteriors.

    Returns:
        How often each kind of change had each outcome, and descriptions of the failures.
    """
    chance = random.Random(seed)
    counts: Counter[tuple[str, str]] = Counter()
    failures = []
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for number in range(mutations):
            subject = originals[number % len(originals)]
            kind, raw = mutated(subject.raw, chance)
            outcome, message = outcome_of(raw, subject, Path(folder) / "mutated")
            counts[kind, outcome] += 1
            if outcome in (DIFFERENT, CRASHED):
                failures.append(f"{outcome}: {kind}, {subject.name}, number {number}: {message}")
    return counts, failures
