"""`laplace-debias predict`: predictions of a fitted posterior, as a table."""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution
from tqdm import tqdm

from laplace_debias.assessment.predictions import of_laplace
from laplace_debias.commands.network import (
    check_output,
    not_for,
    print_notes,
)
from laplace_debias.curvature.network.batches import Batches, BatchReader
from laplace_debias.laplace import Laplace, file
from laplace_debias.metrics import gaussian_interval
from laplace_debias.report.tables import not_a_formula
from laplace_debias.sources import Loaded, SourceSettings, load
from laplace_debias.sources.parts import batches_of
from laplace_debias.sources.shares import dealt
from laplace_debias.system.checks import check_at_least
from laplace_debias.system.files import written_atomically
from laplace_debias.system.ranks import alone, current

_SUFFIXES = (".parquet", ".csv")


@dataclass(frozen=True, kw_only=True)
class Settings(SourceSettings):
    """Options of `laplace-debias predict`.

    Attributes:
        posterior: The file that `laplace-debias fit` or `tune` wrote.
        inputs: Inputs to predict: a folder of images, a `.npz` file with `x`, a table or an import
            path; the test data by default.
        output: File of the predictions, `.parquet` or `.csv`, with a row for each input, in the
            order of `inputs`.
        overwrite: Replace an existing file.
        method: Predictive, as in `Laplace.predict`; `map` is the trained network alone.
        samples: Number of draws; by default the closed form of `glm`, and 100 for `glm-mc` and
            `nn`.
    """

    posterior: Path
    output: Path
    inputs: str | Path | None = None
    overwrite: bool = False
    method: Literal["glm", "glm-mc", "nn", "map"] = "glm"
    samples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "samples")
        if self.output.suffix not in _SUFFIXES:
            raise ValueError(f"output is {self.output}; expected a .parquet or .csv file")
        if self.samples is not None and self.method == "map":
            raise ValueError("samples is given with method=map, which draws none: leave it out")

    def without_effect(self) -> dict[str, str]:
        """As `SourceSettings.without_effect`."""
        of_test = () if self.inputs is None else ("test_examples",)
        return not_for("predict", "train_examples", "validation_examples", *of_test)


def run(settings: Settings) -> Any:
    """Predict and write the table, which is returned as a pandas data frame.

    Its columns are `name` (of images in a folder, their path) or `row` (their number, from 0); the
    `label` or `target` of test data; for classification `prediction`, `probability_CLASS` and
    `entropy` (nats); for one logit `probability` and `entropy`; for several labels
    `probability_NUMBER`; for regression, in the target's unit, `mean`, `standard_deviation`, which
    has the noise in it, `lower` and `upper`, the ends of its 95 % interval, and `epistemic`, the
    standard deviation without the noise, with `_NUMBER` behind them where there are several
    targets.
    """
    import pandas

    check_output(settings.output, settings.overwrite)
    # Before the data, which can take minutes.
    file.read(settings.posterior)
    loaded = load(settings.without_comparison())
    print_notes(loaded)
    batches, names = loaded.test, None
    if settings.inputs is not None and loaded.read is not None:
        further = loaded.read(settings.inputs, "inputs")
        for note in further.notes:
            print(note)
        batches, names = batches_of(further.part, settings)[0], further.names
    la = Laplace.load(settings.posterior, loaded.model)
    generator = torch.Generator(la.mean.device).manual_seed(settings.seed)

    def predicted(x: Any) -> dict[str, Tensor]:
        if loaded.task == "regression" and settings.method == "glm" and not settings.samples:
            return _of_regression(**of_laplace(la, x, loaded.task))
        found = la.predict(x, settings.method, settings.samples, generator)
        if loaded.task != "regression":
            return _of_batch(found, loaded)
        variance = found.variance.double()
        # What draws of the mean add to the noise.
        epistemic = (variance - la.sigma.to(variance).square()).clamp_min(0).sqrt()
        has_some = settings.method != "map"
        return _of_regression(found.mean, variance.sqrt(), has_some * epistemic)

    columns = _columns(predicted, batches, loaded, settings)
    first = {"row": range(len(next(iter(columns.values()))))} if names is None else {"name": names}
    table = pandas.DataFrame({**first, **columns})
    if current().rank > 0:
        return table
    with written_atomically(settings.output) as temporary:
        if settings.output.suffix == ".csv":
            table.map(not_a_formula).to_csv(temporary, index=False)
        else:
            table.to_parquet(temporary, index=False)
    print(f"{len(table):,} predictions: {settings.output}")
    return table


def as_json(settings: Settings, table: Any) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "output": str(settings.output),
        "num_predictions": len(table),
        "columns": list(table.columns),
    }


def _columns(
    predicted: Callable[[Any], dict[str, Tensor]],
    batches: Batches,
    loaded: Loaded,
    settings: Settings,
) -> dict[str, Any]:
    """The table's columns, by name, on all processes."""
    draws = settings.method in ("glm-mc", "nn") or settings.samples is not None
    parts: list[tuple[int, dict[str, Tensor], Tensor]] = []
    # Draws follow the order of all batches, so the first process makes them all.
    takes_part = current().rank == 0 or not draws
    with alone() if draws else contextlib.nullcontext():
        own = dealt(batches, BatchReader(loaded.model)) if takes_part else ()
        bar = tqdm(own, "predicting", unit="batch", leave=False, disable=not settings.progress)
        for number, _, x, y in bar:
            parts.append((number, {name: v.detach().cpu() for name, v in predicted(x).items()}, y))
    # In the order of the batches, which were dealt to the processes.
    of_all = sorted(itertools.chain(*current().exchange(parts)), key=lambda part: part[0])
    if not of_all:
        raise ValueError("there is no input to predict: give at least one")
    columns: dict[str, Any] = {
        name: torch.cat([part[name] for _, part, _ in of_all]).numpy() for name in of_all[0][1]
    }
    if "prediction" in columns and loaded.classes is not None:
        columns["prediction"] = [loaded.classes[label] for label in columns["prediction"]]
    if settings.inputs is not None:
        return columns
    y = torch.cat([y for _, _, y in of_all])
    if loaded.task == "classification" and loaded.classes is not None:
        return {"label": [loaded.classes[label] for label in y.tolist()], **columns}
    of_targets = _numbered("target" if loaded.task == "regression" else "label", y)
    return {**{name: part.numpy() for name, part in of_targets.items()}, **columns}


def _of_batch(found: Distribution, loaded: Loaded) -> dict[str, Tensor]:
    """The columns of a batch of classes or labels."""
    if isinstance(found, Categorical):
        probs = found.probs
        names = loaded.classes or tuple(map(str, range(probs.shape[-1])))
        each = {f"probability_{name}": probs[:, n] for n, name in enumerate(names)}
        return {"prediction": probs.argmax(1), **each, "entropy": found.entropy()}
    if loaded.task == "binary":
        return {"probability": found.mean.flatten(), "entropy": found.entropy().flatten()}
    return _numbered("probability", found.mean)


def _of_regression(
    mean: Tensor, standard_deviation: Tensor, epistemic: Tensor
) -> dict[str, Tensor]:
    lower, upper = gaussian_interval(mean, standard_deviation)
    columns = {
        "mean": mean,
        "standard_deviation": standard_deviation,
        "lower": lower,
        "upper": upper,
        "epistemic": epistemic,
    }
    return {key: part for name, v in columns.items() for key, part in _numbered(name, v).items()}


def _numbered(name: str, values: Tensor) -> dict[str, Tensor]:
    """Columns of `[N]` or `[N, K]`, numbered where there are several."""
    if values.ndim == 1 or values.shape[1] == 1:
        return {name: values.flatten()}
    return {f"{name}_{number}": values[:, number] for number in range(values.shape[1])}
