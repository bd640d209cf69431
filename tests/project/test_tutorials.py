"""The notebooks of the documentation are those of their scripts, and their cells run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples" / "tutorials").glob("*.py"))
NOTEBOOKS = ROOT / "docs" / "tutorials"

jupytext = pytest.importorskip(
    "jupytext", reason="the documentation's packages are not installed: pip install -e '.[docs]'"
)
nbformat = pytest.importorskip("nbformat")
notebooks = pytest.importorskip("website.notebooks")


def outputs(notebook):
    """Number of printed lines and of pictures for each cell with code."""
    per_cell = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            printed = "".join(o.text for o in cell.outputs if o.output_type == "stream")
            pictures = sum("image/png" in o.get("data", {}) for o in cell.outputs)
            per_cell.append((len(printed.splitlines()), pictures))
    return per_cell


def test_each_script_has_a_notebook():
    assert {path.stem for path in SCRIPTS} == {path.stem for path in NOTEBOOKS.glob("*.ipynb")}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_has_the_cells_of_its_script(script):
    cells = jupytext.read(script).cells
    written = nbformat.read(NOTEBOOKS / f"{script.stem}.ipynb", as_version=4).cells
    assert [(cell.cell_type, cell.source) for cell in written] == [
        (cell.cell_type, cell.source) for cell in cells
    ], "run `make notebooks`"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_to_pages(script):
    for target in re.findall(r"\]\((?!http)([^)#]+)", script.read_text(encoding="utf-8")):
        assert (NOTEBOOKS / target).exists(), target


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_written(script, tmp_path):
    """Printed lines and pictures per cell are as many; the numbers differ between machines."""
    written = nbformat.read(NOTEBOOKS / f"{script.stem}.ipynb", as_version=4)
    assert outputs(notebooks.execute(script, tmp_path)) == outputs(written)
