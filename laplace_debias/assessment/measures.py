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
from laplace_debias.report.run_folder import read_json

Table = Mapping[str, Tensor]
TEST = "test"
"""The name of the test set."""


def measure(run: Run) -> None:
    """Measure what is written, choose the examples to look at, and mark the run complete."""
    with run.stage("measure"):
        tables = {
            (method.key, part.name): read_predictions(run.path(method, part))
            for method in run.methods
            for part in run.sets
        }
        compared = Comparison(tables, {part.name: part.role for part in run.sets}, run.loaded.task)
        found = {
            "rows": compared.rows(),
            "differences": list(compared.differences()),
            "recommended": recommended(run.methods, run.loaded.task),
        }
        write_json(run.folder / "metrics.json", found)
        of_test = {method.key: tables[method.key, TEST] for method in run.methods}
        write_examples(run.folder, run.loaded, of_test, run.methods[0].key)
        for method in run.methods:
            told = [run.told(method, part) for part in run.sets]
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
    if task == "regression":
        spread = table["epistemic"]
        variance = spread.square() if spread.ndim == 1 else spread.square().mean(1)
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
    if task == "regression":
        return None
    *_, last = (method for method in methods if method is methods[0] or method.posterior)
    return {"method": last.key, "score": "entropy"}


def common(ours: Table, theirs: Table) -> tuple[Table, Table]:
    """The rows of both tables that are of the same examples, in one order."""
    here = torch.isin(ours["index"], theirs["index"])
    there = torch.isin(theirs["index"], ours["index"])
    return _where(ours, here), _where(theirs, there)


def _where(table: Table, rows: Tensor) -> Table:
    # Indices ascend in both, so the rows come in one order.
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
            for score, report in self._reports(
                method, name, table, self._tables[method, TEST]
            ).items()
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
        ours, theirs = common(self._tables[method, name], self._tables[reference, name])
        our_test, their_test = common(self._tables[method, TEST], self._tables[reference, TEST])
        mine = self._reports(method, name, ours, our_test)
        other = self._reports(reference, name, theirs, their_test)
        reference_score, against = next(iter(other.items()))
        told = {"method": method, "reference": reference, "set": name}
        for score, report in mine.items():
            if (method, score) == (reference, reference_score):
                continue
            scores = {"score": score, "reference_score": reference_score} if score else {}
            for row in metrics.compare(report, against).rows():
                yield {**told, **row, **scores, "num_examples": len(ours["index"])}

    def _reports(
        self, method: str, name: str, table: Table, test: Table
    ) -> dict[str, metrics.Report]:
        """The reports of rows of a method's tables: of an OOD set by score, else a single one."""
        key = method, name, len(table["index"]), len(test["index"])
        if key not in self._known:
            if self._roles[name] == "ood":
                inside, outside = scores_of(test, self._task), scores_of(table, self._task)
                self._known[key] = {
                    score: metrics.evaluate_ood(inside[score], outside[score])
                    for score in inside
                    if score in outside
                }
            else:
                self._known[key] = {"": report_of_table(table, self._task)}
        return self._known[key]


def report_of_table(table: Table, task: str) -> metrics.Report:
    """The metrics of labelled predictions."""
    if task == "regression":
        mean, deviation = table["mean"], table["standard_deviation"]
        return metrics.evaluate_regression(mean, deviation, table["target"])
    evaluate = metrics.evaluate_multilabel if task == "multilabel" else metrics.evaluate
    return evaluate(table["probs"], table["label"].long())
