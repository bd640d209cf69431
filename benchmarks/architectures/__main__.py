"""Anybody's network: `python -m benchmarks.architectures`, one process an architecture."""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.architectures import page
from benchmarks.architectures.measurement import Row
from benchmarks.architectures.worker import SETTINGS, measure_in_process, write
from benchmarks.architectures.zoo import architectures

_ROOT = Path(__file__).parents[2]
_SECONDS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure architectures and write their table.

    Args:
        arguments: The arguments of the command line; None for the arguments of this process.

    Returns:
        The exit status: 1 if an architecture does not work with the defaults.
    """
    known = architectures()
    options = _parser(list(known)).parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = str(SETTINGS.threads)
    # Child processes are forked from a process that has imported the libraries, since the imports
    # take seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.architectures.worker"])
    for name in options.only or known:
        path = _path(options.results, name)
        path.unlink(missing_ok=True)
        process = context.Process(target=measure_in_process, args=(name, path))
        process.start()
        process.join(_SECONDS)
        if process.exitcode != 0:
            process.kill()
            process.join()
            said = f"the process ended with {process.exitcode}, after {_SECONDS} s at most"
            write(path, Row(name, known[name].library, message=said))
        row, _ = page.read(path)
        print(f"{name}: {'works' if row.works else 'fails'} {row.message}".strip(), flush=True)
    found = [page.read(path) for name in known if (path := _path(options.results, name)).exists()]
    text = page.page([row for row, _ in found], [set_up for _, set_up in found])
    (options.results / "architectures.md").write_text(text, encoding="utf-8")
    print(text)
    if options.docs:
        (_ROOT / "docs" / "architectures.md").write_text(text, encoding="utf-8")
    return 0 if all(row.works for row, _ in found) else 1


def _parser(names: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", help="these alone; others are kept"
    )
    parser.add_argument(
        "--results", type=Path, default=Path("results/architectures"), help="folder of rows"
    )
    parser.add_argument("--docs", action="store_true", help="write docs/architectures.md")
    return parser


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(', ', '-')}.json"


if __name__ == "__main__":
    sys.exit(main())
