"""Tasks for the processes of `processes.py`, with a model that `fully_shard` has split."""

import gc
import itertools
from pathlib import Path

import torch
from rank_tasks import Deadly
from spectra import generator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, ShardedBatches, alone
from laplace_debias.curvature import GGN

SIZE = 19
BATCH = 7
WIDTH = 11


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self, d_in, d_out):
        super().__init__()
        self.base = nn.Linear(d_in, d_out)
        self.down = nn.Linear(d_in, 2, bias=False)
        self.up = nn.Linear(2, d_out, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    """A normalisation, an adapted layer, and a frozen weight that is used without its module."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.adapted = Adapted(WIDTH, WIDTH)
        self.mixing = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = self.adapted(self.norm(x)).tanh()
        return x + nn.functional.linear(hidden, self.mixing.weight.T, self.mixing.bias)


def whole_network(dtype=torch.float64):
    torch.manual_seed(5)
    layers = [nn.Linear(4, WIDTH), nn.Tanh(), Block(), Block(), nn.Linear(WIDTH, 3)]
    model = nn.Sequential(*layers).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_bayesian(name))
    return model


def is_bayesian(name):
    return "down" in name or "up" in name or name.startswith("4.")


def sharded(num_ranks, dtype=torch.float64):
    """The network with its blocks and the rest sharded, without adapters and head."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    model = whole_network(dtype)
    replicated = {p for name, p in model.named_parameters() if is_bayesian(name)}
    for module in (model[2], model[3], model):
        fully_shard(module, mesh=mesh, ignored_params=replicated)
    return model


def examples(dtype=torch.float64):
    x = torch.randn(SIZE, 4, generator=generator(7), dtype=dtype)
    return TensorDataset(x, torch.randint(3, (SIZE,), generator=generator(8)))


def numbers(la, x, folder, name):
    """Return the numbers of a fit and of its predictions, also after saving and loading."""
    la.save(Path(folder) / f"{name}.safetensors")
    again = Laplace.load(Path(folder) / f"{name}.safetensors", la.model)
    mean, covariance = la.functional(x)
    return {
        "mean": la.mean,
        "precision": la.posterior.precision.to_dense(),
        "prior": la.prior_precision,
        "evidence": la.log_marginal_likelihood().detach(),
        "outputs": mean,
        "covariance": covariance,
        "probs": la.predict(x).probs,
        "loaded": again.predict(x).probs,
    }


def verbs(rank, num_ranks, curvature, mode, folder, dtype=torch.float64):
    """All verbs with the sharded model; the inputs of predictions differ between the ranks."""
    data = examples(dtype)
    if num_ranks:
        model = sharded(num_ranks, dtype)
        parameters = {name: id(p) for name, p in model.named_parameters()}
        outputs = model(data[:2][0])
        loader = DataLoader(data, batch_sampler=ShardedBatches(data, BATCH))
    else:
        model = whole_network(dtype)
        loader = DataLoader(data, batch_size=BATCH)
    la = Laplace(model, curvature=curvature).fit(loader, mode=mode, generator=generator(2))
    la.tune(loader, grid=[0.1, 1.0, 10.0])
    result = numbers(la, data[: 3 + 2 * rank][0], folder, curvature)
    result["fingerprint"] = la._state.fitted_model.frozen_fingerprint
    result["nll"] = torch.tensor(la.evaluate(loader)["nll"].value)
    if num_ranks:
        # Samples are compared with those of a posterior from the same file, because a fit by one
        # process may have other vectors in a common eigenspace.
        path = Path(folder) / f"{curvature}.safetensors"
        unsharded = Laplace.load(path, whole_network(dtype))
        tolerance = 1e-10 if dtype == torch.float64 else 1e-4
        x = data[:3][0]
        probs, unsharded_probs = (
            posterior.predict(x, method="nn", samples=3, generator=generator(1)).probs
            for posterior in (la, unsharded)
        )
        torch.testing.assert_close(probs, unsharded_probs, rtol=tolerance, atol=tolerance)
        assert {name: id(p) for name, p in model.named_parameters()} == parameters
        assert torch.equal(model(data[:2][0]), outputs)
    return result


def unequal_parts(rank, num_ranks):
    """A fit in which the processes have different numbers and sizes of batches."""
    data = examples()
    batches_by_rank = [
        [data[0:1], data[1:6], data[6:7]],
        [data[7:12], data[12:16]],
        [data[16:19]],
    ]
    if num_ranks == 0:
        la = Laplace(whole_network()).fit(list(itertools.chain.from_iterable(batches_by_rank)))
    else:
        la = Laplace(sharded(num_ranks)).fit(batches_by_rank[rank])
    return la.posterior.precision.to_dense()


def be_killed(rank, num_ranks, killed_rank):
    """Fit a sharded model, while one process is killed when it reads its data."""
    data = Deadly(examples()) if rank == killed_rank else examples()
    la = Laplace(sharded(num_ranks))
    return la.fit(DataLoader(data, batch_sampler=ShardedBatches(data, BATCH)))


def count_whole_weights():
    """Count the tensors in memory that have the shape of a whole weight."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    shape = (WIDTH, WIDTH)
    return sum(x.shape == shape and x.untyped_storage().nbytes() > 0 for x in tensors)


def whole_weights_in_graph(rank, num_ranks):
    """Count the whole frozen weights that exist between the forward and the backward pass."""
    la = Laplace(sharded(num_ranks))
    network = la._state.spec.network(la.param_names)
    for name, parameter in network.named_parameters():
        if is_bayesian(name):
            parameter.requires_grad_()
    count_before_pass = count_whole_weights()
    outputs = network(examples()[:3][0])
    count = count_whole_weights() - count_before_pass
    outputs.sum().backward()
    plain = whole_network()
    plain(examples()[:3][0]).sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return count, gradients, expected


def refused(rank, num_ranks, case):
    model = sharded(num_ranks)
    data = [examples()[:4]]
    if case == "bayesian":
        Laplace(model, params=["4.weight", "2.mixing.weight"])
    if case == "trainable":
        for parameter in model.parameters():
            parameter.requires_grad_()
        Laplace(model)
    if case == "operator":
        GGN(model, nn.CrossEntropyLoss(), data)
    if case == "differentiable":
        x = data[0][0].requires_grad_()
        Laplace(model).fit(
            DataLoader(examples(), batch_sampler=ShardedBatches(examples(), BATCH))
        ).predict(x, differentiable=True)
    if case == "alone":
        with alone():
            Laplace(model).fit(data)
    return "accepted"
