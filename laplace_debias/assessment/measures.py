"""The last stage of a run: metrics of what methods predicted, paired differences, the verdict."""

import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laplace_debias import metrics
from laplace_debias.assessment.conclusion import conclude
from laplace_debias.assessment.examples import write_examples
from laplace_debias.assessment.methods import Method
from laplace_debias.assessment.predictions import SCORES
from laplace_debias.assessment.run import Run
from laplace_debias.assessment.run_folder import read_predictions, write_json
from laplace_debias.metrics.definitions import per_example
from laplace_debias.report.run_folder import read_json
from laplace_debias.sources.task import REGRESSIONS

Table = Mapping[str, Tensor]
TEST = "test"
"""The name of the test set."""


def measure(run: Run) -> None:
    """Measure what is written, choose the examples to look at, and mark the run complete."""
    with run.stage("measure"):
        tables = {
            (method.key, name): read_predictions(run.path(method, name))
            for method in run.methods
            for name in run.sets
        }
        roles = {entry["name"]: entry["role"] for entry in run.said["sets"]}
        compared = Comparison(tables, roles, run.loaded.task)
        found = {
            "rows": compared.rows(),
            "differences": list(compared.differences()),
            "recommended": recommended(run.methods, run.loaded.task),
        }
        write_json(run.folder / "metrics.json", found)
        of_test = {method.key: tables[method.key, TEST] for method in run.methods}
        write_examples(run.folder, run.loaded, of_test, run.methods[0].key)
        for method in run.methods:
            told = [run.told(method, name) for name in run.sets]
            seconds = sum(part["seconds"] for part in told)
            entry = run.entry(method.key)
            entry["seconds"]["predict"] = seconds
            entry["seconds_per_example"] = seconds / sum(part["num_examples"] for part in told)
    run.said["conclusion"] = conclude(run.said, read_json(run.folder / "metrics.json"))
    run.said["status"] = "complete"
    run.write()
    shutil.rmtree(run.folder / "state", ignore_errors=True)  # The work is done.


def scores_of(table: Table, task: str) -> dict[str, Tensor]:
    """Scores of how unlike the training data an example is, higher where it is more so.

    Of labels that apply or not there is no largest probability; of a regression there is the
    variance without the noise alone.
    """
    if task in REGRESSIONS:
        variance = per_example(table["epistemic"].square())
        return {"variance": variance} if bool((variance > 0).any()) else {}
    scores = {"entropy": table["entropy"]}
    if task != "multilabel":
        scores["max_probability"] = metrics.max_probability(table["probs"])
    for name in SCORES:
        if not bool(table[name].isnan().any()):
            scores[name] = table[name]
    return scores


def recommended(methods: Sequence[Method], task: str) -> dict[str, str] | None:
    """The score for OOD examples: the entropy of the last posterior, or of the network without one.

    A rule that sees neither test nor OOD sets. In `examples/study` this one, of all parameters and
    of the last layer, is behind the entropy of temperature scaling on no problem, and mutual
    information is on four of eleven.
    """
    if task in REGRESSIONS:
        return None
    *_, last = (method for method in methods if method is methods[0] or method.posterior)
    return {"method": last.key, "score": "entropy"}


def common(table: Table, other: Table) -> Table:
    """The rows of a table that are of examples of the other, in ascending order in both."""
    rows = torch.isin(table["index"], other["index"])
    return table if bool(rows.all()) else {name: column[rows] for name, column in table.items()}


class Comparison:
    """Metrics of every method on every set, and differences between methods."""

    def __init__(
        self, tables: Mapping[tuple[str, str], Table], roles: Mapping[str, str], task: str
    ) -> None:
        self._tables, self._roles, self._task = tables, roles, task
        self._methods = list(dict.fromkeys(method for method, _ in tables))
        self._known: dict[tuple[str, str, int, int], dict[str, metrics.Report]] = {}

    def rows(self) -> list[dict[str, Any]]:
        """As `rows` of `metrics.json`."""
        return [
            {"method": method, "set": name, **row, **({"score": score} if score else {})}
            | {"num_examples": len(table["index"])}
            for (method, name), table in self._tables.items()
            for score, report in self._reports(method, name, method).items()
            for row in report.rows()
        ]

    def differences(self) -> Iterator[dict[str, Any]]:
        """As `differences` of `metrics.json`: each on the examples that both have predicted.

        Of labelled sets of every method from every one before it; of OOD sets of every method and
        score from the first: the network's entropy, of a regression the first posterior's variance.
        """
        for name, role in self._roles.items():
            pairs: Iterator[tuple[str, str]] = itertools.combinations(self._methods, 2)
            if role == "ood":
                has_score = (
                    m for m in self._methods if scores_of(self._tables[m, name], self._task)
                )
                first = next(has_score, None)
                pairs = ((first, method) for method in self._methods if first is not None)
            for reference, method in pairs:
                yield from self._difference(method, reference, name)

    def _difference(self, method: str, reference: str, name: str) -> Iterator[dict[str, Any]]:
        mine = self._reports(method, name, reference)
        other = self._reports(reference, name, method)
        reference_score, against = next(iter(other.items()))
        shared = common(self._tables[method, name], self._tables[reference, name])
        told = {"method": method, "reference": reference, "set": name}
        for score, report in mine.items():
            if (method, score) == (reference, reference_score):
                continue
            scores = {"score": score, "reference_score": reference_score} if score else {}
            for row in metrics.compare(report, against).rows():
                yield {**told, **row, **scores, "num_examples": len(shared["index"])}

    def _reports(self, method: str, name: str, other: str) -> dict[str, metrics.Report]:
        """A method's reports on examples of another's: of an OOD set by score, else one."""
        table, test = (
            common(self._tables[method, of], self._tables[other, of]) for of in (name, TEST)
        )
        key = method, name, len(table["index"]), len(test["index"])
        if key in self._known:
            return self._known[key]
        if self._roles[name] == "ood":
            inside, outside = scores_of(test, self._task), scores_of(table, self._task)
            found = {
                score: metrics.evaluate_ood(inside[score], outside[score])
                for score in inside
                if score in outside
            }
        elif self._task in REGRESSIONS:
            mean, deviation = table["mean"], table["standard_deviation"]
            found = {"": metrics.evaluate_regression(mean, deviation, table["target"])}
        else:
            is_multilabel = self._task == "multilabel"
            evaluate = metrics.evaluate_multilabel if is_multilabel else metrics.evaluate
            found = {"": evaluate(table["probs"], table["label"].long())}
        self._known[key] = found
        return found
