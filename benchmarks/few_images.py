"""Whole fits to one small batch, whose factors have few rows, and predictions for this batch."""

from collections.abc import Callable
from functools import partial

import timm
import torch
import torchvision
from torch import Tensor, nn

from benchmarks.report import Goal
from benchmarks.settings import Settings
from benchmarks.timing import Contender, Row, Run, measure
from laplace_debias import Laplace

TITLE = "One batch of 8 images, 64 × 64 pixels, 10 classes, Monte-Carlo Fisher, one thread"
UNIT = "s per batch"
REFERENCES = ()
# The networks of timm, each with the goal for the time of a fit in units of a gradient's time.
_FIT_GOALS = {
    "resnet10t": 15.0,
    "resnet18": 25.0,
    "mobilenetv3_small_050": 15.0,
    "convnext_atto": 15.0,
}
_TEN_BATCHES = "mobilenet_v3_small, 10 batches"
GOALS = (
    *(Goal(f"{name}, fit", f"{name}, gradient", at_most=goal) for name, goal in _FIT_GOALS.items()),
    *(Goal(f"{name}, predict", f"{name}, gradient", at_most=12.0) for name in _FIT_GOALS),
    Goal(f"{_TEN_BATCHES}, fit", f"{_TEN_BATCHES}, gradients", at_most=4.0),
)
_CLASSES = 10


def compare(settings: Settings) -> list[Row]:
    """Networks of timm with random weights: the fit with its eigendecompositions, and `predict`.

    The last rows are fits to ten batches of 32 by torchvision's network. All is done five times in
    a turn, so that fresh memory is paid for once.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    side = 32 if settings.quick else 64
    num_batches = 2 if settings.quick else 10
    num_repetitions = 1 if settings.quick else 5
    contenders = []
    for name in _FIT_GOALS:
        model = timm.create_model(name, num_classes=_CLASSES).eval().to(settings.device)
        batch = _batch(8, side, settings.device)
        contenders += [
            Contender(f"{name}, gradient", partial(_gradients, model, [batch])),
            Contender(f"{name}, fit", partial(_fit, model, [batch])),
            Contender(f"{name}, predict", partial(_predict, model, batch)),
        ]
    model = torchvision.models.mobilenet_v3_small(num_classes=_CLASSES).eval().to(settings.device)
    batches = [_batch(32, side, settings.device) for _ in range(num_batches)]
    contenders += [
        Contender(f"{_TEN_BATCHES}, gradients", partial(_gradients, model, batches)),
        Contender(f"{_TEN_BATCHES}, fit", partial(_fit, model, batches)),
    ]
    return measure(contenders, settings, num_repetitions, warm_up=1, per_example=True)


def _batch(size: int, side: int, device: str) -> tuple[Tensor, Tensor]:
    labels = torch.randint(_CLASSES, (size,))
    return torch.randn(size, 3, side, side).to(device), labels.to(device)


def _repeated(work: Callable[[], object]) -> Run:
    def run(num_repetitions: int) -> None:
        for _ in range(num_repetitions):
            work()

    return run


def _gradients(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Run:
    def work() -> None:
        for x, y in batches:
            loss = nn.functional.cross_entropy(model(x), y)
            torch.autograd.grad(loss, list(model.parameters()))

    return _repeated(work)


def _fitted(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Laplace:
    la = Laplace(model, fisher="mc", factor_dtype=torch.float32)
    return la.fit_batches(batches, num_data=50_000)


def _fit(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Run:
    return _repeated(partial(_fitted, model, batches))


def _predict(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Run:
    la = _fitted(model, [batch])
    return _repeated(lambda: la.predict(batch[0]))
