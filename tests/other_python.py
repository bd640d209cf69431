"""The tests of `make test` with another Python, in an environment of its own that is removed again.

`python tests/other_python.py python3.13` installs the newest versions that pyproject.toml allows;
with `--lowest` the lowest of what it names itself (by uv, from PyPI). Other arguments go to pytest.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHOWN = ("torch", "numpy", "scipy", "torchmetrics", "backpack-for-pytorch", "jaxtyping", "beartype")


def install(interpreter, folder, lowest):
    """A virtual environment with the package and what its tests need; its Python."""
    subprocess.run([interpreter, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if lowest:
        subprocess.run([*pip, "uv"], check=True)
        pip = [python, "-m", "uv", "pip", "install", "-q", "--python", python]
        pip += ["--resolution", "lowest-direct"]
    subprocess.run([*pip, "-e", ".[dev]"], cwd=ROOT, check=True)
    return python


def versions(python):
    code = (
        "import sys; from importlib.metadata import version; "
        f"print(sys.version.split()[0], *(f'{{n}} {{version(n)}}' for n in {SHOWN}), sep=', ')"
    )
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("interpreter", help="name or path of a Python, such as python3.13")
    parser.add_argument("--lowest", action="store_true", help="the lowest versions allowed")
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="laplace-debias-") as folder:
        python = install(options.interpreter, Path(folder) / "venv", options.lowest)
        print(f"Python {versions(python)}", end="", flush=True)
        began = time.monotonic()
        command = [python, "-m", "pytest", "-n", "auto", "--dist", "worksteal", "-m", "not slow"]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        status = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, check=False)
        print(f"{'failed' if status.returncode else 'passed'}, {time.monotonic() - began:.0f} s")
    return status.returncode


if __name__ == "__main__":
    sys.exit(main())
