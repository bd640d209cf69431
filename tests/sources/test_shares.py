"""Batches that processes share: each takes a part of every batch, or every n-th batch."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias.curvature.data.batch_reader import BatchReader
from laplace_debias.curvature.data.shards import with_batches
from laplace_debias.sources import shares
from laplace_debias.sources.settings import SourceSettings
from laplace_debias.sources.splits import batches_of
from laplace_debias.system.ranks import Ranks

X = torch.arange(11.0).view(-1, 1)
Y = torch.arange(11)
DATA = TensorDataset(X, Y)


class Doubling(DataLoader):
    def __iter__(self):
        for x, y in super().__iter__():
            yield 2 * x, y


class Backwards(DataLoader):
    def __iter__(self):
        yield from reversed(list(super().__iter__()))


SOURCES = {
    "loader": DataLoader(DATA, batch_size=4),
    "without the last": DataLoader(DATA, batch_size=4, drop_last=True),
    "shuffled": DataLoader(
        DATA, batch_sampler=[[3, 1, 7], [0, 10, 2], [9, 8, 6, 5], [4]], collate_fn=None
    ),
    "an iteration of its own": Doubling(DATA, batch_size=4),
    "in another order": Backwards(DATA, batch_size=4, drop_last=True),
    "list": [(X[:5], Y[:5]), (X[5:], Y[5:])],
}


def batches_of_each_rank(monkeypatch, num_ranks, call):
    """Call a function once as each rank; list the batches that it returns to each."""
    batches_per_rank = []
    for rank in range(num_ranks):
        group = Ranks()
        group.rank = rank
        group.size = num_ranks
        monkeypatch.setattr(shares, "process_group", lambda group=group: group)
        batches_per_rank.append(list(call()))
    return batches_per_rank


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", SOURCES)
def test_the_parts_of_a_batch_are_the_batch(name, num_ranks, monkeypatch):
    source = SOURCES[name]
    batches_per_rank = batches_of_each_rank(
        monkeypatch, num_ranks, lambda: shares.share(source, nn.Identity())
    )
    for number, (x, y) in enumerate(source):
        shares_of_batch = [batches[number] for batches in batches_per_rank if number < len(batches)]
        assert torch.cat([x_share for x_share, _ in shares_of_batch]).equal(x)
        assert torch.cat([y_share for _, y_share in shares_of_batch]).equal(y)
    assert max(map(len, batches_per_rank)) == len(list(source))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", SOURCES)
def test_whole_batches_are_dealt_out_with_their_places(name, num_ranks, monkeypatch):
    source = SOURCES[name]
    read = BatchReader(nn.Identity())
    dealt = batches_of_each_rank(monkeypatch, num_ranks, lambda: shares.dealt(source, read))
    first_index = 0
    for number, (x, y) in enumerate(source):
        batch = dealt[number % num_ranks][number // num_ranks]
        assert batch.first_index == first_index
        assert batch.inputs.equal(x)
        assert batch.targets.equal(y)
        first_index += len(y)
    assert sum(map(len, dealt)) == number + 1


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
@pytest.mark.parametrize(
    "remade",
    [
        lambda loader: with_batches(loader, DATA, [[0, 1], [2]]),
        lambda loader: batches_of(loader, SourceSettings(model="a:b"))[0],
    ],
    ids=["other batches", "the command line"],
)
def test_a_loader_that_is_made_anew_reads_like_the_users_loader(remade):
    options = {
        "num_workers": 1,
        "collate_fn": list,
        "pin_memory": True,
        "timeout": 60,
        "worker_init_fn": print,
        "multiprocessing_context": "spawn",
        "prefetch_factor": 3,
        "persistent_workers": True,
    }
    loader = DataLoader(DATA, batch_size=4, **options)
    remade_loader = remade(loader)
    for name in options:
        assert getattr(remade_loader, name) == getattr(loader, name), name
