"""The verdict on a run: three to five sentences on what its numbers show.

Methods are compared by three criteria: two proper scores, and the error of the network's confidence
(for a regression, of its standard deviation). One method is better than another if, on the examples
that both predicted, it is significantly better in at least one criterion and significantly worse in
none. A difference is significant if the 95 % interval of the paired difference excludes zero.
Differences that are too small to matter are ignored, even if they are significant.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

from laplace_debias.assessment.temperature import BOUNDS
from laplace_debias.runs.records import (
    DifferenceRow,
    Measurements,
    MetricRow,
    MetricValue,
    Recommendation,
    RunRecord,
    TrainingRecord,
)
from laplace_debias.runs.relevance import matters
from laplace_debias.runs.wording import SCORE_LABELS, brief
from laplace_debias.system.shown import counted

_CRITERIA = {
    "nll": ("NLL", "{} nats"),
    "brier": ("Brier score", "{}"),
    "overconfidence": ("difference between confidence and accuracy", "{} points"),
    "crps": ("CRPS", "{}"),
    "scaled_error": ("misfit of the standard deviations", "{}"),
}
_FEWEST_EXAMPLES = 20
"""With fewer examples, nothing is concluded: an interval can then miss the true value much more
often than in 5 % of the cases, or is too wide to be of use."""
_LARGEST_TEMPERATURE = 20.0
"""If the fitted temperature is above this, the network's confidence is meaningless."""
_MOST_OVERCONFIDENCE = 0.1
"""A properly trained network is not more over-confident than this on its own training examples."""
_LEAST_ABOVE_CHANCE = 0.1
"""If a network's score covers less than this fraction of the range from chance to a perfect score,
the network has learnt nothing."""


def conclude(record: RunRecord, measurements: Measurements) -> list[str]:
    """Return the verdict on a run, given its metrics; each entry has one or two sentences."""
    verdict = _Verdict(record, measurements)
    doubts = list(verdict.doubts())
    if _are_too_few(record.test.num_examples):
        advice = [verdict.advice_to_check(doubts)] if doubts else []
        return [*advice, verdict.on_few_examples()]
    if doubts:
        sentences = [
            verdict.advice_to_check(doubts),
            verdict.on_network(),
            *verdict.on_shifts(None),
        ]
    else:
        best_method = verdict.best_method
        sentences = [
            verdict.on_network(),
            *verdict.remedy(),
            *verdict.on_temperatures(),
            *verdict.on_shifts(best_method),
        ]
    return [*sentences, *verdict.on_ood_sets()]


def points(share: float) -> str:
    """Format a fraction in percentage points."""
    return f"{100 * share:.1f}".replace("-", "−")


class _Verdict:
    """A run with its metrics; the methods return sentences about the metrics."""

    def __init__(self, record: RunRecord, measurements: Measurements) -> None:
        self._record = record
        self._network = record.network.key
        # A temperature at the lower limit is not an optimum, so the method is not judged.
        self._without_optimum = [
            method.key for method in record.methods if method.temperature == BOUNDS[0]
        ]
        # The first method is the network itself.
        self._alternatives = [
            method.key for method in record.methods[1:] if method.key not in self._without_optimum
        ]
        self._labels = {method.key: f"“{method.label}”" for method in record.methods}
        self._labels[self._network] = "the network"
        self._has_numbers = record.has_numbers
        criteria = ("nll", "brier", "overconfidence")
        if self._has_numbers:
            criteria = ("nll", "crps", "scaled_error")
        measured = {row.metric for row in measurements.rows}
        self._criteria = [metric for metric in criteria if metric in measured]
        self._recommended = measurements.recommended
        # Metrics by their names, for each method and set; only OOD sets have an AUROC per score.
        self._metrics: dict[tuple[str, str], dict[str, MetricRow]] = {}
        self._aurocs: dict[tuple[str, str, str], MetricRow] = {}
        for row in measurements.rows:
            if row.score is None:
                self._metrics.setdefault((row.method, row.set_name), {})[row.metric] = row
            elif row.metric == "auroc":
                self._aurocs[row.method, row.set_name, row.score] = row
        self._differences = {
            (row.method, row.reference, row.metric, row.set_name, row.score): row
            for row in measurements.differences
        }

    # ------------------------------------------------------------------------- the metrics

    def _metrics_of(self, method: str, set_name: str = "test") -> Mapping[str, MetricRow]:
        """Return the metrics that were measured of a method on a set, by their names."""
        return self._metrics.get((method, set_name), {})

    def _difference(
        self,
        method: str,
        reference: str,
        metric: str,
        set_name: str = "test",
        score: str | None = None,
    ) -> DifferenceRow:
        """Return a method's metric minus a reference method's, on the examples of both."""
        row = self._differences.get((method, reference, metric, set_name, score))
        if row is not None:
            return row
        row = self._differences[reference, method, metric, set_name, score]
        return dataclasses.replace(
            row,
            method=method,
            reference=reference,
            value=-row.value,
            low=None if row.high is None else -row.high,
            high=None if row.low is None else -row.low,
        )

    def _significant(
        self, method: str, reference: str
    ) -> tuple[dict[str, DifferenceRow], dict[str, DifferenceRow]]:
        """Return the criteria in which a method is significantly better, and worse."""
        better = {}
        worse = {}
        for metric in self._criteria:
            row = self._difference(method, reference, metric)
            sign = self._sign(row)
            if sign < 0:
                better[metric] = row
            elif sign > 0:
                worse[metric] = row
        return better, worse

    def _sign(self, difference: DifferenceRow) -> int:
        """Return the sign of a difference, or 0 if it is not significant or too small to matter."""
        reference_rows = self._metrics_of(difference.reference, difference.set_name)
        reference_metrics = {metric: row.value for metric, row in reference_rows.items()}
        if not matters(difference.metric, difference.value, reference_metrics):
            return 0
        return difference.sign()

    def _is_better(self, method: str, reference: str) -> bool:
        better, worse = self._significant(method, reference)
        return bool(better) and not worse

    def _inputs(self, count: int | None) -> str:
        """Format a number of inputs, as in `300 images`."""
        assert count is not None
        return counted(count, self._record.input_name)

    # ------------------------------------------------------------------------- the set-up

    def doubts(self) -> Iterator[str]:
        """Yield sentences on signs that the network and the data do not match."""
        training = self._record.training
        if training is not None and not _are_too_few(training.num_examples):
            yield from self._doubts_of_training(training)
        for method in self._record.methods:
            is_large = (method.temperature or 0) > _LARGEST_TEMPERATURE
            if is_large and not _are_too_few(method.num_validation):
                yield f"the temperature of “{method.label}” is {method.temperature:.3g}"
            if method.prior_precision_at_limit:
                yield (
                    f"the prior precision of “{method.label}” is at the end of the range of the "
                    "search"
                )

    def _doubts_of_training(self, training: TrainingRecord) -> Iterator[str]:
        """Yield sentences on such signs in the metrics on the network's own training examples."""
        rows = training.metrics()
        inputs = f"its own training {self._record.input_name}s"
        if "explained" in rows and rows["explained"].value < _LEAST_ABOVE_CHANCE:
            percent = 100 * rows["explained"].value
            share = f"{percent:.0f}".replace("-", "−")
            yield f"it explains {share} % of the variance of the targets of {inputs}"
        if "accuracy" not in rows:
            return
        assert training.num_classes is not None
        assert training.uniform_nll is not None
        chance = 0.5 if self._record.target_kind == "labels" else 1 / training.num_classes
        accuracy = rows["accuracy"].value
        gap = rows["overconfidence"]
        if accuracy < chance + _LEAST_ABOVE_CHANCE * (1 - chance):
            yield f"its accuracy on {inputs} is {accuracy:.3f}, near chance"
        elif gap.lower > _MOST_OVERCONFIDENCE:
            yield f"on {inputs} it is over-confident by {points(gap.value)} points"
        nll_on_test = self._metrics_of(self._network)["nll"]
        for row, examples in ((rows["nll"], inputs), (nll_on_test, "the test set")):
            if row.lower > training.uniform_nll:
                yield (
                    f"its NLL on {examples} is {brief(row.value)} nats, worse than the "
                    f"{brief(training.uniform_nll)} of a uniform guess"
                )
                break

    def advice_to_check(self, doubts: Sequence[str]) -> str:
        """Return the advice to check the network and the data first."""
        causes = "the order of the classes, the normalisation of the inputs and the checkpoint"
        if self._record.input_name == "image":
            causes = (
                "the order of the classes, the size and normalisation of the images and the "
                "checkpoint"
            )
        if self._has_numbers:
            causes = (
                "the order and scaling of the columns, the units of the targets and the checkpoint"
            )
        reasons = _join_with_and(doubts)
        return (
            f"First check {causes}, because the network does not fit these data as a trained "
            f"network does. {_capitalised(reasons)}. Until this is resolved, the "
            "results below mean little."
        )

    # ------------------------------------------------------------------------- the network

    def on_few_examples(self) -> str:
        """Return the network's metrics on a test set that is too small for a conclusion."""
        inputs = self._inputs(self._record.test.num_examples)
        metrics = self._metrics_of(self._network)
        if self._has_numbers:
            metric = f"RMSE of {brief(metrics['rmse'].value)}"
        else:
            metric = f"accuracy of {100 * metrics['accuracy'].value:.1f} %"
        return (
            f"The test set of {inputs} is too small for a conclusion about the uncertainty. On it, "
            f"the network has an {metric} and an NLL of {brief(metrics['nll'].value)} nats. "
            f"Use at least {_FEWEST_EXAMPLES} test {self._record.input_name}s; several "
            "hundred give useful intervals."
        )

    def on_network(self) -> str:
        """Describe the network's confidence and its accuracy or, for a regression, its errors."""
        num_examples = self._record.test.num_examples
        beginning = f"On {self._inputs(num_examples)} of the test set, the network has"
        metrics = self._metrics_of(self._network)
        nll = f"an NLL of {_with_interval(metrics['nll'])} nats"
        if self._has_numbers:
            rmse = _with_interval(metrics["rmse"])
            sentence = f"{beginning} an RMSE of {rmse} and {nll}. {self._on_bias()}"
            clauses = [clause for clause in (self._on_width(), self._on_coverage()) if clause]
            if clauses:
                sentence += f" Its {', and its '.join(clauses)}."
            return sentence
        accuracy = metrics["accuracy"]
        gap = metrics["overconfidence"]
        return (
            f"{beginning} an accuracy of {100 * accuracy.value:.1f} % and a mean confidence of "
            f"{100 * (accuracy.value + gap.value):.1f} %. It is {_confidence(gap)}, and has {nll}."
        )

    def _on_bias(self) -> str:
        """Return a sentence on the mean error of a regression."""
        bias = self._metrics_of(self._network)["bias"]
        if not bias.sign():
            interval = f"95 % interval {brief(bias.lower)} to {brief(bias.upper)}"
            return f"Its bias, {brief(bias.value)}, is not significant ({interval})."
        amount, interval = _in_words(bias, brief)
        direction = "low" if bias.value < 0 else "high"
        return (
            f"Its predictions are too {direction} by {amount} on average (95 % interval "
            f"{interval}). A posterior does not correct this bias. Subtract the bias, or find out "
            "how these data differ from the training data."
        )

    def _on_coverage(self) -> str:
        """Describe how many targets lie in the intervals, or return "" if this was not measured."""
        coverage = self._metrics_of(self._network).get("coverage")
        if coverage is None:
            return ""
        return f"95 % intervals contain {100 * coverage.value:.1f} % of the targets"

    def _on_width(self) -> str:
        """Describe how well the standard deviations match the errors; return "" if any is zero."""
        scaled_error = self._metrics_of(self._network).get("scaled_error")
        if scaled_error is None:
            return ""
        ratio = f"{brief(scaled_error.value)} standard deviations"
        interval = f"95 % interval {brief(scaled_error.lower)} to {brief(scaled_error.upper)}"
        if not scaled_error.sign(1):
            return (
                "standard deviations are not significantly too small or too large: the root mean "
                f"square error is {ratio} ({interval})"
            )
        size = "small" if scaled_error.value > 1 else "large"
        return (
            f"standard deviations are too {size}: the root mean square error is {ratio} instead of "
            f"1 ({interval})"
        )

    # ------------------------------------------------------------------------- the remedy

    @cached_property
    def best_method(self) -> str | None:
        """The method to use, or None if no method is better than the network."""
        remedies = [key for key in self._alternatives if self._is_better(key, self._network)]
        # Choose the first method that no other method improves on, because simple methods come
        # first.
        unbeaten = [
            key
            for key in remedies
            if not any(self._is_better(rival, key) for rival in remedies if rival != key)
        ]
        return next(iter(unbeaten or remedies), None)

    def remedy(self) -> list[str]:
        """Describe the best method, and how the other methods compare with it."""
        if not self._alternatives:
            if self._without_optimum:
                return []
            return ["Only the network was evaluated. Add a method to compare it with."]
        best = self.best_method
        if best is None:
            advice = (
                "No method improves the network significantly, judged by "
                f"{_names(self._criteria)} together. Keep the network as it is, or use more test "
                "examples."
            )
            return [advice, *self._on_alternatives(self._network)]
        better, _ = self._significant(best, self._network)
        num_examples = next(iter(better.values())).num_examples
        unchanged = ""
        if len(better) < len(self._criteria):
            names = _names([metric for metric in self._criteria if metric not in better])
            unchanged = f" (no significant change: {names})"
        confidence = ""
        if not self._has_numbers:
            confidence = f" It is {_confidence(self._metrics_of(best)['overconfidence'])}."
        advice = (
            f"Use {self._labels[best]}. On the same {self._inputs(num_examples)}, it "
            f"lowers {_amounts(better)}{unchanged}.{confidence}"
        )
        return [advice, *self._on_alternatives(best)]

    def on_temperatures(self) -> list[str]:
        """Explain why a method has no optimal temperature."""
        inputs = f"{self._record.input_name}s"
        return [
            f"{self._labels[key]} has no optimum. The network predicts all validation {inputs} "
            "correctly, so every smaller temperature has a lower NLL, and the search ended at its "
            f"lower limit, {BOUNDS[0]:g}. Use more validation {inputs}, of all classes, on which "
            "the network was not trained."
            for key in self._without_optimum
        ]

    def _on_alternatives(self, reference: str) -> list[str]:
        """Compare the methods that are not recommended with the recommended method."""
        worse = []
        equal = []
        for key in self._alternatives:
            if key == reference:
                continue
            gains, losses = self._significant(key, reference)
            name = self._labels[key]
            if losses:
                gained = f"is better in {_names(gains)} but " if gains else ""
                worse.append(f"{name} {gained}raises {_amounts(losses)}{self._on_reversal(key)}")
            else:
                equal.append(f"{name}{self._on_reversal(key)}")
        sentences = []
        label = self._labels[reference]
        if worse:
            sentences.append(f"Compared with {label}, {'; '.join(worse)}.")
        if equal and (worse or reference != self._network):
            sentences.append(
                f"No significant difference from {label} was found for {_join_with_and(equal)}."
            )
        return [" ".join(sentences)] if sentences else []

    def _on_reversal(self, key: str) -> str:
        """Describe whether a method turns over-confidence into under-confidence, or vice versa."""
        if self._has_numbers:
            return ""
        gap_of_network = self._metrics_of(self._network)["overconfidence"]
        gap = self._metrics_of(key)["overconfidence"]
        if gap_of_network.sign() * gap.sign() < 0:
            return f" and is {_confidence(gap)}"
        return ""

    # ------------------------------------------------------- inputs that differ from the test set

    def on_shifts(self, best_method: str | None) -> list[str]:
        """Describe the network on the most severe shift, and how the best method changes this."""
        shifts = self._record.sets_of("shift")
        if not shifts:
            return []
        hardest = shifts[-1]
        metric = "scaled_error" if self._has_numbers else "overconfidence"
        metrics = self._metrics_of(self._network, hardest.name)
        if metric not in metrics:
            return []
        row = metrics[metric]
        sentence = f"On shifted inputs of severity {hardest.severity}, the network"
        if self._has_numbers:
            sentence += f"'s errors are {_with_interval(row)} times its standard deviations"
        else:
            accuracy = 100 * metrics["accuracy"].value
            sentence += f" has an accuracy of {accuracy:.1f} % and is {_confidence(row)}"
        if best_method is None:
            return [f"{sentence}."]
        label = self._labels[best_method]
        change = self._difference(best_method, self._network, metric, hardest.name)
        sign = self._sign(change)
        if not sign:
            return [f"{sentence}. For {label}, this is not significantly different."]
        verb = "lowers" if sign < 0 else "raises"
        return [f"{sentence}. {_capitalised(label)} {verb} {_amounts({metric: change})}."]

    def on_ood_sets(self) -> list[str]:
        """Describe how well the OOD sets are detected, and by which score.

        A score is not recommended for a set if the interval of its AUROC on this set includes 0.5
        or less.
        """
        sentences_by_set = {}
        sentences_on_small_sets = []
        for ood_set in self._record.sets_of("ood"):
            if _are_too_few(ood_set.num_examples):
                inputs = self._inputs(ood_set.num_examples)
                sentences_on_small_sets.append(
                    f"“{ood_set.name}” has only {inputs}, too few for a conclusion."
                )
                continue
            sentence = self._on_ood_set(ood_set.name)
            if sentence:
                sentences_by_set[ood_set.name] = sentence
        sentences = [
            *self._advice_on_score(list(sentences_by_set)),
            *sentences_by_set.values(),
            *sentences_on_small_sets,
        ]
        return [" ".join(sentences)] if sentences else []

    def _advice_on_score(self, set_names: Sequence[str]) -> list[str]:
        """Name the score to use for the sets that it detects, if there are any."""
        recommended = self._recommended
        detected = [f"“{name}”" for name in set_names if not self._is_missed(name)]
        if recommended is None or not detected:
            return []
        inputs = "out-of-distribution inputs"
        if len(detected) < len(set_names):
            inputs = f"inputs like those of {_join_with_and(detected)}"
        score = self._named_score(recommended.score, recommended.method)
        return [f"To detect {inputs}, use {score}."]

    def _named_score(self, score: str | None, method: str) -> str:
        name = SCORE_LABELS[score or ""]
        if method == self._network:
            return f"the network's {name}"
        return f"the {name} of {self._labels[method]}"

    def _is_missed(self, set_name: str) -> bool:
        """Whether the interval of the recommended score's AUROC on a set reaches 0.5."""
        if self._recommended is None:
            return False
        return self._auroc(self._recommended, set_name).lower <= 0.5

    def _auroc(self, recommended: Recommendation, set_name: str) -> MetricRow:
        return self._aurocs[recommended.method, set_name, recommended.score]

    def _on_ood_set(self, set_name: str) -> str:
        """Describe how well one set is detected, or return "" if that was not measured."""
        reference = self._reference_auroc(set_name)
        if reference is None:
            return ""
        recommended = self._recommended
        if recommended is not None and self._is_missed(set_name):
            return self._on_missed_set(set_name, recommended, reference)
        score = self._named_score(reference.score, reference.method)
        separates = "separates" if reference.lower > 0.5 else "does not separate"
        sentence = (
            f"{_capitalised(score)} {separates} “{set_name}” from test "
            f"{self._record.input_name}s, with an AUROC of {_with_interval(reference)}."
        )
        if recommended is None or _is_score_of(recommended, reference):
            return sentence
        change = self._difference(
            recommended.method, reference.method, "auroc", set_name, recommended.score
        )
        comparison = (
            f"On the same {self._inputs(change.num_examples)}, the AUROC of the recommended score"
        )
        if not change.sign():
            difference = _with_interval(change)
            return f"{sentence} {comparison} is not significantly different, by {difference}."
        direction = "higher" if change.sign() > 0 else "lower"
        amount, interval = _in_words(change, brief)
        return f"{sentence} {comparison} is {direction} by {amount} ({interval})."

    def _reference_auroc(self, set_name: str) -> MetricRow | None:
        """Return the reference AUROC: of the network's entropy or, for numbers, of a variance."""
        candidates = [(self._network, "entropy")]
        candidates += [(method, "variance") for method in self._alternatives]
        for method, score in candidates:
            if (method, set_name, score) in self._aurocs:
                return self._aurocs[method, set_name, score]
        return None

    def _on_missed_set(
        self, set_name: str, recommended: Recommendation, reference: MetricRow
    ) -> str:
        """Describe a set that the recommended score does not detect."""
        row = self._auroc(recommended, set_name)
        score = self._named_score(row.score, row.method)
        sentence = (
            f"No score that was chosen beforehand detects “{set_name}”. The AUROC is "
            f"{_with_interval(row)} for {score}"
        )
        if _is_score_of(recommended, reference):
            return f"{sentence}."
        score = self._named_score(reference.score, reference.method)
        return f"{sentence}, and {_with_interval(reference)} for {score}."


def _are_too_few(num_examples: int | None) -> bool:
    """Whether a number of examples is too small for a conclusion; an unknown number is not."""
    return num_examples is not None and num_examples < _FEWEST_EXAMPLES


def _is_score_of(recommended: Recommendation, row: MetricRow) -> bool:
    """Whether a row contains a metric of the recommended score."""
    return (recommended.method, recommended.score) == (row.method, row.score)


def _in_words(row: MetricValue, text: Callable[[float], str]) -> tuple[str, str]:
    """Format the absolute value and the interval; if it excludes 0, omit the signs of its ends."""
    ends = [row.lower, row.upper]
    if row.sign():
        ends = sorted(map(abs, ends))
    return text(abs(row.value)), " to ".join(map(text, ends))


def _confidence(gap: MetricValue) -> str:
    amount, interval = _in_words(gap, points)
    if math.isinf(gap.lower):
        return "not significantly over- or under-confident"
    if abs(gap.value) < 5e-4 or not gap.sign():
        return f"not significantly over- or under-confident (95 % interval {interval} points)"
    direction = "over" if gap.sign() > 0 else "under"
    return f"{direction}-confident by {amount} points (95 % interval {interval})"


def _names(criteria: Sequence[str] | Mapping[str, MetricValue]) -> str:
    return _join_with_and([_CRITERIA[metric][0] for metric in criteria])


def _amounts(rows: Mapping[str, MetricValue]) -> str:
    """Format significant differences, e.g. `the NLL by 0.1 nats (0.05 to 0.15)`."""
    amounts = []
    for metric, row in rows.items():
        name, unit = _CRITERIA[metric]
        amount, interval = _in_words(row, points if metric == "overconfidence" else brief)
        amounts.append(f"the {name} by {unit.format(amount)} ({interval})")
    return _join_with_and(amounts)


def _join_with_and(texts: Sequence[str]) -> str:
    """Join strings as in `a, b and c`."""
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def _capitalised(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _with_interval(row: MetricValue) -> str:
    if math.isinf(row.lower):
        return brief(row.value)
    return f"{brief(row.value)} ({brief(row.lower)} to {brief(row.upper)})"
