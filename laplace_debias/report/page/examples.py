"""The examples that the page shows: the most uncertain, the most confidently wrong, the changed."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from laplace_debias.report.names import significant
from laplace_debias.report.run_folder import Run

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
}


def example_groups(run: Run) -> list[dict[str, Any]]:
    """The groups of `examples.json` that have examples, as the page's template takes them."""
    chosen = run.json("examples.json")
    network = run.methods[0]
    labels = {method.key: method.label for method in run.methods}
    groups = []
    for key, (title, reads) in _GROUPS.items():
        by = chosen.get("chosen_by", {}).get(key, run.methods[-1].key)
        shown = {method: labels[method] for method in (network.key, by)}
        if examples := [_example(run, entry, shown) for entry in chosen.get(key, ())]:
            text = reads.format(method=labels[by])
            groups.append({"title": title, "reads": text, "examples": examples})
    return groups


def _example(run: Run, entry: Mapping[str, Any], shown: Mapping[str, str]) -> dict[str, Any]:
    index = int(entry["index"])
    told: dict[str, tuple[str, tuple[tuple[str, float, bool], ...]]]
    picture, is_small = _picture(run.folder / "examples" / f"{index}.png")
    if run.is_regression:
        truth, said = _numbers(entry["target"]), entry["predictions"]
        told = {key: (_interval(one), ()) for key, one in said.items()}
    else:
        truth, said = _class_names(run, entry["label"]), entry["probs"]
        told = {key: ("", _top_classes(run, one, entry["label"])) for key, one in said.items()}
    named = {f"x{i}": x for i, x in enumerate(entry.get("inputs") or (), start=1)}
    return {
        "index": index,
        "truth": truth,
        "picture": picture,
        "is_small": is_small,
        "inputs": [
            (name, significant(float(x))) for name, x in (entry.get("columns") or named).items()
        ],
        "guesses": [(label, *told[key]) for key, label in shown.items() if key in told],
    }


def _picture(path: Path) -> tuple[str, bool]:
    """A picture as an address, made smaller where it is large, and whether it is small."""
    if not path.is_file():
        return "", False
    try:
        with Image.open(path) as image:
            is_small = max(image.size) <= _SMALL
            shown = image.convert("RGB")
    except (OSError, SyntaxError) as error:
        raise ValueError(
            f"{path} is no picture that can be read ({error}): delete it to draw the page without "
            "it, or run the report again."
        ) from error
    shown.thumbnail((_MOST_PIXELS, _MOST_PIXELS), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    shown.save(buffer, "png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}", is_small


def _class_names(run: Run, label: Any) -> str:
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
    """At most two classes, of those that round to a percent at least."""
    return tuple(
        (_class(run, label), 100 * prob, label == truth)
        for label, prob in probs[:_SHOWN_CLASSES]
        if prob >= _LEAST
    )


def _interval(said: Mapping[str, Any]) -> str:
    return f"{_numbers(said['mean'])} ± {_numbers(said['standard_deviation'])}"


def _numbers(value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    return ", ".join(significant(float(one)) for one in values)
