"""Random sequences of verbs: after each step, the state is what the formulas make of the fit.

The curvature of each fit is read once, as a dense matrix. All later numbers are computed from this
matrix, the network's Jacobian and the settings, by the formulas of docs/method.md.
"""

import copy
import math
import random

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from laplace_debias import Laplace, Link

NUM_STEPS = 14
NUM_DATA = 24


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class SharedLayer(nn.Module):
    """A network that uses one of its layers twice."""

    def __init__(self, num_outputs: int):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, num_outputs)

    def forward(self, x):
        return self.last(self.first(self.first(x).tanh()).tanh())


def network(kind: str, num_outputs: int) -> nn.Module:
    torch.manual_seed(3)
    if kind == "shared":
        return SharedLayer(num_outputs).double().eval()
    layers = (nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, num_outputs))
    return nn.Sequential(*layers).double().eval()


def examples(likelihood: str, num_outputs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(NUM_DATA, 3, generator=generator(seed), dtype=torch.float64)
    if likelihood == "classification":
        return x, torch.randint(num_outputs, (NUM_DATA,), generator=generator(seed + 1))
    if likelihood == "binary":
        return x, torch.randint(2, (NUM_DATA,), generator=generator(seed + 1))
    y = torch.randn(NUM_DATA, num_outputs, generator=generator(seed + 1), dtype=torch.float64)
    return x, y


def interrupted(batches):
    """Yield one batch, as if Ctrl-C were pressed while the next one is read."""
    yield batches[0]
    raise KeyboardInterrupt


class Interrupted:
    """A loader that can be read repeatedly, but never to its end."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return interrupted(self.batches)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    # The dense inverse loses digits if `tune` chooses a small prior precision.
    assert actual.shape == expected.shape
    scale = expected.abs().max().clamp_min(1e-12)
    assert (actual - expected).abs().max() <= tolerance * scale


class Walk:
    """A posterior, and what it must be according to the steps that were taken."""

    def __init__(self, seed, likelihood, num_outputs, curvature, params, mode, kind):
        self.random = random.Random(seed)
        self.likelihood = likelihood
        self.num_outputs = num_outputs
        self.mode = mode
        self.model = network(kind, num_outputs)
        self.test_x = torch.randn(4, 3, generator=generator(100), dtype=torch.float64)
        self.options = {"curvature": curvature, "params": params}
        self.delta = torch.tensor(1.0, dtype=torch.float64)
        self.prior_mean = torch.zeros((), dtype=torch.float64)
        self.temperature = 1.0
        self.link = None
        self.sigma = torch.tensor(0.8, dtype=torch.float64) if likelihood == "regression" else None
        self.la = Laplace(self.model, likelihood, sigma=self.sigma, **self.options)
        self.num_fits = 0
        self.fit()

    # Steps of the walk.

    def fit(self) -> None:
        self.data = [self.new_batches()]
        self.la.fit(self.data[0], mode=self.mode, num_data=NUM_DATA)
        self.read_curvature()

    def update(self) -> None:
        if self.mode != "full" or len(self.data) == 3:
            return
        self.data.append(self.new_batches())
        self.la.update(self.data[-1])
        self.read_curvature()

    def set_prior_precision(self) -> None:
        shape = ()
        if self.la.block_names == self.la.param_names and self.random.random() < 0.5:
            shape = (len(self.la.block_names),)
        self.delta = 10 ** torch.empty(shape, dtype=torch.float64).uniform_(
            -1, 2, generator=generator(self.random.randrange(1000))
        )
        self.la.prior_precision = self.delta

    def set_prior_mean(self) -> None:
        self.prior_mean = torch.tensor(self.random.gauss(0, 1), dtype=torch.float64)
        self.la.prior_mean = self.prior_mean

    def set_temperature(self) -> None:
        self.temperature = self.random.uniform(0.5, 2)
        self.la.temperature = self.temperature

    def set_sigma(self) -> None:
        if self.sigma is None:
            return
        self.sigma = self.sigma * self.random.uniform(0.5, 2)
        self.la.sigma = self.sigma

    def set_link(self) -> None:
        if self.sigma is not None:
            return
        temperatures = [self.random.uniform(0.5, 2) for _ in range(3)]
        self.link = Link("probit", *temperatures)
        self.la.link = self.link

    def tune(self) -> None:
        sigma = self.sigma is not None
        link = None if sigma else "probit"
        tuned = self.la.tune(self.new_batches(), sigma=sigma or None, link=link)
        assert tuned.prior_precision == self.la.prior_precision
        self.read_settings()

    def tune_by_evidence(self) -> None:
        self.la.prior_mean = self.prior_mean = torch.zeros((), dtype=torch.float64)
        self.la.tune_evidence(sigma=self.sigma is not None)
        link = self.link
        self.read_settings()
        assert self.link == link

    def save_and_load(self, folder) -> None:
        path = folder / "posterior.safetensors"
        self.la.save(path)
        self.la = Laplace.load(path, self.model)

    def copy(self) -> None:
        self.la = copy.deepcopy(self.la)
        self.model = self.la.model

    def change_the_model_and_restore_it(self) -> None:
        parameter = self.model.get_parameter(self.la.param_names[-1])
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter += 1
        for call in (lambda: self.la.predict(self.test_x), lambda: self.la.update(self.data[0])):
            with pytest.raises(RuntimeError, match="changed"):
                call()
        with torch.no_grad():
            parameter.copy_(before)

    def switch_to_training(self) -> None:
        self.model.train()
        self.la.functional(self.test_x)
        assert self.model.training
        self.model.eval()

    def interrupt(self) -> None:
        loader = Interrupted(self.data[0])
        verb = self.random.choice([self.la.fit, self.la.update, self.la.tune, self.la.evaluate])
        with pytest.raises(KeyboardInterrupt):
            verb(loader)

    def pass_bad_targets(self) -> None:
        x, y = self.data[0][1]
        bad = y + self.num_outputs + 1 if self.sigma is None else torch.full_like(y, math.nan)
        verb = self.random.choice([self.la.fit, self.la.update, self.la.tune, self.la.evaluate])
        with pytest.raises(ValueError, match=r"label|NaN|target"):
            verb([self.data[0][0], (x, bad)])

    # What the state must be.

    def new_batches(self):
        self.num_fits += 1
        x, y = examples(self.likelihood, self.num_outputs, 10 * self.num_fits)
        return [(x[:10], y[:10]), (x[10:], y[10:])]

    def read_settings(self) -> None:
        """Take over what was chosen from the data; the choice itself has its own tests."""
        self.delta = self.la.prior_precision
        self.link = self.la.link
        if self.sigma is not None:
            self.sigma = self.la.sigma

    def deltas(self) -> torch.Tensor:
        """The prior precision of each parameter."""
        sizes = [self.model.get_parameter(name).numel() for name in self.la.param_names]
        if self.delta.ndim == 0:
            return self.delta.expand(sum(sizes))
        return self.delta.repeat_interleave(torch.tensor(sizes))

    def read_curvature(self) -> None:
        """Read N C, the curvature of all examples at σ = 1 and T = 1, as a dense matrix."""
        prior = self.deltas().diag()
        matrix = (self.la.posterior.precision.to_dense() - prior) * self.temperature
        if self.sigma is not None:
            matrix = matrix * self.sigma**2
        self.curvature = matrix

    def jacobian(self, x: torch.Tensor) -> torch.Tensor:
        """The Jacobian of the outputs, `[B, C, D]`."""
        parameters = {name: self.model.get_parameter(name).detach() for name in self.la.param_names}
        jacobians = jacrev(lambda p: functional_call(self.model, p, (x,)))(parameters)
        return torch.cat([jacobian.flatten(2) for jacobian in jacobians.values()], 2)

    def precision(self) -> torch.Tensor:
        curvature = self.curvature / self.temperature
        if self.sigma is not None:
            curvature = curvature / self.sigma**2
        return curvature + self.deltas().diag()

    def loss(self) -> torch.Tensor:
        """The negative log-likelihood of all training examples, as far as the fit has read them."""
        if self.mode in ("mini", "crossfit"):
            batches = [self.data[0][0]]
        else:
            batches = [batch for part in self.data for batch in part]
        x = torch.cat([x for x, _ in batches])
        y = torch.cat([y for _, y in batches])
        outputs = self.model(x).detach()
        if self.likelihood == "classification":
            total = nn.functional.cross_entropy(outputs, y, reduction="sum")
        elif self.likelihood == "binary":
            total = nn.functional.binary_cross_entropy_with_logits(
                outputs[:, 0], y.double(), reduction="sum"
            )
        else:
            total = -torch.distributions.Normal(outputs, self.sigma).log_prob(y).sum()
        return total * self.la.num_data / len(x)

    def check(self) -> None:
        """Compare all numbers with those of the formulas."""
        la = self.la
        assert la.num_data == len(self.data) * NUM_DATA
        precision = self.precision()
        close(la.posterior.precision.to_dense(), precision)

        outputs = self.model(self.test_x).detach()
        jacobian = self.jacobian(self.test_x)
        covariance = jacobian @ torch.linalg.inv(precision) @ jacobian.transpose(1, 2)
        mean, functional_covariance = la.functional(self.test_x)
        close(mean, outputs)
        close(functional_covariance, covariance)
        self.check_predictions(outputs, covariance)

        deviation = la.mean - self.prior_mean
        deltas = self.deltas()
        log_evidence = (
            -self.loss() / self.temperature
            - (deltas * deviation**2).sum() / 2
            + deltas.log().sum() / 2
            - torch.linalg.slogdet(precision).logabsdet / 2
        )
        close(la.log_marginal_likelihood().detach(), log_evidence)

    def check_predictions(self, outputs: torch.Tensor, covariance: torch.Tensor) -> None:
        la = self.la
        x = self.test_x
        if self.sigma is not None:
            noise = self.sigma**2 * torch.eye(self.num_outputs, dtype=torch.float64)
            predictive = la.predict(x)
            close(predictive.mean, outputs)
            close(predictive.covariance_matrix, covariance + noise)
            close(la.predict(x, "map").covariance_matrix, noise.expand_as(covariance))
            return
        if self.link is None:
            return
        variances = covariance.diagonal(dim1=1, dim2=2) / self.link.temperature**2
        shrunk = outputs / self.link.temperature / (1 + math.pi / 8 * variances).sqrt()
        close(self.probabilities(la.predict(x)), self.activated(shrunk))
        close(self.probabilities(la.predict(x, "map")), self.activated(outputs))
        tempered = outputs / self.link.network_temperature
        close(self.probabilities(la.predict(x, "temperature")), self.activated(tempered))
        draws = la.sample(5, generator(0))
        close(self.probabilities(la.predict(x, "nn", 5, generator(0))), self.averaged(draws))

    def averaged(self, draws: torch.Tensor) -> torch.Tensor:
        """The mean probabilities of networks with the given parameters, `[S, D]`."""
        probabilities = []
        for draw in draws:
            parameters = {}
            start = 0
            for name in self.la.param_names:
                parameter = self.model.get_parameter(name)
                parameters[name] = draw[start : start + parameter.numel()].view_as(parameter)
                start += parameter.numel()
            outputs = functional_call(self.model, parameters, (self.test_x,)).detach()
            probabilities.append(self.activated(outputs / self.link.draw_temperature))
        return torch.stack(probabilities).mean(0)

    def activated(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(-1) if self.likelihood == "classification" else logits.sigmoid()

    def probabilities(self, predictive: torch.distributions.Distribution) -> torch.Tensor:
        if self.likelihood == "classification":
            return predictive.probs
        return predictive.mean.reshape(-1, 1)


CASES = [
    ("classification", 3, "kfac", "all", "full", "plain"),
    ("classification", 3, "kfac", "last_layer", "debiased", "plain"),
    ("classification", 3, "ekfac", "all", "crossfit", "shared"),
    ("classification", 3, "diag", "all", "full", "shared"),
    ("classification", 3, "full", "weights", "mini", "plain"),
    ("classification", 3, "lowrank", "all", "full", "plain"),
    ("binary", 1, "kfac", "all", "full", "shared"),
    ("binary", 1, "full", "last_layer", "full", "plain"),
    ("binary", 1, "ekfac", "last_layer", "full", "plain"),
    ("regression", 1, "kfac", "all", "full", "plain"),
    ("regression", 2, "kfac", "last_layer", "crossfit", "plain"),
    ("regression", 2, "full", "all", "full", "shared"),
    ("regression", 1, "diag", "weights", "full", "plain"),
    ("regression", 2, "ekfac", "all", "debiased", "shared"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_state_of_a_random_walk_follows_from_the_formulas(case, tmp_path):
    walk = Walk(CASES.index(case), *case)
    walk.check()
    steps = [
        walk.fit,
        walk.update,
        walk.set_prior_precision,
        walk.set_prior_mean,
        walk.set_temperature,
        walk.set_sigma,
        walk.set_link,
        walk.tune,
        walk.tune_by_evidence,
        lambda: walk.save_and_load(tmp_path),
        walk.copy,
        walk.change_the_model_and_restore_it,
        walk.switch_to_training,
        walk.interrupt,
        walk.pass_bad_targets,
    ]
    for _ in range(NUM_STEPS):
        walk.random.choice(steps)()
        walk.check()
