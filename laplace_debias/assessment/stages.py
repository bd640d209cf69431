"""The stages of a run before it is measured: posteriors and temperatures, then predictions.

What the run's folder holds is read; what it does not hold is made and written.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from laplace_debias.assessment.methods import Method, PosteriorChoice
from laplace_debias.assessment.posteriors import fitted, is_at_limit, of_training, thinned, tuned
from laplace_debias.assessment.predictions import (
    Chosen,
    Table,
    chosen_positions,
    mixed,
    of_laplace,
    predict_set,
    with_temperature,
    written,
)
from laplace_debias.assessment.run import Run
from laplace_debias.assessment.run_folder import write_json, write_table
from laplace_debias.assessment.temperature import BOUNDS, fit_temperature
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.inputs import num_examples, take
from laplace_debias.laplace import Laplace
from laplace_debias.report.names import duration
from laplace_debias.report.run_folder import read_json
from laplace_debias.sources.changed import Changed
from laplace_debias.sources.loaded import Loaded
from laplace_debias.system.ranks import alone, current

Member = tuple[Loaded, Laplace | None]
"""A network with its data, and its posterior where it has one."""
SHORT = 60.0
"""Seconds above which the time is told before."""
AFFORDED = 600.0
"""Seconds that fit the examples that a posterior over more than the last layer predicts."""
FEWEST = 100
"""Examples of each set that are predicted whatever time they take."""
_MEASURED = 2.0
"""Seconds after which no more examples are taken to measure the time of one."""
# Two at most, and each looks at a grid: of the All-CNN-C 1.6 predictions (last layer) to 4.2 (all).
_PASSES_OF_TUNING = 3


def fit(run: Run) -> dict[str, list[Member]]:
    """Find the noise, the posteriors and the temperature; by methods' keys what predicts."""
    members: dict[str, list[Member]] = {}
    with run.stage("fit"):
        if run.loaded.task == "regression" and run.said["sigma"] is None:
            run.said["sigma"] = _noise(run.loaded)
        if run.said["training"] is None:
            run.said["training"] = of_training(run.loaded)
        run.write()
        for method in run.methods:
            models = [run.loaded.model, *(run.loaded.others if method.of_all else ())]
            members[method.key] = [
                (replace(run.loaded, model=model), _posterior(run, method, model, number))
                for number, model in enumerate(models, start=1)
            ]
            if method.has_temperature and run.entry(method.key)["temperature"] is None:
                _find_temperature(run, method)
            run.write()
    return members


def _noise(loaded: Loaded) -> float:
    """The standard deviation of the validation (else training) residuals, about zero."""
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


def _posterior(run: Run, method: Method, model: nn.Module, number: int) -> Laplace | None:
    """Fit, tune and save the posterior of a checkpoint, or read the saved one; None without one."""
    choice = method.posterior
    if choice is None:
        return None
    loaded, label = replace(run.loaded, model=model), method.label
    name = f"{method.key}-{number}" if method.of_all else method.key
    path = run.folder / "posteriors" / f"{name}.safetensors"
    sweep_path = run.folder / "sweeps" / f"{name}.json"
    if not current().from_rank(path.exists(), 0):
        verb = "Reading" if isinstance(choice, Path) else "Fitting"
        run.say(f"{verb} {label}{f', checkpoint {number}' if method.of_all else ''}")
        with run.stage("fit", method):
            resume = run.folder / "state" / f"{name}.fit"
            la = fitted(loaded, choice, run.said["sigma"], run.seed, resume)
        _choose_examples(run, la, method)
        with run.stage("tune", method):
            validation, positions = loaded.validation, None
            if validation is not None:
                if (examples := run.entry(method.key)["examples"]) is not None:
                    sizes = (len(y) for _, y in Chosen(model, validation))
                    there = sum(current().exchange(sum(sizes)))
                    positions = chosen_positions(there, examples, run.seed)
                validation = Chosen(model, validation, positions)
            sweep, notes = tuned(la, choice, validation)
            notes += thinned(la, choice, loaded)
            if isinstance(choice, PosteriorChoice) and choice.mode == "auto":
                notes += (str(la.fit_report),)
            for note in notes:
                run.note(f"{label}: {note}")
            write_json(sweep_path, sweep)
        # The last of its files: where it is, they are.
        path.parent.mkdir(parents=True, exist_ok=True)
        la.save(path)
    # Read back also by the run that wrote it, so that one that goes on gives the same numbers.
    la = Laplace.load(path, model)
    run.entry(method.key).update(
        prior_precision=None if method.of_all else la.prior_precision.tolist(),
        link=None if method.of_all or la.link is None else str(la.link),
        prior_precision_at_limit=is_at_limit(read_json(sweep_path)),
        bytes=number * path.stat().st_size,
    )
    return la


def _choose_examples(run: Run, la: Laplace, method: Method) -> None:
    """Choose how many examples are predicted where nobody said; tell how long it takes."""
    passes = 0 if isinstance(method.posterior, Path) else _PASSES_OF_TUNING
    sets = [*run.sets.values(), *([run.loaded.validation] * passes)]
    sizes = [size_of(batches) for batches in sets if batches is not None]
    each = current().from_rank(seconds_an_example(la, run.loaded) / current().size, 0)
    examples = method.examples
    if examples is None and getattr(method.posterior, "params", "all") != "last_layer":
        examples = most_examples(sizes, AFFORDED / each)
    run.entry(method.key)["examples"] = examples
    number, every = num_predictions(sizes, examples or math.inf), sum(sizes)
    if SHORT <= each * number < math.inf:
        run.say(
            f"{method.label}: tuning and predicting ({number:,} predictions) will take about "
            f"{duration(each * number)}; fewer --examples take less time."
        )
    if examples != method.examples:
        told = f"; all would take about {duration(each * every)}" if every < math.inf else ""
        run.note(
            f"{method.label} predicts {examples:,} examples of each set, chosen at random, as many "
            f"as about {duration(AFFORDED)} allow{told} (--examples)."
        )


def size_of(batches: Batches) -> float:
    """How many examples a set has; infinity where it does not tell."""
    source: Any = batches.source if isinstance(batches, Changed) else batches
    if isinstance(source, DataLoader) and source.batch_size is not None:
        return len(source.dataset)  # type: ignore[arg-type]
    if isinstance(source, Sequence) and all(isinstance(batch, Sequence) for batch in source):
        return sum(len(batch[1]) for batch in source)
    return math.inf


def num_predictions(sizes: Sequence[float], examples: float) -> float:
    """How many predictions are made of sets of these sizes, of so many examples of each at most."""
    return sum(min(size, examples) for size in sizes)


def most_examples(sizes: Sequence[float], number: float) -> int | None:
    """How many examples of each set make a number of predictions at most, 100 at least."""
    if sum(sizes) <= number:
        return None
    counts = range(int(number) + 2)
    return max(FEWEST, bisect_right(counts, number, key=partial(num_predictions, sizes)) - 1)


def _find_temperature(run: Run, method: Method) -> None:
    """Fit the network's temperature on the validation examples."""
    assert run.loaded.validation is not None
    with run.stage("tune", method):
        found, _ = predict_set(run.loaded, run.loaded.validation, None, None, None)
        best = fit_temperature(found["log_probs"], found["targets"], run.loaded.task)
        run.entry(method.key)["temperature"] = best
    if best in BOUNDS:
        run.note(
            f"The temperature of {method.label} is {best:g}, the end of the search range: "
            "its validation examples are too few or too easy, or the network is no better than "
            "chance."
        )


def seconds_an_example(la: Laplace, loaded: Loaded) -> float:
    """Seconds that predicting one example takes, by the first batch of the test set.

    Of a batch that takes long its first examples tell.
    """
    with alone():
        x, _ = next(iter(Chosen(loaded.model, loaded.test)))
    # Once before: first calls also choose algorithms and allocate.
    of_laplace(la, take(x, slice(1)), loaded.task)
    size, most = 1, num_examples(x)
    while True:
        start = time.perf_counter()
        of_laplace(la, take(x, slice(size)), loaded.task)
        seconds = time.perf_counter() - start
        if size == most or seconds > _MEASURED:
            return seconds / size
        size = min(4 * size, most)


def predict(run: Run, members: Mapping[str, Sequence[Member]]) -> None:
    """Write the predictions of every method for every set, but for those that are complete."""
    for entry in run.said["sets"]:
        part = entry["name"]
        with run.stage("predict"):
            of_network = None
            for method in run.methods:
                if run.told(method, part):
                    continue
                run.say(f"Predicting {part}: {method.label}")
                shares = method.posterior is None and not method.of_all
                found = of_network if shares else None
                found = found or _predicted(run, method, part, members[method.key])
                of_network = found if shares else of_network
                (table, seconds), task = found, run.loaded.task
                if method.has_temperature:
                    temperature = run.entry(method.key)["temperature"]
                    table = with_temperature(table, temperature, task)
                told = {"num_examples": len(table["index"]), "seconds": seconds}
                write_table(
                    run.path(method, part), written(table, task, entry["role"] != "ood"), told
                )
            entry["num_examples"] = run.told(run.methods[0], part)["num_examples"]


def _predicted(
    run: Run, method: Method, part: str, members: Sequence[Member]
) -> tuple[Table, float]:
    """A method's table for a set, without its temperature, and the seconds that it took."""
    positions, examples = None, run.entry(method.key)["examples"]
    if examples is not None:
        # The network comes first and predicts all: its table knows how many there are.
        size = run.told(run.methods[0], part)["num_examples"]
        positions = chosen_positions(size, examples, run.seed)
    sigma, task = run.said["sigma"], run.loaded.task
    found = [predict_set(one, run.sets[part], la, positions, sigma) for one, la in members]
    table = mixed([table for table, _ in found], task) if method.of_all else found[0][0]
    return table, sum(seconds for _, seconds in found)
