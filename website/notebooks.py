"""Run the scripts in examples/tutorials, and write them as notebooks to docs/tutorials.

`make notebooks` runs all of them; `python website/notebooks.py NAME …` runs only these scripts.
"""

import os
import sys
from pathlib import Path

import jupytext
import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples" / "tutorials").glob("*.py"))
NOTEBOOKS = ROOT / "docs" / "tutorials"


def execute(script: Path, folder: Path) -> nbformat.NotebookNode:
    """Run a script's cells and return the notebook with their outputs.

    Args:
        script: A script in jupytext's percent format.
        folder: The folder in which the cells run and write their files.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised an error.
    """
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"
    notebook = jupytext.read(script)
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    # A user's kernel file may name another interpreter; the kernel must use this one.
    manager = AsyncKernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = sys.executable
    resources = {"metadata": {"path": folder}}
    NotebookClient(notebook, km=manager, timeout=600, resources=resources).execute()
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index}"
        if cell.cell_type == "code":
            cell.metadata.clear()
            # Libraries write notices about their versions to stderr.
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main(names: list[str]) -> None:
    """Write the named notebooks, or all of them.

    Args:
        names: The names of scripts, without their suffix.
    """
    NOTEBOOKS.mkdir(exist_ok=True)
    folder = ROOT / "results" / "tutorials"
    folder.mkdir(parents=True, exist_ok=True)
    for script in SCRIPTS:
        if not names or script.stem in names:
            nbformat.write(execute(script, folder), NOTEBOOKS / f"{script.stem}.ipynb")
            print(f"docs/tutorials/{script.stem}.ipynb")


if __name__ == "__main__":
    main(sys.argv[1:])
