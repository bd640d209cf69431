"""Check the words of pages, docstrings and messages, as `make lint` does (CONTRIBUTING.md, Words).

Run with `python website/word_rules.py`. It prints each place that breaks a rule, and needs no
package. Exceptions are in `website/word_exceptions.txt`, one per line, with a reason.
"""

import ast
import re
import sys
from collections.abc import Iterator
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
    """Yield the prose of a file with the line it begins at: a page, or docstrings and messages."""
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
    """Keep only the lines of what is no prose."""
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


def main() -> int:
    """Print the places without an exception; the exit status is 1 if there is any."""
    lines = EXCEPTIONS.read_text(encoding="utf-8").splitlines()
    excepted = [line.partition("  #")[0] for line in lines if line and not line.startswith("#")]
    wrong = [
        place
        for place in places()
        if not any(
            place.startswith(f"{file}:") and words in place
            for file, _, words in (entry.partition(": ") for entry in excepted)
        )
    ]
    sys.stdout.write("".join(f"{place}\n" for place in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
