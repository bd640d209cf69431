"""The last stage of a run: metrics, paired differences and the verdict."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from laplace_debias import metrics
from laplace_debias.assessment.conclusion import conclude
from laplace_debias.assessment.labelled import Columns, labelled_report, scores_of
from laplace_debias.assessment.methods import Method
from laplace_debias.assessment.notable_examples import write_examples
from laplace_debias.assessment.run import Run
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.runs.records import (
    TEST,
    DifferenceRow,
    Measurements,
    MetricRow,
    Recommendation,
)


def measure(run: Run) -> None:
    """Compute the metrics, choose examples for the page, and mark the run complete."""
    with run.stage("measure"):
        tables = {
            (method.key, name): _read_columns(run, method, name)
            for method in run.methods
            for name in run.sets
        }
        roles = {dataset.name: dataset.role for dataset in run.record.sets}
        comparison = Comparison(tables, roles, run.loaded.likelihood)
        measurements = Measurements(
            rows=comparison.rows(),
            differences=list(comparison.differences()),
            recommended=recommended(run.methods, run.loaded.likelihood),
        )
        run.folder.write_measurements(measurements)
        test_tables = {method.key: tables[method.key, TEST] for method in run.methods}
        write_examples(run.folder, run.loaded, test_tables, run.methods[0].key)
        for method in run.methods:
            _record_seconds(run, method)
    run.record.conclusion = conclude(run.record, run.folder.read_measurements())
    run.record.status = "complete"
    run.write()
    run.folder.remove_state()


def _read_columns(run: Run, method: Method, set_name: str) -> dict[str, Tensor]:
    columns = run.folder.read_predictions(method.key, set_name)
    return {name: torch.from_numpy(column.copy()) for name, column in columns.items()}


def _record_seconds(run: Run, method: Method) -> None:
    """Record the time that a method takes to predict one example."""
    summaries = [run.summary(method, name) for name in run.sets]
    seconds = sum(summary.seconds for summary in summaries if summary is not None)
    num_examples = sum(summary.num_examples for summary in summaries if summary is not None)
    record = run.method_record(method)
    record.seconds["predict"] = seconds
    record.seconds_per_example = seconds / num_examples


def recommended(methods: Sequence[Method], likelihood: Likelihood) -> Recommendation | None:
    """Return the recommended OOD score, which is always an entropy, or None for a regression.

    The choice depends on neither the test set nor the OOD sets. In `examples/study`, this score was
    not worse than the entropy of temperature scaling on any problem, neither for posteriors over
    all parameters nor for those over the last layer. Mutual information, however, was worse on four
    of eleven problems.
    """
    if likelihood.predicts_numbers:
        return None
    *_, last = (method for method in methods if method is methods[0] or method.posterior)
    return Recommendation(last.key, "entropy")


def common(table: Columns, reference: Columns) -> Columns:
    """Select the rows of a table whose examples the reference table also contains."""
    rows = torch.isin(table["index"], reference["index"])
    return table if bool(rows.all()) else {name: column[rows] for name, column in table.items()}


class Comparison:
    """Metrics of every method on every set, and differences between methods."""

    def __init__(
        self,
        tables: Mapping[tuple[str, str], Columns],
        roles: Mapping[str, str],
        likelihood: Likelihood,
    ) -> None:
        self._tables = tables
        self._roles = roles
        self._likelihood = likelihood
        self._methods = list(dict.fromkeys(method for method, _ in tables))
        self._cached_reports: dict[tuple[str, str, int, int], dict[str, metrics.Report]] = {}

    def rows(self) -> list[MetricRow]:
        """Compute the metrics of every method on every set."""
        return [
            MetricRow(
                method=method,
                set_name=set_name,
                score=score or None,
                num_examples=len(table["index"]),
                **row,
            )
            for (method, set_name), table in self._tables.items()
            for score, report in self._reports(method, set_name, method).items()
            for row in report.rows()
        ]

    def differences(self) -> Iterator[DifferenceRow]:
        """Compute differences between methods on the examples that both have predicted.

        On labelled sets, every method is compared with every earlier method. On OOD sets, each
        score of each method is compared with the first score, which is the network's entropy; for a
        regression, it is the variance of the first posterior.
        """
        for set_name, role in self._roles.items():
            pairs: Iterator[tuple[str, str]] = itertools.combinations(self._methods, 2)
            if role == "ood":
                with_scores = (
                    method
                    for method in self._methods
                    if scores_of(self._tables[method, set_name], self._likelihood)
                )
                first = next(with_scores, None)
                pairs = ((first, method) for method in self._methods if first is not None)
            for reference, method in pairs:
                yield from self._differences_from(reference, method, set_name)

    def _differences_from(
        self, reference: str, method: str, set_name: str
    ) -> Iterator[DifferenceRow]:
        """Yield the difference between a method and a reference on a set for each metric.

        If there are several OOD scores, each one is compared with the first score of the reference.
        """
        reports = self._reports(method, set_name, reference)
        reference_reports = self._reports(reference, set_name, method)
        reference_score, reference_report = next(iter(reference_reports.items()))
        shared = common(self._tables[method, set_name], self._tables[reference, set_name])
        for score, report in reports.items():
            if (method, score) == (reference, reference_score):
                continue
            for row in metrics.compare(report, reference_report).rows():
                yield DifferenceRow(
                    method=method,
                    reference=reference,
                    set_name=set_name,
                    score=score or None,
                    reference_score=reference_score or None,
                    num_examples=len(shared["index"]),
                    **row,
                )

    def _reports(self, method: str, set_name: str, reference: str) -> dict[str, metrics.Report]:
        """Return a method's reports on the reference's examples, by score if it is an OOD set."""
        table = common(self._tables[method, set_name], self._tables[reference, set_name])
        test = common(self._tables[method, TEST], self._tables[reference, TEST])
        key = (method, set_name, len(table["index"]), len(test["index"]))
        if key not in self._cached_reports:
            self._cached_reports[key] = self._reports_by_score(table, test, self._roles[set_name])
        return self._cached_reports[key]

    def _reports_by_score(
        self, table: Columns, test: Columns, role: str
    ) -> dict[str, metrics.Report]:
        """Compute reports on a table; an OOD set is compared with the test set, by each score."""
        if role == "ood":
            inside = scores_of(test, self._likelihood)
            outside = scores_of(table, self._likelihood)
            return {
                score: metrics.evaluate_ood(inside[score], outside[score])
                for score in inside
                if score in outside
            }
        return {"": labelled_report(table, self._likelihood)}
