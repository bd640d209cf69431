"""The memory and seconds that a plan tells of, beside what fits take: `python -m benchmarks.plan`.

The fits of a problem are measured in a process of their own. What torch's allocator on the CPU has
given out at most is summed from the profiler's record of every allocation; working space that
oneDNN and MKL take by themselves is not in it. The growth of the resident set at most, in a second
fit, is what the system sees.

`--docs` measures a fixed list (of `--only` some problems) and keeps it in `benchmarks/plan.json`,
from which `python -m benchmarks.scale` makes the table in docs/scale.md.
"""

import argparse
import ctypes
import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plan_networks import NETWORKS, Batches, network
from laplace_debias import Laplace
from laplace_debias.laplace import plan_seconds
from laplace_debias.problems import PROBLEMS, get_problem, load_checkpoint

WITHIN = 0.25
RESULTS = Path(__file__).parent / "plan.json"
_CLASSES = {"cifar100": 100, "imagenet": 1000}
_SIDES = {"vit-little-imagenet": 256, "imagenet": 224}
_CURVATURES = ("kfac", "ekfac", "diag")
_MODES = ("full", "mini", "debiased", "crossfit")
# Fits that would take more are planned and not run.
_LIMIT = 2**31
_LARGE = ("allcnnc-cifar100", "vit-little-imagenet")
# Examples in a batch of networks that take minutes with more.
_BATCHES = {"wrn404-cifar100": 4, "resnet50-imagenet": 2, "vit-little-imagenet": 2}
CHECKPOINT = "LAPLACE_DEBIAS_CHECKPOINT"
"""Names weights of All-CNN-C on CIFAR-10, for the problem that has them."""


@dataclass(frozen=True)
class Case:
    """One fit.

    Attributes:
        problem: A test problem's name, or one of `plan_networks.NETWORKS`.
        curvature: As `Laplace` takes it.
        mode: As `Laplace.fit` takes it.
        fisher: As `Laplace` takes it.
        batch: Examples in each of two batches.
        params: As `Laplace` takes it.
    """

    problem: str
    curvature: str = "kfac"
    mode: str = "full"
    fisher: str = "exact"
    batch: int = 16
    params: str = "all"


def of_problems() -> list[Case]:
    """The documented fits of test problems: all of them; modes, curvatures, Fishers on some."""
    small = {"allcnn-digits", "convnet-digits"}
    cases = []
    for problem in PROBLEMS:
        name = problem.name
        fisher = "exact" if _classes_of(name) == 10 else "mc"
        curvatures = _CURVATURES if problem.is_reduced or name in _LARGE else ("kfac",)
        batch = _BATCHES.get(name, 16)
        cases += [Case(name, curvature, fisher=fisher, batch=batch) for curvature in curvatures]
        if name in small:
            modes = itertools.product(_MODES[1:], _CURVATURES)
            cases += [Case(name, curvature, mode) for mode, curvature in modes]
            cases += [Case(name, "lowrank", mode) for mode in _MODES]
        if name in (*small, "vit-cifar10"):
            cases += [Case(name, fisher=kind) for kind in ("mc", "empirical")]
        if name == "allcnnc-cifar10":
            cases += [
                Case(name, curvature, mode, "mc", 96)
                for curvature, mode in (
                    *(("kfac", "full"), ("kfac", "crossfit"), ("ekfac", "debiased")),
                )
            ]
    return cases


def of_networks() -> list[Case]:
    """Fits of networks that the plan was not written for."""
    cases = []
    for name in NETWORKS:
        cases += [Case(name, kind, fisher="mc", batch=8) for kind in (*_CURVATURES, "lowrank")]
        # The last layer of a language model is its table of tokens, too.
        if name != "transformers GPT-2":
            cases.append(Case(name, "full", fisher="mc", batch=8, params="last_layer"))
    return cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure fits, and print a table.

    Returns:
        The exit status: 1 if a plan missed by more than a quarter.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[*(p.name for p in PROBLEMS), *NETWORKS])
    parser.add_argument("--curvature", nargs="*", default=list(_CURVATURES))
    parser.add_argument("--mode", nargs="*", default=["full"])
    parser.add_argument("--fisher", default="exact")
    parser.add_argument("--batch", type=int, default=16, help="examples in each of two batches")
    parser.add_argument("--params", default="all", choices=["all", "weights", "last_layer"])
    parser.add_argument(
        "--most", type=float, default=_LIMIT / 1e9, help="GB of a plan whose fit is run"
    )
    parser.add_argument("--docs", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--missing", action="store_true", help="with --docs: what is not there")
    parser.add_argument("--replan", action="store_true", help="with --docs: plan anew, fit nothing")
    parser.add_argument("--worker", metavar="CASES")
    options = parser.parse_args(arguments)
    if options.worker:
        for case in json.loads(options.worker):
            of_case = measured(Case(**case), options.most * 1e9, not options.replan)
            print(json.dumps(of_case), flush=True)
        return 0
    cases = [
        Case(name, curvature, mode, options.fisher, options.batch, options.params)
        for name in options.only
        for curvature in options.curvature
        for mode in options.mode
    ]
    rows: dict[Case, dict[str, Any]] = {}
    documented = (*of_problems(), *of_networks())
    if options.docs:
        cases = [case for case in documented if case.problem in options.only]
        if RESULTS.exists():
            rows = {_case_of(row): row for row in json.loads(RESULTS.read_text(encoding="utf-8"))}
        there = [case for case, row in rows.items() if "plan" in row]
        if options.missing or options.replan:
            cases = [case for case in cases if (case in there) == options.replan]
    print(table_head())
    missed = False
    for case, of_case in in_processes(cases, options.most, options.replan):
        rows[case] = (rows.get(case, {}) if options.replan else {}) | asdict(case) | of_case
        print(table_row(rows[case]), flush=True)
        missed = missed or is_missed(rows[case])
        if options.docs:
            ordered = [rows[of] for of in documented if of in rows]
            RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    return int(missed)


def _case_of(row: dict[str, Any]) -> Case:
    return Case(**{field.name: row[field.name] for field in fields(Case) if field.name in row})


def table_head() -> str:
    """The first two lines of the table."""
    names = ["problem", "fit", "batch", "planned MB", "allocated MB", "planned / allocated"]
    names += ["resident MB", "planned s", "fit s"]
    return f"| {' | '.join(names)} |\n|---|---|{'---:|' * (len(names) - 2)}"


def table_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    fit = f"{row['curvature']}, {row['mode']}, {row['fisher']}"
    if row.get("params", "all") != "all":
        fit += f", {row['params']}"
    cells = [row["problem"], fit, str(row["batch"])]
    if "plan" not in row:
        return f"| {' | '.join([*cells, row['why']])} |"
    cells.append(f"{row['plan'] / 1e6:,.1f}")
    if "allocated" not in row:
        return f"| {' | '.join([*cells, 'not run'])} | | | | |"
    ratio = f"{row['plan'] / row['allocated']:.2f}{' (missed)' * is_missed(row)}"
    resident = "–" if row["resident"] is None else f"{row['resident'] / 1e6:,.1f}"
    cells += [f"{row['allocated'] / 1e6:,.1f}", ratio, resident]
    return f"| {' | '.join([*cells, *(_seconds(row[k]) for k in ('plan_s', 'fit_s'))])} |"


def is_missed(row: dict[str, Any]) -> bool:
    """Whether a plan is off by more than a quarter."""
    return "allocated" in row and abs(row["plan"] / row["allocated"] - 1) > WITHIN


def _seconds(number: float | None) -> str:
    if number is None:
        return "–"
    return f"{number:.2f}" if number < 10 else f"{number:.0f}"


def in_processes(
    cases: Sequence[Case], most: float, is_planned_alone: bool
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """What is found for the cases; those of one problem share a process that did nothing before."""
    for _, group in itertools.groupby(cases, key=lambda case: case.problem):
        of_problem = list(group)
        command = [sys.executable, "-m", "benchmarks.plan", "--most", str(most)]
        command += ["--replan"] * is_planned_alone + [
            "--worker",
            json.dumps([asdict(case) for case in of_problem]),
        ]
        # What is freed goes back to the system.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            lines = (line for line in run.stdout if line.startswith("{"))
            for case in of_problem:
                line = next(lines, None)
                yield case, {"why": "not measured"} if line is None else json.loads(line)


def measured(case: Case, most: float, is_fitted: bool) -> dict[str, float | None]:
    """Bytes that are planned, allocated and resident; seconds that are planned, and taken.

    Of `NETWORKS` only the bytes that are planned and allocated.

    Args:
        case: The fit.
        most: Bytes of a plan beyond which nothing is run.
        is_fitted: Whether there is a fit, or a plan alone.
    """
    model, data = network_of(case)
    warm_up()

    def laplace() -> Laplace:
        return Laplace(model, curvature=case.curvature, fisher=case.fisher, params=case.params)

    plan = laplace().plan(data, case.mode)
    if plan.peak > most:
        return {"plan": plan.peak}
    is_timed = case.problem not in NETWORKS
    if is_timed:
        # Seconds of the processor, which other work on the machine does not change.
        plan_seconds.perf_counter = time.process_time
        plan = laplace().plan(data, case.mode, timed=True)
    # Of eigendecompositions of all parameters in one nothing is told.
    found: dict[str, float | None] = {"plan": plan.peak, "plan_s": plan.seconds}
    if not is_fitted:
        return found
    num_data = None if case.mode == "full" else 2 * case.batch

    def fit() -> None:
        laplace().fit(data, case.mode, num_data=num_data)

    found |= {"allocated": allocated(fit), "resident": None, "fit_s": None}
    if is_timed:
        start = time.process_time()
        found["resident"] = resident(fit)
        found["fit_s"] = time.process_time() - start
    return found


def network_of(case: Case) -> tuple[nn.Module, Batches]:
    """A case's network and its two batches."""
    if case.problem in NETWORKS:
        return network(case.problem, case.batch)
    x, classes = inputs(case.problem, case.batch), _classes_of(case.problem)
    data: Batches = [(x + step, torch.arange(len(x)) % classes) for step in range(2)]
    return model_of(case.problem), data


def model_of(name: str) -> nn.Module:
    """A test problem's network; with trained weights where a path to them is given."""
    model = get_problem(name).initial_model(0)
    path = os.environ.get(CHECKPOINT)
    if path and name == "allcnnc-cifar10":
        load_checkpoint(model, path)
    return model.eval()


def _classes_of(name: str) -> int:
    return next((n for key, n in _CLASSES.items() if key in name), 10)


def warm_up() -> None:
    """What the first fit of a process loads."""
    layers = [torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(2 * 36, 3)]
    data = [(torch.randn(4, 1, 8, 8), torch.zeros(4).long())]
    for curvature in _CURVATURES:
        Laplace(torch.nn.Sequential(*layers).eval(), curvature=curvature).fit(data)


def inputs(name: str, batch: int) -> Tensor:
    """Images of a problem's size."""
    torch.manual_seed(0)
    if "digits" in name:
        return torch.randn(batch, 1, 8, 8)
    side = next((n for key, n in _SIDES.items() if key in name), 32)
    return torch.randn(batch, 3, side, side)


def allocated(run: Callable[[], None]) -> int:
    """Bytes that torch's allocator has given out at most, above those at the start."""
    # What is collected within would be taken off what the run holds.
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    steps = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    live = peak = 0
    for step in steps:
        live += step.nbytes()
        peak = max(peak, live)
    return peak


def resident(run: Callable[[], None]) -> int:
    """Bytes by which the resident set grows at most."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


if __name__ == "__main__":
    sys.exit(main())
