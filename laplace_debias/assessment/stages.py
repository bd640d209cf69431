"""The stages of a run before it is measured: posteriors and temperatures, then predictions.

What the run's folder holds is read; what it does not hold is made and written.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from laplace_debias.assessment.methods import Family, Method
from laplace_debias.assessment.posteriors import (
    fitted,
    is_at_limit,
    of_training,
    spectrum_of,
    tuned,
)
from laplace_debias.assessment.predictions import (
    Chosen,
    Table,
    chosen_positions,
    of_laplace,
    predict_set,
    with_temperature,
    written,
)
from laplace_debias.assessment.run import DataSet, Run
from laplace_debias.assessment.run_folder import write_json, write_table
from laplace_debias.assessment.temperature import fit_temperature, kind_of
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.inputs import num_examples, take
from laplace_debias.laplace import Laplace
from laplace_debias.report.run_folder import read_json
from laplace_debias.sources.changed import Cast, Changed
from laplace_debias.sources.loaded import Loaded
from laplace_debias.system.ranks import alone, current

SHORT = 60.0
"""Seconds below which all examples are predicted, and above which the time is told."""
_TIMED = 4
_PASSES_OF_TUNING = 2


class Fits:
    """The noise, the posteriors and the temperatures of a run.

    Args:
        run: The run.

    Attributes:
        posteriors: By the keys of their families.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.posteriors: dict[str, Laplace] = {}
        self._num_validation: int | None = None

    def fit(self) -> dict[str, Laplace]:
        """Find them; the posteriors by their families' keys."""
        run = self.run
        with run.stage("fit"):
            if run.loaded.task == "regression" and run.said["sigma"] is None:
                run.said["sigma"] = self._noise()
            if run.said["training"] is None:
                run.said["training"] = of_training(run.loaded)
            run.write()
            for family in run.families:
                if family.posterior is not None:
                    self._posterior(family)
                self._temperatures(family)
                run.write()
        return self.posteriors

    def _noise(self) -> float:
        """The standard deviation of the validation (else training) residuals, about zero.

        Raises:
            ValueError: If they are all zero.
        """
        loaded = self.run.loaded
        data = loaded.train if loaded.validation is None else loaded.validation
        found, _ = predict_set(loaded, data, None, None, 1.0)
        residuals = found["targets"].double().reshape(found["mean"].shape) - found["mean"]
        sigma = math.sqrt(residuals.square().mean().item())
        if sigma == 0:
            raise ValueError(
                "the network predicts every target exactly, so there is no noise to estimate: "
                "check that the targets are not among the inputs"
            )
        return sigma

    def _positions(self, family: Family) -> Tensor | None:
        """Which validation examples a family predicts; None for all."""
        loaded, examples = self.run.loaded, self.run.examples(family)
        if examples is None or loaded.validation is None:
            return None
        if self._num_validation is None:
            sizes = (len(y) for _, y in Chosen(loaded.model, loaded.validation))
            self._num_validation = sum(current().exchange(sum(sizes)))
        return chosen_positions(self._num_validation, examples, self.run.seed)

    def _posterior(self, family: Family) -> None:
        """Fit, tune and save a posterior, or read the saved one."""
        run, path, choice = self.run, self.run.folder.posterior(family.key), family.posterior
        assert choice is not None
        loaded = run.loaded
        if not current().from_rank(path.exists(), 0):
            run.say(f"Fitting {family.methods[0].label}")
            start, resume = time.perf_counter(), run.folder.state(f"{family.key}.fit")
            la = fitted(loaded, choice, run.said["sigma"], run.seed, resume)
            self._took(family, "fit", start)
            self._choose_examples(la, family)
            start, validation = time.perf_counter(), loaded.validation
            if validation is not None:
                validation = Chosen(loaded.model, validation, self._positions(family))
            sweep, notes = tuned(la, choice, validation)
            for note in notes:
                run.note(f"{family.methods[0].label}: {note}")
            write_json(run.folder.sweep(family.key), sweep)
            write_json(run.folder.spectrum(family.key), spectrum_of(la))
            self._took(family, "tune", start)
            # The last of its files: where it is, they are.
            if current().rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
            la.save(path)
        # Read back also by the run that wrote it, so that one that goes on gives the same numbers.
        if not path.exists():
            raise FileNotFoundError(
                f"{path}, which rank 0 has written, is not seen by rank {current().rank}: give a "
                "folder that all machines share"
            )
        la = self.posteriors[family.key] = Laplace.load(path, loaded.model)
        for method in family.methods:
            run.entry(method.key).update(
                prior_precision=la.prior_precision.tolist(),
                link=None if la.link is None else str(la.link),
                prior_precision_at_limit=is_at_limit(read_json(run.folder.sweep(family.key))),
                bytes=path.stat().st_size,
            )

    def _took(self, family: Family, what: str, start: float) -> None:
        for method in family.methods:
            self.run.entry(method.key)["seconds"][what] = time.perf_counter() - start
        self.run.write()

    def _choose_examples(self, la: Laplace, family: Family) -> None:
        """Predict all examples where that is quick; where it is not, tell how long it takes."""
        run, passes = self.run, sum(method.has_temperature for method in family.methods)
        if family.posterior is not None and family.posterior.path is None:
            passes += _PASSES_OF_TUNING
        sets = [part.batches for part in run.sets] + [run.loaded.validation] * passes
        each = seconds_an_example(la, run.loaded) / current().size
        all_of_them = num_predictions(sets, None)
        examples = family.examples
        if all_of_them is not None and each * all_of_them < SHORT:
            examples = None
        examples = current().from_rank(examples, 0)
        for method in family.methods:
            run.entry(method.key)["examples"] = examples
        run.write()
        number = num_predictions(sets, examples)
        if number is not None and each * number >= SHORT:
            run.say(
                f"{family.methods[0].label}: tuning and predicting ({number:,} predictions) will "
                f"take about {in_words(each * number)}; fewer --examples take less time."
            )

    def _temperatures(self, family: Family) -> None:
        """Fit the temperatures of the methods that have one."""
        run, loaded, start = self.run, self.run.loaded, time.perf_counter()
        missing = [
            method
            for method in family.methods
            if method.has_temperature and run.entry(method.key)["temperature"] is None
        ]
        if not missing:
            return
        assert loaded.validation is not None
        la, positions = self.posteriors.get(family.key), self._positions(family)
        found, _ = predict_set(loaded, loaded.validation, la, positions, None)
        best = fit_temperature(found["log_probs"], found["targets"], kind_of(loaded.task))
        for method in missing:
            entry = run.entry(method.key)
            entry["temperature"] = best.value
            took = entry["seconds"].get("tune", 0.0) + time.perf_counter() - start
            entry["seconds"]["tune"] = took
            if best.is_at_limit:
                run.note(
                    f"The temperature of {method.label} is {best.value:g}, the end of the search "
                    "range: its validation examples are too few or too easy, or the "
                    "network is no better than chance."
                )


def seconds_an_example(la: Laplace, loaded: Loaded) -> float:
    """Seconds that predicting one example takes, by the first few test examples.

    Args:
        la: The fitted posterior.
        loaded: The network and its data.
    """
    with alone():
        x, _ = next(iter(Chosen(loaded.model, loaded.test)))
    x = take(x, slice(_TIMED))
    # Once before: first calls also choose algorithms and allocate.
    of_laplace(la, take(x, slice(1)), loaded.task)
    start = time.perf_counter()
    of_laplace(la, x, loaded.task)
    return (time.perf_counter() - start) / num_examples(x)


def num_predictions(sets: Iterable[Batches | None], examples: int | None) -> int | None:
    """How many predictions are made in all; None if a set does not tell its size.

    Args:
        sets: The sets, each as often as it is predicted; None for none.
        examples: How many examples of each; None for all.
    """
    total = 0
    for batches in sets:
        source: Any = [] if batches is None else batches
        while isinstance(source, Cast | Changed):
            source = source.source
        if isinstance(source, DataLoader) and source.batch_size is not None:
            size = len(source.dataset)  # type: ignore[arg-type]
        elif isinstance(source, Sequence):
            size = sum(len(batch[1]) for batch in source if isinstance(batch, Sequence))
        elif examples is None:
            return None
        else:
            size = examples
        total += size if examples is None else min(size, examples)
    return total


def in_words(seconds: float) -> str:
    """A time to one or two digits, e.g. `90 s`, `25 minutes`, `3.4 hours`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"


def predict(run: Run, posteriors: Mapping[str, Laplace]) -> None:
    """Write the predictions of every method for every set, but for those that are complete.

    Args:
        run: The run.
        posteriors: The fitted posteriors by their families' keys.
    """
    for part in run.sets:
        with run.stage("predict"):
            for family in run.families:
                _predict(run, family, part, posteriors.get(family.key))
            num_predicted = run.told(run.methods[0], part)["num_examples"]
            for entry in run.said["sets"]:
                if entry["name"] == part.name:
                    entry["num_examples"] = num_predicted


def _predict(run: Run, family: Family, part: DataSet, la: Laplace | None) -> None:
    missing = [m for m in family.methods if run.told(m, part).get("digest") != run.digest]
    if not missing:
        return
    run.say(f"Predicting {part.name}: {', '.join(method.label for method in missing)}")
    positions, examples = None, run.examples(family)
    if examples is not None:
        # The network comes first and predicts all: its table knows how many there are.
        size = run.told(run.methods[0], part)["num_examples"]
        positions = chosen_positions(size, examples, run.seed)
    table, seconds = predict_set(run.loaded, part.batches, la, positions, run.said["sigma"])
    for method in missing:
        _write(run, method, part, table, seconds)


def _write(run: Run, method: Method, part: DataSet, table: Table, seconds: float) -> None:
    if method.has_temperature:
        table = with_temperature(table, run.entry(method.key)["temperature"], run.loaded.task)
    told = {"digest": run.digest, "num_examples": len(table["index"]), "seconds": seconds}
    write_table(run.path(method, part), written(table, run.loaded.task, part.role != "ood"), told)
