"""The verdict of a run: what its numbers show, in three to five sentences for page and terminal.

Methods are judged by three things together: two proper scores, and how far the network's confidence
(of a regression its standard deviation) is off. A method is better than another where it is better
in one of them significantly and worse in none, on the examples that both predicted: where the 95 %
interval of the paired difference excludes zero. Differences that are too small to matter do not
count, however certain they are.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from laplace_debias.report.names import SCORES, brief
from laplace_debias.sources.task import REGRESSIONS

Row = Mapping[str, Any]

_CRITERIA = {
    "nll": ("NLL", "{} nats"),
    "brier": ("Brier score", "{}"),
    "overconfidence": ("gap of confidence and accuracy", "{} points"),
    "crps": ("CRPS", "{}"),
    "scaled_error": ("misfit of the standard deviations", "{}"),
}
_SMALLEST = {"nll": 1e-3, "brier": 1e-3, "overconfidence": 5e-3, "scaled_error": 1e-2}
"""Differences below are too small to matter."""
_LARGEST_TEMPERATURE = 20.0
"""Larger ones are no correction of a confidence that means something."""
_MOST_OVERCONFIDENCE = 0.1
"""Training leaves no network far more confident than right on the examples it has learnt."""
_LEAST_ABOVE_CHANCE = 0.1
"""The part of the way from chance to certainty below which nothing was learnt."""


def conclude(run: Row, found: Row) -> list[str]:
    """The verdict on `run.json` and `metrics.json`, a sentence or two an entry."""
    verdict = _Verdict(run, found)
    doubts = list(verdict.doubts())
    first = [verdict.doubted(doubts)] if doubts else []
    remedy = [] if doubts else verdict.remedy()
    return [*first, verdict.measured(), *remedy, *verdict.shifted(), *verdict.foreign()]


def points(share: float) -> str:
    """A share in percentage points."""
    return f"{100 * share:.1f}".replace("-", "−")


class _Verdict:
    """The content of `run.json` and `metrics.json`, and the sentences made of it."""

    def __init__(self, run: Row, found: Row) -> None:
        self._run = run
        self._labels = {method["key"]: f"“{method['label']}”" for method in run["methods"]}
        self._network, *self._others = self._labels
        self._labels[self._network] = "the network"
        self._test = next(part for part in run["sets"] if part["role"] == "test")
        self._is_regression = run["task"] in REGRESSIONS
        self._criteria = (
            ("nll", "crps", "scaled_error")
            if self._is_regression
            else ("nll", "brier", "overconfidence")
        )
        self._chosen: str | None = None
        self._rows = {
            (row["method"], row["metric"], row["set"], row.get("score")): _with_ends(row)
            for row in found["rows"]
        }
        self._changes = {
            (row["method"], row["reference"], row["metric"], row["set"], row.get("score")): (
                _with_ends(row)
            )
            for row in found["differences"]
        }
        self._recommended: Row | None = found.get("recommended")

    # ----------------------------------------------------------------- what the files say

    def _row(self, metric: str, method: str | None = None, of: str = "test") -> Row:
        """A metric of a method, of the network if none is named."""
        return self._rows[method or self._network, metric, of, None]

    def _change(self, method: str, other: str, metric: str, of: str = "test") -> Row:
        """Method less other, on the examples of both."""
        if (method, other, metric, of, None) in self._changes:
            return self._changes[method, other, metric, of, None]
        row = self._changes[other, method, metric, of, None]
        return {**row, "value": -row["value"], "low": -row["high"], "high": -row["low"]}

    def _significant(self, method: str, other: str) -> tuple[dict[str, Row], dict[str, Row]]:
        """The criteria in which a method is better, and in which it is worse, significantly."""
        rows = {metric: self._change(method, other, metric) for metric in self._criteria}
        rows = {m: row for m, row in rows.items() if abs(row["value"]) >= _SMALLEST.get(m, 0)}
        better = {metric: row for metric, row in rows.items() if _sign(row) < 0}
        return better, {metric: row for metric, row in rows.items() if _sign(row) > 0}

    def _is_better(self, method: str, other: str) -> bool:
        better, worse = self._significant(method, other)
        return bool(better) and not worse

    def _inputs(self, count: int) -> str:
        return f"{count:,} {self._run['input_name']}{'' if count == 1 else 's'}"

    # ------------------------------------------------------------------------- the set-up

    def doubts(self) -> Iterator[str]:
        """Signs that network and data do not belong together."""
        training = self._run.get("training") or {"rows": ()}
        rows = {row["metric"]: _with_ends(row) for row in training["rows"]}
        own = f"its own training {self._run['input_name']}s"
        if "explained" in rows and rows["explained"]["value"] < _LEAST_ABOVE_CHANCE:
            share = 100 * rows["explained"]["value"]
            yield f"it explains {share:.0f} % of the variance of the targets of {own}"
        if "accuracy" in rows:
            chance = 0.5 if self._run["task"] == "multilabel" else 1 / training["num_classes"]
            accuracy, gap = rows["accuracy"]["value"], rows["overconfidence"]
            if accuracy < chance + _LEAST_ABOVE_CHANCE * (1 - chance):
                yield f"its accuracy on {own} is {accuracy:.3f}, near chance"
            elif gap["low"] > _MOST_OVERCONFIDENCE:
                yield f"on {own} it is over-confident by {points(gap['value'])} points"
            for row, where in ((rows["nll"], own), (self._row("nll"), "the test set")):
                if row["low"] > training["uniform_nll"]:
                    yield (
                        f"its NLL on {where} is {brief(row['value'])} nats, worse than the "
                        f"{brief(training['uniform_nll'])} of a uniform guess"
                    )
                    break
        for method in self._run["methods"]:
            if (method["temperature"] or 0) > _LARGEST_TEMPERATURE:
                yield f"the temperature of “{method['label']}” is {method['temperature']:.3g}"
            if method.get("prior_precision_at_limit"):
                yield (
                    f"the prior precision of “{method['label']}” is at the end of the range of the "
                    "search"
                )

    def doubted(self, doubts: Sequence[str]) -> str:
        """The check that comes before anything else."""
        causes = (
            "the order and scaling of the columns, the units of the targets and the checkpoint"
            if self._is_regression
            else "the order of the classes, the normalisation of the inputs and the checkpoint"
        )
        return (
            f"First check {causes}: the network does not fit these data as a trained one does. "
            f"{_joined(doubts)[:1].upper()}{_joined(doubts)[1:]}. The results below mean little "
            "until then."
        )

    # ----------------------------------------------------------------------- the network

    def measured(self) -> str:
        """How sure the network is, and how right."""
        on = f"On {self._inputs(self._test['num_examples'])} of the test set the network has"
        nll = f"an NLL of {_ends(self._row('nll'))} nats"
        if self._is_regression:
            bias, scaled = self._row("bias"), self._row("scaled_error")
            told = f"It has no significant bias ({_ends(bias)})."
            if _sign(bias):
                amount, interval = _in_words(bias, brief)
                way = "low" if bias["value"] < 0 else "high"
                told = (
                    f"It is biased: its predictions are too {way} by {amount} on average (95 % "
                    f"interval {interval}), which no posterior corrects. Subtract it, or find out "
                    "what differs from the training data."
                )
            width = "fit its errors"
            if _sign(scaled, 1):
                way = "small" if scaled["value"] > 1 else "large"
                width = f"are too {way}: errors measure {_ends(scaled)} of them where 1 is right"
            return (
                f"{on} an RMSE of {_ends(self._row('rmse'))} and {nll}. {told} Its standard "
                f"deviations {width}, and the 95 % intervals contain "
                f"{100 * self._row('coverage')['value']:.1f} % of the targets."
            )
        accuracy, gap = self._row("accuracy"), self._row("overconfidence")
        sure = 100 * (accuracy["value"] + gap["value"])
        return (
            f"{on} an accuracy of {100 * accuracy['value']:.1f} % and a mean confidence of "
            f"{sure:.1f} %: it is {_confidence(gap)}. It has {nll}."
        )

    # ------------------------------------------------------------------ what mends it

    def remedy(self) -> list[str]:
        """The method that mends it, and the others beside it."""
        if not self._others:
            return ["Nothing else was compared: add a method to compare with the network."]
        remedies = [key for key in self._others if self._is_better(key, self._network)]
        # The first of those that none of the others betters: simple methods come first.
        unbeaten = [
            key
            for key in remedies
            if not any(self._is_better(other, key) for other in remedies if other != key)
        ]
        self._chosen = next(iter(unbeaten or remedies), None)
        if self._chosen is None:
            first = (
                f"No method improves it significantly, judged by {_names(self._criteria)} "
                "together: keep the network as it is, or use more test examples."
            )
            return [first, *self._the_others(self._network)]
        better, _ = self._significant(self._chosen, self._network)
        count = next(iter(better.values()))["num_examples"]
        left = _names([metric for metric in self._criteria if metric not in better])
        rest = f" (no significant change: {left})" if left else ""
        after = ""
        if not self._is_regression:
            after = f" It is {_confidence(self._row('overconfidence', self._chosen))}."
        first = (
            f"Use {self._labels[self._chosen]}: on the same {self._inputs(count)} it lowers "
            f"{_amounts(better)}{rest}.{after}"
        )
        return [first, *self._the_others(self._chosen)]

    def _the_others(self, reference: str) -> list[str]:
        """How the methods that are not recommended compare with the one that is."""
        worse, same = [], []
        for key in self._others:
            if key == reference:
                continue
            gains, losses = self._significant(key, reference)
            name = self._labels[key]
            if losses:
                gained = f"is better in {_names(gains)} but " if gains else ""
                worse.append(f"{name} {gained}raises {_amounts(losses)}{self._turned(key)}")
            else:
                same.append(f"{name}{self._turned(key)}")
        told, of = [], self._labels[reference]
        if worse:
            told.append(f"Compared with {of}, {'; '.join(worse)}.")
        if same and (self._chosen or worse):
            told.append(f"No clear difference from {of}: {_joined(same)}.")
        return [" ".join(told)] if told else []

    def _turned(self, key: str) -> str:
        """Whether a method makes an over-confident network under-confident, or the reverse."""
        if self._is_regression:
            return ""
        before, after = self._row("overconfidence"), self._row("overconfidence", key)
        return f" and is {_confidence(after)}" if _sign(before) * _sign(after) < 0 else ""

    # --------------------------------------------------- other inputs than those it knows

    def shifted(self) -> list[str]:
        """Accuracy and confidence on the hardest shift."""
        shifts = [part for part in self._run["sets"] if part["role"] == "shift"]
        if not shifts:
            return []
        hardest = max(shifts, key=lambda part: part["severity"])
        of, calibration = hardest["name"], self._criteria[2]
        gap = self._row(calibration, of=of)
        told = f"Shifted inputs: at severity {hardest['severity']} the network"
        if self._is_regression:
            told += f"'s errors measure {_ends(gap)} of its standard deviations"
        else:
            accuracy = 100 * self._row("accuracy", of=of)["value"]
            told += f" has an accuracy of {accuracy:.1f} % and is {_confidence(gap)}"
        if self._chosen is None:
            return [f"{told}."]
        row = self._change(self._chosen, self._network, calibration, of)
        name = self._labels[self._chosen]
        if not _sign(row):
            return [f"{told}; {name} makes no significant difference."]
        verb = "lowers" if _sign(row) < 0 else "raises"
        return [f"{told}; {name} {verb} {_amounts({calibration: row})}."]

    def foreign(self) -> list[str]:
        """How well foreign inputs are detected, and by which score; see `recommended`.

        A score whose AUROC on a set may be 0.5 or less is recommended for none of it.
        """
        names = [part["name"] for part in self._run["sets"] if part["role"] == "ood"]
        sentences = {name: sentence for name in names if (sentence := self._noticed(name))}
        if not sentences:
            return []
        parts = list(sentences.values())
        recommended = self._recommended
        detected = [name for name in sentences if not self._is_missed(name)]
        if recommended is not None and detected:
            score = self._whose(recommended["score"], recommended["method"])
            sets = ""
            if len(detected) < len(sentences):
                sets = f"for {_joined([f'“{name}”' for name in detected])} "
            parts.insert(0, f"{sets}{score} is recommended")
        return [f"Foreign inputs: {'; '.join(parts)}."]

    def _whose(self, score: str, method: str) -> str:
        if method == self._network:
            return f"the network's {SCORES[score]}"
        return f"the {SCORES[score]} of {self._labels[method]}"

    def _is_missed(self, name: str) -> bool:
        """Whether the interval of the recommended score's AUROC on a set reaches 0.5."""
        if self._recommended is None:
            return False
        method, score = self._recommended["method"], self._recommended["score"]
        return self._rows[method, "auroc", name, score]["low"] <= 0.5

    def _noticed(self, name: str) -> str:
        """How well one set is detected; empty where it was not measured."""
        reference = self._reference_score(name)
        if reference is None:
            return ""
        recommended = self._recommended
        if recommended is not None and self._is_missed(name):
            return self._missed(name, recommended, reference)
        whose = self._whose(reference["score"], reference["method"])
        sentence = (
            f"“{name}” is {'not ' if reference['low'] <= 0.5 else ''}separated from test "
            f"{self._run['input_name']}s by {whose}, AUROC {_ends(reference)}"
        )
        if recommended is None or _is_same_score(recommended, reference):
            return sentence
        change = self._changes[
            recommended["method"], reference["method"], "auroc", name, recommended["score"]
        ]
        on = f"on the same {self._inputs(change['num_examples'])} the recommended score"
        if not _sign(change):
            return f"{sentence}; {on} makes no clear difference ({_ends(change)})"
        way = "better" if _sign(change) > 0 else "worse"
        return f"{sentence}; {on} is {way} by {' ('.join(_in_words(change, brief))})"

    def _reference_score(self, name: str) -> Row | None:
        """The AUROC on a set that others are compared with: the network's entropy, where it is."""
        by = [("entropy", self._network), *(("variance", key) for key in self._others)]
        rows = (self._rows.get((method, "auroc", name, score)) for score, method in by)
        return next((row for row in rows if row is not None), None)

    def _missed(self, name: str, recommended: Row, reference: Row) -> str:
        """A set that the score chosen beforehand does not detect."""
        row = self._rows[recommended["method"], "auroc", name, recommended["score"]]
        whose = self._whose(row["score"], row["method"])
        sentence = (
            f"no score that was chosen beforehand detects “{name}”: AUROC {_ends(row)} of {whose}"
        )
        if _is_same_score(recommended, reference):
            return sentence
        whose = self._whose(reference["score"], reference["method"])
        return f"{sentence}, {_ends(reference)} of {whose}"


def _is_same_score(row: Row, other: Row) -> bool:
    return (row["method"], row["score"]) == (other["method"], other["score"])


def _with_ends(row: Row) -> dict[str, Any]:
    """The same, where an interval that is not known is the whole line."""
    ends = {"low": -math.inf, "high": math.inf}
    return {**row, **{name: end for name, end in ends.items() if row[name] is None}}


def _sign(row: Row, ideal: float = 0) -> int:
    """1 or -1 where a value is significantly above or below another, else 0."""
    return int(row["low"] > ideal) - int(row["high"] < ideal)


def _in_words(row: Row, text: Callable[[float], str]) -> tuple[str, str]:
    """A value and its interval for the sentences, without signs where it is significant."""
    low, high = row["low"], row["high"]
    ends = sorted([abs(low), abs(high)]) if _sign(row) else [low, high]
    return text(abs(row["value"])), " to ".join(map(text, ends))


def _confidence(gap: Row) -> str:
    amount, interval = _in_words(gap, points)
    sign = _sign(gap) if abs(gap["value"]) >= 5e-4 else 0
    if not sign:
        return f"not significantly over- or under-confident (95 % interval {interval} points)"
    way = "over" if sign > 0 else "under"
    return f"{way}-confident by {amount} points (95 % interval {interval})"


def _names(criteria: Sequence[str] | Mapping[str, Row]) -> str:
    return _joined([_CRITERIA[metric][0] for metric in criteria])


def _amounts(rows: Mapping[str, Row]) -> str:
    """Significant differences by their criteria, e.g. `the NLL by 0.1 nats (0.05 to 0.15)`."""
    told = []
    for metric, row in rows.items():
        name, unit = _CRITERIA[metric]
        amount, interval = _in_words(row, points if metric == "overconfidence" else brief)
        told.append(f"the {name} by {unit.format(amount)} ({interval})")
    return _joined(told)


def _joined(texts: Sequence[str]) -> str:
    return "".join(texts) if len(texts) < 2 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def _ends(row: Row) -> str:
    if math.isinf(row["low"]):
        return brief(row["value"])
    return f"{brief(row['value'])} ({brief(row['low'])} to {brief(row['high'])})"
