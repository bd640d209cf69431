"""Methods that make predictives from trained networks, tuned on validation examples."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Normal

from examples.study.problems import Examples, Problem
from laplace_debias import Laplace, Link, Mixture
from laplace_debias.assessment.methods import RecalibrationName
from laplace_debias.assessment.recalibration import fit_recalibration
from laplace_debias.assessment.temperature import fit_temperature

DEFAULT_LINK = Link("pairwise")
"""The link of methods that do not tune a link."""
# If all validation examples are classified correctly, the optimum is T = 0. The lower bound is the
# same as the bound of recalibrations.
_LEAST_TEMPERATURE = 0.5
# At this temperature T, N C / T is negligible, so that the precision of the posterior is δI.
_TEMPERATURE_WITHOUT_CURVATURE = 1e15

Predict = Callable[[Tensor], Distribution]
"""A function from inputs to their predictive distribution."""


@dataclass(frozen=True)
class Method:
    """A way to predict.

    Attributes:
        names: The name of the method, or several names if methods are equivalent.
        predict: The predictive.
        seconds: The time that the method took after the training.
        posterior: The posterior or mixture that computes uncertainties, if there is one.
        tuned: The tuned values of the posterior, in words.
    """

    names: Sequence[str]
    predict: Predict
    seconds: float
    posterior: Laplace | Mixture | None = None
    tuned: str = ""


def all_methods(problem: Problem) -> Iterator[Method]:
    """Yield all methods; each method must be used before the next one is requested."""
    yield from network_methods(problem)
    yield from posterior_methods(problem, "last_layer")
    yield from posterior_methods(problem, "all")
    if len(problem.networks) > 1:
        start = time.perf_counter()
        members = [fit_posterior(problem, network, "all") for network in problem.networks]
        for member in members:
            tune(member, problem)
        mixture = Mixture(members)
        yield Method(["mixture"], mixture.predict, time.perf_counter() - start, mixture)


def network_methods(problem: Problem) -> Iterator[Method]:
    """Yield the methods without a posterior: networks, ensembles and their recalibrations."""
    network = problem.networks[0]
    yield untuned_average(problem, [network], "network")
    yield tempered_average(problem, [network], "temperature")
    if not problem.is_regression:
        yield from recalibrations(network, problem.validation)
    if len(problem.networks) > 1:
        yield untuned_average(problem, problem.networks, "ensemble")
        yield tempered_average(problem, problem.networks, "ensemble, tempered")


def untuned_average(problem: Problem, networks: Sequence[nn.Module], name: str) -> Method:
    """Average networks as they are; a regression takes σ from the residuals in training."""
    start = time.perf_counter()
    if problem.is_regression:
        scales = [residual_scale(network, problem.train) for network in networks]
    else:
        scales = [1.0 for _ in networks]
    return Method([name], average(networks, scales), time.perf_counter() - start)


def tempered_average(problem: Problem, networks: Sequence[nn.Module], name: str) -> Method:
    """Average networks with a temperature (regression: σ) each, from the validation examples."""
    start = time.perf_counter()
    if problem.is_regression:
        scales = [residual_scale(network, problem.validation) for network in networks]
    else:
        x, y = problem.validation
        temperatures = [
            fit_temperature(outputs(network, x), y, "classification") for network in networks
        ]
        scales = [max(temperature, _LEAST_TEMPERATURE) for temperature in temperatures]
    return Method([name], average(networks, scales), time.perf_counter() - start)


def outputs(network: nn.Module, x: Tensor) -> Tensor:
    """Compute the network's outputs `[N, C]` in float64, without gradients."""
    with torch.no_grad():
        return network(x).double()


def residual_scale(network: nn.Module, examples: Examples) -> float:
    """Compute the root mean square of the residuals."""
    x, y = examples
    return float((outputs(network, x) - y).square().mean().sqrt())


def average(networks: Sequence[nn.Module], scales: Sequence[float]) -> Predict:
    """Return the predictive of an equal mixture of networks.

    Args:
        networks: Networks with logits, or with a single output for a regression.
        scales: The temperature (regression: σ) of each network.
    """

    def predict(x: Tensor) -> Distribution:
        network_outputs = torch.stack([outputs(network, x) for network in networks])
        network_scales = torch.tensor(scales)
        if network_outputs.shape[2] == 1:
            noise_variance = network_scales.square().mean()
            variance = noise_variance + network_outputs.var(0, unbiased=False)
            return Normal(network_outputs.mean(0), variance.sqrt())
        log_probs = (network_outputs / network_scales[:, None, None]).log_softmax(2)
        return Categorical(logits=log_probs.logsumexp(0))

    return predict


def recalibrations(network: nn.Module, validation: Examples) -> Iterator[Method]:
    """Yield vector scaling and isotonic regression, and Platt scaling if there are two classes."""
    x, y = validation
    names: tuple[RecalibrationName, ...] = ("vector", "isotonic")
    for name in names:
        start = time.perf_counter()
        predict = recalibrate_logits(name, network, x, y)
        yield Method([name], predict, time.perf_counter() - start)
    if outputs(network, x).shape[1] == 2:
        start = time.perf_counter()
        predict = scale_by_platt(network, x, y)
        yield Method(["platt"], predict, time.perf_counter() - start)


def recalibrate_logits(
    name: RecalibrationName, network: nn.Module, x: Tensor, y: Tensor
) -> Predict:
    """Recalibrate the logits of a network on examples."""
    recalibrate = fit_recalibration(name, outputs(network, x), y)

    def predict(x: Tensor) -> Distribution:
        return Categorical(logits=recalibrate(outputs(network, x)))

    return predict


def scale_by_platt(network: nn.Module, x: Tensor, y: Tensor) -> Predict:
    """Recalibrate the difference of a network's two logits on examples."""
    recalibrate = fit_recalibration("platt", outputs(network, x).diff(dim=1), y)

    def predict(x: Tensor) -> Distribution:
        logit = recalibrate(outputs(network, x).diff(dim=1))
        return Categorical(logits=torch.cat([torch.zeros_like(logit), logit], 1))

    return predict


def fit_posterior(problem: Problem, network: nn.Module, params: str) -> Laplace:
    """Fit a posterior with the default options of the package."""
    if problem.is_regression:
        la = Laplace(network, "regression", params=params, sigma=1.0)
    else:
        la = Laplace(network, "classification", params=params)
    mode = problem.mode if params == "all" else "full"
    return la.fit(batches(problem.train), mode, num_data=problem.num_data)


def batches(examples: Examples) -> list[Examples]:
    """Split examples into batches of 256."""
    x, y = examples
    return list(zip(x.split(256), y.split(256), strict=True))


def tune(la: Laplace, problem: Problem, link: Link | None = None) -> str:
    """Tune a posterior, with one link or (default) with all links; return the tuned values."""
    sigma = True if problem.is_regression else None
    return repr(la.tune(batches(problem.validation), sigma=sigma, link=link))


def posterior_methods(problem: Problem, params: str) -> Iterator[Method]:
    """Yield posteriors: by `tune`, at T = 1, by the evidence, with the identity as curvature.

    All are the same `Laplace`, which is changed before each of them is yielded.
    """
    name = params.replace("_", " ")
    start = time.perf_counter()
    la = fit_posterior(problem, problem.networks[0], params)
    fit_seconds = time.perf_counter() - start

    def method(names: Sequence[str], tuned: str, tuning_start: float) -> Method:
        seconds = fit_seconds + time.perf_counter() - tuning_start
        return Method(names, la.predict, seconds, posterior=la, tuned=tuned)

    start = time.perf_counter()
    tuned = tune(la, problem)
    if la.link in (DEFAULT_LINK, None):
        yield method([name, f"{name}, T = 1"], tuned, start)
    else:
        yield method([name], tuned, start)
        start = time.perf_counter()
        tuned = tune(la, problem, DEFAULT_LINK)
        yield method([f"{name}, T = 1"], tuned, start)

    la.link = None
    start = time.perf_counter()
    tuned = repr(la.tune_evidence(sigma=problem.is_regression))
    yield method([f"{name}, evidence"], tuned, start)

    la.temperature = _TEMPERATURE_WITHOUT_CURVATURE
    start = time.perf_counter()
    tuned = tune(la, problem)
    yield method([f"{name}, identity"], tuned, start)
