"""`ShardedBatches`: each example is read once, by one process, in the batches of one process."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import ShardedBatches
from laplace_debias.curvature.data.shards import check_shared, first_indices_of_batches
from laplace_debias.system.ranks import Ranks


def shares(size, batch, num_ranks, **options):
    return [
        ShardedBatches(range(size), batch, rank=rank, num_ranks=num_ranks, **options)
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize(
    ("batch", "num_ranks"), list(itertools.product((1, 3, 8, 40), (1, 2, 3, 5)))
)
def test_the_union_of_the_kth_batches_is_the_kth_batch_of_one_process(batch, num_ranks):
    for size in (0, 1, 2, 5, 16, 37):
        batches_by_rank = [list(share) for share in shares(size, batch, num_ranks)]
        expected = [list(range(size))[start : start + batch] for start in range(0, size, batch)]
        kth_batches = itertools.zip_longest(*batches_by_rank, fillvalue=[])
        assert [list(itertools.chain(*shards)) for shards in kth_batches] == expected
        sizes = [list(map(len, batches)) for batches in batches_by_rank]
        for share, batches in zip(shares(size, batch, num_ranks), batches_by_rank, strict=True):
            assert all(batches)
            assert len(share) == len(batches)
            assert share.num_examples == sum(map(len, batches))
            first_indices = [shard.start for shard in share.shares]
            assert first_indices == [indices[0] for indices in batches]
            # Other loaders get their first indices from the sizes that all ranks report.
            ranks = ReportedSizes(share.rank, sizes)
            assert first_indices == first_indices_of_batches(ranks, sizes[share.rank])


class ReportedSizes(Ranks):
    """A rank among others whose values are known: `exchange` returns them without a message."""

    def __init__(self, rank, values):
        self.rank = rank
        self.size = len(values)
        self.values = values

    def exchange(self, value):
        assert value == self.values[self.rank]
        return self.values


def test_shuffled_examples_are_read_once_and_in_one_order():
    batches_by_rank = [list(share) for share in shares(37, 8, 3, shuffle=True, seed=1)]
    read = []
    for batches in batches_by_rank:
        for batch in batches:
            read.extend(batch)
    assert sorted(read) == list(range(37))
    assert read != sorted(read)
    same_seed, other_seed = (list(shares(37, 8, 3, shuffle=True, seed=seed)[0]) for seed in (1, 2))
    assert same_seed == batches_by_rank[0]
    assert other_seed != batches_by_rank[0]


def test_without_a_process_group_it_has_everything():
    data = TensorDataset(torch.arange(10.0))
    batches = [x for (x,) in DataLoader(data, batch_sampler=ShardedBatches(data, 4))]
    assert [len(x) for x in batches] == [4, 4, 2]
    assert torch.equal(torch.cat(batches), torch.arange(10.0))


class SecondOfTwo(Ranks):
    """The second of two ranks, each of which reads all of a data set."""

    def __init__(self, first, second):
        self.rank = 1
        self.size = 2
        self.data = [first, second]
        self.announced = []

    def exchange(self, value):
        self.announced.append(value)
        return self.announced if len(self.announced) == 2 else [value, ["", None]]

    def check(self):
        for data in self.data:
            check_shared(self, DataLoader(data, batch_size=4))


def test_mirrored_images_are_not_the_same_data_set():
    x = torch.randn(8, 2, 3, 3)
    y = torch.arange(8)
    with pytest.raises(ValueError, match="Rank 1 reads the same data set from end to end"):
        SecondOfTwo(TensorDataset(x, y), TensorDataset(x.clone(), y)).check()
    SecondOfTwo(TensorDataset(x, y), TensorDataset(x.flip(3), y)).check()


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (range(5), {"batch_size": 0}, ValueError, "batch_size. is 0. Pass at least 1"),
        (range(5), {"batch_size": 2, "rank": 1}, ValueError, "Pass both"),
        (range(5), {"batch_size": 2, "rank": 2, "num_ranks": 2}, ValueError, "rank=2"),
        (iter([]), {"batch_size": 2}, TypeError, "no length"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_is_refused(data, options, error, message):
    with pytest.raises(error, match=message):
        ShardedBatches(data, **options)


def test_the_text_shows_the_options():
    text = repr(ShardedBatches(range(5), 3, shuffle=True, seed=2, rank=1, num_ranks=2))
    assert text == (
        "ShardedBatches(5 examples, batch_size=3, shuffle=True, seed=2, rank=1, num_ranks=2)"
    )
