"""Tasks that `kill_fits.py` kills: each task sends its steps through a pipe.

A task saves its state after every batch.
"""

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

SIZE = 60
END = "end"


def begin(pipe):
    """Save after every batch and report each file operation; return a function that reports a step.

    Args:
        pipe: The end of the pipe to which the names of the steps are sent.
    """
    torch.set_num_threads(1)
    checkpoint.EVERY = 0.0
    original_fsync = os.fsync
    original_replace = os.replace

    def report_step(step):
        pipe.send_bytes(step.encode())

    def reporting_fsync(descriptor):
        report_step("writing to the disk")
        original_fsync(descriptor)

    def reporting_replace(source, target):
        report_step(f"putting {Path(target).name} in its place")
        original_replace(source, target)
        report_step(f"{Path(target).name} is in its place")

    os.fsync = reporting_fsync
    os.replace = reporting_replace
    return report_step


class Reporting:
    """Batches that report each batch when it is read."""

    report_step = None

    def __iter__(self):
        for number, batch in enumerate(super().__iter__(), start=1):
            self.report_step(f"batch {number}")
            yield batch


class ReportingLoader(Reporting, DataLoader):
    pass


class ReportingList(Reporting, list):
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
    batches = ReportingLoader(images, batch_size=5, shuffle=True)
    batches.report_step = begin(pipe)
    la.fit(batches, generator=torch.Generator().manual_seed(2), resume=folder)
    la.save(output)
    batches.report_step(END)


def report(pipe, folder):
    """Compare methods on a small network."""
    loaded = a_run.loaded_images(num_test=100, num_ood=40, severities=(3,))
    report_step = begin(pipe)
    sets = {}
    for name in ("train", "validation", "test"):
        batches = ReportingList()
        for x, y in getattr(loaded, name):
            batches.extend(zip(x.split(10), y.split(10), strict=True))
        batches.report_step = report_step
        sets[name] = batches
    loaded = replace(loaded, **sets)
    assess(loaded, folder, a_run.methods_for(loaded))
    report_step(END)
