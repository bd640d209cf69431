"""Work that `kill_fits.py` kills: each task tells its steps by a pipe, saves after every batch."""

from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import a_run
import torch
import torch.distributed as dist
from killing import TellingList, tell, telling
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, ShardedBatches
from laplace_debias.assessment import assess
from laplace_debias.curvature.fits import checkpoint

SIZE = 60


class TellingLoader(DataLoader):
    """A loader that tells when a batch is read."""

    def __iter__(self) -> Iterator:
        return telling("data", super().__iter__())


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
    return TellingLoader(images(), batch_size=5, shuffle=True)


def begin(pipe: Connection | None) -> None:
    """Tell the steps from now on, and save after each batch."""
    torch.set_num_threads(1)
    checkpoint.EVERY = 0.0
    tell.begin(pipe)


def fit(pipe: Connection, curvature: str, folder: Path | None, output: Path) -> None:
    """Fit and write the posterior."""
    la = Laplace(network(), curvature=curvature, fisher="mc" if curvature == "ekfac" else "exact")
    begin(pipe)
    la.fit(loader(), generator=torch.Generator().manual_seed(2), resume=folder)
    la.save(output)


def save(pipe: Connection, outputs: dict[float, Path], num_rounds: int | None) -> None:
    """Write one posterior with one prior precision after the other, once or for ever."""
    la = Laplace(network(), curvature="full").fit([images()[:5]], num_data=SIZE)
    begin(pipe)
    rounds = 0
    while num_rounds is None or rounds < num_rounds:
        rounds += 1
        for prior_precision, output in outputs.items():
            la.prior_precision = prior_precision
            tell("saving")
            la.save(output)
            tell("saved")


def report(pipe: Connection, folder: Path) -> None:
    """Compare methods on a small network."""
    loaded = a_run.loaded_images(num_test=100, num_ood=40, severities=(3,))
    telling_lists = {
        name: TellingList(
            name,
            (
                pair
                for x, y in getattr(loaded, name)
                for pair in zip(x.split(10), y.split(10), strict=True)
            ),
        )
        for name in ("train", "validation", "test")
    }
    begin(pipe)
    loaded = replace(loaded, **telling_lists)
    assess(loaded, folder, a_run.methods_for(loaded))


def fit_of_ranks(
    pipe: Connection,
    rank: int,
    size: int,
    store: Path,
    curvature: str,
    folder: Path | None,
    output: Path,
) -> None:
    """One process's part of a fit of several; the first one writes the posterior."""
    if size > 1:
        url = store.as_uri()
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
    begin(pipe)
    data = images(torch.float64)
    sampler = ShardedBatches(data, 5, shuffle=True, seed=3)
    la = Laplace(
        network().double(), curvature=curvature, fisher="mc" if curvature == "ekfac" else "exact"
    )
    batches = TellingLoader(data, batch_sampler=sampler)
    la.fit(batches, generator=torch.Generator().manual_seed(2), resume=folder)
    la.save(output)
