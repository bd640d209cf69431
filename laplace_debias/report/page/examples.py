"""The examples that the page shows: the most uncertain, the most confidently wrong, the changed."""

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from laplace_debias.report.page.names import significant
from laplace_debias.report.page.run_folder import Run

_MOST_PIXELS = 128
_SMALL = 64
_SHOWN_CLASSES = 2
_LEAST = 0.005
_GROUPS = {
    "most_uncertain": (
        "Most uncertain",
        "“{method}” is least certain of these. If you could not tell either, its doubt is right.",
    ),
    "most_confidently_wrong": (
        "Most confidently wrong",
        "Mistakes that “{method}” is surest of. Look for wrong labels first, then for what these "
        "have in common.",
    ),
    "most_changed": (
        "Most changed",
        "Where “{method}” and “{network}” differ most.",
    ),
}


@dataclass(frozen=True)
class Guess:
    """What a method says of an example.

    Attributes:
        label: The method's.
        classes: Its most probable classes: name, probability in percent, whether it is the truth.
        interval: Of a regression, mean and standard deviation, else empty.
    """

    label: str
    classes: tuple[tuple[str, float, bool], ...] = ()
    interval: str = ""


@dataclass(frozen=True)
class Example:
    """One example.

    Attributes:
        index: In the test set.
        truth: The right class or the target.
        picture: Address of its picture, `data:`; empty where it has none.
        is_small: Whether its pixels are to be seen when it is drawn larger.
        values: Inputs by name where they are no picture.
        guesses: By method.
    """

    index: int
    truth: str
    picture: str
    is_small: bool
    values: tuple[tuple[str, str], ...]
    guesses: tuple[Guess, ...]


@dataclass(frozen=True)
class ExampleGroup:
    """Examples that have something in common."""

    title: str
    reads: str
    examples: tuple[Example, ...]


def example_groups(run: Run) -> list[ExampleGroup]:
    """The groups of `examples.json` that have examples; none if the run has none.

    Raises:
        ValueError: If the file or a picture is damaged.
    """
    found = run.json("examples.json")
    if found is None:
        return []
    chosen_by = found.get("chosen_by") or {}
    network = run.methods[0]
    labels = {method.key: method.label for method in run.methods}
    groups = []
    for key, (title, reads) in _GROUPS.items():
        by = chosen_by.get(key, run.methods[-1].key)
        shown = list(dict.fromkeys([network.key, by]))
        examples = tuple(_example(run, entry, shown, labels) for entry in found.get(key) or ())
        if examples:
            text = reads.format(method=labels.get(by, by), network=network.label)
            groups.append(ExampleGroup(title, text, examples))
    return groups


def _example(
    run: Run, entry: Mapping[str, Any], shown: list[str], labels: Mapping[str, str]
) -> Example:
    picture, is_small = _picture(run.folder / "examples" / f"{int(entry['index'])}.png")
    if run.is_regression:
        said, truth = entry.get("predictions") or {}, _numbers(entry.get("target"))
        guesses = tuple(
            Guess(labels[key], interval=_interval(said[key])) for key in shown if key in said
        )
    else:
        said, truth = entry.get("probs") or {}, _class_names(run, entry.get("label"))
        guesses = tuple(
            Guess(labels[key], _top_classes(run, said[key], entry.get("label")))
            for key in shown
            if key in said
        )
    inputs = entry.get("inputs") or ()
    values = tuple((f"x{i}", significant(float(x))) for i, x in enumerate(inputs, start=1))
    return Example(int(entry["index"]), truth, picture, is_small, values, guesses)


def _picture(path: Path) -> tuple[str, bool]:
    """A picture as an address, made smaller where it is large, and whether it is small."""
    if not path.is_file():
        return "", False
    try:
        with Image.open(path) as image:
            is_small = max(image.size) <= _SMALL
            data = path.read_bytes()
            if max(image.size) > _MOST_PIXELS:
                smaller = image.convert("RGB")
                smaller.thumbnail((_MOST_PIXELS, _MOST_PIXELS), Image.Resampling.LANCZOS)
                buffer = io.BytesIO()
                smaller.save(buffer, "png")
                data = buffer.getvalue()
            else:
                image.verify()
    except (OSError, SyntaxError, UnidentifiedImageError) as error:
        raise ValueError(
            f"{path} is no picture that can be read ({error}): delete it to draw the page without "
            "it, or run the report again."
        ) from error
    return f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}", is_small


def _class_names(run: Run, label: Any) -> str:
    if label is None:
        return ""
    if isinstance(label, list):
        return ", ".join(_class(run, i) for i, is_one in enumerate(label) if is_one) or "none"
    return _class(run, label)


def _class(run: Run, label: float) -> str:
    classes = run.meta.get("classes") or []
    index = int(label)
    return str(classes[index]) if 0 <= index < len(classes) else f"class {index}"


def _top_classes(
    run: Run, probs: list[list[float]], truth: Any
) -> tuple[tuple[str, float, bool], ...]:
    """Those that round to a percent at least, at most two of them."""
    return tuple(
        (_class(run, label), 100 * prob, not isinstance(truth, list) and int(label) == truth)
        for label, prob in probs[:_SHOWN_CLASSES]
        if prob >= _LEAST
    )


def _interval(said: Mapping[str, Any]) -> str:
    return f"{_numbers(said['mean'])} ± {_numbers(said['standard_deviation'])}"


def _numbers(value: Any) -> str:
    if value is None:
        return ""
    values = value if isinstance(value, list) else [value]
    return ", ".join(significant(float(one)) for one in values)
