"""What the processes of `processes.py` do: fits and the like of data that they share."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, Quadratic, ShardedBatches
from laplace_debias.curvature import EKFAC, GGN, KFAC, EmpiricalFisher, Fisher, Hessian
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


def generator(seed):
    return torch.Generator().manual_seed(seed)


def examples(size=SIZE):
    g = generator(1)
    x = torch.randn(size, 2, 4, 4, generator=g, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (size,), generator=g))


def loader(size=SIZE, batch=BATCH, **options):
    data = examples(size)
    return DataLoader(data, batch_sampler=ShardedBatches(data, batch, **options))


def laplace(curvature="kfac", **options):
    if curvature == "lowrank":
        options["rank"] = 5
    return Laplace(network(), curvature=curvature, **options)


def numbers(la):
    """What a posterior is, whatever eigenvectors stand for it."""
    g = generator(2)
    V = torch.randn(len(la.mean), 3, generator=g, dtype=torch.float64)
    x, _ = examples(5)[:]
    return {
        "N": la.num_data,
        "C v": la.posterior.curvature @ V,
        "log evidence": la.log_marginal_likelihood(),
        "covariance": la.functional(x)[1],
    }


def fit(rank, curvature, mode, options, fit_options, size=SIZE, batch=BATCH):
    """A fit of shared data."""
    la = laplace(curvature, **options)
    la.fit(loader(size, batch), mode=mode, generator=generator(5), **fit_options)
    return numbers(la)


def fits(rank, cases, size=SIZE, batch=BATCH):
    """Several of them, one after the other."""
    return [fit(rank, *case, size, batch) for case in cases]


OPERATORS = {
    "hessian": (Hessian, {}),
    "ggn": (GGN, {}),
    "fisher": (Fisher, {"fisher": "mc", "mc_samples": 2}),
    "empirical fisher": (EmpiricalFisher, {}),
    "kfac": (KFAC, {"fisher": "mc"}),
    "ekfac": (EKFAC, {}),
}


def operator(name, data):
    kind, options = OPERATORS[name]
    if "fisher" in options:
        options = {**options, "generator": generator(3)}
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))
    return kind(network(), loss, data, **options)


def products(rank, name):
    """Products, and estimates that draw the same vectors on all processes."""
    A = operator(name, loader())
    V = torch.randn(A.shape[0], 3, generator=generator(4), dtype=torch.float64)
    return {
        "N": A.num_data,
        "product": A @ V,
        "trace": trace(A, num_matvecs=6, generator=generator(5)).value,
        "eigenvalues": eigsh(A, k=2, generator=generator(6)).values,
    }


def quadratic(rank):
    q = Quadratic.from_data(network(), nn.CrossEntropyLoss(), loader())
    return {"value": q.value, "gradient": q.gradient, "step": q.newton_step(damping=0.1)}


def tune_and_evaluate(rank, metric, size=SIZE):
    la = laplace().fit(loader(size))
    tuned = la.tune(loader(size), metric=metric, grid=[0.01, 1.0, 100.0])
    report = la.evaluate(loader(size), ood={"shifted": shifted(size)})
    la.tune(method="marglik")
    return {
        "table": [row[metric] for row in tuned.table],
        "best": tuned.prior_precision,
        "marginal": la.prior_precision,
        **report,
    }


def shifted(size):
    x, y = examples(size)[:]
    data = TensorDataset(3 * x + 1, y)
    return DataLoader(data, batch_sampler=ShardedBatches(data, 7))


def save(rank, folder):
    la = laplace("ekfac").fit(loader())
    path = Path(folder) / "posterior.safetensors"
    la.save(path)
    return numbers(Laplace.load(path, network()))
