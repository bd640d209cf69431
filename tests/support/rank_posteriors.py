"""What processes do with a posterior that they share out by block."""

import contextlib
import hashlib
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from rank_tasks import (
    SIZE,
    broken_or_whole,
    examples,
    generator,
    laplace,
    loader,
    messages_of,
    network,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, ShardedBatches, alone
from laplace_debias.curvature.fits import saved_passes
from laplace_debias.laplace import grouping
from laplace_debias.laplace.laplace import predict_grids

FEW = 5
_PARTS = ("U_G", "U_A", "magnitudes")


def check(found, expected, rel=1e-12):
    """Numbers of a process are those that are expected."""
    assert isinstance(found, dict), found
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        of_one = torch.as_tensor(value, dtype=torch.float64)
        error = (torch.as_tensor(found[key], dtype=torch.float64) - of_one).norm()
        assert error <= rel * of_one.norm(), key


def bytes_of_blocks(curvature):
    """Eigenvectors of both sides and magnitudes, by hand from the network."""
    found = {}
    for name, parameter in network().named_parameters():
        layer, _, kind = name.rpartition(".")
        groups = {"grouped": 2, "depthwise": 4}.get(layer, 1)
        numbers = parameter.numel()
        if curvature != "diag":
            d, e = (
                (parameter.shape[0] // groups, parameter[0].numel()) if kind == "weight" else (0, 0)
            )
            if layer == "depthwise" and kind == "weight":
                d, e = e, 1
            if parameter.ndim == 1:
                groups, d, e = 1, len(parameter), 1
            numbers += groups * (d * d + e * e)
        found[name] = 8 * numbers
    return found


def inputs(size=FEW):
    return examples(size)[:][0]


def fitted(curvature="kfac", mode="full", fit_options=(), **options):
    la = laplace(curvature, **options)
    return la.fit(loader(), mode=mode, generator=generator(5), **dict(fit_options))


def _uncertainty(found):
    return torch.stack([found.total, found.aleatoric, found.epistemic])


def _with_slope(la):
    delta = torch.full((len(la.block_names),), 0.7, dtype=torch.float64, requires_grad=True)
    value = la.log_marginal_likelihood(delta)
    (slope,) = torch.autograd.grad(3 * value, delta)
    return torch.cat([value.detach().reshape(1), slope])


# From a posterior and inputs to numbers that every process must have.
CALLS = {
    "sample": lambda la, x: la.sample(3, generator(7)),
    "functional": lambda la, x: la.functional(x)[1],
    "variances": lambda la, x: la.functional(x, diagonal=True)[1],
    "some outputs": lambda la, x: la.functional(x, outputs=2)[1],
    "joint": lambda la, x: la.functional(x, joint=True)[1],
    "glm": lambda la, x: la.predict(x).probs,
    "bridge": lambda la, x: la.predict(x, link="bridge").probs,
    "glm sampled": lambda la, x: la.predict(x, samples=4, generator=generator(8)).probs,
    "glm-mc": lambda la, x: la.predict(x, "glm-mc", 3, generator(9)).probs,
    "nn": lambda la, x: la.predict(x, "nn", 3, generator(9)).probs,
    "map": lambda la, x: la.predict(x, "map").probs,
    "grid": lambda la, x: torch.stack([p.probs for p in la.predict_grid(x, [0.1, 10.0])]),
    "uncertainty": lambda la, x: _uncertainty(la.uncertainty(x, generator=generator(3))),
    "evidence": lambda la, x: _with_slope(la),
    "covariance": lambda la, x: la.posterior.covariance @ la.mean,
    "precision": lambda la, x: la.posterior.precision @ la.mean,
    "scale": lambda la, x: la.posterior.scale @ la.mean,
}


def calls(rank, curvature="kfac", mode="full", fit_options=(), **options):
    """Numbers of all calls, at a prior precision of each block, and at another temperature."""
    la = fitted(curvature, mode, fit_options, **options)
    la.prior_precision = torch.linspace(0.5, 2.0, len(la.block_names), dtype=torch.float64)
    la.temperature = 0.8
    return {name: call(la, inputs()) for name, call in CALLS.items()}


def _groups_of(sizes):
    """Fits under a bound go through groups of so many blocks, whatever the bound."""
    original = grouping._grouped

    def of_sizes(planned, most, is_stored):
        return replace(original(planned, most, is_stored), sizes=sizes)

    return patch.object(grouping, "_grouped", of_sizes)


def calls_in_groups(rank, curvature, mode, sizes, replicate):
    """As `calls`, of a fit in groups of so many blocks."""
    with _groups_of(sizes):
        return calls(rank, curvature, mode, {"memory_bound": 2**40, "replicate": replicate})


def held_in_groups(rank, sizes):
    """Bytes of the blocks that a process holds after a fit in groups."""
    whole = laplace("kfac").plan(loader(), memory_bound=2**40)
    with _groups_of(sizes):
        la = fitted(fit_options={"memory_bound": 2**40})
    blocks = la.posterior.curvature.blocks.values()
    parts = [getattr(block, part, None) for block in blocks for part in _PARTS]
    most = sum(part.nbytes for part in parts if part is not None)
    return {"bytes": most, "planned": whole.posterior - la.mean.nbytes}


def break_off_in_groups(rank, folder, stops, sizes):
    """A fit in groups that saves after every batch; each process fails before some batch."""
    with patch.object(saved_passes, "EVERY", 0.0), _groups_of(sizes):
        laplace().fit(
            broken_or_whole(stops[rank]),
            generator=generator(5),
            resume=folder,
            memory_bound=2**40,
        )


def resumed_in_groups(rank, folder, sizes):
    """The curvature of a fit in groups."""
    with _groups_of(sizes):
        la = laplace().fit(
            broken_or_whole(), generator=generator(5), resume=folder, memory_bound=2**40
        )
    return la.posterior.curvature.to_dense()


def calls_of_last_layer(rank):
    """Two blocks: with more than two processes some hold none."""
    return calls(rank, params="last_layer")


def functional_of_diagonal(rank):
    return fitted("diag").functional(inputs())[1]


def several(rank, curvatures, replicated):
    """Grids of two posteriors in one call, of which the second may be whole."""
    model = network()
    fits = [
        Laplace(model, curvature=curvature).fit(loader(), replicate=replicate)
        for curvature, replicate in zip(curvatures, (False, replicated), strict=True)
    ]
    found = predict_grids(fits, inputs(), [[0.1, 1.0], [1.0, 10.0]])
    return torch.stack([p.probs for of_fit in found for p in of_fit])


class Tokens(nn.Module):
    """A language model: an embedding that the head shares, and a layer between."""

    def __init__(self, tied):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.hidden(self.embedding(tokens)).tanh())


def predict_tokens(rank, tied):
    """Predictions at one position, which go through the head."""
    torch.manual_seed(1)
    model = Tokens(tied).double().eval()
    tokens = torch.randint(7, (12, 3), generator=generator(2))
    data = TensorDataset(tokens, tokens.roll(-1, 1))
    batches = DataLoader(data, batch_sampler=ShardedBatches(data, 5))
    la = Laplace(model, curvature="ekfac").fit(batches)
    return {
        "last": la.predict(tokens[:4], positions=-1).probs,
        "two": la.functional(tokens[:4], positions=[0, 2], outputs=2)[1],
        "all": la.functional(tokens[:2], diagonal=True)[1],
        "evidence": la.log_marginal_likelihood(),
    }


def regression(rank):
    """Everything that is tuned, of a regression: two layers, four blocks."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double().eval()
    x = torch.randn(SIZE, 3, generator=generator(1), dtype=torch.float64)
    noise = 0.3 * torch.randn(SIZE, 2, generator=generator(2), dtype=torch.float64)
    data = TensorDataset(x, x[:, :2].sin() + noise)
    batches = DataLoader(data, batch_sampler=ShardedBatches(data, 16))
    found = {}
    for name, options in {
        "evidence": {"method": "marglik", "sigma": False},
        "noise": {"method": "marglik", "sigma": True},
        "kinds": {"method": "marglik", "sigma": False, "per": "kind"},
        "blocks and noise": {"method": "marglik", "sigma": True, "per": "block"},
        "data": {"loader": batches, "grid": [0.1, 1.0, 10.0]},
        "refined": {"loader": batches},
    }.items():
        la = Laplace(model, "regression", sigma=None if name == "refined" else 0.5)
        tuned = la.fit(batches).tune(**options)
        found[name] = torch.tensor([tuned.value, la.log_marginal_likelihood()])
        found[f"{name}: δ"] = la.prior_precision
    found["interval"] = la.marginals(x[:3]).icdf(torch.tensor(0.975, dtype=torch.float64))
    found["draws"] = la.marginals(x[:3], samples=4, generator=generator(2)).mean
    report = la.evaluate(batches, ood={"far": far(x)}, intervals=False)
    return found | dict(report)


def far(x):
    """Inputs that are far from those of the fit."""
    data = TensorDataset(10 * x, x)
    return DataLoader(data, batch_sampler=ShardedBatches(data, 9))


def search(rank):
    """A search over held-out data of a classification, with all its passes."""
    tuned = fitted().tune(loader())
    rows = [[row["prior_precision"], row["nll"], row["standard_error"]] for row in tuned.table]
    return {"best": tuned.prior_precision, "rows": rows}


def unseeded(rank):
    """Samples without a generator: rank 0's state of torch's counts."""
    la = fitted()
    torch.manual_seed(7 + rank)
    before = torch.get_rng_state()
    found = la.sample(2), la.predict(inputs(), samples=3).probs
    moved = not torch.equal(before, torch.get_rng_state())
    return {"sample": found[0], "probs": found[1], "moved": moved}


def held(rank, curvature, replicate=False):
    """Bytes of the storages that the curvature holds, and the names of its blocks."""
    la = fitted(curvature, fit_options={"replicate": replicate})
    tensors, names = [], []
    for name, block in la.posterior.curvature.blocks.items():
        parts = [getattr(block, part, None) for part in _PARTS]
        parts = [part for part in parts if part is not None]
        names += [name] if parts else []
        tensors += parts
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    planned = laplace(curvature).plan(loader(), replicate=replicate).posterior
    return {
        "names": names,
        "bytes": sum(storages.values()),
        "planned": planned - la.mean.nbytes,
        "repr": repr(la),
    }


def count_calls(rank, num_examples):
    """The collectives of some calls, `(name, bytes)`; None for what is pickled."""
    la, x = fitted(), inputs(num_examples)
    data = DataLoader(
        TensorDataset(*examples(num_examples)[:]),
        batch_sampler=ShardedBatches(range(num_examples), 6),
    )
    counted = {
        "functional": lambda: la.functional(x),
        "predict": lambda: la.predict(x),
        "grid": lambda: la.predict_grid(x, [0.1, 1.0, 10.0]),
        "sample": lambda: la.sample(4),
        "evidence": la.log_marginal_likelihood,
        "product": lambda: la.posterior.covariance @ la.mean,
        "evaluate": lambda: la.evaluate(data, intervals=False),
        "gather": la.gather,
        "whole": lambda: (la.predict(x), la.sample(4), la.log_marginal_likelihood()),
    }
    return {name: messages_of(call) for name, call in counted.items()}


def save(rank, folder):
    """Checksums of the file that is saved sharded, and of that of the gathered posterior."""
    la = fitted("ekfac", prior_mean=0.1)
    found = []
    for name in ("sharded", "whole"):
        path = Path(folder) / name
        la.save(path)
        found.append(hashlib.sha256(path.read_bytes()).hexdigest())
        la.gather()
    with alone():
        read = Laplace.load(path, network()).functional(inputs())[1]
        return {"files": found, "read": read, "own": la.functional(inputs())[1]}


def save_parts(rank, folder):
    """What a sharded posterior says, which was saved in parts."""
    la = fitted("ekfac", prior_mean=0.1)
    la.save(folder, parts=True)
    return la.functional(inputs())[1]


def load(rank, path, mmap=False):
    """What `save` wrote, read by every process."""
    return Laplace.load(path, network(), mmap=mmap).functional(inputs())[1]


def each_its_own(rank):
    """After `gather` every process predicts for its own inputs, with its own prior precision."""
    la = fitted()
    la.gather()
    la.prior_precision = 1.0 + rank
    return la.predict(inputs() + rank).probs


def _alone(la, rank):
    with alone():
        la.predict(inputs())


def _other_inputs(la, rank):
    la.predict(inputs() + rank)


def _other_request(la, rank):
    la.functional(inputs(), diagonal=rank == 1)


def _other_prior(la, rank):
    la.prior_precision = 1.0 + rank
    la.sample(2)


def _other_vector(la, rank):
    return la.posterior.covariance @ (la.mean + rank)


def _other_call(la, rank):
    return la.sample(1) if rank else la.predict(inputs())


def _export(la, rank):
    la.export("nowhere.pt2", inputs())


def _changed(la, rank):
    if rank:
        la.model.head.bias.data += 1.0
    la.log_marginal_likelihood()
    la.predict(inputs())


def _no_folder(la, rank):
    la.save("/nowhere/posterior.safetensors")


def _one_block(la, rank):
    for block in la.posterior.curvature.blocks.values():
        block @ torch.ones(block.shape[0], dtype=torch.float64)


FAULTS = {
    fault.__name__.strip("_"): fault
    for fault in (
        *(_alone, _other_inputs, _other_request, _other_prior, _other_vector),
        *(_other_call, _export, _changed, _no_folder, _one_block),
    )
}


def fault(rank, name):
    """A call that is refused; and one that goes well behind it."""
    la = fitted()
    try:
        FAULTS[name](la, rank)
    except Exception as error:
        told = type(error).__name__, str(error)
    else:
        told = "nothing", ""
    la.prior_precision = 1.0
    with contextlib.suppress(RuntimeError):
        la.sample(1)
    return told


def option_on_one(rank, option, value):
    return fitted(fit_options={option: value} if rank == 0 else {})
