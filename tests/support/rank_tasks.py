"""Tasks for the processes of `processes.py`: fits and evaluations of data that they share."""

import itertools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from spectra import generator
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from laplace_debias import (
    Auto,
    Categorical,
    Conformal,
    Laplace,
    Quadratic,
    ShardedBatches,
    alone,
    posterior_as_prior,
)
from laplace_debias.curvature import (
    EKFAC,
    GGN,
    KFAC,
    EmpiricalFisher,
    Fisher,
    Hessian,
    Jacobian,
)
from laplace_debias.curvature.fits import checkpoint, chunks, factors, gram_factor
from laplace_debias.curvature.fits.checkpoint import SavedPass
from laplace_debias.laplace.fitting.schemes import Full
from laplace_debias.linalg import eigsh, trace

SIZE = 37
BATCH = 16


class Net(nn.Module):
    """A convolution in groups, a depthwise one, a normalisation, two linear layers."""

    def __init__(self):
        super().__init__()
        self.grouped = nn.Conv2d(2, 4, 3, groups=2)
        self.depthwise = nn.Conv2d(4, 4, 2, groups=4)
        self.norm = nn.LayerNorm(4)
        self.hidden = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        h = self.depthwise(self.grouped(x).tanh()).tanh().flatten(1)
        return self.head(self.hidden(self.norm(h)).tanh())


def network():
    torch.manual_seed(3)
    net = Net().double().eval()
    for parameter in net.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return net


def examples(size=SIZE):
    g = generator(1)
    x = torch.randn(size, 2, 4, 4, generator=g, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (size,), generator=g))


def loader(size=SIZE, batch=BATCH, **options):
    data = examples(size)
    return DataLoader(data, batch_sampler=ShardedBatches(data, batch, **options))


def weighted_loader():
    weights = torch.rand(SIZE, generator=generator(8), dtype=torch.float64)
    weights[0] = 0.0
    data = TensorDataset(*examples()[:], weights)
    return DataLoader(data, batch_sampler=ShardedBatches(data, BATCH))


def a_batch():
    x, y = zip(*(examples()[index] for index in range(4)), strict=True)
    return torch.stack(x), torch.stack(y)


def laplace(curvature="kfac", **options):
    if curvature == "lowrank":
        options["rank"] = 5
    return Laplace(network(), curvature=curvature, **options)


def numbers(la):
    """Return numbers of a posterior that do not depend on the choice of eigenvectors."""
    g = generator(2)
    C = la.posterior.curvature
    V = torch.randn(C.shape[1], 3, generator=g, dtype=torch.float64)
    x, _ = examples(5)[:]
    return {
        "N": la.num_data,
        "C v": C @ V,
        "log evidence": la.log_marginal_likelihood(),
        "covariance": la.functional(x)[1],
    }


def fit(rank, curvature, mode, options, fit_options, size=SIZE, batch=BATCH):
    """A fit of shared data."""
    la = laplace(curvature, **options)
    la.fit(loader(size, batch), mode=mode, generator=generator(5), **fit_options)
    return numbers(la)


def update(rank, curvature, options):
    """An update of a fit of shared data."""
    la = laplace(curvature, **options)
    la.fit(loader())
    data = examples(2 * SIZE)
    new_data = Subset(data, range(SIZE, SIZE + 7))
    again = laplace(curvature, prior=posterior_as_prior(la), **options)
    again.fit(DataLoader(new_data, batch_sampler=ShardedBatches(new_data, 3)))
    la.update(DataLoader(new_data, batch_sampler=ShardedBatches(new_data, 3)))
    with_prior = {f"{name} with the prior": value for name, value in numbers(again).items()}
    return {**numbers(la), **with_prior}


def updates(rank, cases):
    """Several updates, one after the other."""
    return [update(rank, *case) for case in cases]


def fit_auto(rank, options, size=2000, batch=48):
    """A fit of shared data in rounds, with its report."""
    la = laplace(**options)
    data = loader(size, batch, shuffle=True)
    first = Auto(data, tolerance=1e-9, examples=130)
    la.fit(first, num_data=size, generator=generator(5))
    later = Auto(data, tolerance=1e-9, examples=200, after=la.fit_report)
    la.fit(later, num_data=size, generator=generator(5))
    report = la.fit_report
    errors = torch.tensor(list(report.error_by_block.values()))
    rounds = torch.tensor([*itertools.chain.from_iterable(report.rounds), report.num_read])
    return {**numbers(la), "error by block": errors, "rounds": rounds}


def fits(rank, cases, size=SIZE, batch=BATCH):
    """Several fits, one after the other."""
    return [fit(rank, *case, size, batch) for case in cases]


def fits_of_few_rows(rank, cases, size=SIZE, batch=BATCH):
    """Several fits, in which factors of few rows are stored as rows."""
    thin = mock.patch.object(gram_factor, "_THIN_FROM", 2)
    with mock.patch.object(factors, "_WIDE", 2), thin:
        return fits(rank, cases, size, batch)


OPERATORS = {
    "hessian": (Hessian, {}),
    "ggn": (GGN, {}),
    "fisher": (Fisher, {"fisher": "mc", "mc_samples": 2}),
    "fisher with random signs": (Fisher, {"fisher": "signs", "mc_samples": 2}),
    "empirical fisher": (EmpiricalFisher, {}),
    "kfac": (KFAC, {"fisher": "mc"}),
    "ekfac": (EKFAC, {}),
}
# The same operators with weights of the examples.
WEIGHTED_OPERATORS = [f"weighted {name}" for name in OPERATORS]


def operator(name, data):
    kind, options = OPERATORS[name.removeprefix("weighted ")]
    if "fisher" in options:
        options = {**options, "generator": generator(3)}
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))
    return kind(network(), loss, data, **options)


def products(rank, name):
    """Products, and estimates that draw the same vectors on all processes."""
    A = operator(name, weighted_loader() if name.startswith("weighted") else loader())
    V = torch.randn(A.shape[0], 3, generator=generator(4), dtype=torch.float64)
    return {
        "N": A.num_data,
        "product": A @ V,
        "trace": trace(A, num_matvecs=6, generator=generator(5)).value,
        "eigenvalues": eigsh(A, k=2, generator=generator(6)).values,
    }


def products_with_other_vectors(rank, name):
    """A product and an estimate with vectors that every process draws by itself."""
    A = operator(name, loader())
    messages = []
    for compute in (
        lambda: A @ torch.randn(A.shape[0], generator=generator(rank), dtype=torch.float64),
        lambda: trace(A, num_matvecs=6, generator=generator(rank)),
    ):
        try:
            compute()
        except ValueError as error:
            messages.append(str(error))
    return messages


def quadratic(rank):
    q = Quadratic.from_data(network(), nn.CrossEntropyLoss(), loader())
    return {"value": q.value, "gradient": q.gradient, "step": q.newton_step("exact", damping=0.1)}


def tune_and_evaluate(rank, metric, size=SIZE):
    la = laplace().fit(loader(size))
    tuned = la.tune(loader(size), metric=metric, grid=[0.01, 1.0, 100.0])
    report = la.evaluate(loader(size), ood={"shifted": shifted(size)})
    la.tune(method="marglik")
    last_layer = laplace(params="last_layer").fit(loader(size))
    searched = last_layer.tune(loader(size), metric=metric, grid=[0.01, 1.0, 100.0])
    return {
        "last_layer_table": [row[metric] for row in searched.table],
        "last_layer_best": searched.prior_precision,
        "table": [row[metric] for row in tuned.table],
        "best": tuned.prior_precision,
        "marginal": la.prior_precision,
        **report,
    }


def noise_per_output(rank):
    """The noise of each output of a regression, tuned on examples that the processes share."""
    x, _ = examples()[:]
    noise = torch.tensor([0.1, 0.5, 0.2]) * torch.randn(SIZE, 3, generator=generator(9))
    data = TensorDataset(x, network()(x).detach() + noise)
    shared = DataLoader(data, batch_sampler=ShardedBatches(data, BATCH))
    la = laplace(likelihood="regression", sigma=[0.3, 0.3, 0.3]).fit(shared)
    tuned = la.tune(shared, sigma="per_output")
    return {"sigma": tuned.sigma, "value": tuned.value, "best": tuned.prior_precision}


def conformal_sets(rank):
    """Class sets by scores of examples that the processes share."""
    la = laplace().fit(loader())
    conformal = Conformal(la).calibrate(loader(), level=0.8)
    x, _ = examples()[:]
    sets = conformal.predict(x)
    return {"quantiles": torch.stack(list(conformal.quantiles.values())), "sizes": sets.sizes}


def shifted(size):
    x, y = examples(size)[:]
    data = TensorDataset(3 * x + 1, y)
    return DataLoader(data, batch_sampler=ShardedBatches(data, 7))


def save(rank, folder):
    la = laplace("ekfac").fit(loader())
    path = Path(folder) / "posterior.safetensors"
    la.save(path)
    return numbers(Laplace.load(path, network()))


SHARES = (slice(0, 20), slice(20, 23), slice(23, 37))
"""The examples of each process, if each has a loader of its own."""


def share_loader(rank, batch=6):
    return DataLoader(TensorDataset(*examples()[SHARES[rank]]), batch_size=batch)


def fit_own_part(rank, mode):
    return numbers(laplace().fit(share_loader(rank), mode=mode))


def fit_own_part_with_drawn_labels(rank):
    return numbers(laplace(fisher="mc").fit(share_loader(rank), generator=generator(5)))


def union_of_parts(num_ranks, mode):
    """Return the arguments of `fit_batches` for one process with the data of several ones.

    The k-th batch is the union of the k-th batches of all processes.
    """
    batches_by_rank = [list(share_loader(rank)) for rank in range(num_ranks)]
    longest = max(map(len, batches_by_rank))
    unions = []
    for k in range(longest):
        inputs, labels = zip(
            *(batches[k] for batches in batches_by_rank if k < len(batches)), strict=True
        )
        unions.append((torch.cat(inputs), torch.cat(labels)))
    if mode == "full":
        return [unions]
    if mode == "debiased":
        return [unions[:1], unions[1:2]]
    return [unions[:1]]


def ignored(rank, num_ranks):
    """Batches in which the last process has only ignored targets."""
    x, y = examples(24)[:]
    y = y.clone()
    y[6:12] = -100
    y[18:] = -100
    batches = []
    for x_batch, y_batch in zip(x.split(12), y.split(12), strict=True):
        batches.append((x_batch.chunk(num_ranks)[rank], y_batch.chunk(num_ranks)[rank]))
    return batches


def fit_and_tune_ignored(rank, num_ranks):
    la = laplace(likelihood=Categorical(ignore_index=-100))
    la.fit(ignored(rank, num_ranks), num_data=24)
    tuned = la.tune(ignored(rank, num_ranks), grid=[0.1, 1.0, 10.0])
    table = [row["nll"] for row in tuned.table]
    return numbers(la) | {"table": table, "nll": la.evaluate(ignored(rank, num_ranks))["nll"]}


def lists(rank, num_ranks):
    """Return batches for directions and for magnitudes; each process has a share of every batch."""
    x, y = examples()[:]

    def share(start, stop):
        batch = slice(start, stop)
        return x[batch].chunk(num_ranks)[rank], y[batch].chunk(num_ranks)[rank]

    return [[share(0, 10), share(10, 21)], [share(21, 30)]]


def fit_lists(rank, fisher):
    la = laplace(fisher=fisher)
    return numbers(la.fit_batches(*lists(rank, 2), num_data=100, generator=generator(5)))


def fit_ddp(rank):
    la = Laplace(nn.parallel.DistributedDataParallel(network()))
    return numbers(la.fit(loader()))


def fit_alone(rank):
    with alone():
        return numbers(laplace().fit(loader(rank=0, num_ranks=1)))


def fit_in_threads(rank, num_threads, seconds):
    """Return how often each thread fits one model."""
    model = network()
    data = [a_batch()]
    end = time.monotonic() + seconds

    def work(_):
        count = 0
        while time.monotonic() < end:
            Laplace(model).fit_batches(data)
            count += 1
        return count

    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(work, range(num_threads)))


def refused_operator(rank):
    return Jacobian(network(), loader())


class Faulty(torch.utils.data.Dataset):
    """Examples of which the last three have a fault, or cannot be read."""

    def __init__(self, fault):
        self.fault = fault
        self.entries = examples()

    def __len__(self):
        return len(self.entries)

    def __getitem__(self, index):
        x, y = self.entries[index]
        if index < SIZE - 3:
            return x, y
        if self.fault == "loader":
            raise KeyError("the file is missing")
        if self.fault == "memory":
            raise torch.OutOfMemoryError("out of memory")
        return (x * float("nan"), y) if self.fault == "nan" else (x, y + 7)


def fail(rank, fault, failing_rank):
    data = Faulty(fault) if rank == failing_rank else examples()
    return numbers(laplace().fit(DataLoader(data, batch_sampler=ShardedBatches(data, BATCH))))


def fail_then_fit(rank):
    try:
        fail(rank, "label", 1)
    except (ValueError, RuntimeError):
        return numbers(laplace().fit(loader()))
    raise AssertionError("nothing failed")


class Slow(torch.utils.data.Dataset):
    """Examples that take half a second each, or that cannot be read."""

    def __init__(self, fails):
        self.fails = fails

    def __len__(self):
        return 400

    def __getitem__(self, index):
        if self.fails:
            raise ValueError("no disk")
        time.sleep(0.5)
        return examples(1)[0]


def fail_while_the_other_reads(rank):
    data = Slow(fails=rank == 1)
    la = laplace()
    if rank == 1:
        # This process fails after the other one has started its pass.
        time.sleep(5)
    return numbers(la.fit(DataLoader(data, batch_sampler=ShardedBatches(data, 2))))


class Deadly(torch.utils.data.Dataset):
    """Examples that kill the process which reads one of the last three."""

    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        if index >= len(self) - 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.examples[index]


def be_killed(rank, killed_rank):
    data = Deadly(examples()) if rank == killed_rank else examples()
    return numbers(laplace().fit(DataLoader(data, batch_sampler=ShardedBatches(data, BATCH))))


def the_same_loader(rank):
    return numbers(laplace().fit(DataLoader(examples(), batch_size=8)))


def the_same_loader_shuffled(rank):
    torch.manual_seed(rank)
    return numbers(laplace().fit(DataLoader(examples(), batch_size=8, shuffle=True), mode="mini"))


def the_same_loader_as_a_scheme(rank):
    torch.manual_seed(rank)
    return numbers(laplace().fit(Full(DataLoader(examples(), batch_size=8, shuffle=True))))


def the_same_batches(rank):
    return numbers(laplace().fit_batches(list(DataLoader(examples(), batch_size=8))))


def padded(rank):
    data = examples()
    return numbers(laplace().fit(DataLoader(data, 8, sampler=DistributedSampler(data))))


def prepared_by_accelerate(rank, size=SIZE, sampler=None, drop_last=False, **options):
    """A loader of batches of 4, split as by `accelerate.Accelerator.prepare`."""
    from accelerate.data_loader import BatchSamplerShard

    data = examples(size)
    batches = BatchSampler(sampler or SequentialSampler(data), 4, drop_last)
    shard = BatchSamplerShard(batches, dist.get_world_size(), rank, **options)
    return DataLoader(data, batch_sampler=shard)


def fit_prepared(rank, *args):
    return numbers(laplace().fit(prepared_by_accelerate(rank, *args)))


def evaluate_prepared(rank):
    return laplace().fit(loader()).evaluate(prepared_by_accelerate(rank))["nll"].value


def fit_prepared_without_the_rest(rank):
    return numbers(laplace().fit(prepared_by_accelerate(rank, drop_last=True)))


def fit_prepared_draws(rank):
    sampler = WeightedRandomSampler(torch.ones(SIZE), 40)
    return numbers(laplace().fit(prepared_by_accelerate(rank, sampler=sampler)))


def fits_prepared_without_repeats(rank):
    """Fits whose loaders from accelerate read each example once."""
    even = 40
    cases = [
        (SIZE, {"even_batches": False}),
        (SIZE, {"even_batches": False, "split_batches": True}),
        (even, {}),
        (even, {"split_batches": True}),
        (even, {"drop_last": True}),
    ]
    return [
        numbers(laplace().fit(prepared_by_accelerate(rank, size, **options)))
        for size, options in cases
    ]


class Examples(IterableDataset):
    """A stream of examples whose length is known."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        return iter(self.data)


def prepared_stream(rank, size=SIZE, drop_last=False):
    """A stream in batches of 4, split as by `accelerate.Accelerator.prepare`."""
    from accelerate.data_loader import prepare_data_loader

    stream = DataLoader(Examples(examples(size)), 4, drop_last=drop_last)
    return prepare_data_loader(
        stream, num_processes=dist.get_world_size(), process_index=rank, dispatch_batches=False
    )


def fit_prepared_stream(rank):
    return numbers(laplace().fit(prepared_stream(rank)))


def evaluate_prepared_stream(rank):
    return laplace().fit(loader()).evaluate(prepared_stream(rank))["nll"].value


def check_prepared_stream_before_training(rank):
    from laplace_debias.integrations.end_of_training import PosteriorAtEnd

    settings = PosteriorAtEnd("classification", "full", tune=False, options={})
    settings.check(network(), prepared_stream(rank), None)


def fit_dispatched(rank):
    from accelerate.data_loader import DataLoaderDispatcher

    loader = DataLoaderDispatcher(examples(), batch_size=4)
    loader.state = SimpleNamespace(process_index=rank, num_processes=dist.get_world_size())
    return numbers(laplace().fit(loader))


def fit_prepared_stream_at_end_of_training(rank):
    """The callback fits to a stream that has a length and leaves out the last five examples."""
    from laplace_debias.integrations.end_of_training import PosteriorAtEnd

    la = laplace()
    settings = PosteriorAtEnd("classification", "full", tune=False, options={})
    settings.fit(la, prepared_stream(rank, drop_last=True), None)
    return numbers(la)


def sharded_on_one(rank):
    return numbers(laplace().fit(loader() if rank == 0 else share_loader(1)))


def another_model(rank):
    net = network()
    net.head.bias.data[0] += rank
    return numbers(Laplace(net).fit(loader()))


def another_num_data(rank):
    return numbers(laplace().fit(loader(), num_data=37 + rank))


def another_argument(rank, call, option, values):
    """A call with an option whose value differs between the processes."""
    la = laplace()
    if call != "fit":
        la.fit(loader())
    calls = {
        "fit": partial(la.fit, loader()),
        "fit_batches": partial(la.fit_batches, loader()),
        "tune": partial(la.tune, loader()),
        "evaluate": partial(la.evaluate, loader(), intervals=False),
    }
    calls[call](**{option: values[rank]})


def another_laplace(rank, option, values):
    """A fit of an object with an option whose value differs between the processes."""
    Laplace(network(), **{option: values[rank]}).fit(loader())


def another_posterior(rank, call):
    """A call with posteriors that each process has fitted to different data."""
    la = laplace()
    with alone():
        la.fit(DataLoader(Subset(examples(), range(8 * rank, 8 * rank + 8)), batch_size=4))
    calls = {
        "update": la.update,
        "tune": la.tune,
        "evaluate": partial(la.evaluate, intervals=False),
    }
    calls[call](loader())


def other_sets(rank):
    """An evaluation with out-of-distribution data only on rank 0."""
    la = laplace().fit(loader())
    la.evaluate(loader(), ood={"shifted": shifted(SIZE)} if rank == 0 else {})


def fit_with_own_generator(rank):
    """A fit whose labels should be drawn by the generator of rank 0."""
    la = laplace("ekfac", fisher="mc")
    return numbers(la.fit(loader(), generator=generator(5 + rank)))


def different_calls(rank):
    la = laplace().fit(loader())
    return numbers(la.fit(loader())) if rank == 0 else la.save("nowhere")


def a_shard_alone(rank):
    with alone():
        return numbers(laplace().fit(loader()))


COLLECTIVES = ("all_reduce", "reduce", "broadcast")


def count_messages(rank, curvature, mode, batch, fisher="exact", options=()):
    """Return the collectives that a fit calls, `(name, bytes)`."""
    la = laplace(curvature, fisher=fisher)
    data = loader(batch=batch)
    return messages_of(lambda: la.fit(data, mode=mode, **dict(options)))


def messages_of_each(rank, cases):
    """Return the collectives of several fits."""
    return [count_messages(rank, *case) for case in cases]


def messages_of(call):
    """Return the collectives that a call makes, `(name, bytes)`."""
    called = []
    with ExitStack() as stack:
        for name in dir(dist):
            function = getattr(dist, name)
            if name in COLLECTIVES:
                counting = partial(_count, called, name, function)
                stack.enter_context(mock.patch.object(dist, name, counting))
        call()
    return called


def _count(called, name, function, tensor, *args, **kwargs):
    called.append((name, tensor.nbytes if isinstance(tensor, torch.Tensor) else None))
    return function(tensor, *args, **kwargs)


class Broken(Exception):  # noqa: N818
    """The error that a `BreakingLoader` raises."""


class BreakingLoader(DataLoader):
    """A loader that fails after this many batches of all passes; None if it does not fail."""

    num_remaining = None

    def __iter__(self):
        for batch in super().__iter__():
            if self.num_remaining == 0:
                raise Broken
            if self.num_remaining is not None:
                self.num_remaining -= 1
            yield batch


def broken_or_whole(stop=None, seed=3):
    data = examples()
    batches = BreakingLoader(data, batch_sampler=ShardedBatches(data, 6, shuffle=True, seed=seed))
    batches.num_remaining = stop
    return batches


def break_off(rank, curvature, options, folder, stops):
    """A fit that saves after every batch; each process fails after its number of batches."""
    every_batch = mock.patch.object(checkpoint, "EVERY", 0.0)
    with every_batch, mock.patch.object(chunks, "_JOINED_BYTES", 0):
        batches = broken_or_whole(stops[rank])
        laplace(curvature, **options).fit(batches, generator=generator(5), resume=folder)


def resumed(rank, curvature, options, folder, seed=3):
    """Resume a fit; return its curvature, and the number of batches that its last pass skipped."""
    skipped = {}
    remaining = SavedPass.remaining

    def counting(self, batches):
        remaining_batches = list(remaining(self, batches))
        num_skipped = len(batches) - len(remaining_batches)
        skipped[self._number] = skipped.get(self._number, 0) + num_skipped
        return remaining_batches

    batches_apart = mock.patch.object(chunks, "_JOINED_BYTES", 0)
    with batches_apart, mock.patch.object(SavedPass, "remaining", counting):
        la = laplace(curvature, **options)
        la.fit(broken_or_whole(None, seed), generator=generator(5), resume=folder)
    return la.posterior.curvature.to_dense(), skipped[max(skipped)] if skipped else 0


class SplitExperts(nn.Module):
    """Three experts, each called only if an example of the batch takes it."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x):
        choice = x[:, 0].long()
        outputs = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            takes = choice == number
            if takes.any():
                outputs = outputs + takes.unsqueeze(1) * expert(x).tanh()
        return outputs


def experts_of_processes(rank, num_ranks, curvature):
    """Fit experts; the first process has examples for two of them, the last one for the third.

    Returns:
        The names of the parameters, the curvature's trace, and covariances.
    """
    torch.manual_seed(0)
    model = SplitExperts().double().eval()
    x = torch.randn(40, 4).double()
    y = torch.randint(3, (40,))
    x[:, 0] = (torch.arange(40) % 2) * 1.0
    x[30:, 0] = 2.0
    batches = [(x[n : n + 10], y[n : n + 10]) for n in range(0, 40, 10)]
    if num_ranks > 1:
        batches = batches[:2] if rank == 0 else batches[2:]
    la = Laplace(model, curvature=curvature).fit_batches(batches)
    trace = la.posterior.curvature.to_dense().trace()
    return la.param_names, float(trace), la.functional(x[28:32])[1].flatten().tolist()


def experts_of_two_processes(rank, curvature):
    """Call `experts_of_processes` with two processes."""
    return experts_of_processes(rank, 2, curvature)
