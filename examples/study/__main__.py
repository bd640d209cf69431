"""Run the study and make its tables; an interrupted study is continued."""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.study.deep_problems import DEEP_PROBLEMS
from examples.study.measures import measure
from examples.study.methods import Method, all_methods, network_methods
from examples.study.problems import PERCEPTRON_PROBLEMS, MissingError, Problem
from examples.study.tables import Row, all_tables, read, table_without_posteriors

PROBLEMS = PERCEPTRON_PROBLEMS | DEEP_PROBLEMS


def main(arguments: Sequence[str] | None = None) -> str:
    """Run the missing problems and seeds, with one JSON line each; print and return tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--problems", default=",".join(PROBLEMS), help="names, separated by commas")
    parser.add_argument("--seeds", type=int, default=5, help="number; 0 only makes the tables")
    parser.add_argument(
        "--first_seed", type=int, default=0, help="the first seed; give a folder of its own"
    )
    parser.add_argument(
        "--networks_only", action="store_true", help="no posteriors; write a separate file"
    )
    parser.add_argument("--out", type=Path, default=Path("results/study"), help="folder")
    options = parser.parse_args(arguments)
    names = options.problems.split(",")
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    unknown = set(names) - set(PROBLEMS)
    if unknown:
        parser.error(f"no problem {', '.join(sorted(unknown))}; there are {', '.join(PROBLEMS)}")

    options.out.mkdir(parents=True, exist_ok=True)
    if options.networks_only:
        results_file = options.out / "networks.jsonl"
        run_missing(names, seeds, network_methods, results_file)
    else:
        results_file = options.out / "study.jsonl"
        run_missing(names, seeds, all_methods, results_file)

    rows = [row for row in read(results_file) if row["problem"] in names]
    if options.networks_only:
        tables = table_without_posteriors(rows)
        tables_file = options.out / "networks.md"
    else:
        tables = all_tables(rows)
        tables_file = options.out / "tables.md"
    tables_file.write_text(tables, encoding="utf-8")
    print(tables)
    return tables


def run_missing(
    names: Sequence[str],
    seeds: Sequence[int],
    methods: Callable[[Problem], Iterator[Method]],
    results_file: Path,
) -> None:
    """Run the problems and seeds that are not in a file of results, and append them to it."""
    rows = read(results_file)
    # An incomplete last line of an interrupted run is removed.
    results_file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    finished = {(row["problem"], row["seed"]) for row in rows}
    for name in names:
        try:
            for seed in seeds:
                if (name, seed) not in finished:
                    row = run(name, seed, methods)
                    with results_file.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
        except MissingError as error:
            print(f"{name} is skipped: {error}", flush=True)


def run(name: str, seed: int, methods: Callable[[Problem], Iterator[Method]]) -> Row:
    """Train the networks of a problem, and measure every method."""
    start = time.perf_counter()
    problem = PROBLEMS[name](seed)
    measures: dict[str, dict[str, Any]] = {}
    for method in methods(problem):
        measures |= dict.fromkeys(method.names, measure(method, problem))
    print(f"{name}, seed {seed}: {time.perf_counter() - start:.1f} s", flush=True)
    return {"problem": name, "seed": seed, "methods": measures}


if __name__ == "__main__":
    main()
