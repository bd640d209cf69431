"""The cards of the page for the most uncertain and the most confidently wrong examples."""

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from laplace_debias.report.page.run import Run
from laplace_debias.runs.records import ExampleRecord
from laplace_debias.runs.wording import significant

_MOST_PIXELS = 128
_SMALL = 64
_SHOWN_CLASSES = 2
_LEAST = 0.005
_GROUPS = {
    "most_uncertain": (
        "Most uncertain",
        "The examples with the least certain predictions of “{method}”. If you are "
        "unsure about them, too, the uncertainty is justified.",
    ),
    "most_confidently_wrong": (
        "Most confidently wrong",
        "The wrong predictions in which “{method}” is most confident. First look for wrong labels, "
        "then for what these examples have in common.",
    ),
}


@dataclass(frozen=True)
class ClassProbability:
    """The predicted probability of a class in percent."""

    name: str
    percent: float
    is_true_class: bool


@dataclass(frozen=True)
class Guess:
    """A method's prediction for an example: classes or, for a regression, an interval."""

    label: str
    interval: str
    classes: list[ClassProbability]


@dataclass(frozen=True)
class Card:
    """An example in the form that the template of the page needs."""

    index: int
    truth: str
    picture: str
    is_small: bool
    inputs: list[tuple[str, str]]
    guesses: list[Guess]


@dataclass(frozen=True)
class CardGroup:
    """A group of examples, with a title and a text that explains how to read them."""

    title: str
    reads: str
    examples: list[Card]


def example_groups(run: Run) -> list[CardGroup]:
    """Return all groups that contain examples."""
    examples = run.folder.read_examples()
    labels = {method.key: method.label for method in run.methods}
    keys = list(labels)
    network = keys[0]
    groups = []
    # The names of the groups are those of the fields of `examples`.
    for name, (title, text) in _GROUPS.items():
        chosen_by = examples.chosen_by.get(name, keys[-1])
        methods = {key: labels[key] for key in (network, chosen_by)}
        cards = [_card(run, record, methods) for record in getattr(examples, name)]
        if cards:
            groups.append(CardGroup(title, text.format(method=labels[chosen_by]), cards))
    return groups


def _card(run: Run, record: ExampleRecord, methods: Mapping[str, str]) -> Card:
    """Make the card of an example, which shows the predictions of the given methods."""
    picture, is_small = _picture(run.folder.example(record.index))
    if run.has_numbers:
        truth = _numbers(record.target)
        guesses = _interval_guesses(record, methods)
    else:
        truth = _names(run, record.label)
        guesses = _class_guesses(run, record, methods)
    numbered = {f"x{number}": x for number, x in enumerate(record.inputs or (), start=1)}
    inputs = record.columns or numbered
    return Card(
        index=record.index,
        truth=truth,
        picture=picture,
        is_small=is_small,
        inputs=[(name, significant(float(x))) for name, x in inputs.items()],
        guesses=guesses,
    )


def _interval_guesses(record: ExampleRecord, methods: Mapping[str, str]) -> list[Guess]:
    """Return the predictions of numbers, each as a mean with its standard deviation."""
    guesses = []
    for key, predicted in record.predictions.items():
        if key in methods:
            mean = _numbers(predicted["mean"])
            interval = f"{mean} ± {_numbers(predicted['standard_deviation'])}"
            guesses.append(Guess(methods[key], interval, []))
    return guesses


def _class_guesses(run: Run, record: ExampleRecord, methods: Mapping[str, str]) -> list[Guess]:
    """Return the predictions of labels, each as the most probable classes."""
    guesses = []
    for key, probs in record.probs.items():
        if key in methods:
            classes = [
                ClassProbability(_names(run, label), 100 * prob, label == record.label)
                for label, prob in probs[:_SHOWN_CLASSES]
                if prob >= _LEAST
            ]
            guesses.append(Guess(methods[key], "", classes))
    return guesses


def _picture(path: Path) -> tuple[str, bool]:
    """Return a picture as a data URL, shrunk if it is large, and whether the picture is small."""
    if not path.is_file():
        return "", False
    try:
        with Image.open(path) as image:
            is_small = max(image.size) <= _SMALL
            shown = image.convert("RGB")
    except (OSError, SyntaxError) as error:
        raise ValueError(
            f"{path} is not a readable picture ({error}). Delete it to create the "
            "report page without this picture, or run the report again."
        ) from error
    shown.thumbnail((_MOST_PIXELS, _MOST_PIXELS), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    shown.save(buffer, "png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}", is_small


def _names(run: Run, label: Any) -> str:
    """Format a label: the name of the class, or the names of all labels that apply."""
    labels = [label]
    if isinstance(label, list):
        labels = [number for number, applies in enumerate(label) if applies]
    classes = dict(enumerate(run.record.classes or ()))
    return ", ".join(str(classes.get(int(i), f"class {int(i)}")) for i in labels) or "none"


def _numbers(value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    return ", ".join(significant(float(number)) for number in values)
