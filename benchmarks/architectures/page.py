"""The page about architectures, and its rows on disk."""

import json
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.architectures.measurement import EXAMPLES, Row
from benchmarks.report import markdown_table

_TUPLE_FIELDS = ("fit", "further", "predict")
_LINE_LENGTH = 150
_INTRODUCTION = f"""\
Each network is fitted with `Laplace(model).fit(loader)`, without any other argument. The networks,
from torchvision, timm and Hugging Face, have random weights and are reduced in width and depth.
Batches have {EXAMPLES} examples, and there are three classes (thirteen tokens for language models).
Every trainable parameter has a block, and all probabilities are finite, unless a line below the
table states otherwise.

- **blocks**: the number of blocks of supported layers and, after a plus sign, of all other
  blocks. The latter are those of class tokens, position tables, tied weights, and layer types that
  only one library defines. Their curvature is computed from per-example gradients.
- **fit**: the time of a fit to one batch with `fisher="mc"`, divided by the time of the batch's
  gradient. This includes two one-off costs of a fit: checking every block, and computing the
  eigendecompositions.
- **each further batch**: the time that each batch after the first adds to a fit, divided by the
  time of a gradient. It is a quarter of the difference between fits to five batches and to one, so
  it is noisy: repeated measurements differ by up to about 1. [Benchmarks](benchmarks.md) measure
  larger networks.
- **predict**: the time to predict the batch with exact functional variances, divided by the time of
  a gradient.

Times are medians over three rounds on one thread.

The error refers to the variances of the outputs that a fit with `curvature="diag"` predicts. The
reference is Σ_d J_cd² / (N·C_dd + δ), computed by automatic differentiation in double precision,
and the error is the largest relative difference over two examples. Llama and its relatives
normalise in single precision, which explains errors of 1e-8."""


def write(path: Path, row: Row, machine: str, versions: Mapping[str, str]) -> None:
    """Write a row, the machine and the versions as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"row": asdict(row), "machine": machine, "versions": dict(versions)}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path) -> tuple[Row, str]:
    """Read a row, and a description of the machine and the versions."""
    content = json.loads(path.read_text(encoding="utf-8"))
    fields: dict[str, Any] = content["row"]
    for name in _TUPLE_FIELDS:
        fields[name] = tuple(fields[name])
    row = Row(**fields)
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    return row, f"float32; {content['machine']}; {versions}."


def page(rows: Sequence[Row], set_ups: Sequence[str]) -> str:
    """Return the page as Markdown.

    Args:
        rows: The rows, one per architecture.
        set_ups: Descriptions of the machines and versions.
    """
    libraries = list(dict.fromkeys(row.library for row in rows))
    working = sum(row.works for row in rows)
    errors = [row.disagreement for row in rows if row.disagreement is not None]
    sections = [
        "# Architectures",
        "`python -m benchmarks.architectures --docs` writes this page. "
        f"{working} of {len(rows)} architectures work with the defaults."
        + (f" The largest error is {max(errors):.1e}." if errors else ""),
        *map(_fill, _INTRODUCTION.split("\n\n")),
        *map(_fill, sorted(set(set_ups))),
    ]
    for library in libraries:
        library_rows = [row for row in rows if row.library == library]
        sections.append(f"## {library}")
        sections.append(markdown_table([_cells(row) for row in library_rows]))
        remarks = [f"- `{row.name}`: {text}" for row in library_rows for text in _remarks(row)]
        if remarks:
            sections.append(_fill("\n".join(remarks)))
    return "\n\n".join(sections) + "\n"


def _fill(text: str) -> str:
    """Break the lines of a paragraph, or of each item of a list, where they are full."""
    filled = []
    for item in re.split(r"\n(?=- )", text):
        indent = "  " if item.startswith("- ") else ""
        filled.append(
            textwrap.fill(
                " ".join(item.split()),
                _LINE_LENGTH,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(filled)


def _cells(row: Row) -> dict[str, object]:
    blocks = "fails"
    if row.works:
        blocks = str(row.of_layers)
        if row.of_calls:
            blocks += f" + {row.of_calls}"
    return {
        "architecture": row.name,
        "blocks": blocks,
        "fit ÷ gradient": _median(row.fit),
        "each further batch": _median(row.further),
        "predict ÷ gradient": _median(row.predict),
    }


def _median(values: Sequence[float]) -> str | None:
    return f"{statistics.median(values):.1f}" if values else None


def _remarks(row: Row) -> list[str]:
    """Return the lines about an architecture below the table: parameters left out, and an error."""
    # The advice about parameters that are left out is for users, so it is not on the page.
    left_out = row.left_out.replace(" through differentiable", ".\n").partition("\n")[0]
    if left_out:
        left_out = (
            f"{100 * row.covered:.4g} % of the parameters are part of a block of the "
            f"curvature. {left_out}"
        )
    remarks = [left_out, row.message]
    return [" ".join(remark.split()) for remark in remarks if remark]
