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
    labels = {method["key"]: method["label"] for method in run.methods}
    keys = list(labels)
    groups = []
    for key, (title, reads) in _GROUPS.items():
        by = chosen.get("chosen_by", {}).get(key, keys[-1])
        shown = {method: labels[method] for method in (keys[0], by)}
        if examples := [_example(run, entry, shown) for entry in chosen.get(key, ())]:
            text = reads.format(method=labels[by])
            groups.append({"title": title, "reads": text, "examples": examples})
    return groups


def _example(run: Run, entry: Mapping[str, Any], shown: Mapping[str, str]) -> dict[str, Any]:
    index = int(entry["index"])
    picture, is_small = _picture(run.folder / "examples" / f"{index}.png")
    truth = _numbers(entry["target"]) if run.is_regression else _names(run, entry["label"])
    guesses = []
    for key, said in entry["predictions" if run.is_regression else "probs"].items():
        interval, classes = "", []
        if run.is_regression:
            interval = f"{_numbers(said['mean'])} ± {_numbers(said['standard_deviation'])}"
        else:
            likely = [(label, prob) for label, prob in said[:_SHOWN_CLASSES] if prob >= _LEAST]
            classes = [(_names(run, i), 100 * prob, i == entry["label"]) for i, prob in likely]
        if key in shown:
            guesses.append((shown[key], interval, classes))
    named = {f"x{i}": x for i, x in enumerate(entry.get("inputs") or (), start=1)}
    inputs = entry.get("columns") or named
    return {
        "index": index,
        "truth": truth,
        "picture": picture,
        "is_small": is_small,
        "inputs": [(name, significant(float(x))) for name, x in inputs.items()],
        "guesses": guesses,
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


def _names(run: Run, label: Any) -> str:
    """The class, or those of several labels that apply."""
    labels = (
        [i for i, applies in enumerate(label) if applies] if isinstance(label, list) else [label]
    )
    known = dict(enumerate(run.meta.get("classes") or ()))
    return ", ".join(str(known.get(int(i), f"class {int(i)}")) for i in labels) or "none"


def _numbers(value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    return ", ".join(significant(float(one)) for one in values)
