"""The pages state the numbers of docs/results.toml."""

import re
import tomllib
from pathlib import Path

import pytest

from benchmarks import conformal_coverage, function_space
from examples import continual_learning

ROOT = Path(__file__).parents[2]
SOURCES = tomllib.loads((ROOT / "docs" / "results.toml").read_text(encoding="utf-8"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
NONE = ("none", "no")
NUMBER = r"[-−+]?\d[\d,]*(?:\.\d+)?(?:e[-−]?\d+)?"
STATED = re.compile(
    rf"(?P<number>{NUMBER}|\b(?:{'|'.join([*WORDS, *NONE])})\b)"
    r"(?:\s?(?:%|s|ms|MB|million))?\*{0,2}<!-- (?P<name>[\w-]+\.[\w.-]+) -->"
)
MARKER = re.compile(r"<!-- [\w-]+\.[\w.-]+ -->")
# Numbers in a README that are no results: versions, the confidence level, sizes of the problems.
NOT_RESULTS = {
    *("CIFAR-10", "0.5 is chance", "within 5 %", "float64", "ICLR 2025"),
    *("Python 3.11", "FSDP2"),
}


def parsed(text):
    """The value of a number on a page, and half a unit of its last digit."""
    if text in NONE:
        return 0.0, 0.0
    if text in WORDS:
        return float(WORDS.index(text)), 0.0
    text = text.replace("−", "-").replace(",", "")
    mantissa, _, exponent = text.partition("e")
    decimals = len(mantissa.partition(".")[2])
    return float(text), 0.5 * 10.0 ** (int(exponent or 0) - decimals)


def entry_value(name):
    """The value of an entry, or of the end of its interval."""
    source, entry, *field = name.split(".")
    return SOURCES[source][entry][field[0] if field else "value"]


def entries():
    """Each entry of the file by its name."""
    return {
        f"{source}.{name}": entry
        for source, table in SOURCES.items()
        for name, entry in table.items()
        if isinstance(entry, dict)
    }


def wrong_statements(text):
    """The numbers of a page that differ from those of the file, by more than rounding."""
    wrong = []
    for match in STATED.finditer(text):
        value, rounding = parsed(match["number"])
        if abs(value - entry_value(match["name"])) > 1.001 * rounding + 1e-12:
            wrong.append(f"{match['number']} for {match['name']} = {entry_value(match['name'])}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_states_the_numbers_of_the_results_file(page):
    text = page.read_text(encoding="utf-8")
    assert len(STATED.findall(text)) == len(MARKER.findall(text)), "a marker follows no number"
    assert wrong_statements(text) == []


def test_a_number_that_differs_is_reported():
    marker = "<!-- report-1000.network-nll -->"
    assert wrong_statements(f"NLL 0.585{marker}, about 0.59{marker}, **0.6**{marker}") == []
    assert len(wrong_statements(f"NLL 0.586{marker}, 0.57{marker}, five{marker}")) == 3
    assert (
        wrong_statements("−0.0006<!-- report-10000.last-layer-minus-temperature-nll.low -->") == []
    )
    assert (
        wrong_statements("none<!-- study.last-layer-worse -->, 86<!-- architectures.passed -->")
        == []
    )


def test_every_number_of_the_readme_is_in_the_results_file():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for pattern in (r"```.*?```", r"`[^`\n]*`", r"\]\([^)]*\)", r"<!-- --8<-- .*? -->"):
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    text = STATED.sub("", text)
    for words in NOT_RESULTS:
        text = text.replace(words, "")
    assert re.findall(r".{0,30}\d.{0,30}", text) == []


def test_every_entry_says_what_it_is_and_is_stated_somewhere():
    stated = {
        ".".join(match["name"].split(".")[:2])
        for page in PAGES
        for match in STATED.finditer(page.read_text(encoding="utf-8"))
    }
    for source in SOURCES.values():
        assert source.keys() & {"command", "page"}
    for name, entry in entries().items():
        assert entry.keys() >= {"value", "unit", "what"}, name
    assert set(entries()) - stated == set()


def cell(page, heading, row, column):
    """A cell of the table below a heading, by the beginnings of heading and row."""
    section = page.split(f"\n## {heading}", 1)[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    names = [name.strip() for name in lines[0]]
    (cells,) = [line for line in lines if line[0].strip() == row]
    return cells[names.index(column)].strip()


@pytest.mark.parametrize("name", [name for name, e in entries().items() if "cell" in e])
def test_a_number_is_that_of_the_page_that_a_program_wrote(name):
    entry = entries()[name]
    page = (ROOT / SOURCES[name.split(".")[0]]["page"]).read_text(encoding="utf-8")
    assert parsed(re.search(NUMBER, cell(page, *entry["cell"]))[0])[0] == entry["value"]


@pytest.mark.parametrize("name", [name for name, e in entries().items() if "sentence" in e])
def test_a_number_is_in_a_sentence_that_a_program_wrote(name):
    entry = entries()[name]
    page = (ROOT / SOURCES[name.split(".")[0]]["page"]).read_text(encoding="utf-8")
    assert entry["sentence"] in page
    numbers = [parsed(number)[0] for number in re.findall(NUMBER, entry["sentence"])]
    assert entry["value"] in numbers


@pytest.mark.slow
def test_continual_learning_ends_with_the_stated_accuracies():
    curves = continual_learning.main(["--methods", "fine-tuning", "kfac"])
    for method, (curve,) in curves.items():
        stated = SOURCES["continual-learning"][method]["seed-0"]
        assert curve[-1] == pytest.approx(stated, abs=0.03)


@pytest.mark.slow
def test_function_space_has_the_stated_errors():
    pytest.importorskip("laplace", reason="compares with laplace-torch")
    errors = function_space.main(["--problems", "classes-1"])["classes-1"]
    for number, row in zip(function_space.NUM_INDUCING, errors.tolist(), strict=True):
        entry = SOURCES["function-space"][f"classes-1-{number}"]
        stated = [entry[column] for column in function_space.COLUMNS]
        assert row == pytest.approx(stated, rel=0.15, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("problem", conformal_coverage.PROBLEMS)
def test_conformal_coverage_is_nominal_on_ten_seeds_and_in_each_group(problem):
    by_seed = conformal_coverage.main(["--problems", problem])[problem]
    assert len(by_seed) == 10
    for group in by_seed[0]:
        coverages = [coverage[group] for coverage in by_seed]
        assert all(coverage.has_level(0.999) for coverage in coverages)
        entry = SOURCES["conformal"][f"{problem}-{group.replace(' ', '-')}"]
        mean = sum(coverage.covered / coverage.num_test for coverage in coverages) / 10
        mean_of_posterior = (
            sum(coverage.covered_by_posterior / coverage.num_test for coverage in coverages) / 10
        )
        assert mean == pytest.approx(entry["value"], abs=0.01)
        assert mean_of_posterior == pytest.approx(entry["own"], abs=0.02)
