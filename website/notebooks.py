"""Makes the notebooks in docs/tutorials from the scripts in examples/tutorials, with their outputs.

`make notebooks` runs it; `python website/notebooks.py NAME …` makes those only.
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


def executed(script: Path, folder: Path) -> nbformat.NotebookNode:
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
    # The kernel of this interpreter, whichever one a file of the user's names.
    manager = AsyncKernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = sys.executable
    resources = {"metadata": {"path": folder}}
    NotebookClient(notebook, km=manager, timeout=600, resources=resources).execute()
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index}"
        if cell.cell_type == "code":
            cell.metadata.clear()
            # Libraries write notices of their versions there.
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main(names: list[str]) -> None:
    """Write the named notebooks, or all of them.

    Args:
        names: Stems of scripts.
    """
    NOTEBOOKS.mkdir(exist_ok=True)
    folder = ROOT / "results" / "tutorials"
    folder.mkdir(parents=True, exist_ok=True)
    for script in SCRIPTS:
        if not names or script.stem in names:
            nbformat.write(executed(script, folder), NOTEBOOKS / f"{script.stem}.ipynb")
            print(f"docs/tutorials/{script.stem}.ipynb")


if __name__ == "__main__":
    main(sys.argv[1:])
