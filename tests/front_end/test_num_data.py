"""N: told by the loader, counted, given, or asked for; never a sampler's number of draws."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from laplace_debias import Laplace
from laplace_debias.laplace.data_size import (
    Expected,
    Known,
    Misleading,
    Supposed,
    Untold,
    data_size,
)
from laplace_debias.laplace.posterior_range import check_num_data

SIZE = 24
PARTIAL = ("mini", "debiased", "crossfit")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()


def examples(size=SIZE):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (size,), generator=generator)


DATA = TensorDataset(*examples())


def loader(**options):
    return DataLoader(DATA, **{"batch_size": 10, **options})


def batches(size=10):
    x, y = DATA.tensors
    return [(x[i : i + size], y[i : i + size]) for i in range(0, SIZE, size)]


class Reversed(Sampler):
    """A sampler of a kind that nobody knows."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size - 1, -1, -1))

    def __len__(self):
        return self.size


class WithoutLength(Sampler):
    def __iter__(self):
        return iter(range(SIZE))


class EverySecond(RandomSampler):
    """A subclass that goes its own way."""

    def __iter__(self):
        return iter(range(0, SIZE, 2))

    def __len__(self):
        return SIZE // 2


class Shard(BatchSampler):
    """As the libraries for several processes split batches: every second one."""

    def __iter__(self):
        return itertools.islice(super().__iter__(), 0, None, 2)


class Stream(IterableDataset):
    def __init__(self, length=None, copies=1):
        self.length, self.copies = length, copies

    def __iter__(self):
        return iter([DATA[i] for i in range(SIZE)] * self.copies)

    def __len__(self):
        if self.length is None:
            raise TypeError("no length")
        return self.length


def read_by_two_workers():
    """A stream that does not ask which worker reads it: each reads all of it."""
    return DataLoader(Stream(), batch_size=10, num_workers=2)


class PartOfStream(IterableDataset):
    """Each worker yields a part."""

    def __iter__(self):
        worker = get_worker_info()
        return (DATA[i] for i in range(worker.id, SIZE, worker.num_workers))


class OfShards:
    """A loader of another kind: what it calls its data set are three shards."""

    def __init__(self):
        self.dataset = ["a.tar", "b.tar", "c.tar"]

    def __iter__(self):
        return iter(batches())


class Prefetching:
    """A loader of another kind around one of torch's."""

    def __init__(self, inner):
        self.inner, self.sampler, self.dataset = inner, inner.sampler, inner.dataset

    def __iter__(self):
        return iter(self.inner)


def split(num_replicas, **options):
    return DistributedSampler(DATA, num_replicas, rank=0, shuffle=False, **options)


def shards_as_entries():
    """Every entry of the data set is several examples, which the collator joins."""
    return DataLoader(
        batches(8),
        batch_size=1,
        collate_fn=lambda parts: tuple(map(torch.cat, zip(*parts, strict=True))),
    )


ONES = torch.ones(SIZE)
TELLING = {
    "sequential": (loader, SIZE),
    "shuffled": (lambda: loader(shuffle=True), SIZE),
    "sequential part": (lambda: loader(sampler=SequentialSampler(range(7))), 7),
    "subset": (lambda: loader(sampler=SubsetRandomSampler(range(5, 17))), 12),
    "subset of tensors": (lambda: loader(sampler=SubsetRandomSampler(torch.arange(9))), 9),
    "subset of the data": (lambda: DataLoader(Subset(DATA, range(11)), batch_size=10), 11),
    "list of indices": (lambda: loader(sampler=[3, 1, 2]), 3),
    "array of indices": (lambda: loader(sampler=np.arange(6)), 6),
    "unknown of all": (lambda: loader(sampler=Reversed(SIZE)), SIZE),
    "one process": (lambda: loader(sampler=split(1)), SIZE),
    "weighted without replacement": (
        lambda: loader(sampler=WeightedRandomSampler(ONES, SIZE, replacement=False)),
        SIZE,
    ),
    "batch sampler": (
        lambda: DataLoader(
            DATA, batch_sampler=BatchSampler(SubsetRandomSampler(range(8)), 4, drop_last=False)
        ),
        8,
    ),
    "lists of batches": (lambda: DataLoader(DATA, batch_sampler=[[0, 1, 2], [5, 4]]), 5),
    "another kind of loader": (lambda: Prefetching(loader(shuffle=True)), SIZE),
}
MISLEADING = {
    "distributed": (lambda: loader(sampler=split(4)), "DistributedSampler .* 4 processes"),
    "distributed, padded": (
        lambda: loader(sampler=split(5)),
        "DistributedSampler .* gives this one 5",
    ),
    "distributed, cut": (lambda: loader(sampler=split(5, drop_last=True)), "gives this one 4"),
    "weighted": (
        lambda: loader(sampler=WeightedRandomSampler(ONES, 50)),
        "WeightedRandomSampler draws 50 out of 24 examples with replacement",
    ),
    "as many weighted draws as examples": (
        lambda: loader(sampler=WeightedRandomSampler(ONES, SIZE)),
        "WeightedRandomSampler draws 24 out of 24 examples with replacement",
    ),
    "random with replacement": (
        lambda: loader(sampler=RandomSampler(DATA, replacement=True)),
        "RandomSampler draws 24 out of 24 examples with replacement",
    ),
    "random, fewer": (
        lambda: loader(sampler=RandomSampler(DATA, num_samples=7)),
        "RandomSampler draws 7 out of 24 examples anew in every pass",
    ),
    "random, more": (
        lambda: loader(sampler=RandomSampler(DATA, num_samples=70)),
        "RandomSampler draws 70 out of 24",
    ),
    "repeated indices": (
        lambda: loader(sampler=SubsetRandomSampler([0, 1, 1, 2])),
        "SubsetRandomSampler repeats examples: of 4 indices 3",
    ),
    "stream of two workers": (
        read_by_two_workers,
        r"a stream \(Stream\), is read by 2 workers, .* not known. Pass num_data=",
    ),
    "repeated list": (lambda: loader(sampler=[0, 0, 1]), "list.* repeats examples"),
    "unknown of a part": (
        lambda: loader(sampler=Reversed(6)),
        "Reversed gives 6 examples, the data set has 24",
    ),
    "subclass of its own": (lambda: loader(sampler=EverySecond(DATA)), "EverySecond gives 12"),
    "in a batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(split(2), 4, drop_last=False)),
        "DistributedSampler",
    ),
    "in a batch sampler of the user's": (
        lambda: DataLoader(DATA, batch_sampler=Shard(split(2), 4, drop_last=False)),
        "DistributedSampler",
    ),
    "lists of batches that overlap": (
        lambda: DataLoader(DATA, batch_sampler=[[0, 1], [1, 2]]),
        "list of batches repeats examples",
    ),
    "batches as entries, split": (
        lambda: DataLoader(
            batches(), batch_size=None, sampler=DistributedSampler(batches(), 2, rank=0)
        ),
        "DistributedSampler",
    ),
    "another kind of loader": (lambda: Prefetching(loader(sampler=split(4))), "DistributedSampler"),
}
# A full fit counts what these hold, which is right; from a part of them N cannot be had.
SILENT = {
    "list": batches,
    "shards": OfShards,
    "stream": lambda: DataLoader(Stream(), batch_size=10),
    "stream with a length": lambda: DataLoader(Stream(SIZE), batch_size=10),
    "batches as entries": lambda: DataLoader(batches(), batch_size=None),
    "sampler without length": lambda: loader(sampler=WithoutLength()),
    "batch sampler of the user's": lambda: DataLoader(
        DATA, batch_sampler=Shard(SequentialSampler(DATA), SIZE, drop_last=False)
    ),
}
# What a full fit finds out: told and seen.
CONTRADICTED = {
    "stream read by two workers": (lambda: DataLoader(Stream(SIZE, 2), batch_size=10), 24, 48),
    "stream of shards": (lambda: DataLoader(Stream(3), batch_size=10), 3, 24),
    "batches split over processes": (
        lambda: DataLoader(DATA, batch_sampler=Shard(SequentialSampler(DATA), 6, drop_last=False)),
        24,
        12,
    ),
    "entries of several examples": (shards_as_entries, 3, 24),
}


@pytest.mark.parametrize("name", TELLING)
def test_a_loader_that_goes_through_each_example_once_tells_n(name):
    make, number = TELLING[name]
    found = data_size(make())
    assert isinstance(found, Known)
    assert found.num_examples == number
    la = Laplace(network())
    for mode in ("full", "mini"):
        assert la.fit(make(), mode=mode).num_data == number
        # The posterior is that of so many examples, not only its name.
        precision = la.posterior.precision.to_dense()
        expected = number * la.posterior.curvature.to_dense() + torch.eye(len(precision))
        torch.testing.assert_close(precision, expected.to(precision))


@pytest.mark.parametrize("name", MISLEADING)
def test_a_sampler_that_repeats_or_splits_is_named_before_any_work(name):
    make, says = MISLEADING[name]
    assert isinstance(data_size(make()), Misleading)
    la = Laplace(network())
    la.model.register_forward_hook(lambda *_: pytest.fail("work has started"))
    for fit in (
        *(lambda mode=mode: la.fit(make(), mode=mode) for mode in ("full", *PARTIAL)),
        lambda: la.fit_batches(make()),
        lambda: la.fit_batches(batches(), make()),
    ):
        with pytest.raises(ValueError, match=says) as error:
            fit()
        assert "num_data=" in str(error.value)


@pytest.mark.parametrize("mode", ["full", *PARTIAL])
def test_with_n_given_every_sampler_will_do(mode):
    part = [DATA[i] for i in split(2)]
    x, y = (torch.stack(tensors) for tensors in zip(*part, strict=True))
    pieces = [(x[:8], y[:8]), (x[8:], y[8:])]
    la = Laplace(network()).fit(loader(sampler=split(2), batch_size=8), mode=mode, num_data=SIZE)
    expected = Laplace(network()).fit(pieces, mode=mode, num_data=SIZE)
    assert la.num_data == SIZE
    assert torch.equal(la.posterior.precision.to_dense(), expected.posterior.precision.to_dense())
    Laplace(network()).fit_batches(loader(sampler=split(2)), num_data=SIZE)


@pytest.mark.parametrize("name", SILENT)
def test_a_loader_that_does_not_tell_is_counted_or_asked_about(name):
    make = SILENT[name]
    assert isinstance(data_size(make()), (Supposed, Untold))
    la = Laplace(network())
    assert la.fit(make()).num_data == SIZE
    for mode in PARTIAL:
        with pytest.raises(ValueError, match=f'mode="{mode}" sees a part .* pass num_data='):
            la.fit(make(), mode=mode)
    assert la.fit(make(), mode="mini", num_data=99).num_data == 99


@pytest.mark.parametrize("name", CONTRADICTED)
def test_a_full_fit_that_saw_another_number_than_told_leaves_the_posterior_as_it_was(name):
    make, told, seen = CONTRADICTED[name]
    la = Laplace(network()).fit(batches(7)[:1])
    before = la.posterior
    with pytest.raises(ValueError, match=f"tells of {told} .* saw {seen}: pass num_data="):
        la.fit(make())
    assert la.posterior is before
    evidence = la.log_marginal_likelihood()
    assert la.fit(make(), num_data=77).num_data == 77
    assert la.log_marginal_likelihood() != evidence


def test_entries_of_several_examples_are_noticed_in_one_batch():
    la = Laplace(network())
    with pytest.raises(ValueError, match=r"saw 8 examples .* batch size allows 1.* pass num_data="):
        la.fit(shards_as_entries(), mode="mini")
    with pytest.raises(RuntimeError, match="Not fitted"):
        la.posterior
    assert la.fit(shards_as_entries(), mode="mini", num_data=SIZE).num_data == SIZE


def test_a_dropped_batch_is_told_before_a_full_fit_and_no_matter_to_the_others():
    dropping = loader(drop_last=True)
    la = Laplace(network())
    with pytest.raises(ValueError, match=r"leaves out 4 of its 24 .*drop_last=False"):
        la.fit(dropping)
    for mode in PARTIAL:
        assert la.fit(dropping, mode=mode).num_data == SIZE
    la.fit(dropping, num_data=SIZE)
    seen = Laplace(network()).fit(batches()[:2], num_data=SIZE)
    assert torch.equal(la.posterior.precision.to_dense(), seen.posterior.precision.to_dense())
    assert la.fit(loader(drop_last=True, batch_size=8)).num_data == SIZE


def test_a_subset_stands_for_as_many_examples_as_given():
    la = Laplace(network(), prior_precision=0.3).fit(batches()[:1], num_data=1000)
    C = la.posterior.curvature.to_dense()
    expected = 1000 * C + 0.3 * torch.eye(len(C)).double()
    torch.testing.assert_close(la.posterior.precision.to_dense(), expected)


WRONG = [math.nan, math.inf, -math.inf, 1.5, 24.0, True, False, torch.tensor(True), "24", [24]]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("value", WRONG, ids=str)
def test_n_must_be_of_an_integer_type(value):
    la = Laplace(network())
    for fit in (la.fit, la.fit_batches):
        with pytest.raises(TypeError, match="num_data must be a whole number"):
            fit(batches(), num_data=value)


def test_examples_that_each_worker_reads_are_not_counted_several_times():
    la = Laplace(network()).fit(batches())
    calls = (
        la.evaluate,
        lambda data: la.tune(data, grid=[1.0]),
        lambda data: la.fit(data, num_data=SIZE),
        lambda data: la.evaluate(batches(), ood={"o": data}),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"2 workers that read the stream .* num_workers=1"):
            call(read_by_two_workers())
    parts = DataLoader(PartOfStream(), batch_size=5, num_workers=2)
    whole = [DATA[:]]
    assert float(la.evaluate(parts)["nll"]) == pytest.approx(float(la.evaluate(whole)["nll"]))
    la.fit(parts, num_data=SIZE)


@pytest.mark.parametrize("value", [0, -3, 2**53 + 1, 10**30])
def test_n_must_lie_where_float64_is_exact(value):
    la = Laplace(network())
    for fit in (la.fit, la.fit_batches):
        with pytest.raises(ValueError, match=r"at least 1 and at most 2\*\*53"):
            fit(batches(), num_data=value)


@pytest.mark.parametrize(
    "value", [1, 2**53, np.int64(7), np.uint8(7), torch.tensor(7), np.array(7)], ids=repr
)
def test_n_of_any_integer_type_becomes_an_int(value):
    assert type(check_num_data(value)) is int
    la = Laplace(network()).fit(batches(), num_data=value)
    assert json.loads(json.dumps(la.num_data)) == int(value)


def test_what_is_expected_of_a_pass():
    assert Expected(None).given(5) == 5
    assert Expected(9).given(5) == 9
    assert Expected(5, sees_all=True).given(5) == 5
    with pytest.raises(ValueError, match=r"tells of 5 .* saw 6"):
        Expected(5, sees_all=True).given(6)
    with pytest.raises(ValueError, match=r"saw 3 .* allows 2"):
        Expected(5, most=2).given(3)
