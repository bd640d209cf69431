"""With a generator, a call is a function of it and of the data; torch's global one stays."""

import inspect
from functools import cache

import numpy as np
import pytest
import torch
from cases import others_slow
from spectra import Counted, with_eigenvalues
from spectra import generator as seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

from laplace_debias import Laplace, OneArgument, curvature, linalg, metrics, operators
from laplace_debias.curvature.data.batch_reader import BatchReader
from laplace_debias.curvature.data.batches import Stream
from laplace_debias.laplace.state.posterior import GaussianPosterior

ONES = torch.ones(40, dtype=torch.float64)
N = 24
LABELS = torch.arange(24) % 3


class Augmented(Dataset):
    """Inputs with new random noise at each access, as from augmentation."""

    def __init__(self, noise=0.3):
        self.noise = noise
        self.x = torch.randn(N, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return N

    def __getitem__(self, index):
        # From the global generator, as torchvision's transforms.
        return self.x[index] + self.noise * torch.randn(4), int(LABELS[index])


class AsIs(Augmented):
    def __getitem__(self, index):
        return self.x[index], int(LABELS[index])


def shuffled(**options):
    return DataLoader(Augmented(), batch_size=8, shuffle=True, **options)


def in_order():
    """A loader without shuffling; torch still draws a seed for its workers in every pass."""
    return DataLoader(AsIs(), batch_size=8)


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).eval()


@cache
def fitted():
    return Laplace(network()).fit_batches([(Augmented().x, LABELS)])


def fit(mode="full", **options):
    def result(generator):
        la = Laplace(network(), **options)
        return la.fit(shuffled(), mode, generator=generator).sample(1, seed(0))

    return result


def fit_batches(generator):
    data = shuffled(), shuffled()
    return Laplace(network()).fit_batches(*data, generator=generator).sample(1, seed(0))


def fit_of_an_iterator(generator):
    def read():
        yield from shuffled()

    return Laplace(network()).fit_batches(read(), generator=generator).sample(1, seed(0))


def update(generator):
    la = Laplace(network()).fit_batches([(Augmented().x, LABELS)])
    return la.update(shuffled(), generator=generator).sample(1, seed(0))


def predict(method, samples=None):
    def result(generator):
        x = Augmented().x
        return fitted().predict(x, method, samples or 7, generator).probs

    return result


@cache
def fitted_to_numbers():
    x = Augmented().x
    return Laplace(network(), "regression", sigma=0.5).fit_batches([(x, x[:, :3])])


def marginals(method):
    def result(generator):
        return fitted_to_numbers().marginals(Augmented().x, method, 7, generator).mean

    return result


def uncertainty(method):
    def result(generator):
        return fitted().uncertainty(Augmented().x, method, 7, generator).epistemic

    return result


def sample_outputs(method, **options):
    def result(generator):
        return fitted().sample_outputs(Augmented().x, 5, method, generator, **options)

    return result


def tune(generator):
    la = fitted()
    values = la.tune(shuffled(), grid=[0.1, 10.0], generator=generator).table
    return torch.tensor([row["nll"] for row in values])


def evaluate(method):
    def result(generator):
        samples = None if method == "map" else 4
        scores = fitted().evaluate(shuffled(), {"ood": shuffled()}, method, samples, generator)
        return torch.tensor(list(scores.values()))

    return result


def matrix():
    """A matrix without a closed form, with well separated eigenvalues."""
    return Counted(with_eigenvalues(torch.logspace(-1, 1, 40, dtype=torch.float64)))


def applied(algorithm, *arguments, **options):
    def result(generator):
        estimate = algorithm(matrix(), *arguments, generator=generator, **options)
        for name in ("value", "vectors", "x", "density"):
            estimate = getattr(estimate, name, estimate)
        return torch.as_tensor(estimate)

    return result


def operator(kind):
    def result(generator):
        A = kind(network(), nn.CrossEntropyLoss(), in_order(), fisher="mc", generator=generator)
        return A @ torch.ones(A.shape[1])

    return result


# The function that takes a generator, and cases of it.
CASES = {
    Laplace.fit: {
        "full": fit(),
        "full of fisher=mc": fit(fisher="mc"),
        "full of ekfac": fit(curvature="ekfac"),
        "mini": fit("mini"),
        "debiased": fit("debiased"),
        "crossfit": fit("crossfit"),
    },
    Laplace.fit_batches: {"two loaders": fit_batches, "an iterator": fit_of_an_iterator},
    Laplace.update: {"": update},
    Laplace.sample: {"": lambda generator: fitted().sample(3, generator)},
    Laplace.predict: {method: predict(method) for method in ("glm", "glm-mc", "nn")},
    Laplace.marginals: {method: marginals(method) for method in ("glm", "glm-mc", "nn")},
    Laplace.uncertainty: {method: uncertainty(method) for method in ("glm", "glm-mc", "nn")},
    Laplace.sample_outputs: {
        **{method: sample_outputs(method) for method in ("glm", "glm-mc", "nn")},
        "joint": sample_outputs("glm", joint=True),
    },
    Laplace.tune: {"grid": tune},
    Laplace.evaluate: {method: evaluate(method) for method in ("glm", "glm-mc", "nn", "map")},
    GaussianPosterior.sample: {"": lambda generator: fitted().posterior.sample(3, generator)},
    curvature.Fisher: {"": operator(curvature.Fisher)},
    curvature.KFAC: {"": operator(curvature.KFAC)},
    curvature.EKFAC: {"": operator(curvature.EKFAC)},
    linalg.diagonal: {"": applied(linalg.diagonal, num_matvecs=10)},
    linalg.eigsh: {
        method: applied(linalg.eigsh, 2, method=method, tol=1e-3)
        for method in ("lanczos", "arpack", "power")
    },
    linalg.frobenius_norm: {"": applied(linalg.frobenius_norm, num_matvecs=10)},
    linalg.logdet: {"": applied(linalg.logdet, num_probes=3, num_steps=5)},
    linalg.matrix_function_trace: {
        "": applied(linalg.matrix_function_trace, torch.exp, num_probes=3, num_steps=5)
    },
    linalg.neumann: {"": applied(linalg.neumann, ONES, num_terms=5)},
    linalg.sample_gaussian: {
        "": lambda generator: linalg.sample_gaussian(ONES, matrix(), 2, generator=generator)
    },
    linalg.spectral_density: {"": applied(linalg.spectral_density, num_probes=3, num_steps=5)},
    linalg.spectral_norm: {"": applied(linalg.spectral_norm)},
    linalg.trace: {
        method: applied(linalg.trace, method=method, num_matvecs=12)
        for method in ("hutchinson", "hutch++")
    },
}


def takers(*owners):
    """Find the public functions and classes that have a parameter `generator`."""
    with_generator = set()
    for owner in owners:
        names = getattr(owner, "__all__", None) or [n for n in dir(owner) if n[0] != "_"]
        for name in names:
            value = getattr(owner, name)
            is_ours = inspect.isfunction(value) or inspect.isclass(value)
            is_ours = is_ours and value is not OneArgument  # A dict, which has no signature.
            if is_ours and "generator" in inspect.signature(value).parameters:
                with_generator.add(value)
    return with_generator


NAMED = {
    f"{function.__qualname__} {name}".strip(): case
    for function, cases in CASES.items()
    for name, case in cases.items()
}

# One case for each function: enough to show that the function passes the generator on.
FIRST = [
    f"{function.__qualname__} {next(iter(cases))}".strip() for function, cases in CASES.items()
]


def test_every_function_that_takes_a_generator_has_a_case():
    owners = (Laplace, curvature, linalg, metrics, operators, GaussianPosterior)
    assert set(CASES) == takers(*owners)


def global_states():
    """States of the global generators of torch and of NumPy."""
    return torch.get_rng_state(), np.random.get_state()[1:]


def assert_same(states, expected_states):
    torch_state, numpy_state = states
    expected_torch_state, expected_numpy_state = expected_states
    assert torch.equal(expected_torch_state, torch_state), "torch's global generator has moved"
    for actual, expected in zip(numpy_state, expected_numpy_state, strict=True):
        assert np.array_equal(actual, expected)


@pytest.mark.parametrize("name", NAMED)
def test_a_call_is_a_function_of_its_generator_and_leaves_the_global_one(name):
    results = []
    for global_seed, number in ((1, 0), (2, 0), (2, 1)):
        torch.manual_seed(global_seed)
        states = global_states()
        results.append(NAMED[name](seed(number)))
        assert_same(global_states(), states)
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1]), "the global generator has an effect"
    assert not torch.equal(results[0], results[2]), "the generator has no effect"


@pytest.mark.slow
@pytest.mark.parametrize("name", others_slow(NAMED, *FIRST))
def test_without_a_generator_the_global_one_is_used(name):
    results = []
    for global_seed in (1, 1, 2):
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        results.append(NAMED[name](None))
        assert not torch.equal(state, torch.get_rng_state())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_two_calls_with_one_generator_see_other_orders():
    generator = seed(0)
    first, second = fit()(generator), fit()(generator)
    assert not torch.equal(first, second)


LAYER = nn.Linear(1, 1)


def seeded(source, generator):
    return Stream(source, BatchReader(LAYER), generator)


def test_passes_differ_as_those_of_a_shuffling_loader_do():
    stream = seeded(shuffled(), seed(0))
    first, second = (torch.cat([batch.targets for batch in stream]) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values)
    again = torch.cat([batch.targets for batch in seeded(shuffled(), seed(0))])
    assert torch.equal(first, again)


def test_what_the_user_draws_between_batches_is_the_users():
    """A loader changes none of these numbers, even if it is left in the middle or fails."""
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    drawn = []
    for _ in seeded(shuffled(), seed(0)):
        drawn.append(torch.randn(()))
        if len(drawn) == 2:
            break

    def broken():
        torch.randn(5)
        yield torch.zeros(2, 1), torch.zeros(2)
        torch.randn(5)
        raise OSError("the disk is gone")

    steps = iter(seeded(broken(), seed(0)))
    next(steps)
    drawn.append(torch.randn(()))
    with pytest.raises(OSError, match="the disk is gone"):
        next(steps)
    drawn.append(torch.randn(()))
    torch.testing.assert_close(torch.stack(drawn), expected, rtol=0, atol=0)


def test_workers_are_seeded_from_the_generator():
    fits = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        loader = shuffled(num_workers=1)
        state = torch.get_rng_state()
        la = Laplace(network()).fit(loader, "mini", generator=seed(0))
        assert torch.equal(state, torch.get_rng_state())
        fits.append(la.posterior.precision.to_dense())
    assert torch.equal(*fits)


def test_a_list_of_batches_takes_nothing_from_the_generator():
    """An evaluation therefore has the numbers of its predictions one after the other."""
    la = fitted()
    data = list(in_order())
    scores = la.evaluate(data, method="nn", samples=5, generator=seed(0))
    generator = seed(0)
    probs = torch.cat([la.predict(x, "nn", 5, generator).probs for x, _ in data])
    assert scores["nll"] == pytest.approx(float(metrics.nll(probs, LABELS)), rel=1e-6)


def test_the_marginal_likelihood_takes_no_generator():
    with pytest.raises(ValueError, match=r"does not use `generator`\. Remove"):
        fitted().tune(method="marglik", generator=seed(0))
