"""Pages of what lies outside docs/: changelog, contributing, examples, and source that is linked.

Nothing is copied into docs/: each has one source. Links are written as GitHub follows them, and
lead to the pages here.
"""

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Documents of the root, and their pages.
DOCUMENTS = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"\]\((?!https?:|#)(?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills the empty part `All examples` of the navigation."""
    for part in config.nav or []:
        for entries in part.values():
            for entry in entries if isinstance(entries, list) else ():
                if entry.get("All examples") == []:
                    entry["All examples"] = [
                        {path.stem.replace("_", " ").capitalize(): page_of(relative(path))}
                        for path in sorted((ROOT / "examples").glob("*.py"))
                    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    sources = {relative(path) for path in (ROOT / "examples").glob("*.py")}
    for page in files.documentation_pages():
        sources |= set(_targets(page.content_string, f"docs/{page.src_uri}"))
    for document, name in DOCUMENTS.items():
        text = (ROOT / document).read_text(encoding="utf-8")
        sources |= set(_targets(text, document))
        files.append(File.generated(config, name, content=translated(text, document)))
    for path in sorted(sources - set(DOCUMENTS)):
        files.append(File.generated(config, page_of(path), content=_listing(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Leads links that point out of docs/ to the pages of what they point to."""
    if page.file.generated_by:
        return markdown
    return translated(markdown, f"docs/{page.file.src_uri}")


def translated(markdown: str, document: str) -> str:
    """A document's text with links that lead from its page to pages.

    Args:
        markdown: The text.
        document: Its file, from the root of the project.
    """
    here = posixpath.dirname(page_of(document)) or "."

    def link(match: re.Match[str]) -> str:
        path = _target(match, document)
        if path is None:
            return match[0]  # mkdocs finds out whether there is such a page
        return f"]({posixpath.relpath(page_of(path), here)}{match['anchor'] or ''})"

    return _LINK.sub(link, markdown)


def _targets(markdown: str, document: str) -> Iterator[str]:
    """The files outside docs/ that a document links to."""
    for match in _LINK.finditer(markdown):
        path = _target(match, document)
        if path is not None and not path.startswith("docs/"):
            yield path


def _target(match: re.Match[str], document: str) -> str | None:
    """The file that a link leads to, from the root of the project; None if there is none."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(document), match["target"]))
    return path if (ROOT / path).is_file() else None


def _listing(path: str) -> str:
    """The page of a source file: its description, how to run it if it is an example, its lines."""
    text = (ROOT / path).read_text(encoding="utf-8")
    parts = [f"# {path}"]
    if path.endswith(".py"):
        parts.append(ast.get_docstring(ast.parse(text)) or "")
    if path.startswith("examples/"):
        parts.append(f"```bash\npython {path}\n```")
    return "\n\n".join([*parts, f"````python\n{text}````\n"])


def page_of(path: str) -> str:
    """A file's page, from the root of the site; the file from the root of the project."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return DOCUMENTS.get(path) or f"source/{path}.md"


def relative(path: Path) -> str:
    """A file's path from the root of the project."""
    return path.relative_to(ROOT).as_posix()
