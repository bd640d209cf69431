"""Formulas as MathML, made when the site is built: a reader's browser fetches no renderer."""

import html
import re

from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves of `$…$` and of `$$…$$`.
_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[(\[])(?P<tex>.*?)\\[)\]]</(?P=tag)>',
    re.DOTALL,
)


def on_page_content(content: str, **_: object) -> str:
    """Puts MathML in the place of every formula of a page; mkdocs calls it."""
    return _FORMULA.sub(_rendered, content)


def _rendered(match: re.Match[str]) -> str:
    display = "inline" if match["open"] == "(" else "block"
    formula = convert(html.unescape(match["tex"]).strip(), display=display)
    return f'<{match["tag"]} class="formula">{formula}</{match["tag"]}>'
