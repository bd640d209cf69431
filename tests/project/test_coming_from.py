"""The pages for users of other libraries have an equivalent for each of their public names."""

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "coming-from"
WITHOUT_EQUIVALENT = {"", "-", "–", "none", "no", "not available", "not available here"}


def rows(page):
    """The cells of each row of the tables of a page, without the lines below the headers."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\|(.+)\|$", text, re.M)
    cells = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    return [row for row in cells if not set("".join(row)) <= set("|-: ")]


def names(cell):
    """The names in the code of a cell."""
    return {name for code in re.findall(r"`([^`]+)`", cell) for name in re.findall(r"\w+", code)}


def test_each_public_name_of_curvlinops_has_a_row():
    curvlinops = pytest.importorskip("curvlinops", reason="reads the names of curvlinops")
    listed = set().union(*[names(row[0]) for row in rows("curvlinops-backpack")])
    missing = set(curvlinops.__all__) - listed
    assert not missing, f"Add rows to docs/coming-from/curvlinops-backpack.md for {missing}."


@pytest.mark.parametrize("page", ["curvlinops-backpack", "laplace-torch"])
def test_each_row_has_an_equivalent(page):
    table = rows(page)
    assert len(table) > 20
    for name, equivalent, *further_cells in table:
        assert not further_cells, f"{name}: a row has two cells."
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", equivalent).rstrip(".").lower()
        assert plain not in WITHOUT_EQUIVALENT, f"{name} has no equivalent."
