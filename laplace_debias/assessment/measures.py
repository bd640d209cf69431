"""Metrics of what methods predicted, with intervals, and paired differences between methods."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laplace_debias import metrics

Table = Mapping[str, Tensor]
TEST = "test"
"""The name of the test set."""


def scores_of(table: Table, task: str) -> dict[str, Tensor]:
    """What tells that an example is unlike the training data, higher where it is more so.

    Args:
        table: What a method predicts.
        task: As in `Loaded`. Of labels that apply or not there is no largest probability; of a
            regression there is the variance without the noise alone.
    """
    if task == "regression":
        spread = table["epistemic"]
        variance = spread.square() if spread.ndim == 1 else spread.square().mean(1)
        return {"variance": variance} if bool((variance > 0).any()) else {}
    scores = {"entropy": table["entropy"]}
    if task != "multilabel":
        scores["max_probability"] = 1 - table["probs"].amax(1)
    for name in ("mutual_information", "variance"):
        if not bool(table[name].isnan().any()):
            scores[name] = table[name]
    return scores


def common(ours: Table, theirs: Table) -> tuple[Table, Table]:
    """The rows of both tables that are of the same examples, in one order."""
    here = torch.isin(ours["index"], theirs["index"])
    there = torch.isin(theirs["index"], ours["index"])
    return _where(ours, here), _where(theirs, there)


def _where(table: Table, rows: Tensor) -> Table:
    # Indices ascend in both, so the rows come in one order.
    return table if bool(rows.all()) else {name: column[rows] for name, column in table.items()}


class Comparison:
    """Metrics of every method on every set, and differences from the methods of reference.

    Args:
        tables: By method and set what was predicted; the methods in their order.
        roles: By set its role: `test`, `shift` or `ood`; the test set is the one called `test`.
        references: Keys of the methods that the others are held against.
        task: As in `Loaded`.
        num_resamples: Draws for the intervals that have no closed form.
        seed: Of these draws.
    """

    def __init__(
        self,
        tables: Mapping[tuple[str, str], Table],
        roles: Mapping[str, str],
        references: list[str],
        task: str,
        num_resamples: int,
        seed: int,
    ) -> None:
        self._tables, self._roles, self._references = tables, roles, references
        self._task = task
        self._draws: dict[str, Any] = {"num_resamples": num_resamples, "seed": seed}
        self._known: dict[tuple[str, str, int, int], dict[str, metrics.Report]] = {}

    def rows(self) -> list[dict[str, Any]]:
        """As `rows` of `metrics.json`."""
        return [
            {"method": method, "set": name, **row, **_of_score(score)}
            | {"num_examples": len(table["index"])}
            for (method, name), table in self._tables.items()
            for score, report in self._reports(
                method, name, table, self._tables[method, TEST]
            ).items()
            for row in report.rows()
        ]

    def differences(self) -> list[dict[str, Any]]:
        """As `differences` of `metrics.json`."""
        found = []
        for method, name in self._tables:
            for reference in self._references:
                if method != reference:
                    found += self._difference(method, reference, name)
        return found

    def _difference(self, method: str, reference: str, name: str) -> list[dict[str, Any]]:
        ours, theirs = common(self._tables[method, name], self._tables[reference, name])
        our_test, their_test = common(self._tables[method, TEST], self._tables[reference, TEST])
        mine = self._reports(method, name, ours, our_test)
        other = self._reports(reference, name, theirs, their_test)
        told = {"method": method, "reference": reference, "set": name}
        return [
            {**told, **row, **_of_score(score), "num_examples": len(ours["index"])}
            for score in mine
            if score in other
            for row in metrics.compare(mine[score], other[score], **self._draws).rows()
        ]

    def _reports(
        self, method: str, name: str, table: Table, test: Table
    ) -> dict[str, metrics.Report]:
        """The reports of some rows of a method's tables: of an OOD set by score, else a single one.

        Args:
            method: The method.
            name: The set.
            table: Rows of what it predicts for the set.
            test: Rows of what it predicts for the test set, which OOD sets are told from.
        """
        key = method, name, len(table["index"]), len(test["index"])
        if key not in self._known:
            if self._roles[name] == "ood":
                self._known[key] = self._of_ood(test, table)
            else:
                self._known[key] = {"": self._of_labelled(table)}
        return self._known[key]

    def _of_labelled(self, table: Table) -> metrics.Report:
        if self._task == "regression":
            mean, spread, target = (
                table[name] for name in ("mean", "standard_deviation", "target")
            )
            return metrics.evaluate_regression(mean, spread, target, **self._draws)
        evaluate = metrics.evaluate_multilabel if self._task == "multilabel" else metrics.evaluate
        return evaluate(table["probs"], table["label"].long(), **self._draws)

    def _of_ood(self, test: Table, ood: Table) -> dict[str, metrics.Report]:
        inside, outside = scores_of(test, self._task), scores_of(ood, self._task)
        return {
            score: metrics.evaluate_ood(inside[score], outside[score], **self._draws)
            for score in inside
            if score in outside
        }


def _of_score(score: str) -> dict[str, str]:
    return {"score": score} if score else {}
