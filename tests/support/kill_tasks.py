"""Work that `kill_fits.py` kills: each task tells its steps by a pipe, saves after every batch."""

import os
from dataclasses import replace
from pathlib import Path

import a_run
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.assessment import assess
from laplace_debias.curvature.fits import checkpoint

SIZE, END = 60, "end"


def begin(pipe):
    """What tells a step, from now on; and save after each batch."""
    torch.set_num_threads(1)
    checkpoint.EVERY = 0.0
    fsync, move = os.fsync, os.replace

    def tell(step):
        pipe.send_bytes(step.encode())

    def told_fsync(descriptor):
        tell("writing to the disk")
        fsync(descriptor)

    def told_replace(source, target):
        tell(f"putting {Path(target).name} in its place")
        move(source, target)
        tell(f"{Path(target).name} is in its place")

    os.fsync, os.replace = told_fsync, told_replace
    return tell


class Telling:
    """Batches that tell when one is read."""

    tell = None

    def __iter__(self):
        for number, batch in enumerate(super().__iter__(), start=1):
            self.tell(f"batch {number}")
            yield batch


class TellingLoader(Telling, DataLoader):
    pass


class TellingList(Telling, list):
    pass


def network():
    """An untrained network, the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3)]
        return nn.Sequential(*layers).eval()


def fit(pipe, curvature, folder, output):
    """Fit to random images, in an order that the generator decides, and write the posterior."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SIZE, 2, 4, 4, generator=generator)
    images = TensorDataset(x, torch.randint(3, (SIZE,), generator=generator))
    la = Laplace(network(), curvature=curvature, fisher="mc" if curvature == "ekfac" else "exact")
    batches = TellingLoader(images, batch_size=5, shuffle=True)
    batches.tell = begin(pipe)
    la.fit(batches, generator=torch.Generator().manual_seed(2), resume=folder)
    la.save(output)
    batches.tell(END)


def report(pipe, folder):
    """Compare methods on a small network."""
    loaded = a_run.loaded_images(num_test=100, num_ood=40, severities=(3,))
    tell, of_tens = begin(pipe), {}
    for name in ("train", "validation", "test"):
        of_tens[name] = TellingList(
            pair
            for x, y in getattr(loaded, name)
            for pair in zip(x.split(10), y.split(10), strict=True)
        )
        of_tens[name].tell = tell
    loaded = replace(loaded, **of_tens)
    assess(loaded, folder, a_run.methods_for(loaded))
    tell(END)
