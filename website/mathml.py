"""Turn formulas into MathML when the site is built, so that browsers need no renderer."""

import html
import re

from latex2mathml.converter import convert

# The HTML that pymdownx.arithmatex writes for `$…$` and for `$$…$$`.
_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[(\[])(?P<tex>.*?)\\[)\]]</(?P=tag)>',
    re.DOTALL,
)


def on_page_content(content: str, **_: object) -> str:
    """Replace every formula of a page by MathML; mkdocs calls this hook."""
    return _FORMULA.sub(_to_mathml, content)


def _to_mathml(match: re.Match[str]) -> str:
    display = "inline" if match["open"] == "(" else "block"
    formula = convert(html.unescape(match["tex"]).strip(), display=display)
    return f'<{match["tag"]} class="formula">{formula}</{match["tag"]}>'
