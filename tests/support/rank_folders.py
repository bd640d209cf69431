"""What processes do with posteriors in folders: each writes and reads the blocks that it holds."""

import io
import os
import pickle
import signal
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from rank_posteriors import CALLS, _groups_of, inputs
from rank_tasks import generator, laplace, loader, messages_of, network

from laplace_debias import Laplace
from laplace_debias.laplace.files import folder as folder_file
from laplace_debias.laplace.files import parts
from laplace_debias.system import agreement

_PARTS = ("U_G", "U_A", "magnitudes")


def numbers(la):
    """What a posterior answers, at a prior precision of each block."""
    la.prior_precision = torch.linspace(0.5, 2.0, len(la.block_names), dtype=torch.float64)
    return {name: call(la, inputs()) for name, call in CALLS.items()}


def stored(rank, folder, curvature="kfac", mode="full", sizes=None, options=()):
    """A fit that keeps its posterior in a folder, and what it answers."""
    la, options = laplace(curvature), dict(options)
    if sizes is None:
        la.fit(loader(), mode, generator=generator(5), store=folder, **options)
    else:
        with _groups_of(sizes):
            la.fit(
                *(loader(), mode),
                generator=generator(5),
                store=folder,
                memory_bound=2**40,
                **options,
            )
    return numbers(la)


def saved(rank, folder, curvature="kfac", mode="full", options=()):
    """A fit that is saved in parts, and what it answers."""
    la = laplace(curvature).fit(loader(), mode, generator=generator(5), **dict(options))
    la.save(folder, parts=True)
    return numbers(la)


def read(rank, path, mmap=False, replicate=None):
    """What a posterior answers that was read, and whether it is sharded."""
    la = Laplace.load(path, network(), mmap=mmap, replicate=replicate)
    return {**numbers(la), "sharded": la.posterior.num_ranks}


class Counting(io.BufferedReader):
    """A file that counts what is read from it."""

    total = 0

    def read(self, *args):
        found = super().read(*args)
        Counting.total += len(found)
        return found

    def readinto(self, buffer):
        found = super().readinto(buffer)
        Counting.total += found
        return found


def bytes_read(rank, folder, mmap):
    """Bytes that a process reads from the parts; and those of the blocks that it holds then."""
    original = Path.open

    def opened(path, mode="r", **options):
        if path.suffix == ".safetensors":
            return Counting(io.FileIO(path))
        return original(path, mode, **options)

    Counting.total = 0
    found = []
    with mock.patch.object(Path, "open", opened):
        sent = messages_of(lambda: found.append(Laplace.load(folder, network(), mmap=mmap)))
    blocks = found[0].posterior.curvature.blocks
    here = [block for block in blocks.values() if hasattr(block, "magnitudes")]
    parts = [getattr(block, part) for block in here for part in _PARTS]
    return {
        "read": Counting.total,
        "held": sum(part.nbytes for part in parts if part is not None),
        "owners": found[0].posterior.curvature.owners,
        "sent": sent,
    }


def owners_after_a_fit(rank):
    return laplace().fit(loader()).posterior.curvature.owners


def messages(rank, folder):
    """The collectives of a saving in parts, and of a fit with a folder and without."""
    la = laplace().fit(loader())
    pickled = []
    original = dist.all_gather_object

    def gather(found, value):
        pickled.append(len(pickle.dumps(value)))
        original(found, value)

    with mock.patch.object(dist, "all_gather_object", gather):
        save = messages_of(lambda: la.save(folder, parts=True))
        fits = [
            messages_of(lambda options=options: laplace().fit(loader(), **options))
            for options in ({}, {"store": folder})
        ]
    return {"save": save, "fits": fits, "pickled": pickled}


def save_again(rank, folder):
    """What a posterior that is mapped from a folder writes into it: inodes before and after."""
    la = Laplace.load(folder, network(), mmap=True)
    la.prior_precision = 7.0

    def blocks():
        return sorted((p.name, p.stat().st_ino) for p in Path(folder).glob("blocks-*"))

    before = blocks()
    la.save(folder, parts=True)
    return before, blocks(), read(rank, folder)["functional"]


def apart(rank, call, folders):
    """A call in another folder on each process: a name that is relative leads elsewhere."""
    here = Path.cwd()
    os.chdir(folders[rank])
    try:
        with mock.patch.object(folder_file, "_SEEN_WITHIN", 0.3):
            return call(rank, "posterior")
    finally:
        os.chdir(here)


def be_killed(rank, folder, which, when):
    """One process is killed when it writes a part, or before the index is written."""
    agreement.SILENCE = 5.0
    la = laplace().fit(loader())

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    name = {"a part": "write_part", "the index": "index_of"}[when]
    with mock.patch.object(folder_file, name, die if rank == which else getattr(folder_file, name)):
        la.save(folder, parts=True)


def store_on_one(rank, folder):
    return laplace().fit(loader(), store=folder if rank == 0 else None)


def fit_that_fails(rank, folder):
    """A fit in groups of which one process cannot write its second part."""
    original, calls = parts.names_in_order, []

    def write(*arguments):
        calls.append(1)
        if rank == 1 and len(calls) == 2:
            raise OSError(28, "No space left on device")
        return original(*arguments)

    with mock.patch.object(parts, "names_in_order", write):
        stored(rank, folder, sizes=(4, 6))
