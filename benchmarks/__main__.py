"""All comparisons, each in a separate process, and a page of tables: `python -m benchmarks`."""

import argparse
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import results
from benchmarks.report import comparison_table, goals_table
from benchmarks.settings import Settings

# A comparison is a module with TITLE, UNIT, REFERENCES, GOALS and `compare(settings)`. It may have
# `tables(rows)`, which formats the results in its own way, and NETWORK, a description of its
# networks.
COMPARISONS = (
    "common",
    "kfac_monte_carlo",
    "kfac_exact",
    "eigendecompositions",
    "debiased_fit",
    "prediction",
    "thin",
    "tuning",
    "sampling",
    "resnet50",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "convnext_tiny",
    "few_images",
)
_ROOT = Path(__file__).parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run comparisons and write their tables.

    Args:
        arguments: The arguments of the command line; None for the arguments of this process.

    Returns:
        The exit status: 1 if a comparison failed.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.quick and options.publish:
        parser.error("--publish is for real measurements, --quick has none to show")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    settings = Settings(options.device, options.quick, options.repetitions, options.threads)
    names = options.only or COMPARISONS
    if options.render:
        names = ()
    failed = []
    for name in names:
        print(f"{name} …", flush=True)
        if not _run(name, settings, options.results / f"{name}.json", options.append):
            failed.append(name)
    text = _page(options.results)
    if text is not None:
        (options.results / "benchmarks.md").write_text(text)
        print(text)
        if options.publish:
            (_ROOT / "docs" / "benchmarks.md").write_text(text)
    if failed:
        print(f"Failed: {', '.join(failed)}.", file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, help="only these comparisons")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny network: does it run at all?")
    parser.add_argument("--repetitions", type=_positive, default=3, help="rounds (3)")
    parser.add_argument("--threads", type=_positive, default=2, help="threads of torch (2)")
    parser.add_argument(
        "--append", action="store_true", help="add rounds to those measured before, do not replace"
    )
    parser.add_argument(
        "--results", type=Path, default=Path("results/benchmarks"), help="folder of measurements"
    )
    parser.add_argument(
        "--render", action="store_true", help="measure nothing, show what has been measured"
    )
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks.md")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _run(name: str, settings: Settings, path: Path, append: bool) -> bool:
    """Measure one comparison in a separate process; return whether it succeeded."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(settings.threads)}
    with tempfile.TemporaryDirectory() as folder:
        result_path = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.worker", name]
        command += [json.dumps(asdict(settings)), str(result_path)]
        if subprocess.run(command, env=environment, cwd=_ROOT, check=False).returncode != 0:
            return False
        result = results.read(result_path)
    if append and path.exists():
        result = results.join_rounds(results.read(path), result)
    results.write(path, result)
    return True


def _page(folder: Path) -> str | None:
    """Return the page of all measurements in a folder; None if there are none."""
    results_by_name = {}
    for name in COMPARISONS:
        path = folder / f"{name}.json"
        if path.exists():
            results_by_name[name] = results.read(path)
    if not results_by_name:
        return None
    sections = [
        "# Benchmarks",
        "`python -m benchmarks --publish` writes this page. Each comparison runs in a "
        "separate process, in which the libraries are timed in turn,\nin an order that alternates "
        "between rounds. (`--append` adds rounds from additional processes.)",
        "- **Times** are medians over rounds.\n"
        "- **Ratios** are medians of the ratios within a round.\n"
        "- **Added memory** is the peak memory during the call minus the memory in use before "
        "the call, including the result.\n"
        "- **Goals** are the targets that the project has set for itself.",
        *sorted({_describe_set_up(result) for result in results_by_name.values()}),
    ]
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in results_by_name}
    goals = goals_table(
        [
            (modules[name].TITLE, modules[name].GOALS, result.rows)
            for name, result in results_by_name.items()
            if not result.quick
        ]
    )
    if goals is not None:
        sections.append(goals)
    for name, result in results_by_name.items():
        module = modules[name]
        num_rounds = max((len(row.seconds) for row in result.rows), default=0)
        sections.append(f"## {module.TITLE}")
        sections.append(f"{inspect.getdoc(module.compare)} {num_rounds} rounds.")
        if hasattr(module, "tables"):
            sections.append(module.tables(result.rows))
        else:
            sections.append(comparison_table(result.rows, module.UNIT, module.REFERENCES))
    return "\n\n".join(sections) + "\n"


def _describe_set_up(result: results.Result) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in result.versions.items())
    return textwrap.fill(f"{result.network}, float32; {result.machine}; {versions}.", 150)


if __name__ == "__main__":
    sys.exit(main())
