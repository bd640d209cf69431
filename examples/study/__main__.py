"""Runs the study, or makes its tables: `python -m examples.study --help`."""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from examples.study.measures import measured
from examples.study.methods import methods_of
from examples.study.more import MORE
from examples.study.problems import PROBLEMS, MissingError
from examples.study.tables import read, tables

ALL = PROBLEMS | MORE


def main(arguments: Sequence[str] | None = None) -> str:
    """Run what is not there yet, a line of JSON a problem and seed; returns and prints tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--problems", default=",".join(ALL), help="names, with commas between")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--out", type=Path, default=Path("results/study"), help="folder")
    parser.add_argument("--tables", action="store_true", help="only make tables of what is there")
    options = parser.parse_args(arguments)
    names = options.problems.split(",")
    if unknown := set(names) - set(ALL):
        parser.error(f"no problem {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "study.jsonl"
    if not options.tables:
        run(names, options.seeds, file)
    made = tables(read(file))
    (options.out / "tables.md").write_text(made, encoding="utf-8")
    print(made)
    return made


def run(names: Sequence[str], seeds: int, file: Path) -> None:
    """Run problems and seeds that the file does not have; what is missing is said and skipped."""
    rows = read(file)
    # Without a line that was broken off.
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    done = {(row["problem"], row["seed"]) for row in rows}
    for name in names:
        for seed in range(seeds):
            if (name, seed) in done:
                continue
            start = time.perf_counter()
            try:
                problem = ALL[name](seed)
            except MissingError as missing:
                print(f"{name} is skipped: {missing}", flush=True)
                break
            row = {"problem": name, "seed": seed, "training": time.perf_counter() - start}
            row["methods"] = {
                called: of_method
                for method in methods_of(problem)
                for of_method in [measured(method, problem)]
                for called in method.names
            }
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")
            print(f"{name}, seed {seed}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
