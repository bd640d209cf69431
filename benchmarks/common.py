"""Fits and predictions of common networks, alternating with laplace-torch."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import ours
from benchmarks.common_networks import (
    FURTHER_NETWORKS,
    NETWORKS,
    CommonNetwork,
    random_examples,
)
from benchmarks.kfac_factors import peer_contenders
from benchmarks.report import markdown_table, ratios
from benchmarks.settings import Settings
from benchmarks.timing import Contender, Row, Run, measure
from laplace_debias import Laplace

TITLE = "Common networks"
NETWORK = "networks of tutorials, random weights"
UNIT = "ms"
REFERENCES = ()
GOALS = ()
_BATCH = 64
_LEAST_ROUNDS = 7
# The number of prediction calls that are timed together, by the number of inputs.
_NUM_CALLS = {1: 20, 64: 2}
_NETWORK = "network"
_OURS = "ours"
_THEIRS = "laplace-torch"
_EXPORTED = "exported program"
_COMPILED = "exported program, compiled"
# The task for which exported programs are also measured.
_SERVED = "last layer, predict 1"
# The Fisher matrix of each computation of factors.
_FACTORS = {"factors, exact": "exact", "factors, Monte-Carlo": "mc"}
# The Fisher matrix and the parameters of each fit.
_FITS = {
    "fit, exact": ("exact", "all"),
    "Monte-Carlo": ("mc", "all"),
    "empirical": ("empirical", "all"),
    "last layer": ("exact", "last_layer"),
}
# Curvatures other than K-FAC, with the closest structure of laplace-torch, if it runs without
# packages that are not on PyPI. These are fits of small networks, with the first prediction.
_STRUCTURES = {"full": "full", "lowrank": None, "ekfac": "kron"}
_SMALL_NETWORKS = ("MLP 20-50-50-3", "MLP 8-50-2")
# For these networks, laplace-torch needs minutes for 64 predictions with all parameters, or more
# than 23 GB of memory.
_LARGE_NETWORKS = (
    "small ResNet, 32 × 32",
    "3 × 3 CNN, 28 × 28",
    "7 × 7 stem, 64 × 64",
    "Keras, CNN tutorial",
)
# The parameters of the posterior and the number of inputs of each prediction.
_PREDICTIONS = {
    "predict 1": ("all", 1),
    "last layer, predict 1": ("last_layer", 1),
    "predict 64": ("all", 64),
    "last layer, predict 64": ("last_layer", 64),
}


@dataclass(frozen=True)
class _NetworkSettings(Settings):
    """Settings with a common network instead of the All-CNN-C.

    Attributes:
        common: The network.
    """

    common: CommonNetwork = NETWORKS["MLP 8-50-2"]

    @property
    def batch(self) -> int:
        """The number of images in a batch for which factors are computed."""
        return _BATCH

    @property
    def fit_size(self) -> int:
        """The number of examples of a fit."""
        return self.common.size

    def model(self) -> nn.Sequential:
        """Return the network in eval mode, with the same weights at every call."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.common.build().eval().to(self.device)

    def data(self, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return random inputs and labels."""
        return random_examples(self.common, size, seed, self.device)


def compare(settings: Settings) -> list[Row]:
    """Fits in batches of 64 examples and predictions with the defaults of both, float32.

    Fits include the passes over the data and the eigendecompositions. Predictions are in closed
    form; `network` is the forward pass of the network itself.
    """
    networks = NETWORKS | FURTHER_NETWORKS
    if settings.quick:
        networks = {"MLP 8-50-2": replace(NETWORKS["MLP 8-50-2"], size=_BATCH)}
    else:
        settings = replace(settings, repetitions=max(_LEAST_ROUNDS, settings.repetitions))
    rows = []
    for name, network in networks.items():
        print(f"  {name} …", flush=True)
        network_settings = _NetworkSettings(**asdict(settings), common=network)
        for task, fisher in _FACTORS.items():
            rows += _named(name, task, _measure_factors(network_settings, fisher))
        for task, (fisher, params) in _FITS.items():
            rows += _named(name, task, _measure_fits(network_settings, fisher, params))
        if name in _SMALL_NETWORKS:
            for curvature, structure in _STRUCTURES.items():
                measured = _measure_structures(network_settings, curvature, structure)
                rows += _named(name, curvature, measured)
        for task, (params, num_inputs) in _PREDICTIONS.items():
            measured = _measure_predictions(
                network_settings,
                params,
                num_inputs,
                has_peer=not (name in _LARGE_NETWORKS and task == "predict 64"),
                has_exports=task == _SERVED,
            )
            rows += _named(name, task, measured)
    return rows


def _measure_factors(settings: _NetworkSettings, fisher: str) -> list[Row]:
    contenders = [
        Contender("gradient", ours.gradient(settings)),
        Contender(_OURS, ours.factors(settings, fisher, "hooks")),
        *peer_contenders(settings, fisher),
    ]
    return measure(contenders, settings, _BATCH, warm_up=_BATCH)


def _measure_fits(settings: _NetworkSettings, fisher: str, params: str) -> list[Row]:
    contenders = [
        Contender(_OURS, partial(_our_fit, settings, fisher, params)),
        Contender(_THEIRS, partial(_their_fit, settings, fisher, params), is_peer=True),
    ]
    return measure(contenders, settings, settings.fit_size, warm_up=_BATCH)


def _measure_structures(
    settings: _NetworkSettings, curvature: str, structure: str | None
) -> list[Row]:
    contenders = [Contender(_OURS, partial(_our_first_prediction, settings, curvature))]
    if structure is not None:
        build = partial(_their_first_prediction, settings, structure)
        contenders.append(Contender(_THEIRS, build, is_peer=True))
    return measure(contenders, settings, settings.fit_size, warm_up=_BATCH)


def _measure_predictions(
    settings: _NetworkSettings, params: str, num_inputs: int, has_peer: bool, has_exports: bool
) -> list[Row]:
    x, _ = settings.data(num_inputs, seed=2)
    contenders = [
        Contender(_NETWORK, partial(_forward, settings, x)),
        Contender(_OURS, partial(_our_prediction, settings, params, x)),
    ]
    if has_peer:
        build = partial(_their_prediction, settings, params, x)
        contenders.append(Contender(_THEIRS, build, is_peer=True))
    if has_exports:
        build = partial(_exported_prediction, settings, x, compiles=False)
        contenders.append(Contender(_EXPORTED, build))
        # Without a C++ compiler, the program cannot be compiled.
        if not settings.quick:
            build = partial(_exported_prediction, settings, x, compiles=True)
            contenders.append(Contender(_COMPILED, build, is_peer=True))
    num_calls = 1 if settings.quick else _NUM_CALLS[num_inputs]
    return measure(contenders, settings, num_calls, warm_up=1, per_example=True)


def _named(network: str, task: str, rows: Sequence[Row]) -> list[Row]:
    """Return rows whose contenders' names contain the network and the task."""
    return [replace(row, contender=f"{network} | {task} | {row.contender}") for row in rows]


def _fit_loader(settings: Settings, size: int) -> DataLoader:
    return DataLoader(TensorDataset(*settings.data(size)), batch_size=_BATCH)


def _our_fit(settings: Settings, fisher: str, params: str) -> Run:
    model = settings.model()

    def run(size: int) -> object:
        return Laplace(model, fisher=fisher, params=params).fit(_fit_loader(settings, size))

    return run


def _their_fit(settings: Settings, fisher: str, params: str) -> Run:
    model = settings.model()

    def run(size: int) -> object:
        la = _their_posterior(model, fisher, params)
        la.fit(_fit_loader(settings, size))
        return la

    return run


def _their_posterior(model: nn.Module, fisher: str, params: str) -> Any:
    from laplace import Laplace as LaplaceTorch
    from laplace.curvature import CurvlinopsEF

    options: dict[str, Any] = {"backend_kwargs": {"stochastic": fisher == "mc"}}
    if fisher == "empirical":
        options = {"backend": CurvlinopsEF}
    return LaplaceTorch(
        model,
        "classification",
        subset_of_weights=params,
        hessian_structure="kron",
        **options,
    )


def _our_first_prediction(settings: Settings, curvature: str) -> Run:
    model = settings.model()
    x, _ = settings.data(1, seed=2)

    def run(size: int) -> object:
        la: Any = Laplace(model, curvature=curvature).fit(_fit_loader(settings, size))
        return la.predict(x).probs

    return run


def _their_first_prediction(settings: Settings, structure: str) -> Run:
    from laplace import Laplace as LaplaceTorch

    model = settings.model()
    x, _ = settings.data(1, seed=2)

    def run(size: int) -> object:
        la = LaplaceTorch(
            model, "classification", subset_of_weights="all", hessian_structure=structure
        )
        la.fit(_fit_loader(settings, size))
        return la(x, pred_type="glm", link_approx="probit")

    return run


def _forward(settings: Settings, x: Tensor) -> Run:
    model = settings.model()

    @torch.no_grad()
    def forward() -> object:
        return model(x)

    return _repeated(forward)


def _our_prediction(settings: Settings, params: str, x: Tensor) -> Run:
    la: Any = Laplace(settings.model(), params=params).fit(_fit_loader(settings, _BATCH))
    return _repeated(lambda: la.predict(x).probs)


def _their_prediction(settings: Settings, params: str, x: Tensor) -> Run:
    la = _their_posterior(settings.model(), "exact", params)
    la.fit(_fit_loader(settings, _BATCH))
    return _repeated(lambda: la(x, pred_type="glm", link_approx="probit"))


def _exported_prediction(settings: Settings, x: Tensor, compiles: bool) -> Run:
    la: Any = Laplace(settings.model(), params="last_layer").fit(_fit_loader(settings, _BATCH))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "predictive.pt2"
        la.export(path, x)
        program: Any = torch.export.load(path).module()
    if compiles:
        program = torch.compile(program)

    @torch.no_grad()
    def predict() -> object:
        return program(x)["probs"]

    return _repeated(predict)


def _repeated(work: Callable[[], object]) -> Run:
    def run(num_calls: int) -> None:
        for _ in range(num_calls):
            work()

    return run


# The rows by the names of the network, the task and the contender.
_RowsByNetwork = dict[str, dict[str, dict[str, Row]]]


def tables(rows: Sequence[Row]) -> str:
    """Return ratios to laplace-torch, latencies, and factors of all libraries, in Markdown."""
    rows_by_network: _RowsByNetwork = {}
    for row in rows:
        network, task, contender = row.contender.split(" | ")
        rows_by_task = rows_by_network.setdefault(network, {})
        rows_by_task.setdefault(task, {})[contender] = row
    return "\n\n".join(
        [
            "The table shows our time divided by the time of laplace-torch, as the median over "
            "rounds with the range in parentheses.\nValues below 1 mean that this package is "
            "faster.",
            markdown_table(_ratio_table(rows_by_network)),
            "Time of a prediction (`la.predict(x).probs`) and, in parentheses, of the network's "
            "forward pass, in milliseconds:",
            markdown_table(_latency_table(rows_by_network)),
            "Time of a prediction of one input with a posterior over the last layer, in "
            "milliseconds: with `la.predict(x).probs`, with the\nprogram that `la.export` writes, "
            "and with this program after `torch.compile`.",
            markdown_table(_served_table(rows_by_network)),
            "Time of a fit and its first prediction for other values of `curvature=`, in "
            "milliseconds. EKFAC is compared with K-FAC of\nlaplace-torch, which has no EKFAC.",
            markdown_table(_structure_table(rows_by_network)),
            f"Time to compute the K-FAC factors of {_BATCH} examples, without "
            "eigendecompositions, in milliseconds:",
            markdown_table(_factor_table(rows_by_network)),
        ]
    )


def _ratio_table(rows_by_network: _RowsByNetwork) -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    medians = []
    for network, rows_by_task in rows_by_network.items():
        line: dict[str, object] = {"network": network}
        for task in (*_FITS, *_PREDICTIONS):
            line[task] = None
            if _THEIRS not in rows_by_task[task]:
                continue
            by_round = ratios(rows_by_task[task][_OURS], rows_by_task[task][_THEIRS])
            if by_round:
                median = statistics.median(by_round)
                medians.append(median)
                line[task] = f"{median:.2f} ({min(by_round):.2f} – {max(by_round):.2f})"
        table.append(line)
    if medians:
        mean = math.exp(statistics.fmean(map(math.log, medians)))
        table.append({"network": f"geometric mean: {mean:.2f}"})
    return table


def _latency_table(rows_by_network: _RowsByNetwork) -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    for network, rows_by_task in rows_by_network.items():
        line: dict[str, object] = {"network": network}
        for task in _PREDICTIONS:
            our_time = _milliseconds(rows_by_task[task][_OURS])
            network_time = _milliseconds(rows_by_task[task][_NETWORK])
            line[f"{task} (network)"] = f"{our_time} ({network_time})"
        table.append(line)
    return table


def _served_table(rows_by_network: _RowsByNetwork) -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    for network, rows_by_task in rows_by_network.items():
        line: dict[str, object] = {"network": network}
        # The time of the network itself is in the table of latencies.
        for name in (_OURS, _EXPORTED, _COMPILED):
            row = rows_by_task[_SERVED].get(name)
            time = None if row is None else _milliseconds(row)
            line[name] = time or "not available"
        table.append(line)
    return table


def _structure_table(rows_by_network: _RowsByNetwork) -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    for network, rows_by_task in rows_by_network.items():
        for curvature in _STRUCTURES:
            if curvature in rows_by_task:
                times = {name: _milliseconds(row) for name, row in rows_by_task[curvature].items()}
                table.append({"network": network, "curvature": curvature, **times})
    return table


def _factor_table(rows_by_network: _RowsByNetwork) -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    for network, rows_by_task in rows_by_network.items():
        for task in _FACTORS:
            times = {name: _milliseconds(row) for name, row in rows_by_task[task].items()}
            table.append({"network": network, "": task.removeprefix("factors, "), **times})
    return table


def _milliseconds(row: Row) -> str | None:
    """Format the median time; None if the contender did not run."""
    if not row.seconds:
        return None
    return f"{1e3 * statistics.median(row.seconds):.3g}"
