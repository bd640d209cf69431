"""Tasks for the processes of `processes.py`: likelihoods, links, entries, weights and operators.

Each task fits, tunes and evaluates data that the processes share, and returns its numbers.
"""

import a_run
import torch
from spectra import generator
from torch import nn
from torch.utils.data import DataLoader, StackDataset, TensorDataset

from laplace_debias import Conformal, GaussianPrior, Laplace, Ordinal, ShardedBatches
from laplace_debias.assessment import assess
from laplace_debias.assessment.methods import ISOTONIC, NETWORK, PLATT, VECTOR
from laplace_debias.compat.laplace_torch import Laplace as LaplaceTorch
from laplace_debias.curvature import GGN, BradleyTerry, FunctionModel, Subnetwork
from laplace_debias.linalg import diagonal, inverse, trace
from laplace_debias.operators import Identity

SIZE = 23
GRID = [0.1, 1.0, 10.0]


def network(num_outputs):
    torch.manual_seed(2)
    layers = nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, num_outputs)
    return nn.Sequential(*layers).double().eval()


def inputs(seed=1):
    return torch.randn(SIZE, 4, generator=generator(seed), dtype=torch.float64)


def classes(num_classes):
    return torch.randint(num_classes, (SIZE,), generator=generator(3))


def sharded(*tensors):
    """A loader of examples that the processes share."""
    data = TensorDataset(*tensors)
    return DataLoader(data, batch_sampler=ShardedBatches(data, 6))


def sharded_pairs():
    """Preferences between two inputs, `((a, b), y)`."""
    pairs = TensorDataset(inputs(), inputs(seed=2))
    data = StackDataset(pairs, TensorDataset(classes(2)))
    sampler = ShardedBatches(data, 6)
    return DataLoader(data, batch_sampler=sampler, collate_fn=collated_pairs)


def collated_pairs(examples):
    first, second, labels = zip(*((a, b, y) for (a, b), (y,) in examples), strict=True)
    return (torch.stack(first), torch.stack(second)), torch.stack(labels)


def tuned_and_evaluated(la, data, x, **options):
    """The numbers of a posterior that is fitted, tuned and evaluated on the same data."""
    la.fit(data)
    result = la.tune(data, grid=GRID, **options)
    report = la.evaluate(data)
    mean, covariance = la.functional(x)
    return {
        "scores": torch.tensor([row["nll"] for row in result.table]),
        "evidence": la.log_marginal_likelihood(),
        "mean": mean,
        "covariance": covariance,
        **{name: torch.tensor([m.value, m.low, m.high]) for name, m in report.items()},
    }


def ordinal(rank):
    la = Laplace(network(1), Ordinal([-0.5, 0.2, 0.9]))
    return tuned_and_evaluated(la, sharded(inputs(), classes(4)), inputs())


def poisson(rank):
    counts = torch.randint(6, (SIZE, 2), generator=generator(4))
    return tuned_and_evaluated(Laplace(network(2), "poisson"), sharded(inputs(), counts), inputs())


def bradley_terry(rank):
    la = Laplace(BradleyTerry(network(1)), "binary")
    return tuned_and_evaluated(la, sharded_pairs(), (inputs(), inputs(seed=2)))


def subnetwork(rank):
    la = Laplace(Subnetwork(network(3), [0, 7, 21, 30, 41]), curvature="full")
    return tuned_and_evaluated(la, sharded(inputs(), classes(3)), inputs())


def function_of_parameters(rank):
    """A posterior of the parameters of a function."""
    parameters = {
        "W": torch.randn(4, 3, generator=generator(8), dtype=torch.float64),
        "b": torch.zeros(3, dtype=torch.float64),
    }
    model = FunctionModel(lambda p, x: (x @ p["W"]).tanh() + p["b"], parameters)
    data = sharded(inputs(), classes(3))
    return tuned_and_evaluated(Laplace(model, curvature="full"), data, inputs())


def precision_per_parameter(rank):
    """A posterior under a prior with one precision per parameter."""
    model = network(3)
    names = [name for name, _ in model.named_parameters()]
    size = sum(parameter.numel() for parameter in model.parameters())
    precisions = torch.linspace(0.5, 2, size, dtype=torch.float64)
    prior = GaussianPrior(torch.zeros_like(precisions), precisions, names)
    la = Laplace(model, curvature="diag", prior=prior)
    return tuned_and_evaluated(la, sharded(inputs(), classes(3)), inputs())


def bridge(rank):
    data = sharded(inputs(), classes(3))
    return tuned_and_evaluated(Laplace(network(3)), data, inputs(), link="bridge")


def weighted_evaluation(rank):
    """An evaluation of examples with weights; some have weight 0."""
    weights = torch.arange(SIZE) % 3
    data = sharded(inputs(), classes(3), weights.double())
    la = Laplace(network(3)).fit(data)
    report = la.evaluate(data)
    return {name: torch.tensor([m.value, m.low, m.high]) for name, m in report.items()}


def gradients_in_inputs(rank):
    """Derivatives of a predictive's entropy in the inputs."""
    la = Laplace(network(3)).fit(sharded(inputs(), classes(3)))
    x = inputs(seed=5).requires_grad_()
    (gradient,) = torch.autograd.grad(la.predict(x, differentiable=True).entropy().sum(), x)
    return {"gradient": gradient}


def compat(rank):
    """The methods of laplace-torch that read a loader."""
    data = sharded(inputs(), classes(3))
    la = LaplaceTorch(network(3), "classification", subset_of_weights="all")
    la.fit(data)
    la.optimize_prior_precision(method="gridsearch", val_loader=data, grid_size=5)
    chosen = la.prior_precision
    la.fit(data, override=False)
    la.optimize_prior_precision(method="marglik")
    restored = LaplaceTorch(network(3), "classification", subset_of_weights="all")
    restored.load_state_dict(la.state_dict())
    if rank == 1:
        la.state_dict()  # The other processes need not take part.
    return {
        "restored": restored(inputs(seed=5)),
        "chosen": torch.as_tensor(chosen),
        "prior precision": torch.as_tensor(la.prior_precision),
        "evidence": la.log_marginal_likelihood(),
        "probabilities": la(inputs(seed=5)),
    }


def conformal_by_group(rank):
    """Intervals by groups of the inputs."""
    y = torch.randn(SIZE, 1, generator=generator(6), dtype=torch.float64)
    data = sharded(inputs(), y)
    la = Laplace(network(1), "regression", sigma=0.7).fit(data)
    conformal = Conformal(la, groups=lambda x: (x[:, 0] > 0).long()).calibrate(data, level=0.6)
    report = conformal.evaluate(data)
    # One of the processes has no example.
    report_of_one_example = conformal.evaluate(sharded(inputs()[:1], y[:1]))
    return {
        **{f"quantile {group}": value for group, value in conformal.quantiles.items()},
        **{name: torch.tensor([m.value, m.low, m.high]) for name, m in report.items()},
        **{
            f"{name} of one example": torch.tensor(m.value)
            for name, m in report_of_one_example.items()
        },
    }


def estimates(rank):
    """Estimators and inverses of operators, of a module and of a function of parameters."""
    data = sharded(inputs(), classes(3), torch.rand(SIZE, generator=generator(7)).double())
    parameters = {
        "W": torch.randn(4, 3, generator=generator(8), dtype=torch.float64),
        "b": torch.zeros(3, dtype=torch.float64),
    }
    function = FunctionModel(lambda p, x: (x @ p["W"]).tanh() + p["b"], parameters)
    numbers = {}
    for name, model in (("module", network(3)), ("function", function)):
        A = GGN(model, nn.CrossEntropyLoss(), data)
        v = torch.randn(A.shape[0], generator=generator(9), dtype=torch.float64)
        options = {"num_matvecs": 8, "generator": generator(5)}
        numbers[f"trace of the {name}"] = trace(A, "xtrace", **options).value
        numbers[f"diagonal of the {name}"] = diagonal(A, "xdiag", **options).value
        damped = A + 0.3 * Identity(A.shape[0], dtype=torch.float64)
        numbers[f"solution of the {name}"] = inverse(damped, "lsmr", tol=1e-13) @ v
    return numbers


RECALIBRATED = {
    "classification": (NETWORK, VECTOR, ISOTONIC),
    "binary": (NETWORK, PLATT, ISOTONIC),
}


def recalibrated(rank, task, folder):
    """A run folder with recalibrated networks."""
    if task == "classification":
        loaded = a_run.loaded_images(num_test=30, num_ood=0)
    else:
        loaded = a_run.loaded_yes_no(num_test=30)
    return str(assess(loaded, folder, RECALIBRATED[task]))
