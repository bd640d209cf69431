"""Writes the page of a run folder and its pictures."""

import os
import warnings
from pathlib import Path
from typing import Any

import jinja2

from laplace_debias.report.page import embed, facts, legend
from laplace_debias.report.page.examples import example_groups
from laplace_debias.report.page.panel import Look, Picture, drawing, looks
from laplace_debias.report.page.reading import read_run
from laplace_debias.report.page.run_folder import Run
from laplace_debias.report.page.sections import Section, sections
from laplace_debias.report.page.table import difference_tables, full_tables, main_table
from laplace_debias.system.atomic import written_atomically


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
    environment.filters |= {"inline": embed.inline, "points": _points, "tidy": _tidy}
    config = run.folder / "config.yaml"
    num_predicted = {m.key: run.num_predicted(m.key, run.test) for m in run.methods}
    num_test = next(data.num_examples for data in run.sets if data.name == run.test)
    return environment.get_template("page.html.j2").render(
        run=run,
        title=str(run.meta["title"]),
        input_name=str(run.meta.get("input_name") or "example"),
        facts=facts.of_run(run),
        conclusion=_sentences(run.meta.get("conclusion")),
        notes=_sentences(run.meta.get("notes")),
        main=main_table(run),
        differences=difference_tables(run),
        full=[(data, full_tables(run, data.name)) for data in run.sets],
        looks=by_key,
        swatch=legend.swatch,
        sections=shown,
        examples=example_groups(run),
        num_predicted=num_predicted,
        num_test=num_test,
        has_parts=any(0 < (count or 0) < (num_test or 0) for count in num_predicted.values()),
        made=facts.made(run),
        config=config.read_text(encoding="utf-8") if config.is_file() else "",
    )


def _sentences(told: Any) -> list[str]:
    return [told] if isinstance(told, str) else [str(sentence) for sentence in told or ()]


def _points(picture: Picture) -> list[list[object]]:
    return [[point.x, point.y, point.method, point.text] for point in picture.points]


def _tidy(text: str) -> str:
    """Keeps numbers and their percent signs on one line."""
    return text.replace(" %", "\u00a0%")
