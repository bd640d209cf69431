"""Work that `kill_fits.py` kills: each task first touches a file, saves after every batch."""

import json
import time
from dataclasses import replace
from pathlib import Path

import a_run
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, ShardedBatches
from laplace_debias.assessment import assess
from laplace_debias.curvature.fits import saved_passes

NUM_BATCHES, PAUSE = 12, 0.1
SIZE = 5 * NUM_BATCHES


class SlowLoader(DataLoader):
    """A loader that takes its time over every batch."""

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(PAUSE)
            yield batch


class SlowList(list):
    """Batches that take their time."""

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(PAUSE / 5)
            yield batch


def network() -> nn.Module:
    """An untrained network, the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3)]
        return nn.Sequential(*layers).eval()


def images(dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Random images."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SIZE, 2, 4, 4, generator=generator)
    return TensorDataset(x.to(dtype), torch.randint(3, (SIZE,), generator=generator))


def loader() -> DataLoader:
    """Random images, in an order that torch's global generator decides."""
    return SlowLoader(images(), batch_size=5, shuffle=True)


def begin(begun: Path) -> None:
    """Tell that the work begins."""
    torch.set_num_threads(1)
    saved_passes.EVERY = 0.0
    begun.touch()


def fit(begun: Path, curvature: str, folder: Path | None, output: Path) -> None:
    """Fit and write the posterior."""
    la = Laplace(network(), curvature=curvature, fisher="mc" if curvature == "ekfac" else "exact")
    begin(begun)
    la.fit(loader(), generator=torch.Generator().manual_seed(2), resume=folder)
    la.save(output)


def tune(begun: Path, metric: str, folder: Path | None, output: Path) -> None:
    """Tune, and write the posterior with what was tried."""
    la = Laplace(network()).fit([images()[:10]], num_data=SIZE)
    begin(begun)
    generator = torch.Generator().manual_seed(2)
    found = la.tune(loader(), metric, generator=generator, extend=True, resume=folder)
    la.save(output.with_suffix(".posterior"))
    told = json.dumps([found.table, found.prior_precision, found.flat, found.notes])
    output.write_bytes(output.with_suffix(".posterior").read_bytes() + told.encode())


def save(begun: Path, outputs: dict[float, Path], *, ever: bool) -> None:
    """Write one posterior with one prior precision after the other, once or for ever."""
    la = Laplace(network(), curvature="full").fit(list(loader())[:1], num_data=SIZE)
    begin(begun)
    while True:
        for prior_precision, output in outputs.items():
            la.prior_precision = prior_precision
            la.save(output)
        if not ever:
            return


def report(begun: Path, folder: Path) -> None:
    """Compare methods on a small network."""
    loaded = a_run.loaded_images(num_test=100, num_ood=40, severities=(3,))
    slow = {
        name: SlowList(
            pair
            for x, y in getattr(loaded, name)
            for pair in zip(x.split(10), y.split(10), strict=True)
        )
        for name in ("train", "validation", "test")
    }
    begin(begun)
    loaded = replace(loaded, **slow)
    assess(loaded, folder, a_run.methods_for(loaded), num_resamples=4)


def fit_of_ranks(
    begun: Path, rank: int, size: int, store: Path, curvature: str, folder: Path, output: Path
) -> None:
    """One process's part of a fit of several; the first one writes the posterior."""
    if size > 1:
        url = store.as_uri()
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
    begin(begun)
    data = images(torch.float64)
    sampler = ShardedBatches(data, 5, shuffle=True, seed=3)
    la = Laplace(
        network().double(), curvature=curvature, fisher="mc" if curvature == "ekfac" else "exact"
    )
    batches = SlowLoader(data, batch_sampler=sampler)
    la.fit(batches, generator=torch.Generator().manual_seed(2), resume=folder)
    la.save(output)
