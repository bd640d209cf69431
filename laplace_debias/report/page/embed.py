"""A picture's SVG as part of the page: its own names, colours of the theme, no size."""

import re

from markupsafe import Markup

from laplace_debias.report.page.panel import Picture
from laplace_debias.report.style import GRID, INK, OKABE_ITO

THEME = {
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
"""CSS variables of the page by the colours in which pictures are drawn."""

_DROPPED = re.compile(r"<metadata>.*?</metadata>|<!--.*?-->", re.DOTALL)
_METHOD = re.compile(r'\bid="method:([\w.-]+):\d+"')
_ID = re.compile(r'\s\bid="([^"]+)"')
_REFERENCE = re.compile(r'(url\(#|href="#)([^")]+)')
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
_FONT = re.compile(r"font: (\d[\d.]*px) [^;\"]*")


def inline(picture: Picture) -> Markup:
    """The `<svg>` element of a picture.

    Its texts are in the page's font. Its inner names, which have to differ from those of every
    other picture, begin with the picture's name. Parts that belong to a method have
    `data-method`. Colours of `THEME` are CSS variables.

    Args:
        picture: The picture, whose texts matplotlib has escaped.
    """
    text = _DROPPED.sub("", picture.svg[picture.svg.index("<svg") :])
    head, body = text.split(">", 1)
    box = re.search(r'viewBox="[^"]+"', head)
    assert box is not None  # matplotlib writes one
    used = {match[2] for match in _REFERENCE.finditer(body)}
    body = _METHOD.sub(r'data-method="\1"', body)
    body = _ID.sub(
        lambda match: f' id="{picture.name}-{match[1]}"' if match[1] in used else "", body
    )
    body = _REFERENCE.sub(lambda match: f"{match[1]}{picture.name}-{match[2]}", body)
    body = body.replace("xlink:href", "href")
    body = _FONT.sub(r"font-size: \1", body)
    body = _COLOUR.sub(_themed, body)
    body = re.sub(r">\s*\n\s*<", ">\n<", body)
    start = Markup('<svg {} role="img" aria-label="{}" tabindex="0">')
    # The body is matplotlib's, which has escaped the texts.
    return start.format(Markup(box[0]), picture.alt) + Markup(body)


def _themed(match: re.Match[str]) -> str:
    name = _NAMES.get(match[0].upper())
    return f"var(--{name}, {match[0]})" if name else match[0]


_NAMES = {colour.upper(): name for colour, name in THEME.items()}
