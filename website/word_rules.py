"""Check the words of pages, docstrings and messages, as `make lint` does (CONTRIBUTING.md, Words).

Run with `python website/word_rules.py`. It prints each place that breaks a rule, and needs no
package. Exceptions are in `website/word_exceptions.txt`, one per line, with a reason.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXCEPTIONS = ROOT / "website" / "word_exceptions.txt"
RULES = {
    'a sentence begins with "Of"': r"(?:^|[.:;] |\| |\*\*:? )Of (?=[a-z\d])",
    '"alone" for "only"': r"\balone\b(?!\()(?<!import alone)",
    "a docstring refers to another name": r"^As `",
    '"a" for "per"': r"\b(?:\d|one|two|three|labels?|pass|passes|seconds?|once)"
    r" an? (?:batch|draw|example|factor|fit|image|key|pass|probe|query|sample|sequence|step)\b",
    '"less" for "minus"': r"\bless (?:that|those)\b",
    '"ahead" or "behind" for a difference': r"\b(?:is|are) (?:ahead|behind)\b"
    r"(?! (?:the|them)\b)",
}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line at which each text of a file begins, and the text.

    A page is one text. In a module, the texts are the docstrings and other strings with a space.
    Code within a text is blanked out.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        for pattern in (r"```.*?```", r"`[^`\n]+`", r"\]\([^)]*\)", r"<!--.*?-->"):
            text = re.sub(pattern, _blank, text, flags=re.DOTALL)
        yield 1, text
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, re.sub(r"`[^`\n]+`", "`", node.value)


def _blank(match: re.Match[str]) -> str:
    """Replace code by its line breaks, so that line numbers stay the same."""
    return "\n" * match[0].count("\n") or "`"


def places() -> Iterator[str]:
    """Yield each place that breaks a rule: file, line, rule and words."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for path in sorted([*pages, *(ROOT / "laplace_debias").rglob("*.py")]):
        name = path.relative_to(ROOT).as_posix()
        for start, text in texts(path):
            for rule, pattern in RULES.items():
                for match in re.finditer(pattern, text, re.MULTILINE):
                    line = start + text.count("\n", 0, match.start())
                    words = " ".join(text[max(0, match.start() - 30) : match.end() + 30].split())
                    yield f"{name}:{line}: {rule}: {words}"


@dataclass(frozen=True)
class AllowedWords:
    """Words that may break a rule in one file.

    Attributes:
        file: The path of the file, relative to the root of the project.
        words: A piece of the text that `places` yields.
    """

    file: str
    words: str

    def covers(self, place: str) -> bool:
        """Whether a place that breaks a rule contains these words."""
        return place.startswith(f"{self.file}:") and self.words in place


def read_exceptions() -> list[AllowedWords]:
    """Read the exceptions; the reason after two spaces and `#` is not part of the words."""
    exceptions = []
    for line in EXCEPTIONS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            file, _, words = line.partition("  #")[0].partition(": ")
            exceptions.append(AllowedWords(file, words))
    return exceptions


def main() -> int:
    """Print the places without an exception; the exit status is 1 if there is any."""
    exceptions = read_exceptions()
    exit_status = 0
    for place in places():
        if not any(exception.covers(place) for exception in exceptions):
            sys.stdout.write(f"{place}\n")
            exit_status = 1
    return exit_status


if __name__ == "__main__":
    sys.exit(main())
