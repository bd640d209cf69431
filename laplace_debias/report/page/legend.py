"""How the page draws a method beside its name."""

from laplace_debias.report.page.embed import THEME
from laplace_debias.report.page.panel import Look


def swatch(look: Look) -> dict[str, str]:
    """How the legend draws a method: colour, dashes and marker of a small SVG, 32 × 12."""
    dashes = "" if look.dashes == "-" else " ".join(str(2 * length) for length in look.dashes[1])
    return {
        "colour": f"var(--{THEME[look.colour]}, {look.colour})",
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
    "X": "M12.6 3.9 14.5 2 16 3.6 17.5 2 19.4 3.9 17.8 6 "
    "19.4 8.1 17.5 10 16 8.4 14.5 10 12.6 8.1 14.2 6Z",
}
"""Outlines of matplotlib's markers."""
