"""One row of the table: whether the defaults work, what they cover, and what they cost."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical

from benchmarks.architectures.architecture import Architecture
from benchmarks.architectures.dense import compute_logits, dense_variances
from benchmarks.report import ratios
from benchmarks.settings import Settings
from benchmarks.timing import Contender, Run, measure
from laplace_debias import Laplace

EXAMPLES = 8
_NUM_FURTHER_BATCHES = 4


@dataclass(frozen=True)
class Row:
    """The results for one architecture.

    Attributes:
        name: The name of the network in its library.
        library: The name of the package.
        parameters: The number of trainable parameters.
        works: Whether a fit without options and a prediction gave finite numbers.
        message: The error, with the step at which it was raised.
        covered: The share of the trainable parameters that are in the posterior.
        of_layers: The number of blocks that are computed from a layer's inputs and output
            gradients.
        of_calls: The number of blocks that are computed from the gradients of each example.
        left_out: The warning of a fit about parameters that it left out.
        fit: The time of a fit to one batch divided by the time of a gradient, for each round.
        further: The same ratio for each further batch of a fit.
        predict: The same ratio for a prediction of the batch.
        disagreement: The largest relative error of a functional variance.
    """

    name: str
    library: str
    parameters: int = 0
    works: bool = False
    message: str = ""
    covered: float = 0.0
    of_layers: int = 0
    of_calls: int = 0
    left_out: str = ""
    fit: tuple[float, ...] = ()
    further: tuple[float, ...] = ()
    predict: tuple[float, ...] = ()
    disagreement: float | None = None


def measure_architecture(architecture: Architecture, settings: Settings) -> Row:
    """Measure the row of one architecture; an error becomes the row's message.

    Args:
        architecture: The network and its data.
        settings: The numbers of rounds and threads.
    """
    row = Row(architecture.name, architecture.library)
    # Each step returns fields of the row.
    steps: dict[str, Callable[[], dict[str, Any]]] = {
        "default": lambda: _fit_with_defaults(architecture),
        "time": lambda: _measure_times(architecture, settings),
        "agreement": lambda: {"disagreement": disagreement(architecture)},
    }
    for step, work in steps.items():
        try:
            row = replace(row, **work())
        except Exception as error:
            message = f"{step}: {type(error).__name__}: {error}"
            row = replace(row, message=f"{row.message} {message}".strip())
    return row


def _fit_with_defaults(architecture: Architecture) -> dict[str, Any]:
    """Fit and predict without options; return the row's fields about coverage and success."""
    model = architecture.model()
    x, y = architecture.data(EXAMPLES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la = Laplace(model).fit([(x, y)])
    messages = [str(warning.message) for warning in caught]
    left_out = [message for message in messages if "excluded from" in message]
    predictive = la.predict(x)
    assert isinstance(predictive, Categorical)
    is_finite = bool(predictive.probs.isfinite().all())
    blocks = la._parameters.blocks
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "parameters": trainable,
        "works": is_finite,
        "message": "" if is_finite else "default: probabilities are not finite",
        "covered": sum(block.size for block in blocks) / trainable,
        "of_layers": sum(not block.calls for block in blocks),
        "of_calls": sum(bool(block.calls) for block in blocks),
        "left_out": " ".join(left_out),
    }


def _measure_times(architecture: Architecture, settings: Settings) -> dict[str, Any]:
    """Return the row's fields with ratios to the time of a gradient."""
    contenders = [
        Contender("gradient", lambda: _gradient(architecture)),
        Contender("fit", lambda: _fit(architecture, num_batches=1)),
        Contender("longer fit", lambda: _fit(architecture, num_batches=1 + _NUM_FURTHER_BATCHES)),
        Contender("predict", lambda: _predict(architecture)),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = measure(contenders, settings, EXAMPLES, warm_up=EXAMPLES)
    gradient, fit, longer_fit, predict = rows
    seconds_per_batch = tuple(
        (longer - shorter) / _NUM_FURTHER_BATCHES
        for shorter, longer in zip(fit.seconds, longer_fit.seconds, strict=True)
    )
    further_batch = replace(fit, seconds=seconds_per_batch)
    return {
        "fit": tuple(ratios(fit, gradient)),
        "further": tuple(ratios(further_batch, gradient)),
        "predict": tuple(ratios(predict, gradient)),
    }


def _gradient(architecture: Architecture) -> Run:
    model = architecture.model()
    parameters = [p for p in model.parameters() if p.requires_grad]

    def run(size: int) -> object:
        x, y = architecture.data(size)
        loss = F.cross_entropy(compute_logits(model, x).flatten(0, -2), y.flatten())
        # LeViT and TinyViT keep a part of the graph between forward passes.
        return torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)

    return run


def _fit(architecture: Architecture, num_batches: int) -> Run:
    model = architecture.model()

    def run(size: int) -> object:
        return Laplace(model, fisher="mc").fit([architecture.data(size)] * num_batches)

    return run


def _predict(architecture: Architecture) -> Run:
    la = Laplace(architecture.model(), fisher="mc").fit([architecture.data(EXAMPLES)])
    return lambda size: la.predict(architecture.data(size)[0])


def disagreement(architecture: Architecture) -> float:
    """Compute the largest relative error of functional variances for two examples, in float64.

    Args:
        architecture: The network and its data.
    """
    model = architecture.model(torch.float64)
    x, y = architecture.data(2)
    x = _double(x)
    expected = dense_variances(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = Laplace(model, curvature="diag", prior_precision=expected.prior_precision)
        la.fit([(x, y)])
    _, variances = la.functional(x, diagonal=True)
    return float(((variances - expected.variances) / expected.variances).abs().max())


def _double(x: Tensor | Mapping[str, Tensor]) -> Tensor | Mapping[str, Tensor]:
    # Mappings contain tokens and masks, which are integers.
    return x.double() if isinstance(x, Tensor) else x
