"""A fit waits for the device once per pass, not per batch, and reports errors in data there."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from cases import one_axis_at_a_time
from second_device import DEVICE, Elsewhere, SecondDevice, moved
from torch import nn
from unusual_parameters import ClassToken

from laplace_debias import Categorical, Laplace, MultiLabel
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.outputs import DeferredChecks, require


class Padded(nn.Module):
    """A transformer with a mask of padding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        is_padding = x == 0
        h = self.layer(self.table(x), src_key_padding_mask=is_padding)
        return self.head(h.masked_fill(is_padding[..., None], 0).mean(1))


def mlp(outputs=3):
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def convolutions(groups=1):
    layers = nn.Conv2d(2, 4, 3, groups=groups), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(64, 3))


def features(*shape):
    return lambda n: torch.randn(n, *shape, generator=torch.Generator().manual_seed(0))


def tokens(n):
    x = torch.randint(1, 7, (n, 5), generator=torch.Generator().manual_seed(0))
    x[::2, 3:] = 0
    return x


def labels(n):
    return torch.arange(n) % 3


def bits(*shape):
    return lambda n: (features(*shape)(n) > 0).float()


class Own(Categorical):
    """A user's likelihood, whose check calculates with outputs and targets."""

    def check(self, outputs, targets):
        super().check(outputs, targets)
        outputs.gather(1, targets[:, None])


@dataclass(frozen=True)
class Problem:
    """A network, functions of a number of examples that return its data, and the likelihood.

    `waits_per_batch` is how often K-FAC and EKFAC wait for a batch, to find which positions count.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[int], torch.Tensor]
    targets: Callable[[int], torch.Tensor]
    likelihood: str | Likelihood = "classification"
    waits_per_batch: int = 0


PROBLEMS = {
    "mlp": Problem(mlp, features(4), labels),
    "regression": Problem(mlp, features(4), features(3), "regression"),
    "binary": Problem(lambda: mlp(1), features(4), bits(), "binary"),
    "several labels": Problem(mlp, features(4), bits(3), "multilabel"),
    "weights": Problem(mlp, features(4), labels, Categorical(-100, [1.0, 2.0, 0.5], 0.1)),
    "soft": Problem(mlp, features(4), lambda n: features(3)(n).softmax(-1)),
    "weights of labels": Problem(mlp, features(4), bits(3), MultiLabel(-100, [1.0, 2, 3], 2.0)),
    "noise": Problem(lambda: mlp(4), features(4), features(2), "heteroscedastic"),
    "own": Problem(mlp, features(4), labels, Own()),
    "convolutions": Problem(convolutions, features(2, 6, 6), labels),
    "groups": Problem(lambda: convolutions(2), features(2, 6, 6), labels),
    "class token": Problem(ClassToken, features(4, 3), labels),
    "padding": Problem(Padded, tokens, labels, waits_per_batch=1),
}


def data_of(name, num_batches):
    """Batches of four examples."""
    problem = PROBLEMS[name]
    x = problem.inputs(4 * num_batches)
    y = problem.targets(4 * num_batches)
    return [(x[i : i + 4], y[i : i + 4]) for i in range(0, len(y), 4)]


def model_of(name):
    torch.manual_seed(0)
    return PROBLEMS[name].model().eval()


def fitted(name, model, data, curvature="kfac", fisher="exact", **options):
    la = Laplace(
        model,
        likelihood=PROBLEMS[name].likelihood,
        curvature=curvature,
        fisher=fisher,
        params="all",
    )
    return la.fit(data, generator=torch.Generator().manual_seed(1), num_data=40, **options)


FITS = one_axis_at_a_time(
    list(PROBLEMS), ["kfac", "ekfac", "diag", "full", "lowrank"], ["exact", "mc", "empirical"]
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The noise of the regression")
@pytest.mark.parametrize(("name", "curvature", "fisher"), [fit for fit in FITS if not fit.marks])
def test_a_fit_does_not_wait_for_every_batch(name, curvature, fisher):
    devices = []
    sizes = (2, 4)
    for size in sizes:
        data = data_of(name, size)
        with SecondDevice() as device:
            la = fitted(name, moved(model_of(name)), data, curvature, fisher)
            assert la.mean.device == DEVICE
            evidence = float(la.log_marginal_likelihood())
        devices.append(device)
    # Operations that take a different path on the device give the same result as on the CPU.
    expected = fitted(name, model_of(name), data, curvature, fisher).log_marginal_likelihood()
    assert evidence == pytest.approx(float(expected), rel=1e-6)
    per_batch = PROBLEMS[name].waits_per_batch if curvature in ("kfac", "ekfac") else 0
    assert waits_of_batches(*devices) == (sizes[1] - sizes[0]) * per_batch


def waits_of_batches(few, many):
    """How much more often is waited with more batches; decompositions come once, behind them."""
    places = {place for place in many.places if not place.startswith(("operators/", "linalg/"))}
    assert places, "a fit without any answer from the device"
    return sum(many.places[place] - few.places[place] for place in places)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "per_batch"), [("mlp", 0), ("convolutions", 1), ("padding", 2)])
def test_data_on_the_device_is_asked_for_ignored_targets_where_positions_share_weights(
    name, per_batch
):
    devices = []
    sizes = (2, 4)
    for size in sizes:
        data = [(Elsewhere(x), Elsewhere(y)) for x, y in data_of(name, size)]
        with SecondDevice() as device:
            fitted(name, moved(model_of(name)), data)
        devices.append(device)
    assert waits_of_batches(*devices) == (sizes[1] - sizes[0]) * per_batch


# ------------------------------------------------------------------------------------- errors


@dataclass(frozen=True)
class WrongBatch:
    """A change that makes a batch of a problem wrong, and the error message.

    `is_in_targets` means that the targets are wrong, which is found before they are on the device.
    """

    problem: str
    is_in_targets: bool
    spoil: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    message: str


WRONG_BATCHES = {
    "labels": WrongBatch(
        "mlp", True, lambda x, y: (x, y + 7), r"between 0 and 2, got 9\. .* \(Batch 3"
    ),
    "inputs": WrongBatch(
        "mlp", False, lambda x, y: (x * torch.nan, y), r"outputs contain NaN or Inf.*\(Batch 3"
    ),
    "targets": WrongBatch(
        "regression", True, lambda x, y: (x, y * torch.inf), r"contain NaN or Inf.*\(Batch 3"
    ),
    "bits": WrongBatch("binary", True, lambda x, y: (x, y + 0.5), r"must be 0 or 1\. .* \(Batch 3"),
    "label bits": WrongBatch(
        "several labels", True, lambda x, y: (x, y + 0.5), r"must be 0 or 1.*\(Batch 3"
    ),
}


@pytest.mark.usefixtures("batches_apart")
@pytest.mark.filterwarnings("ignore:The noise of the regression")
@pytest.mark.parametrize(("case", "curvature"), one_axis_at_a_time(WRONG_BATCHES, ["kfac", "full"]))
def test_a_wrong_batch_is_named_and_the_last_posterior_stays(case, curvature):
    wrong_batch = WRONG_BATCHES[case]
    name = wrong_batch.problem
    right = data_of(name, 2)
    data = data_of(name, 5)
    data[2] = wrong_batch.spoil(*data[2])
    # All on the CPU, data on the CPU for a model on the device, and all on the device.
    for place in ("cpu", "moved", "there"):
        with SecondDevice():
            model = model_of(name)
            if place != "cpu":
                model = moved(model)
            la = fitted(name, model, right, curvature)
            posterior = la.posterior
            wrong = data
            if place == "there":
                wrong = [(Elsewhere(x), Elsewhere(y)) for x, y in data]
            read = []
            with pytest.raises(ValueError, match=wrong_batch.message):
                la.fit((read.append(1) or batch for batch in wrong), num_data=40)
            assert la.posterior is posterior
            # Errors in values on the CPU are raised at once, others at the end of the pass.
            at_once = place == "cpu" or (place == "moved" and wrong_batch.is_in_targets)
            assert len(read) == (3 if at_once else 5)


def test_a_failure_that_an_earlier_answer_explains_tells_of_that():
    checks = DeferredChecks()

    def work():
        with checks.during_batch(2):
            require(Elsewhere(torch.tensor(False)), lambda: ValueError("wrong labels"))
            raise RuntimeError("a device that gave up")

    with SecondDevice(), pytest.raises(ValueError, match="wrong labels") as raised:
        work()
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_long_pass_reads_on_the_way():
    checks = DeferredChecks()
    numbers = []

    def work():
        for number in range(1, 10_000):
            numbers.append(number)
            with checks.during_batch(number):
                right = Elsewhere(torch.tensor(number != 2))
                require(right, lambda: ValueError("wrong"))

    with SecondDevice(), pytest.raises(ValueError, match=r"wrong \(Batch 2 "):
        work()
    assert 2 < len(numbers) < 2_000
