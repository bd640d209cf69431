"""Methods that make predictives from trained networks, tuned on validation examples."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Normal

from examples.study.problems import Examples, Problem
from laplace_debias import Laplace, Link, Mixture
from laplace_debias.assessment.methods import RecalibrationName
from laplace_debias.assessment.recalibration import fit_recalibration
from laplace_debias.assessment.temperature import fit_temperature

DEFAULT = Link("pairwise")
"""The link of methods that do not tune a link."""
# If all validation examples are classified correctly, the optimum is T = 0. The lower bound is the
# same as the bound of recalibrations.
_LEAST_TEMPERATURE = 0.5
# At this δ, N C / T is negligible, so the precision of the posterior is a multiple of the identity.
_NO_CURVATURE = 1e15


class Method(NamedTuple):
    """A way to predict, with its names (several if methods are equivalent) and its predictive.

    `seconds` is the time that the method took after the training. `posterior` is the posterior or
    mixture that computes uncertainties.
    """

    names: Sequence[str]
    predict: Callable[[Tensor], Distribution]
    seconds: float
    posterior: Laplace | Mixture | None = None
    chosen: str = ""


def methods_of(problem: Problem) -> Iterator[Method]:
    """Yield all methods; each method must be used before the next one is requested."""
    yield from of_networks(problem)
    yield from of_posteriors(problem, "last_layer")
    yield from of_posteriors(problem, "all")
    if len(problem.networks) > 1:
        start = time.perf_counter()
        members = [fitted(problem, network, "all") for network in problem.networks]
        for member in members:
            tune(member, problem)
        mixture = Mixture(members)
        yield Method(["mixture"], mixture.predict, time.perf_counter() - start, mixture)


def of_networks(problem: Problem) -> Iterator[Method]:
    """Yield one or all networks without a posterior, with or without a temperature (or σ)."""
    x, y = problem.validation
    for number in sorted({1, len(problem.networks)}):
        some, start = problem.networks[:number], time.perf_counter()
        plain = [noise(one, problem.train) if problem.is_regression else 1.0 for one in some]
        name = "ensemble" if number > 1 else "network"
        yield Method([name], mean_of(some, plain), time.perf_counter() - start)
        start = time.perf_counter()
        if problem.is_regression:
            scales = [noise(one, problem.validation) for one in some]
        else:
            found = [fit_temperature(outputs(one, x), y, "classification") for one in some]
            scales = [max(value, _LEAST_TEMPERATURE) for value in found]
        name = "ensemble, tempered" if number > 1 else "temperature"
        yield Method([name], mean_of(some, scales), time.perf_counter() - start)
        if number == 1 and not problem.is_regression:
            yield from recalibrations(some[0], x, y)


def outputs(network: nn.Module, x: Tensor) -> Tensor:
    """Compute the network's outputs, without gradients."""
    with torch.no_grad():
        return network(x).double()


def noise(network: nn.Module, data: Examples) -> float:
    """Compute the root mean square of the residuals."""
    return float((outputs(network, data[0]) - data[1]).square().mean().sqrt())


def mean_of(networks: Sequence[nn.Module], by: Sequence[float]) -> Callable[[Tensor], Distribution]:
    """Return the mixture of networks with a temperature each (or a σ, for a single output)."""

    def predict(x: Tensor) -> Distribution:
        each, scales = torch.stack([outputs(one, x) for one in networks]), torch.tensor(by)
        if each.shape[2] == 1:
            variance = scales.square().mean() + each.var(0, unbiased=False)
            return Normal(each.mean(0), variance.sqrt())
        return Categorical(logits=(each / scales[:, None, None]).log_softmax(2).logsumexp(0))

    return predict


def recalibrations(network: nn.Module, x: Tensor, y: Tensor) -> Iterator[Method]:
    """Yield vector scaling and isotonic regression, and Platt scaling if there are two classes."""
    names: list[RecalibrationName] = ["vector", "isotonic"]
    if outputs(network, x).shape[1] == 2:
        names.append("platt")
    for name in names:
        start = time.perf_counter()
        predict = recalibrated(name, network, x, y)
        yield Method([name], predict, time.perf_counter() - start)


def recalibrated(
    name: RecalibrationName, network: nn.Module, x: Tensor, y: Tensor
) -> Callable[[Tensor], Distribution]:
    """Recalibrate a network on examples. Platt scaling uses the difference of the logits."""
    if name != "platt":
        recalibrate = fit_recalibration(name, outputs(network, x), y)
        return lambda x: Categorical(logits=recalibrate(outputs(network, x)))
    recalibrate = fit_recalibration(name, outputs(network, x).diff(dim=1), y)

    def predict(x: Tensor) -> Distribution:
        logit = recalibrate(outputs(network, x).diff(dim=1))
        return Categorical(logits=torch.cat([torch.zeros_like(logit), logit], 1))

    return predict


def fitted(problem: Problem, network: nn.Module, params: str) -> Laplace:
    """Fit a posterior with the default options of the package."""
    kind, sigma = ("regression", 1.0) if problem.is_regression else ("classification", None)
    la = Laplace(network, kind, params=params, sigma=sigma)
    mode = problem.mode if params == "all" else "full"
    return la.fit(batches(problem.train), mode, num_data=problem.num_data)


def batches(data: Examples) -> list[Examples]:
    """Split the examples into batches."""
    return list(zip(*(part.split(256) for part in data), strict=True))


def tune(la: Laplace, problem: Problem, link: Link | None = None) -> str:
    """Tune a posterior, with a given link or with all links; return the choice in words."""
    sigma = True if problem.is_regression else None
    return repr(la.tune(batches(problem.validation), sigma=sigma, link=link))


def of_posteriors(problem: Problem, params: str) -> Iterator[Method]:
    """Yield posteriors: by `tune`, at T = 1, by the evidence, with the identity as curvature."""
    name, start = params.replace("_", " "), time.perf_counter()
    la = fitted(problem, problem.networks[0], params)
    fit, chosen = time.perf_counter() - start, tune(la, problem)
    same = la.link in (DEFAULT, None)
    names = [name, f"{name}, T = 1"][: 1 + same]
    yield Method(names, la.predict, time.perf_counter() - start, la, chosen)
    if not same:
        start, chosen = time.perf_counter() - fit, tune(la, problem, DEFAULT)
        yield Method([f"{name}, T = 1"], la.predict, time.perf_counter() - start, la, chosen)
    start, la.link = time.perf_counter() - fit, None
    found = la.tune_evidence(sigma=problem.is_regression)
    seconds = time.perf_counter() - start
    yield Method([f"{name}, evidence"], la.predict, seconds, la, repr(found))
    la.temperature, start = _NO_CURVATURE, time.perf_counter() - fit
    chosen = tune(la, problem)
    yield Method([f"{name}, identity"], la.predict, time.perf_counter() - start, la, chosen)
