"""The verdict of a run: what its numbers show, in three to five sentences for page and terminal.

Methods are judged by three things together: two proper scores, and how far the network's confidence
(of a regression its standard deviation) is off. A method is better than another where it is better
in one of them significantly and worse in none, on the examples that both predicted: where the 95 %
interval of the paired difference excludes zero. Differences that are too small to matter do not
count, however certain they are.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
_SCORES = {
    "entropy": "entropy",
    "max_probability": "largest probability",
    "mutual_information": "mutual information",
    "variance": "variance",
}
_LARGEST_TEMPERATURE = 20.0
"""Larger ones are no correction of a confidence that means something."""
_MOST_OVERCONFIDENCE = 0.1
"""Training leaves no network far more confident than right on the examples it has learnt."""
_LEAST_ABOVE_CHANCE = 0.1
"""The part of the way from chance to certainty below which nothing was learnt."""


def conclude(run: Row, found: Row) -> list[str]:
    """The verdict, a sentence or two an entry; what speaks against the set-up comes first.

    Args:
        run: `run.json`.
        found: `metrics.json`.
    """
    verdict = _Verdict(run, found)
    doubts = list(verdict.doubts())
    told = [verdict.doubted(doubts)] if doubts else []
    told.append(verdict.measured())
    if not doubts:
        told += verdict.remedy()
    return [*told, *verdict.shifted(), *verdict.foreign()]


def number(value: float) -> str:
    """A number as people read it: three decimals, more where it is small."""
    if value == 0:
        return "0"
    text = f"{value:.3f}" if abs(value) >= 0.01 else f"{value:.2g}"
    return text.replace("-", "−")


def points(share: float) -> str:
    """A share in percentage points."""
    return f"{100 * share:.1f}".replace("-", "−")


class _Verdict:
    """The content of `run.json` and `metrics.json`, and the sentences made of it."""

    def __init__(self, run: Row, found: Row) -> None:
        self._run, self._found = run, found
        self._labels = {method["key"]: method["label"] for method in run["methods"]}
        self._network, *self._others = self._labels
        self._test = next(part for part in run["sets"] if part["role"] == "test")
        self._is_regression = run["task"] == "regression"
        self._criteria = (
            ("nll", "crps", "scaled_error")
            if self._is_regression
            else ("nll", "brier", "overconfidence")
        )
        self._chosen: str | None = None

    # ----------------------------------------------------------------- what the files say

    def _row(self, method: str, metric: str, of: str = "test", score: str = "") -> Row | None:
        wanted = {"method": method, "metric": metric, "set": of}
        return _first(self._found["rows"], wanted | ({"score": score} if score else {}))

    def _change(self, method: str, other: str, metric: str, of: str = "test") -> Row | None:
        """Method less other, on the examples of both."""
        wanted = {"metric": metric, "set": of}
        row = _first(self._found["differences"], wanted | {"method": method, "reference": other})
        if row is not None:
            return row
        row = _first(self._found["differences"], wanted | {"method": other, "reference": method})
        if row is None or row["low"] is None:
            return row
        return {**row, "value": -row["value"], "low": -row["high"], "high": -row["low"]}

    def _changes(self, method: str, other: str) -> tuple[dict[str, Row], dict[str, Row]]:
        """The criteria in which a method is better, and in which it is worse, significantly."""
        rows = {metric: self._change(method, other, metric) for metric in self._criteria}
        known = {
            metric: row
            for metric, row in rows.items()
            if row and row["low"] is not None and abs(row["value"]) >= _SMALLEST.get(metric, 0)
        }
        better = {metric: row for metric, row in known.items() if row["high"] < 0}
        return better, {metric: row for metric, row in known.items() if row["low"] > 0}

    def _is_better(self, method: str, other: str) -> bool:
        better, worse = self._changes(method, other)
        return bool(better) and not worse

    def _inputs(self, count: int) -> str:
        return f"{count:,} {self._run['input_name']}{'' if count == 1 else 's'}"

    # ------------------------------------------------------------------------- the set-up

    def doubts(self) -> Iterator[str]:
        """Signs that network and data do not belong together."""
        training = self._run.get("training") or {}
        rows = {row["metric"]: row for row in training.get("rows", ())}
        own = f"its own training {self._run['input_name']}s"
        if self._is_regression:
            if rows and rows["explained"]["value"] < _LEAST_ABOVE_CHANCE:
                share = 100 * rows["explained"]["value"]
                yield f"it explains {share:.0f} % of the variance of the targets of {own}"
        elif rows:
            classes = 1 if self._run["task"] == "multilabel" else training["num_classes"]
            chance = 1 / classes
            accuracy, gap = rows["accuracy"]["value"], rows["overconfidence"]
            if accuracy < chance + _LEAST_ABOVE_CHANCE * (1 - chance):
                yield f"its accuracy on {own} is {accuracy:.3f}, near chance"
            elif gap["low"] is not None and gap["low"] > _MOST_OVERCONFIDENCE:
                yield f"on {own} it is over-confident by {points(gap['value'])} points"
            of_test = self._row(self._network, "nll")
            for row, where in ((rows["nll"], own), (of_test, "the test set")):
                if row and row["low"] is not None and row["low"] > training["uniform_nll"]:
                    yield (
                        f"its NLL on {where} is {number(row['value'])} nats, worse than the "
                        f"{number(training['uniform_nll'])} of a uniform guess"
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
        on = f"On {self._inputs(self._test['num_examples'])} of the test set"
        nll = self._row(self._network, "nll")
        scores = [] if nll is None else [f"an NLL of {_ends(nll)} nats"]
        if self._is_regression:
            rmse = self._row(self._network, "rmse")
            scores = [f"an RMSE of {_ends(rmse)}", *scores] if rmse else scores
            return f"{on} the network has {_joined(scores)}. {self._bias()} {self._width()}"
        accuracy, gap = (self._row(self._network, name) for name in ("accuracy", "overconfidence"))
        assert accuracy is not None
        assert gap is not None
        sure = 100 * (accuracy["value"] + gap["value"])
        return (
            f"{on} the network has an accuracy of {100 * accuracy['value']:.1f} % and a mean "
            f"confidence of {sure:.1f} %: it is {self._confidence(gap)}. It has {_joined(scores)}."
        )

    def _confidence(self, gap: Row) -> str:
        amount = f"{points(abs(gap['value']))} points"
        if gap["low"] is None:
            return f"a gap of {points(gap['value'])} points"
        if gap["low"] <= 0 <= gap["high"]:
            interval = f"{points(gap['low'])} to {points(gap['high'])} points"
            return f"not significantly over- or under-confident (95 % interval {interval})"
        ends = sorted([abs(gap["low"]), abs(gap["high"])])
        way = "over" if gap["low"] > 0 else "under"
        return f"{way}-confident by {amount} (95 % interval {points(ends[0])} to {points(ends[1])})"

    def _bias(self) -> str:
        bias = self._row(self._network, "bias")
        if bias is None or bias["low"] is None:
            return ""
        if bias["low"] <= 0 <= bias["high"]:
            return f"It has no significant bias ({_ends(bias)})."
        way = "low" if bias["high"] < 0 else "high"
        ends = sorted([abs(bias["low"]), abs(bias["high"])])
        return (
            f"It is biased: its predictions are too {way} by {number(abs(bias['value']))} on "
            f"average (95 % interval {number(ends[0])} to {number(ends[1])}), which no posterior "
            "corrects. Subtract it, or find out what differs from the training data."
        )

    def _width(self) -> str:
        scaled, coverage = (self._row(self._network, name) for name in ("scaled_error", "coverage"))
        if scaled is None or coverage is None or scaled["low"] is None:
            return ""
        held = f"the 95 % intervals contain {100 * coverage['value']:.1f} % of the targets"
        if scaled["low"] <= 1 <= scaled["high"]:
            return f"Its standard deviations fit its errors: {held}."
        way = "small" if scaled["low"] > 1 else "large"
        return (
            f"Its standard deviations are too {way}: errors measure {number(scaled['value'])} of "
            f"them ({number(scaled['low'])} to {number(scaled['high'])}) where 1 is right, and "
            f"{held}."
        )

    # ------------------------------------------------------------------ what mends it

    def remedy(self) -> list[str]:
        """The method that mends it, and the others beside it."""
        judged = _joined([_CRITERIA[metric][0] for metric in self._criteria])
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
                f"No method improves it significantly, judged by {judged} together: keep the "
                "network as it is, or use more test examples."
            )
            return [first, *self._the_others(self._network)]
        better, _ = self._changes(self._chosen, self._network)
        count = next(iter(better.values()))["num_examples"]
        amounts = _joined([self._amount(metric, row) for metric, row in better.items()])
        left = [_CRITERIA[metric][0] for metric in self._criteria if metric not in better]
        rest = f" (no significant change: {_joined(left)})" if left else ""
        gap = self._row(self._chosen, "overconfidence")
        after = f" It is {self._confidence(gap)}." if gap else ""
        first = (
            f"Use “{self._labels[self._chosen]}”: on the same {self._inputs(count)} it lowers "
            f"{amounts}{rest}.{after}"
        )
        return [first, *self._the_others(self._chosen)]

    def _amount(self, metric: str, row: Row) -> str:
        name, unit = _CRITERIA[metric]
        text = points if metric == "overconfidence" else number
        ends = sorted([abs(row["low"]), abs(row["high"])])
        amount = unit.format(text(abs(row["value"])))
        return f"the {name} by {amount} ({text(ends[0])} to {text(ends[1])})"

    def _the_others(self, reference: str) -> list[str]:
        """How the methods that are not recommended compare with the one that is."""
        worse, mixed, same = [], [], []
        for key in self._others:
            if key == reference:
                continue
            gains, losses = self._changes(key, reference)
            name = f"“{self._labels[key]}”"
            lost = _joined([self._amount(metric, row) for metric, row in losses.items()])
            if losses and gains:
                names = _joined([_CRITERIA[metric][0] for metric in gains])
                mixed.append(f"{name} is better in {names} but raises {lost}")
            elif losses:
                worse.append(f"{name} raises {lost}{self._turned(key)}")
            else:
                same.append(f"{name}{self._turned(key)}")
        told, of = [], "the network"
        if reference != self._network:
            of = f"“{self._labels[reference]}”"
        if worse or mixed:
            told.append(f"Compared with {of}, {'; '.join([*worse, *mixed])}.")
        if same and (self._chosen or worse or mixed):
            told.append(f"No clear difference from {of}: {_joined(same)}.")
        is_open = not self._is_regression and not any(
            method["temperature"] is not None for method in self._run["methods"]
        )
        if is_open:
            told.append(
                "Temperature scaling was left out: compare it too, which needs validation examples."
            )
        return [" ".join(told)] if told else []

    def _turned(self, key: str) -> str:
        """Whether a method makes an over-confident network under-confident, or the reverse."""
        before, after = (self._row(of, "overconfidence") for of in (self._network, key))
        if not before or not after or before["low"] is None or after["low"] is None:
            return ""
        if before["low"] > 0 > after["high"] or before["high"] < 0 < after["low"]:
            return f" and is {self._confidence(after)}"
        return ""

    # --------------------------------------------------- other inputs than those it knows

    def shifted(self) -> list[str]:
        """Accuracy and confidence on the hardest shift."""
        shifts = [part for part in self._run["sets"] if part["role"] == "shift"]
        if not shifts:
            return []
        hardest = max(shifts, key=lambda part: part["severity"])
        of = hardest["name"]
        start = f"Shifted inputs: at severity {hardest['severity']} the network"
        calibration = self._criteria[2]
        if self._is_regression:
            scaled = self._row(self._network, "scaled_error", of)
            assert scaled is not None
            told = f"{start}'s errors measure {_ends(scaled)} of its standard deviations"
        else:
            accuracy = self._row(self._network, "accuracy", of)
            gap = self._row(self._network, "overconfidence", of)
            assert accuracy is not None
            assert gap is not None
            told = (
                f"{start} has an accuracy of {100 * accuracy['value']:.1f} % and is "
                f"{self._confidence(gap)}"
            )
        row = None
        if self._chosen is not None:
            row = self._change(self._chosen, self._network, calibration, of)
        if row is None or row["low"] is None:
            return [f"{told}."]
        name = f"“{self._labels[self._chosen]}”"
        if row["low"] <= 0 <= row["high"]:
            return [f"{told}; {name} makes no significant difference."]
        verb = "lowers" if row["high"] < 0 else "raises"
        return [f"{told}; {name} {verb} {self._amount(calibration, row)}."]

    def foreign(self) -> list[str]:
        """How well foreign inputs are noticed, and by which score."""
        told = [
            sentence
            for part in self._run["sets"]
            if part["role"] == "ood" and (sentence := self._noticed(part))
        ]
        return [f"Foreign inputs: {'; '.join(told)}."] if told else []

    def _noticed(self, part: Row) -> str:
        of, score, method = part["name"], "entropy", self._network
        row = self._row(method, "auroc", of, score)
        if row is None:
            score = "variance"
            row = next(
                (r for key in self._others if (r := self._row(key, "auroc", of, score))), None
            )
        if row is None:
            return ""
        owner = "network" if row["method"] == self._network else f"“{self._labels[row['method']]}”"
        whose = (
            "the network's entropy" if owner == "network" else f"the {_SCORES[score]} of {owner}"
        )
        kind = f" ({part['kind']})" if part.get("kind") else ""
        inside = f"test {self._run['input_name']}s"
        if row["low"] is not None and row["low"] <= 0.5:
            text = f"“{of}”{kind} is not separated from {inside} by {whose}, AUROC {_ends(row)}"
        else:
            text = f"“{of}”{kind} is separated from {inside} by {whose}, AUROC {_ends(row)}"
        better = [
            other
            for other in self._found["differences"]
            if (other["set"], other["metric"]) == (of, "auroc")
            and other.get("reference_score") == score
            and other["low"] is not None
            and other["low"] > 0
        ]
        if not better:
            return text
        most = max(better, key=lambda other: other["low"])
        by = f"the {_SCORES[most['score']]} of “{self._labels[most['method']]}”"
        count = self._inputs(most["num_examples"])
        return f"{text}; on the same {count} {by} is better by {_ends(most)}"


def _first(rows: Sequence[Row], wanted: Row) -> Row | None:
    return next(
        (row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None
    )


def _joined(texts: Sequence[str]) -> str:
    return "".join(texts) if len(texts) < 2 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def _ends(row: Row) -> str:
    if row["low"] is None or row["high"] is None or math.isnan(row["low"]):
        return number(row["value"])
    return f"{number(row['value'])} ({number(row['low'])} to {number(row['high'])})"
