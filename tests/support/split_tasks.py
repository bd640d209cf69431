"""What the processes of `processes.py` do with models that `fully_shard` has split."""

import os
import signal
from contextlib import suppress
from unittest import mock

import rank_tasks as tasks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader

from laplace_debias import Laplace, Quadratic, ShardedBatches, alone, gathered
from laplace_debias.curvature.network import split_model
from laplace_debias.optim import DebiasedHessianFree
from laplace_debias.system import agreement


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def split(way="both", net=None):
    """A network that is split as a whole, in parts, or both."""
    net = tasks.network() if net is None else net
    if way == "compiled":
        net.hidden = torch.compile(net.hidden)
    if way != "whole":
        fully_shard(net.hidden, mesh=mesh())
        fully_shard([net.norm, net.head], mesh=mesh())
    return net if way == "parts" else fully_shard(net, mesh=mesh())


def everything(la):
    """Numbers of a fitted posterior by every method that computes with the model."""
    x, _ = tasks.examples(5)[:]
    found = tasks.numbers(la)
    for method, samples in (("map", None), ("glm-mc", 4), ("nn", 4)):
        found[method] = la.predict(x, method, samples, tasks.generator(7)).probs
    found["grid"] = torch.stack([p.probs for p in la.predict_grid(x, [0.1, 1.0])])
    found["epistemic"] = la.uncertainty(x, generator=tasks.generator(8)).epistemic
    found["samples"] = la.sample(2, tasks.generator(9))
    found["names"] = (la.param_names, la.block_names, repr(la))
    return found


def fits(rank, way, curvatures):
    """Posteriors of the split network and of the plain one, in the same processes."""
    found = []
    for curvature in curvatures:
        options = {"rank": 5} if curvature == "lowrank" else {}
        found.append(
            [
                everything(Laplace(net, curvature=curvature, **options).fit(tasks.loader()))
                for net in (split(way), tasks.network())
            ]
        )
    return found


def tune_and_evaluate(rank, is_split):
    la = Laplace(split() if is_split else tasks.network()).fit(tasks.loader())
    tuned = la.tune(tasks.loader(), grid=[0.01, 1.0, 100.0])
    report = la.evaluate(tasks.loader(), ood={"shifted": tasks.shifted(tasks.SIZE)})
    kinds = la.tune(method="marglik", per="kind")
    return {
        "table": [row["nll"] for row in tuned.table],
        "best": tuned.prior_precision,
        "kinds": kinds.prior_precision,
        **report,
    }


def save_and_load(rank, folder):
    """Files and folders of the split network read for the plain one, and the other way round."""
    found = []
    for number, (of_file, other) in enumerate(((split, tasks.network), (tasks.network, split))):
        la = Laplace(of_file(), curvature="ekfac").fit(tasks.loader())
        for parts in (False, True):
            path = folder / f"{number}-{parts}"
            la.save(path, parts=parts)
            found.append(tasks.numbers(Laplace.load(path, other())))
    return found


def products(rank, name):
    kind, options = tasks.OPERATORS[name]
    if "fisher" in options:
        options = {**options, "generator": tasks.generator(3)}
    net = split()
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))
    A = kind(net, loss, tasks.loader(), **options)
    V = torch.randn(A.shape[0], 3, generator=tasks.generator(4), dtype=torch.float64)
    return {"N": A.num_data, "product": A @ V, "again": A @ V}


def quadratic(rank):
    q = Quadratic.from_data(split(), nn.CrossEntropyLoss(), tasks.loader())
    return {"value": q.value, "gradient": q.gradient, "step": q.newton_step("exact", damping=0.1)}


# ------------------------------------------------------------- the user's model is untouched


def train(net, optimizer):
    """A step of training on this process's part of a batch."""
    x, y = tasks.examples()[:]
    ranks = dist.get_world_size()
    part = slice(dist.get_rank(), 36, ranks)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x[part]), y[part]).backward()
    optimizer.step()


def looks(net):
    """All that there is to see of a model."""
    tensors = {}
    for name, p in net.named_parameters():
        local = p.to_local() if isinstance(p, DTensor) else p
        place = (type(p).__name__, str(getattr(p, "placements", None)), id(p), local.data_ptr())
        grad = None if p.grad is None else p.grad.to_local().clone()
        tensors[name] = (
            *place,
            p._version,
            local._version,
            p.requires_grad,
            local.detach().clone(),
            grad,
        )
    modules = {}
    for path, m in net.named_modules():
        hooks = [list(value) for key, value in vars(m).items() if "hooks" in key]
        modules[path] = (type(m).__name__, m.training, list(vars(m)), hooks)
    return tensors, modules


def same(one, other):
    """Whether two of them are the same, tensors to the last bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


class Interrupted(tasks.Faulty):
    def __getitem__(self, index):
        if index >= tasks.SIZE - 3:
            raise KeyboardInterrupt
        return self.entries[index]


def fail(net, rank, fault):
    """A fit that ends with an error or Ctrl-C on one process, and so on all."""
    data = tasks.examples()
    if rank == 1:
        data = Interrupted(fault) if fault == "interrupt" else tasks.Faulty(fault)
    loader = DataLoader(data, batch_sampler=ShardedBatches(data, tasks.BATCH))
    error = None
    try:
        Laplace(net).fit(loader)
    except BaseException as found:
        error = str(found)
    assert error is not None
    return error


def borrow(rank, how):
    """Whether a model looks the same after it was borrowed, and trains on as one that was not."""
    nets = [split(), split()]
    for net in nets:
        net.hidden.bias.requires_grad_(False)
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer)
    before, error = looks(nets[0]), None
    if how == "fit":
        everything(Laplace(nets[0]).fit(tasks.loader()))
    else:
        error = fail(nets[0], rank, how)
    is_same = same(before, looks(nets[0]))
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer)
    shards = [[p.to_local() for p in net.parameters()] for net in nets]
    return {"same": is_same, "trained": same(*shards), "error": error}


def fit_after_a_forward_pass(rank):
    """torch leaves the outermost parameters whole after a forward pass without a backward one."""
    net = split()
    x, _ = tasks.examples(5)[:]
    with torch.no_grad():
        net(x)
    assert not isinstance(net.grouped.weight, DTensor)
    found = tasks.numbers(Laplace(net).fit(tasks.loader()))
    with torch.no_grad():
        found["outputs"] = net(x)
    return found


def change(rank):
    """What is said of a model that was trained on, and what operators do then."""
    net = split()
    la = Laplace(net).fit(tasks.loader())
    loss = nn.CrossEntropyLoss()
    A = tasks.GGN(net, loss, tasks.loader())
    v = torch.randn(A.shape[0], generator=tasks.generator(4), dtype=torch.float64)
    before = A @ v
    with torch.no_grad():
        net.head.weight.mul_(2)
    after = A @ v
    error = None
    try:
        la.predict(tasks.examples(2)[:][0])
    except RuntimeError as found:
        error = str(found)
    plain = tasks.network()
    with torch.no_grad():
        plain.head.weight.mul_(2)
    expected = tasks.GGN(plain, loss, tasks.loader()) @ v
    return {"error": error, "before": before, "after": after, "expected": expected}


# ------------------------------------------------------------------------- what is sent, and when


def count(rank, batch):
    """How many tensors are gathered, by what is done."""
    counts = {}

    def counted(what, function):
        with CommDebugMode() as messages:
            found = function()
        of_kinds = messages.get_comm_counts().items()
        counts[what] = sum(number for kind, number in of_kinds if "all_gather" in str(kind))
        return found

    net = split()
    counts["split"] = sum(isinstance(p, DTensor) for p in net.parameters())
    la = counted("construction", lambda: Laplace(net))
    counted("fit", lambda: la.fit(tasks.loader(batch=batch), num_data=tasks.SIZE))
    x, _ = tasks.examples(6)[:]
    counted("predict", lambda: la.predict(x))
    counted("evaluate", lambda: la.evaluate(tasks.loader(batch=batch)))
    counted("names", lambda: (la.param_names, repr(la), la.prior_mean, la.sample(2)))
    return counts


def predict_within(rank):
    """Each process predicts other inputs, and as often as it likes."""
    net, plain = split(), tasks.network()
    la, of_plain = (Laplace(model).fit(tasks.loader(), replicate=True) for model in (net, plain))
    x, _ = tasks.examples(7)[:]
    with gathered(net):
        found = torch.cat([la.predict(part).probs for part in x.split(1 + rank)])
        with CommDebugMode() as messages:
            la.predict(x)
            loaded = la.sample(1, tasks.generator(0))
    assert messages.get_total_counts() == 0
    expected = torch.cat([of_plain.predict(part).probs for part in x.split(1 + rank)])
    assert torch.equal(loaded, of_plain.sample(1, tasks.generator(0)))
    error = None
    with suppress(ZeroDivisionError), gathered(net):
        raise ZeroDivisionError
    with gathered(net):
        with torch.no_grad():
            net.head.weight.mul_(2)
        try:
            la.predict(x)
        except RuntimeError as told:
            error = str(told)
    return {"found": found, "expected": expected, "error": error}


def be_killed(rank, which):
    """A process that is killed after it has gathered half of the parameters."""
    agreement.SILENCE = 5.0
    whole, seen = split_model.whole, []

    def deadly(parameter):
        seen.append(parameter)
        if rank == which and len(seen) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(parameter)

    with mock.patch.object(split_model, "whole", deadly):
        return _fit(split())


# ------------------------------------------------------------------------------- what is refused


def _fit(net):
    return tasks.numbers(Laplace(net).fit(tasks.loader()))


def in_half_precision(rank):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return _fit(fully_shard(tasks.network(), mesh=mesh(), mp_policy=policy))


def with_half_outputs(rank):
    policy = MixedPrecisionPolicy(output_dtype=torch.float32)
    return _fit(fully_shard(tasks.network(), mesh=mesh(), mp_policy=policy))


def with_sums_in_half_precision(rank):
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    return _fit(fully_shard(tasks.network(), mesh=mesh(), mp_policy=policy))


def offloaded(rank):
    net = fully_shard(
        tasks.network(), mesh=mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False)
    )
    return _fit(net)


def replicated_too(rank):
    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return _fit(fully_shard(tasks.network(), mesh=two))


def over_some(rank):
    each = init_device_mesh("cpu", (2, 1), mesh_dim_names=("which", "shard"))["shard"]
    return _fit(fully_shard(tasks.network(), mesh=each))


def of_integers(rank):
    net = tasks.network()
    net.codes = nn.Parameter(torch.arange(4), requires_grad=False)
    return _fit(fully_shard(net, mesh=mesh()))


def on_one_rank(rank):
    of_both = mesh()
    return _fit(fully_shard(tasks.network(), mesh=of_both) if rank else tasks.network())


def in_other_ways(rank):
    of_both = mesh()
    net = tasks.network()
    fully_shard(net.head, mesh=of_both)
    return _fit(net if rank else fully_shard(net, mesh=of_both))


def alone_with_it(rank):
    net = split()
    with alone():
        return _fit(net)


def without_fully_shard(rank):
    net = tasks.network()
    net.head.weight = nn.Parameter(distribute_tensor(net.head.weight.data, mesh()))
    return _fit(net)


def diverged(rank):
    net = split()
    if rank == 1:
        net.head.weight.to_local().data.fill_(torch.nan)
    return _fit(net)


def with_a_split_prior(rank):
    net = split()
    return Laplace(net, prior_mean=net.state_dict())


def optimised(rank):
    return DebiasedHessianFree(split().parameters())
