"""Networks of other libraries: `python -m benchmarks.architectures`, one process per network."""

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
_MAX_SECONDS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure architectures and write their table.

    Args:
        arguments: The arguments of the command line; None for the arguments of this process.

    Returns:
        The exit status: 1 if an architecture does not work with the defaults.
    """
    all_architectures = architectures()
    options = _parser(list(all_architectures)).parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = str(SETTINGS.threads)
    # Child processes are forked from a process that has imported the libraries, since the imports
    # take seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.architectures.worker"])
    for name in options.only or all_architectures:
        path = _path(options.results, name)
        path.unlink(missing_ok=True)
        process = context.Process(target=measure_in_process, args=(name, path))
        process.start()
        process.join(_MAX_SECONDS)
        if process.exitcode != 0:
            process.kill()
            process.join()
            message = f"the process ended with {process.exitcode}, after {_MAX_SECONDS} s at most"
            write(path, Row(name, all_architectures[name].library, message=message))
        row, _ = page.read(path)
        print(f"{name}: {'works' if row.works else 'fails'} {row.message}".strip(), flush=True)
    rows = []
    set_ups = []
    for name in all_architectures:
        path = _path(options.results, name)
        if path.exists():
            row, set_up = page.read(path)
            rows.append(row)
            set_ups.append(set_up)
    text = page.page(rows, set_ups)
    (options.results / "architectures.md").write_text(text, encoding="utf-8")
    print(text)
    if options.docs:
        (_ROOT / "docs" / "architectures.md").write_text(text, encoding="utf-8")
    return 0 if all(row.works for row in rows) else 1


def _parser(names: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", help="measure only these"
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
