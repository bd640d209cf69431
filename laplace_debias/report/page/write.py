"""Writes the page of a run folder and its pictures."""

import os
import warnings
from pathlib import Path
from typing import Any

import jinja2

from laplace_debias.report.page import embed
from laplace_debias.report.page.examples import example_groups
from laplace_debias.report.page.names import duration, size
from laplace_debias.report.page.panel import Look, Picture, drawing, looks
from laplace_debias.report.page.run_folder import Run, read_run
from laplace_debias.report.page.sections import Section, sections
from laplace_debias.report.page.table import difference_tables, full_table, main_table
from laplace_debias.system.atomic import written_atomically

_TEMPLATES = Path(__file__).parent / "templates"


def write_page(folder: str | os.PathLike[str]) -> Path:
    """Writes `pictures/NAME.svg` and `report.html` of a run folder, from its files alone.

    The page is one file without anything from outside. What the run does not have is left out. The
    same folder gives the same page.

    Args:
        folder: A complete run folder, as docs/run-folder.md describes it.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: If the folder is missing, or is no run folder.
        ValueError: If the run is not complete, or a file of it is damaged or of another format.
        OSError: If the page cannot be written.
    """
    run = read_run(folder)
    by_key = looks((method.key, method.label) for method in run.methods)
    with drawing(), warnings.catch_warnings():
        # Only the widths of such letters are guessed: the browser has fonts of its own.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        shown = sections(run, by_key)
    text = _page(run, by_key, shown)
    for picture in (p for part in shown for group in part.groups for p in group.pictures):
        with written_atomically(run.folder / "pictures" / f"{picture.name}.svg") as temporary:
            temporary.write_text(picture.svg, encoding="utf-8")
    path = run.folder / "report.html"
    with written_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def _page(run: Run, by_key: dict[str, Look], shown: list[Section]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"inline": embed.inline, "points": _points}
    config = run.folder / "config.yaml"
    return environment.get_template("page.html.j2").render(
        run=run,
        facts=_facts(run),
        conclusion=_sentences(run.meta.get("conclusion")),
        main=main_table(run),
        differences=difference_tables(run),
        full=[(data, full_table(run, data.name)) for data in run.sets],
        looks=by_key,
        swatch=_swatch,
        sections=shown,
        examples=example_groups(run),
        num_predicted={m.key: run.num_predicted(m.key, run.test) for m in run.methods},
        num_test=next(data.num_examples for data in run.sets if data.name == run.test),
        made=_made(run),
        config=config.read_text(encoding="utf-8") if config.is_file() else "",
    )


def _sentences(conclusion: Any) -> list[str]:
    if isinstance(conclusion, str):
        return [conclusion]
    return [str(sentence) for sentence in conclusion or ()]


def _facts(run: Run) -> list[str]:
    """What the page says of the run below its title."""
    meta = run.meta
    what = f"{meta.get('input_name') or 'example'}s"
    classes = len(meta.get("classes") or ())
    test = next(data.num_examples for data in run.sets if data.name == run.test)
    facts = [
        f"{meta['task']}, {classes} classes" if classes else str(meta["task"]),
        f"{test:,} test {what}" if test else "",
        f"{len(run.shifts)} severities of corruption" if run.shifts else "",
        f"{len(run.ood)} out-of-distribution set{'s'[: len(run.ood) != 1]}" if run.ood else "",
        f"{meta['num_parameters']:,} parameters" if meta.get("num_parameters") else "",
        f"trained on {meta['num_train']:,} {what}" if meta.get("num_train") else "",
    ]
    return [fact for fact in facts if fact]


def _made(run: Run) -> list[tuple[str, str]]:
    """How the run was made, names and values."""
    meta = run.meta
    seconds = meta.get("seconds")
    stages = seconds if isinstance(seconds, dict) else {}
    made = {
        "Created": meta.get("created"),
        "Seed": meta.get("seed"),
        "Device": meta.get("device"),
        "Threads": meta.get("threads"),
        "Revision": meta.get("git"),
        "Time": ", ".join(f"{stage} {duration(value)}" for stage, value in stages.items()),
        "Peak memory": size(meta["peak_bytes"]) if meta.get("peak_bytes") else None,
        "Versions": ", ".join(f"{k} {v}" for k, v in (meta.get("versions") or {}).items()),
    }
    return [(name, str(value)) for name, value in made.items() if value not in (None, "")]


def _points(picture: Picture) -> list[list[object]]:
    return [[point.x, point.y, point.method, point.text] for point in picture.points]


def _swatch(look: Look) -> dict[str, str]:
    """How the legend draws a method: colour, dashes and marker of a small SVG, 32 × 12."""
    dashes = "" if look.dashes == "-" else " ".join(str(2 * length) for length in look.dashes[1])
    return {
        "colour": f"var(--{embed.THEME[look.colour]}, {look.colour})",
        "dashes": dashes,
        "marker": _MARKERS[look.marker],
    }


_MARKERS = {
    "o": "M12 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z",
    "s": "M12.5 2.5h7v7h-7Z",
    "D": "M16 1.4 20.6 6 16 10.6 11.4 6Z",
    "^": "M16 1.5 20.5 10h-9Z",
    "v": "M16 10.5 11.5 2h9Z",
    "P": "M14.5 2h3v2.5h2.5v3h-2.5v2.5h-3v-2.5h-2.5v-3h2.5Z",
    "X": "M12.6 3.9 14.5 2 16 3.6 17.5 2 19.4 3.9 17.8 6 19.4 8.1 17.5 10 16 8.4 14.5 10 12.6 8.1 14.2 6Z",
}
"""Outlines of matplotlib's markers."""
