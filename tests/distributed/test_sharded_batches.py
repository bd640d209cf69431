"""`ShardedBatches`: each example is read once, by one process, in the batches of one process."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import ShardedBatches
from laplace_debias.curvature.network.shards import check_shared, first_indices_of_batches
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
        parts = [list(share) for share in shares(size, batch, num_ranks)]
        whole = [list(range(size))[start : start + batch] for start in range(0, size, batch)]
        of_batches = itertools.zip_longest(*parts, fillvalue=[])
        assert [list(itertools.chain(*of_ranks)) for of_ranks in of_batches] == whole
        told = [list(map(len, part)) for part in parts]
        for share, of_rank in zip(shares(size, batch, num_ranks), parts, strict=True):
            assert all(of_rank)
            assert len(share) == len(of_rank)
            assert share.num_examples == sum(map(len, of_rank))
            places = [part.start for part in share.shares]
            assert places == [part[0] for part in of_rank]
            # As other loaders are placed, by what their ranks tell.
            assert places == first_indices_of_batches(Told(share.rank, told), told[share.rank])


class Told(Ranks):
    """Ranks that have said what they say."""

    def __init__(self, rank, said):
        self.rank, self.size, self.said = rank, len(said), said

    def exchange(self, value):
        assert value == self.said[self.rank]
        return self.said


def test_shuffled_examples_are_read_once_and_in_one_order():
    parts = [list(share) for share in shares(37, 8, 3, shuffle=True, seed=1)]
    read = [index for part in parts for batch in part for index in batch]
    assert sorted(read) == list(range(37))
    assert read != sorted(read)
    again, other = (list(shares(37, 8, 3, shuffle=True, seed=seed)[0]) for seed in (1, 2))
    assert again == parts[0]
    assert other != parts[0]


def test_without_a_process_group_it_has_everything():
    data = TensorDataset(torch.arange(10.0))
    batches = [x for (x,) in DataLoader(data, batch_sampler=ShardedBatches(data, 4))]
    assert [len(x) for x in batches] == [4, 4, 2]
    assert torch.equal(torch.cat(batches), torch.arange(10.0))


class SecondOfTwo(Ranks):
    """The second of two ranks, each of which reads all of a data set."""

    def __init__(self, first, second):
        self.rank, self.size = 1, 2
        self.data = [first, second]
        self.announced = []

    def exchange(self, value):
        self.announced.append(value)
        return self.announced if len(self.announced) == 2 else [value, ["", None]]

    def check(self):
        for data in self.data:
            check_shared(self, DataLoader(data, batch_size=4))


def test_mirrored_images_are_not_the_same_data_set():
    x, y = torch.randn(8, 2, 3, 3), torch.arange(8)
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
