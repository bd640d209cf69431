"""N comes from the loader, a count or the caller, never from a sampler's number of draws."""

import itertools
import json
import math
from functools import partial

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

from laplace_debias import Conformal, Laplace, alone
from laplace_debias.curvature import GGN
from laplace_debias.curvature.data.dataset_size import dataset_size
from laplace_debias.system.checks import whole

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
    """A sampler of an unknown type."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size - 1, -1, -1))

    def __len__(self):
        return self.size


class Shard(BatchSampler):
    """Every second batch, as libraries for several processes split the batches."""

    def __iter__(self):
        return itertools.islice(super().__iter__(), 0, None, 2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([DATA[i] for i in range(SIZE)])


def read_by_two_workers():
    """A stream that ignores which worker reads it, so that each worker reads all of it."""
    return DataLoader(Stream(), batch_size=10, num_workers=2)


class PartOfStream(IterableDataset):
    """A stream of which each worker yields a part."""

    def __iter__(self):
        worker = get_worker_info()
        return (DATA[i] for i in range(worker.id, SIZE, worker.num_workers))


def split(num_replicas, **options):
    return DistributedSampler(DATA, num_replicas, rank=0, shuffle=False, **options)


def shards_as_entries():
    """Every entry of the data set is several examples, which the collator joins."""
    return DataLoader(
        batches(8),
        batch_size=1,
        collate_fn=lambda shards: tuple(map(torch.cat, zip(*shards, strict=True))),
    )


ONES = torch.ones(SIZE)
TELLING = {
    "sequential": (loader, SIZE),
    "shuffled": (lambda: loader(shuffle=True), SIZE),
    "sequential part": (lambda: loader(sampler=SequentialSampler(range(7))), 7),
    "subset": (lambda: loader(sampler=SubsetRandomSampler(range(5, 17))), 12),
    "subset of the data": (lambda: DataLoader(Subset(DATA, range(11)), batch_size=10), 11),
    "batch sampler": (
        lambda: DataLoader(
            DATA, batch_sampler=BatchSampler(SubsetRandomSampler(range(8)), 4, drop_last=False)
        ),
        8,
    ),
}
MISLEADING = {
    "distributed": (lambda: loader(sampler=split(4)), "DistributedSampler .* 4 processes"),
    "weighted": (
        lambda: loader(sampler=WeightedRandomSampler(ONES, SIZE)),
        "WeightedRandomSampler draws 24 of 24 examples with replacement",
    ),
    "random with replacement": (
        lambda: loader(sampler=RandomSampler(DATA, replacement=True)),
        "RandomSampler draws 24 of 24 examples with replacement",
    ),
    "random, fewer": (
        lambda: loader(sampler=RandomSampler(DATA, num_samples=7)),
        "RandomSampler draws 7 of 24 examples in each pass",
    ),
    "in a batch sampler of the user's": (
        lambda: DataLoader(DATA, batch_sampler=Shard(split(2), 4, drop_last=False)),
        "DistributedSampler",
    ),
}
# Data without a known size: a full fit counts the examples, a partial fit needs `num_data`.
SILENT = {
    "list": batches,
    "stream": lambda: DataLoader(Stream(), batch_size=10),
    "batches as entries": lambda: DataLoader(batches(), batch_size=None),
    "sampler of the user's": lambda: loader(sampler=Reversed(SIZE)),
    "batch sampler of the user's": lambda: DataLoader(
        DATA, batch_sampler=Shard(SequentialSampler(DATA), SIZE, drop_last=False)
    ),
}


@pytest.mark.parametrize("name", TELLING)
def test_a_loader_that_goes_through_each_example_once_tells_n(name):
    make, number = TELLING[name]
    assert dataset_size(make()) == number
    la = Laplace(network())
    for mode in ("full", "mini"):
        assert la.fit(make(), mode=mode).num_data == number
        # The posterior's precision also has this N.
        precision = la.posterior.precision.to_dense()
        expected = number * la.posterior.curvature.to_dense() + torch.eye(len(precision))
        torch.testing.assert_close(precision, expected.to(precision))


@pytest.mark.parametrize("name", MISLEADING)
def test_a_sampler_that_repeats_or_splits_is_named_before_any_work(name):
    make, message = MISLEADING[name]
    la = Laplace(network())
    la.model.register_forward_hook(lambda *_: pytest.fail("work has started"))
    for fit in (
        *(lambda mode=mode: la.fit(make(), mode=mode) for mode in ("full", *PARTIAL)),
        lambda: la.fit_batches(make()),
        lambda: la.fit_batches(batches(), make()),
    ):
        with pytest.raises(ValueError, match=message) as error:
            fit()
        assert "num_data=" in str(error.value)


REPEATED = {
    "weighted": (lambda: WeightedRandomSampler(ONES, SIZE), "draws 24 of 24 .* replacement"),
    "weighted part": (
        lambda: WeightedRandomSampler(ONES, 7, replacement=False),
        "WeightedRandomSampler draws 7 of 24 examples in each pass",
    ),
    "with replacement": (
        lambda: RandomSampler(DATA, replacement=True),
        "RandomSampler draws 24 of 24 examples with replacement",
    ),
    "more": (lambda: RandomSampler(DATA, num_samples=30), "draws 30 of 24 examples in each pass"),
}


@pytest.mark.parametrize("name", REPEATED)
def test_held_out_data_repeat_no_example(name):
    """Repeated examples would make intervals too narrow, and conformal sets too small."""
    make, message = REPEATED[name]
    la = Laplace(network()).fit(batches())
    repeated = loader(sampler=make())
    for use in (
        la.evaluate,
        la.tune,
        lambda data: la.evaluate(batches(), ood={"other": data}),
        Conformal(la).calibrate,
    ):
        with pytest.raises(ValueError, match=f"{message}, but held-out data must contain each"):
            use(repeated)


def test_held_out_data_may_be_a_random_part():
    generator = torch.Generator().manual_seed(0)
    indices = torch.randperm(SIZE, generator=generator)[:7]
    la = Laplace(network()).fit(batches())
    sampler = RandomSampler(DATA, num_samples=7, generator=generator.manual_seed(0))
    report = la.evaluate(loader(sampler=sampler))
    x, y = DATA.tensors
    expected = -la.predict(x[indices]).log_prob(y[indices]).mean()
    assert report["nll"].value == pytest.approx(float(expected))


@pytest.mark.parametrize("mode", ["full", *PARTIAL])
def test_with_n_given_every_sampler_will_do(mode):
    shard = [DATA[i] for i in split(2)]
    x, y = (torch.stack(tensors) for tensors in zip(*shard, strict=True))
    pieces = [(x[:8], y[:8]), (x[8:], y[8:])]
    la = Laplace(network()).fit(loader(sampler=split(2), batch_size=8), mode=mode, num_data=SIZE)
    expected = Laplace(network()).fit(pieces, mode=mode, num_data=SIZE)
    assert la.num_data == SIZE
    assert torch.equal(la.posterior.precision.to_dense(), expected.posterior.precision.to_dense())
    Laplace(network()).fit_batches(loader(sampler=split(2)), num_data=SIZE)


@pytest.mark.parametrize("name", SILENT)
def test_a_loader_that_does_not_tell_is_counted_or_asked_about(name):
    make = SILENT[name]
    la = Laplace(network())
    assert la.fit(make()).num_data == SIZE
    for mode in PARTIAL:
        with pytest.raises(ValueError, match=f'mode="{mode}"` uses only part .* Pass `num_data='):
            la.fit(make(), mode=mode)
    assert la.fit(make(), mode="mini", num_data=99).num_data == 99


def test_a_full_fit_that_saw_another_number_than_told_leaves_the_posterior_as_it_was():
    la = Laplace(network()).fit(batches(7)[:1])
    posterior = la.posterior
    with pytest.raises(ValueError, match=r"is 3, .* yielded 24. Pass `num_data="):
        la.fit(shards_as_entries())
    assert la.posterior is posterior
    assert la.fit(shards_as_entries(), num_data=77).num_data == 77


def test_a_dropped_batch_is_told_before_a_full_fit_and_no_matter_to_the_others():
    dropping = loader(drop_last=True)
    la = Laplace(network())
    with pytest.raises(ValueError, match=r"leaves out 4 of its 24 .*drop_last=False"):
        la.fit(dropping)
    for mode in PARTIAL:
        assert la.fit(dropping, mode=mode).num_data == SIZE
    la.fit(dropping, num_data=SIZE)
    without_last_batch = Laplace(network()).fit(batches()[:2], num_data=SIZE)
    assert torch.equal(
        la.posterior.precision.to_dense(), without_last_batch.posterior.precision.to_dense()
    )
    assert la.fit(loader(drop_last=True, batch_size=8)).num_data == SIZE


@pytest.mark.parametrize("sampler", [SequentialSampler(DATA), Reversed(SIZE)])
def test_a_batch_that_a_batch_sampler_drops_is_noticed(sampler):
    batch_sampler = BatchSampler(sampler, 10, drop_last=True)
    dropping = DataLoader(DATA, batch_sampler=batch_sampler)
    la = Laplace(network())
    for data in (dropping, loader(sampler=sampler, drop_last=True)):
        with pytest.raises(ValueError, match=r"leaves out 4 of its 24 .*`num_data=24`"):
            la.fit(data)
        assert la.fit(data, num_data=24).num_data == 24


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
        with pytest.raises(ValueError, match=r"2 workers that read the stream .* `num_workers=1`"):
            call(read_by_two_workers())
    shared_stream = DataLoader(PartOfStream(), batch_size=5, num_workers=2)
    one_batch = [DATA[:]]
    assert float(la.evaluate(shared_stream)["nll"]) == pytest.approx(
        float(la.evaluate(one_batch)["nll"])
    )
    la.fit(shared_stream, num_data=SIZE)


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
    assert type(whole(value, "num_data")) is int
    la = Laplace(network()).fit(batches(), num_data=value)
    assert json.loads(json.dumps(la.num_data)) == int(value)


def test_a_sampler_that_repeats_examples_is_refused_whatever_n_is_given():
    la = Laplace(network())
    padded = loader(sampler=split(5))
    message = r"DistributedSampler repeats 1 example .* 5 processes .*ShardedBatches\(data"
    for fit in (la.fit, la.fit_batches, partial(la.fit, mode="mini")):
        with pytest.raises(ValueError, match=message):
            fit(padded, num_data=SIZE)
    with pytest.raises(ValueError, match=message):
        GGN(network(), nn.CrossEntropyLoss(), padded)
    for unpadded in (split(4), split(5, drop_last=True)):
        assert la.fit(loader(sampler=unpadded), num_data=SIZE).num_data == SIZE


def test_processes_that_were_started_together_must_join(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    la = Laplace(network())
    for work in (la.fit, la.fit_batches, partial(GGN, la.model, nn.CrossEntropyLoss())):
        with pytest.raises(RuntimeError, match=r"Call torch\.distributed\.init_process_group\(\)"):
            work(batches())
    with alone():
        la.fit(batches())
    la.predict(DATA[:2][0])
    monkeypatch.setenv("WORLD_SIZE", "1")
    la.fit(batches())
