"""Mutate posteriors in parts, load them, and see whether any of them answers differently.

    python tests/support/fuzz_posterior_folders.py --mutations 10000 --seed 0

As `fuzz_posterior_files`, of folders. *Damaged* is one with a file that was changed, removed,
exchanged with another one, or taken from another save: it must be refused with a `ValueError`.
*Resealed* is one whose index or part was edited, and all checksums computed anew.
"""

import hashlib
import json
import random
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import torch
from fuzz_posterior_files import (
    BAD,
    BYTES,
    CRASHED,
    CURVATURES,
    DIFFERENT,
    REFUSED,
    SAME,
    UNCHANGED,
    Report,
    _alike,
    _fitted,
    _in_good_order,
    answers,
    change_length,
    edit_file_header,
    edit_numbers,
    edit_tensors,
    edit_token,
    edit_value,
    main,
)

from laplace_debias import Laplace

INDEX = "index.json"


class Subject:
    """A posterior in parts, its network, and its answers."""

    def __init__(self, curvature, likelihood, folder):
        la, self.x = _fitted(curvature, likelihood, torch.float64, joint=False)
        la.save(folder, parts=True)
        self.name, self.model = f"{curvature}, {likelihood}", la.model
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.parts = sorted(name for name in self.files if name != INDEX)
        # What another saving of another posterior left.
        la.prior_precision = 3.0
        la.save(folder, parts=True)
        self.other = {path.name: path.read_bytes() for path in folder.iterdir()}
        _write(folder, self.files)
        self.answers = answers(Laplace.load(folder, self.model), self.x)


def subjects():
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [Subject(of, "classification", Path(folder) / of) for of in CURVATURES]


# ---------------------------------------------------------------------------------- mutations


def change_bytes(files, subject, chance):
    name = chance.choice(sorted(files))
    changed = bytearray(files[name])
    # An index does not begin with its header's length.
    changes = [change for change in BYTES if name != INDEX or change is not change_length]
    chance.choice(changes)(changed, chance)
    files[name] = bytes(changed)


def remove_a_file(files, subject, chance):
    del files[chance.choice(sorted(files))]


def exchange_files(files, subject, chance):
    a, b = chance.sample(sorted(files), 2)
    files[a], files[b] = files[b], files[a]


def take_from_another_save(files, subject, chance):
    """The index or a part of a posterior with the same blocks."""
    name = chance.choice(sorted(files))
    kind = name.rpartition("-")[0]
    files[name] = next(raw for of, raw in subject.other.items() if of.rpartition("-")[0] == kind)


DAMAGES = (change_bytes, change_bytes, remove_a_file, exchange_files, take_from_another_save)


def edit_index(files, subject, chance):
    text = chance.choice((edit_token, edit_value))(files[INDEX].decode(), chance)
    files[INDEX] = text.encode(errors="replace")


def edit_part(files, subject, chance):
    """Another header, other tensors or other numbers, with the checksums that they have."""
    name = chance.choice(subject.parts)
    edit = chance.choice((edit_file_header, edit_tensors, edit_numbers))
    files[name] = edit(files[name], chance)
    told = json.loads(files[INDEX])
    part = next(part for part in told["parts"] if part["file"] == name)
    found = _checksums(files[name])
    if found is not None:
        part |= found
    files[INDEX] = json.dumps(told).encode()


EDITS = (edit_index, edit_part)


def _checksums(raw):
    """What the index says of a part, as far as it can be read."""
    end = 8 + int.from_bytes(raw[:8], "little")
    try:
        header = json.loads(raw[8:end])
        tensors = {}
        for name, entry in header.items():
            if name != "__metadata__":
                a, b = entry["data_offsets"]
                tensors[name] = _digest(raw[end + a : end + b])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return {"bytes": len(raw), "header": _digest(raw[:end]), "tensors": tensors}


def _digest(raw):
    return hashlib.blake2b(raw, digest_size=32).hexdigest()


def resealed(raw):
    """The index with a checksum of what it holds, where it still says that it has one."""
    found = re.search(rb'"checksum": "([0-9a-f]{64})"\}\s*\Z', raw)
    if found is None:
        return raw
    blank = raw[: found.start(1)] + b"0" * 64 + raw[found.end(1) :]
    return blank[: found.start(1)] + _digest(blank).encode() + blank[found.end(1) :]


# ------------------------------------------------------------------------------------ the run


def _write(folder, files):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, raw in files.items():
        (folder / name).write_bytes(raw)


def outcome_of(files, subject, folder, *, is_damaged, mmap):
    """What comes of a folder, and what was said."""
    if files == subject.files:
        return UNCHANGED, ""
    _write(folder, files)
    try:
        la = Laplace.load(folder, subject.model, mmap=mmap)
        found = answers(la, subject.x)
    except (ValueError, IsADirectoryError) as error:
        told = str(error)
        is_told = told and len(told) < 2000 and (str(folder) in told or not is_damaged)
        return (REFUSED, told) if is_told else (CRASHED, f"a message that tells little: {told!r}")
    except Exception as error:
        return CRASHED, repr(error)[:300]
    if _alike(found, subject.answers):
        return SAME, ""
    if is_damaged:
        return DIFFERENT, ""
    return _in_good_order(la, found, subject, folder.with_name("again"))


def fuzz(mutations, seed, folder, originals=None):
    """Mutate so many times; as `fuzz_posterior_files.fuzz`."""
    chance = random.Random(seed)
    originals = subjects() if originals is None else originals
    report = Report()
    for number in range(mutations):
        subject = originals[number % len(originals)]
        files = dict(subject.files)
        is_damaged = chance.random() < 0.5
        change = chance.choice(DAMAGES if is_damaged else EDITS)
        change(files, subject, chance)
        if not is_damaged:
            files[INDEX] = resealed(files[INDEX])
        outcome, told = outcome_of(
            *(files, subject, folder / "p"), is_damaged=is_damaged, mmap=chance.random() < 0.5
        )
        family = "damaged" if is_damaged else "resealed"
        kind = f"{family}: {change.__name__.replace('_', ' ')}"
        report.counts.setdefault(kind, Counter())[outcome] += 1
        if outcome in BAD:
            report.failures.append(f"{outcome}: {kind}, {subject.name}, number {number}: {told}")
    return report


if __name__ == "__main__":
    raise SystemExit(main(fuzz, __doc__))
