"""The memory that a plan tells of, beside what fits take: `python -m benchmarks.plan`.

Each fit is measured in a process of its own, twice. What torch's allocator on the CPU has given out
at most is summed from the profiler's record of every allocation; working space that oneDNN and MKL
take by themselves is not in it. The growth of the resident set at most is what the system sees; in
small networks it is mostly libraries that are loaded late, and pages that are not given back.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from laplace_debias import Laplace
from laplace_debias.problems import PROBLEMS, get_problem

WITHIN = 0.25
_CLASSES = {"cifar100": 100, "imagenet": 1000}
_CURVATURES = ("kfac", "ekfac", "diag")
# Fits that would take more are planned and not run.
_LIMIT = 6 * 2**30
_SECONDS = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure fits, and print a table.

    Returns:
        The exit status: 1 if a plan missed by more than a quarter.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[p.name for p in PROBLEMS])
    parser.add_argument("--curvature", nargs="*", default=list(_CURVATURES))
    parser.add_argument("--mode", nargs="*", default=["full"])
    parser.add_argument("--fisher", default="exact")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--worker", nargs=3, metavar=("WHAT", "CURVATURE", "MODE"))
    options = parser.parse_args(arguments)
    if options.worker:
        what, curvature, mode = options.worker
        print(json.dumps(measured(options.only[0], what, curvature, mode, options)))
        return 0
    print("| problem | fit | planned MB | allocated MB | planned / allocated | resident MB |")
    print("|---|---|---|---|---|---|")
    missed = 0
    for name in options.only:
        for curvature in options.curvature:
            for mode in options.mode:
                missed += not row(name, curvature, mode, options)
    return min(missed, 1)


def row(name: str, curvature: str, mode: str, options: argparse.Namespace) -> bool:
    """One line of the table; whether the plan is near enough."""
    found: dict[str, int] = {}
    for what in ("allocated", "resident"):
        command = [sys.executable, "-m", "benchmarks.plan", "--only", name]
        command += ["--batch", str(options.batch), "--fisher", options.fisher]
        command += ["--worker", what, curvature, mode]
        # What is freed goes back to the system.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        try:
            run = subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                env=environment,
                timeout=_SECONDS,
            )
        except subprocess.SubprocessError as error:
            print(f"| {name} | {curvature}, {mode} | not measured: {type(error).__name__} |")
            return True
        found |= json.loads(run.stdout)
        if found["plan"] > _LIMIT:
            print(f"| {name} | {curvature}, {mode} | {found['plan'] / 1e6:,.1f} | too large |")
            return True
    ratio = found["plan"] / found["allocated"]
    near = abs(ratio - 1) <= WITHIN
    mark = "" if near else " (missed)"
    cells = [f"{found[key] / 1e6:,.1f}" for key in ("plan", "allocated")]
    cells += [f"{ratio:.2f}{mark}", f"{found['resident'] / 1e6:,.1f}"]
    print(f"| {name} | {curvature}, {mode} | {' | '.join(cells)} |", flush=True)
    return near


def measured(
    name: str, what: str, curvature: str, mode: str, options: argparse.Namespace
) -> dict[str, int]:
    """Bytes that are planned, allocated or resident."""
    problem = get_problem(name)
    model = problem.initial_model(0).eval()
    warm_up()
    x = inputs(problem.name, options.batch)
    classes = next((n for key, n in _CLASSES.items() if key in name), 10)
    data = [(x + step, torch.arange(len(x)) % classes) for step in range(2)]
    la = Laplace(model, curvature=curvature, fisher=options.fisher)
    plan = la.plan(data, mode).peak
    if plan > _LIMIT:
        return {"plan": plan}

    def fit() -> None:
        la.fit(data, mode, num_data=None if mode == "full" else 2 * options.batch)

    return {"plan": plan, what: allocated(fit) if what == "allocated" else resident(fit)}


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
    return torch.randn(batch, 3, *((224, 224) if "imagenet" in name else (32, 32)))


def allocated(run: Callable[[], None]) -> int:
    """Bytes that torch's allocator has given out at most, above those at the start."""
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
