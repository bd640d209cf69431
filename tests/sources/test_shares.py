"""Batches that several processes share: each takes its part of them, or every n-th."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias.curvature.network.batch_reader import BatchReader
from laplace_debias.sources import shares
from laplace_debias.system.ranks import Ranks

X, Y = torch.arange(11.0).view(-1, 1), torch.arange(11)
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


def of_ranks(monkeypatch, num_ranks, call):
    found = []
    for rank in range(num_ranks):
        one = Ranks()
        one.rank, one.size = rank, num_ranks
        monkeypatch.setattr(shares, "process_group", lambda one=one: one)
        found.append(list(call()))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", SOURCES)
def test_the_parts_of_a_batch_are_the_batch(name, num_ranks, monkeypatch):
    source = SOURCES[name]
    parts = of_ranks(monkeypatch, num_ranks, lambda: shares.share(source, nn.Identity()))
    for number, (x, y) in enumerate(source):
        of_batch = [part[number] for part in parts if number < len(part)]
        for which, whole in enumerate((x, y)):
            assert torch.cat([one[which] for one in of_batch]).equal(whole)
    assert max(map(len, parts)) == len(list(source))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", SOURCES)
def test_whole_batches_are_dealt_out_with_their_places(name, num_ranks, monkeypatch):
    source, read = SOURCES[name], BatchReader(nn.Identity())
    dealt = of_ranks(monkeypatch, num_ranks, lambda: shares.dealt(source, read))
    first = 0
    for number, (x, y) in enumerate(source):
        own = dealt[number % num_ranks][number // num_ranks]
        assert own.first_index == first
        assert own.inputs.equal(x)
        assert own.targets.equal(y)
        first += len(y)
    assert sum(map(len, dealt)) == number + 1
