"""Add pages for files outside docs/: the changelog, CONTRIBUTING.md, examples, and linked sources.

The files are not copied into docs/, so that each text has one source. Documents contain the links
that GitHub needs. On the site, these links lead to the pages that are added here.
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
# Documents in the root folder, and their pages.
DOCUMENTS = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"\]\((?!https?:|#)(?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the empty entry `All examples` of the navigation."""
    example_pages = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        title = path.stem.replace("_", " ").capitalize()
        example_pages.append({title: page_path(relative(path))})
    for section in config.nav or []:
        for entries in section.values():
            # A section without subsections has the path of a page in place of a list.
            if isinstance(entries, list):
                for entry in entries:
                    if entry.get("All examples") == []:
                        entry["All examples"] = example_pages
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    sources = {relative(path) for path in (ROOT / "examples").glob("*.py")}
    for page in files.documentation_pages():
        sources |= set(_linked_files(page.content_string, f"docs/{page.src_uri}"))
    for document, name in DOCUMENTS.items():
        text = (ROOT / document).read_text(encoding="utf-8")
        sources |= set(_linked_files(text, document))
        files.append(File.generated(config, name, content=translate_links(text, document)))
    for path in sorted(sources - set(DOCUMENTS)):
        files.append(File.generated(config, page_path(path), content=_listing(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Translate links to files outside docs/ into links to their pages."""
    if page.file.generated_by:
        return markdown
    return translate_links(markdown, f"docs/{page.file.src_uri}")


def translate_links(markdown: str, document: str) -> str:
    """Return a document's text, in which links to files are links to the pages of these files.

    Args:
        markdown: The text.
        document: The path of the document, relative to the root of the project.
    """
    folder = posixpath.dirname(page_path(document)) or "."

    def translate(match: re.Match[str]) -> str:
        path = _target(match, document)
        if path is None:
            return match[0]  # mkdocs reports links to pages that do not exist
        return f"]({posixpath.relpath(page_path(path), folder)}{match['anchor'] or ''})"

    return _LINK.sub(translate, markdown)


def _linked_files(markdown: str, document: str) -> Iterator[str]:
    """Yield the files outside docs/ that a document links to, relative to the root."""
    for match in _LINK.finditer(markdown):
        path = _target(match, document)
        if path is not None and not path.startswith("docs/"):
            yield path


def _target(match: re.Match[str], document: str) -> str | None:
    """Return the file that a link leads to, relative to the root; None if it does not exist."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(document), match["target"]))
    return path if (ROOT / path).is_file() else None


def _listing(path: str) -> str:
    """Return the page of a source file: its docstring, the command of an example, and its text."""
    text = (ROOT / path).read_text(encoding="utf-8")
    sections = [f"# {path}"]
    if path.endswith(".py"):
        sections.append(ast.get_docstring(ast.parse(text)) or "")
    if path.startswith("examples/"):
        sections.append(f"```bash\npython {path}\n```")
    sections.append(f"````python\n{text}````\n")
    return "\n\n".join(sections)


def page_path(path: str) -> str:
    """Return the path of a file's page in the site, for the file's path in the project."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return DOCUMENTS.get(path) or f"source/{path}.md"


def relative(path: Path) -> str:
    """Return a file's path relative to the root of the project."""
    return path.relative_to(ROOT).as_posix()
