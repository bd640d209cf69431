"""Fits and predictions of common networks, alternating with laplace-torch."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
# The cell in which exported programs are also measured.
_SERVED = "last layer, predict 1"
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

    common: CommonNetwork | None = None

    @property
    def batch(self) -> int:
        """The number of images in a batch for which factors are computed."""
        return _BATCH

    def model(self) -> nn.Sequential:
        """Return the network in eval mode, with the same weights at every call."""
        assert self.common is not None
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.common.build().eval().to(self.device)

    def data(self, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return random inputs and labels."""
        assert self.common is not None
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
        on_network = _NetworkSettings(
            settings.device, settings.quick, settings.repetitions, settings.threads, network
        )
        print(f"  {name} …", flush=True)
        for cell, fisher in _FACTORS.items():
            contenders = [
                Contender("gradient", ours.gradient(on_network)),
                Contender(_OURS, ours.factors(on_network, fisher, "hooks")),
                *peer_contenders(on_network, fisher),
            ]
            rows += _named(name, cell, measure(contenders, on_network, _BATCH, _BATCH))
        for cell, (fisher, params) in _FITS.items():
            contenders = [
                Contender(_OURS, partial(_our_fit, on_network, fisher, params)),
                Contender(_THEIRS, partial(_their_fit, on_network, fisher, params), is_peer=True),
            ]
            rows += _named(name, cell, measure(contenders, on_network, network.size, _BATCH))
        structures = _STRUCTURES if name in _SMALL_NETWORKS else {}
        for curvature, structure in structures.items():
            contenders = [Contender(_OURS, partial(_our_first_prediction, on_network, curvature))]
            if structure is not None:
                build = partial(_their_first_prediction, on_network, structure)
                contenders.append(Contender(_THEIRS, build, is_peer=True))
            rows += _named(name, curvature, measure(contenders, on_network, network.size, _BATCH))
        for cell, (params, num_inputs) in _PREDICTIONS.items():
            x, _ = on_network.data(num_inputs, seed=2)
            contenders = [
                Contender(_NETWORK, partial(_forward, on_network, x)),
                Contender(_OURS, partial(_our_prediction, on_network, params, x)),
            ]
            if not (name in _LARGE_NETWORKS and cell == "predict 64"):
                theirs = partial(_their_prediction, on_network, params, x)
                contenders.append(Contender(_THEIRS, theirs, is_peer=True))
            if cell == _SERVED:
                exported = partial(_exported_prediction, on_network, x)
                contenders.append(Contender(_EXPORTED, partial(exported, compiles=False)))
                # Without a C++ compiler, the program cannot be compiled.
                if not settings.quick:
                    compiled = partial(exported, compiles=True)
                    contenders.append(Contender(_COMPILED, compiled, is_peer=True))
            num_calls = 1 if settings.quick else _NUM_CALLS[num_inputs]
            measured = measure(contenders, on_network, num_calls, 1, per_example=True)
            rows += _named(name, cell, measured)
    return rows


def _named(network: str, cell: str, rows: Sequence[Row]) -> list[Row]:
    """Return rows whose contenders' names contain the network and the cell of the table."""
    return [replace(row, contender=f"{network} | {cell} | {row.contender}") for row in rows]


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


def tables(rows: Sequence[Row]) -> str:
    """Return ratios to laplace-torch, latencies, and factors of all libraries, in Markdown."""
    cells: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        network, cell, contender = row.contender.split(" | ")
        cells.setdefault(network, {}).setdefault(cell, {})[contender] = row
    return "\n\n".join(
        [
            "The table shows our time divided by the time of laplace-torch, as the median over "
            "rounds with the range in parentheses.\nValues below 1 mean that this package is "
            "faster.",
            markdown_table(_ratio_table(cells)),
            "Time of a prediction (`la.predict(x).probs`) and, in parentheses, of the network's "
            "forward pass, in milliseconds:",
            markdown_table(_latency_table(cells)),
            "Time of a prediction of one input with a posterior over the last layer, in "
            "milliseconds: with `la.predict(x).probs`, with the\nprogram that `la.export` writes, "
            "and with this program after `torch.compile`.",
            markdown_table(_served_table(cells)),
            "Time of a fit and its first prediction for other values of `curvature=`, in "
            "milliseconds. EKFAC is compared with K-FAC of\nlaplace-torch, which has no EKFAC.",
            markdown_table(_structure_table(cells)),
            f"Time to compute the K-FAC factors of {_BATCH} examples, without "
            "eigendecompositions, in milliseconds:",
            markdown_table(_factor_table(cells)),
        ]
    )


_Cells = dict[str, dict[str, dict[str, Row]]]


def _ratio_table(cells: _Cells) -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    medians = []
    for network, by_cell in cells.items():
        line: dict[str, object] = {"network": network}
        for cell in (*_FITS, *_PREDICTIONS):
            line[cell] = None
            if _THEIRS not in by_cell[cell]:
                continue
            by_round = ratios(by_cell[cell][_OURS], by_cell[cell][_THEIRS])
            if by_round:
                median = statistics.median(by_round)
                medians.append(median)
                line[cell] = f"{median:.2f} ({min(by_round):.2f} – {max(by_round):.2f})"
        table.append(line)
    if medians:
        mean = math.exp(statistics.fmean(map(math.log, medians)))
        table.append({"network": f"geometric mean: {mean:.2f}"})
    return table


def _latency_table(cells: _Cells) -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    for network, by_cell in cells.items():
        line: dict[str, object] = {"network": network}
        for cell in _PREDICTIONS:
            times = [_milliseconds(by_cell[cell][name]) for name in (_OURS, _NETWORK)]
            line[f"{cell} (network)"] = f"{times[0]} ({times[1]})"
        table.append(line)
    return table


def _served_table(cells: _Cells) -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    for network, by_cell in cells.items():
        line: dict[str, object] = {"network": network}
        # The time of the network itself is in the table of latencies.
        for name in (_OURS, _EXPORTED, _COMPILED):
            row = by_cell[_SERVED].get(name)
            line[name] = (None if row is None else _milliseconds(row)) or "not available"
        table.append(line)
    return table


def _structure_table(cells: _Cells) -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    for network, by_cell in cells.items():
        for curvature in _STRUCTURES:
            if curvature in by_cell:
                times = {name: _milliseconds(row) for name, row in by_cell[curvature].items()}
                table.append({"network": network, "curvature": curvature, **times})
    return table


def _factor_table(cells: _Cells) -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    for network, by_cell in cells.items():
        for cell in _FACTORS:
            times = {name: _milliseconds(row) for name, row in by_cell[cell].items()}
            table.append({"network": network, "": cell.removeprefix("factors, "), **times})
    return table


def _milliseconds(row: Row) -> str | None:
    if not row.seconds:
        return None
    return f"{1e3 * statistics.median(row.seconds):.3g}"
