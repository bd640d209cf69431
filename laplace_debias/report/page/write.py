"""Write the page of a run folder and its pictures."""

import itertools
import os
import re
import warnings
from pathlib import Path

import jinja2
import matplotlib
from markupsafe import Markup

from laplace_debias.report.page.example_cards import example_groups
from laplace_debias.report.page.metric_tables import difference_tables, full_tables, main_table
from laplace_debias.report.page.panel import SETTINGS, Look, Picture, looks
from laplace_debias.report.page.run import Run, read_run
from laplace_debias.report.page.sections import first_picture, pictures_by_section
from laplace_debias.report.style import GRID, INK, OKABE_ITO
from laplace_debias.runs.wording import duration, size
from laplace_debias.system.files import written_atomically

_THEME = {
    INK: "ink",
    GRID: "grid",
    "#FFFFFF": "paper",
    "#7F7F7F": "grey",
    **{
        colour: name.replace(" ", "-")
        for name, colour in OKABE_ITO.items()
        if name not in ("black", "yellow")
    },
}
"""For each colour in the pictures, the CSS variable of the page that replaces it."""

_MARKERS = {
    "o": "M12 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z",
    "s": "M12.5 2.5h7v7h-7Z",
    "D": "M16 1.4 20.6 6 16 10.6 11.4 6Z",
    "^": "M16 1.5 20.5 10h-9Z",
    "v": "M16 10.5 11.5 2h9Z",
    "P": "M14.5 2h3v2.5h2.5v3h-2.5v2.5h-3v-2.5h-2.5v-3h2.5Z",
    "X": "M12.6 3.9 14.5 2 16 3.6 17.5 2 19.4 3.9 17.8 6 "
    "19.4 8.1 17.5 10 16 8.4 14.5 10 12.6 8.1 14.2 6Z",
}
"""Outlines of matplotlib's markers, as SVG paths for the legend."""


def write_page(folder: str | os.PathLike[str]) -> Path:
    """Write `report.html` and `pictures/NAME.svg` into the folder of a complete run.

    The page is a single file that loads nothing else. Parts that the run has no data for are left
    out. The same folder always gives the same page.
    """
    run = read_run(folder)
    by_key = looks(run.methods)
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        # Ignore missing glyphs. They make only text widths inexact, because the browser uses its
        # own fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        shown = pictures_by_section(run, by_key)
        text = _page(run, by_key, shown)
    for picture in itertools.chain(*shown.values()):
        with written_atomically(run.folder.figure(picture.name)) as temporary:
            temporary.write_text(picture.svg, encoding="utf-8")
    with written_atomically(run.folder.page) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return run.folder.page


def _page(run: Run, by_key: dict[str, Look], shown: dict[str, list[Picture]]) -> str:
    """Render the page from its template."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"inline": _inline, "duration": duration, "size": size}
    # Keep numbers and their percent signs on one line.
    environment.filters["tidy"] = lambda text: text.replace(" %", "\u00a0%")
    config = run.folder.config
    main = main_table(run)
    differences = difference_tables(run)
    intervals = [
        cell.interval for table in (main, *differences) for _, cells in table.rows for cell in cells
    ]
    num_test = run.test.num_examples
    num_predicted = {}
    for key in by_key:
        index = run.column(key, run.test.name, "index")
        if index is not None and num_test is not None and len(index) < num_test:
            num_predicted[key] = len(index)
    return environment.get_template("page.html.j2").render(
        run=run,
        record=run.record,
        main=main,
        differences=differences,
        num_intervals=sum(map(bool, intervals)),
        full=[(dataset, full_tables(run, dataset.name)) for dataset in run.record.sets],
        looks=by_key,
        swatch=_swatch,
        pictures=shown,
        first=first_picture(list(itertools.chain(*shown.values()))),
        examples=example_groups(run),
        parts=num_predicted,
        num_test=num_test,
        config=config.read_text(encoding="utf-8") if config.is_file() else "",
    )


def _swatch(look: Look) -> dict[str, str]:
    """Return a method's colour, dashes and marker for its entry in the legend, a 32 × 12 SVG."""
    dashes = "" if look.dashes == "-" else " ".join(str(2 * length) for length in look.dashes[1])
    return {"colour": _theme_colour(look.colour), "dashes": dashes, "marker": _MARKERS[look.marker]}


def _inline(picture: Picture) -> Markup:
    """Return the `<svg>` element of a picture.

    Its texts use the font of the page. Identifiers within the element begin with the picture's
    name, because they must be unique on the page. Parts that show a method have the attribute
    `data-method`. Colours of the theme are replaced by CSS variables.
    """
    text = picture.svg[picture.svg.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    head, body = text.split(">", 1)
    box = re.search(r'viewBox="[^"]+"', head)
    assert box is not None  # Matplotlib always writes a viewBox.
    refers = r'(url\(#|href="#)([^")]+)'
    used = {match[2] for match in re.finditer(refers, body)}
    # Identifiers to which nothing refers are removed, except those of methods.
    body = re.sub(r'\bid="method:([\w.-]+):\d+"', r'data-method="\1"', body)
    body = re.sub(
        r'\s\bid="([^"]+)"',
        lambda match: f' id="{picture.name}-{match[1]}"' if match[1] in used else "",
        body,
    )
    body = re.sub(refers, lambda match: f"{match[1]}{picture.name}-{match[2]}", body)
    body = body.replace("xlink:href", "href")
    body = re.sub(r"font: (\d[\d.]*px) [^;\"]*", r"font-size: \1", body)
    body = re.sub(r"#[0-9a-fA-F]{6}\b", lambda match: _theme_colour(match[0]), body)
    body = re.sub(r">\s*\n\s*<", ">\n<", body)
    start = Markup('<svg {} role="img" aria-label="{}" tabindex="0">')
    # Matplotlib has already escaped the strings in the body.
    return start.format(Markup(box[0]), picture.alt) + Markup(body)


def _theme_colour(colour: str) -> str:
    """Return the CSS variable of the page's theme for a colour, or the colour itself."""
    name = _THEME.get(colour.upper())
    return f"var(--{name}, {colour})" if name else colour
