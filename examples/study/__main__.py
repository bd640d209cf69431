"""Run the study and make its tables; an interrupted study is continued."""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from examples.study.measures import measured
from examples.study.methods import Method, methods_of, of_networks
from examples.study.more import MORE
from examples.study.problems import PROBLEMS, MissingError, Problem
from examples.study.tables import read, table_without_posteriors, tables

ALL = PROBLEMS | MORE


def main(arguments: Sequence[str] | None = None) -> str:
    """Run the missing problems and seeds, with one JSON line each; print and return tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--problems", default=",".join(ALL), help="names, separated by commas")
    parser.add_argument("--seeds", type=int, default=5, help="number; 0 only makes the tables")
    parser.add_argument(
        "--networks_only", action="store_true", help="no posteriors; write a separate file"
    )
    parser.add_argument("--out", type=Path, default=Path("results/study"), help="folder")
    options = parser.parse_args(arguments)
    names = options.problems.split(",")
    if unknown := set(names) - set(ALL):
        parser.error(f"no problem {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / ("networks.jsonl" if options.networks_only else "study.jsonl")
    methods = of_networks if options.networks_only else methods_of
    rows = read(file)
    # An incomplete last line of an interrupted run is removed.
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    done = {(row["problem"], row["seed"]) for row in rows}
    for name in names:
        try:
            for seed in range(options.seeds):
                if (name, seed) not in done:
                    run(name, seed, file, methods)
        except MissingError as missing:
            print(f"{name} is skipped: {missing}", flush=True)
    chosen = [row for row in read(file) if row["problem"] in names]
    made = table_without_posteriors(chosen) if options.networks_only else tables(chosen)
    tables_file = "networks.md" if options.networks_only else "tables.md"
    (options.out / tables_file).write_text(made, encoding="utf-8")
    print(made)
    return made


def run(name: str, seed: int, file: Path, methods: Callable[[Problem], Iterator[Method]]) -> None:
    """Train, measure every method, and add a line to the file."""
    start = time.perf_counter()
    problem, found = ALL[name](seed), {}
    for method in methods(problem):
        found |= dict.fromkeys(method.names, measured(method, problem))
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"problem": name, "seed": seed, "methods": found}) + "\n")
    print(f"{name}, seed {seed}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
