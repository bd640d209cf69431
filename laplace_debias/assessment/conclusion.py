"""What a run shows, in words: measured, better or worse than chance explains, what to do next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class _Change:
    """How a method's negative log-likelihood on the test set differs from another's.

    Attributes:
        value: Method less reference, nats; below zero is better.
        low: Lower end of the 95 % interval; None if it is not known.
        high: Upper end.
        num_examples: Examples that both predicted.
    """

    value: float
    low: float | None
    high: float | None
    num_examples: int

    @property
    def is_better(self) -> bool:
        """Whether it is lower by more than chance explains."""
        return self.high is not None and self.high < 0

    @property
    def is_worse(self) -> bool:
        """Whether it is higher by more than chance explains."""
        return self.low is not None and self.low > 0

    @property
    def amount(self) -> str:
        """How much, with the interval's ends; with a sign where the interval holds zero."""
        low, high = self.low, self.high
        if low is None or high is None:
            return f"{number(self.value)} nats (the interval is not known)"
        if low <= 0 <= high:
            return f"{number(self.value)} nats (95 % interval {number(low)} to {number(high)})"
        least, most = sorted([abs(low), abs(high)])
        size = number(abs(self.value))
        return f"{size} nats (95 % interval {number(least)} to {number(most)})"


def conclude(run: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """The page's first paragraph, a sentence an entry.

    Methods are held against each other by the negative log-likelihood on the test set, on the same
    examples: it is a proper score, which neither a probability that is too high nor one that is too
    low can improve. A difference counts where its 95 % interval does not hold zero.

    Args:
        run: `run.json`.
        found: `metrics.json`.
    """
    methods = {method["key"]: method for method in run["methods"]}
    network = next(iter(methods))
    test = next(part for part in run["sets"] if part["role"] == "test")
    scaled = next(
        (key for key, m in methods.items() if not m["is_laplace"] and m["temperature"] is not None),
        None,
    )
    posteriors = [key for key, method in methods.items() if method["is_laplace"]]
    to_network = _changes(found["differences"], test["name"], network)
    to_scaled = {} if scaled is None else _changes(found["differences"], test["name"], scaled)
    best = min(posteriors, key=lambda key: to_network[key].value, default=None)
    sentences = [_measured(run, found["rows"], test, network)]
    if scaled is not None:
        sentences.append(_of_scaling(methods[scaled]["label"], to_network[scaled]))
    if best is not None:
        several = len(posteriors) > 1
        sentences.append(_of_posterior(methods[best]["label"], to_network[best], run, several))
        if scaled is not None:
            sentences.append(
                _beside_scaling(methods[best]["label"], methods[scaled]["label"], to_scaled[best])
            )
    sentences += _worse(methods, to_network, {best, scaled})
    sentences += _off_the_test_set(found, run, methods, network, best)
    sentences += _advice(run, methods, best, scaled, to_network, to_scaled)
    return sentences


def number(value: float) -> str:
    """A number as people read it: three decimals, more where it is small."""
    if value == 0:
        return "0"
    text = f"{value:.3f}" if abs(value) >= 0.01 else f"{value:.2g}"
    return text.replace("-", "−")


def _changes(differences: Sequence[Row], name: str, reference: str) -> dict[str, _Change]:
    return {
        row["method"]: _Change(row["value"], row["low"], row["high"], row["num_examples"])
        for row in differences
        if row["set"] == name and row["metric"] == "nll" and row["reference"] == reference
    }


def _value(rows: Sequence[Row], method: str, name: str, metric: str) -> Row | None:
    return next(
        (
            row
            for row in rows
            if (row["method"], row["set"], row["metric"]) == (method, name, metric)
        ),
        None,
    )


def _with_interval(row: Row) -> str:
    if row["low"] is None or row["high"] is None:
        return number(row["value"])
    return f"{number(row['value'])} ({number(row['low'])} to {number(row['high'])})"


def _measured(run: Row, rows: Sequence[Row], test: Row, network: str) -> str:
    told = []
    for metric, name in (
        ("accuracy", "accuracy"),
        ("rmse", "root mean squared error"),
        ("nll", "negative log-likelihood in nats"),
    ):
        row = _value(rows, network, test["name"], metric)
        if row is not None:
            told.append(f"{name} {_with_interval(row)}")
    inputs = _inputs(run, test["num_examples"])
    return f"On {inputs} of the test set the network as it is has {', '.join(told)}."


def _inputs(run: Row, number_of: int) -> str:
    plural = "" if number_of == 1 else "s"
    return f"{number_of:,} {run['input_name']}{plural}"


def _of_scaling(label: str, change: _Change) -> str:
    if change.is_better:
        return f"{label} lowers the negative log-likelihood by {change.amount}."
    if change.is_worse:
        return f"{label} raises the negative log-likelihood by {change.amount}."
    return (
        f"{label} changes the negative log-likelihood by no more than chance explains: by "
        f"{change.amount}."
    )


def _of_posterior(label: str, change: _Change, run: Row, several: bool) -> str:
    among = "Of the Laplace approximations " if several else ""
    subject = f"“{label}” does best" if several else f"“{label}”"
    link = ": it" if several else ""
    on = f", on {_inputs(run, change.num_examples)}"
    if change.is_better:
        verb = f"lowers the network's negative log-likelihood by {change.amount}"
    elif change.is_worse:
        verb = f"raises the network's negative log-likelihood by {change.amount}"
    else:
        verb = (
            "changes the network's negative log-likelihood by no more than chance explains: by "
            f"{change.amount}"
        )
    return f"{among}{subject}{link} {verb}{on}."


def _beside_scaling(label: str, scaled: str, change: _Change) -> str:
    if change.is_better:
        return f"It is better than {scaled.lower()} by {change.amount}."
    if change.is_worse:
        return f"It is worse than {scaled.lower()} by {change.amount}."
    return f"Beside {scaled.lower()} it makes no difference beyond chance: {change.amount}."


def _worse(
    methods: Mapping[str, Row], to_network: Mapping[str, _Change], told: set[str | None]
) -> list[str]:
    worse = [
        f"“{methods[key]['label']}” (by {change.amount})"
        for key, change in to_network.items()
        if change.is_worse and key not in told
    ]
    if not worse:
        return []
    return [f"Worse than the network as it is, beyond chance: {', '.join(worse)}."]


def _off_the_test_set(
    found: Row, run: Row, methods: Mapping[str, Row], network: str, best: str | None
) -> list[str]:
    """The hardest shift; and how well OOD sets are told apart."""
    sentences = []
    shifts = [part for part in run["sets"] if part["role"] == "shift"]
    if shifts and best is not None:
        hardest = max(shifts, key=lambda part: part["severity"])
        change = _changes(found["differences"], hardest["name"], network)[best]
        where = f"On test {run['input_name']}s corrupted at severity {hardest['severity']}"
        if change.is_better or change.is_worse:
            verb = "lowers" if change.is_better else "raises"
            sentences.append(f"{where} it {verb} the negative log-likelihood by {change.amount}.")
        else:
            sentences.append(f"{where} it makes no difference beyond chance.")
    for part in (part for part in run["sets"] if part["role"] == "ood"):
        rows = [r for r in found["rows"] if r["set"] == part["name"] and r["metric"] == "auroc"]
        if rows:
            top = max(rows, key=lambda row: row["value"])
            sentences.append(
                f"“{part['name']}” ({part['kind']}) is told from the test set best by the "
                f"{_SCORES[top['score']]} of “{methods[top['method']]['label']}”: AUROC "
                f"{_with_interval(top)}."
            )
    return sentences


_SCORES = {
    "entropy": "entropy",
    "max_probability": "largest probability",
    "mutual_information": "mutual information",
    "variance": "variance",
}


def _advice(
    run: Row,
    methods: Mapping[str, Row],
    best: str | None,
    scaled: str | None,
    to_network: Mapping[str, _Change],
    to_scaled: Mapping[str, _Change],
) -> list[str]:
    """What to do next."""
    advice = []
    is_regression = run["task"] == "regression"
    if scaled is None and not is_regression:
        advice.append(
            "Whether a posterior is worth more than temperature scaling is open, as that was left "
            "out: hold out validation examples, name it among the methods, and run again."
        )
    posterior_helps = best is not None and to_network[best].is_better
    scaling_helps = scaled is not None and to_network[scaled].is_better
    if best is not None and posterior_helps and (not scaling_helps or to_scaled[best].is_better):
        advice.append(f"Use “{methods[best]['label']}”.")
    elif (
        best is not None and scaled is not None and posterior_helps and not to_scaled[best].is_worse
    ):
        advice.append(
            f"{methods[scaled]['label']} is as good here and costs one number: use it, unless you "
            "need what a posterior alone tells, the epistemic uncertainty."
        )
    elif scaled is not None and scaling_helps:
        advice.append(f"Use {methods[scaled]['label'].lower()}.")
    elif len(methods) == 1:
        pass
    elif is_regression:
        advice.append(
            "Nothing that was tried improves the predictions beyond chance: keep the network with "
            "constant noise, or judge on more examples."
        )
    else:
        advice.append(
            "Nothing that was tried improves the network's probabilities beyond chance: keep them "
            "as they are, or judge on more examples."
        )
    return advice
