"""Measurements on disk, in one JSON file per comparison."""

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.peers import PACKAGES
from benchmarks.settings import Settings
from benchmarks.timing import Row


@dataclass(frozen=True)
class Result:
    """The measurements of one comparison, and the machine on which they were taken.

    Attributes:
        network: A description of the network.
        machine: A description of the processor, the device and the threads.
        versions: The versions of Python, torch and the installed peers.
        rows: The measurements.
        quick: Whether the network was a tiny network, for which goals do not apply.
    """

    network: str
    machine: str
    versions: dict[str, str]
    rows: list[Row]
    quick: bool = False


def measured(settings: Settings, network: str, rows: list[Row]) -> Result:
    """Make a result for measurements of this process."""
    versions = versions_of(("torch", *PACKAGES))
    return Result(network, machine_of(settings), versions, rows, settings.quick)


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def machine_of(settings: Settings) -> str:
    """Describe the processor, the device and the threads."""
    machine = f"{_processor()}, {os.cpu_count()} cores, {settings.threads} threads"
    if settings.device == "cuda":
        machine = f"{torch.cuda.get_device_name()}; {machine}"
    return machine


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def joined(first: Result, second: Result) -> Result:
    """Join the rounds of two runs of one comparison.

    Raises:
        ValueError: If the runs differ in the contenders, the machine, the network or the versions.
    """
    names = [[row.contender for row in result.rows] for result in (first, second)]
    if names[0] != names[1] or replace(first, rows=[]) != replace(second, rows=[]):
        raise ValueError(
            "The earlier rounds were measured on another set-up: run without --append to replace "
            "them."
        )
    rows = [
        replace(b, seconds=a.seconds + b.seconds, megabytes=a.megabytes + b.megabytes)
        for a, b in zip(first.rows, second.rows, strict=True)
    ]
    return replace(first, rows=rows)


def write(path: Path, result: Result) -> None:
    """Write a result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=1, ensure_ascii=False) + "\n")


def read(path: Path) -> Result:
    """Read a result that `write` wrote."""
    content = json.loads(path.read_text())
    rows = [
        Row(**{**row, "seconds": tuple(row["seconds"]), "megabytes": tuple(row["megabytes"])})
        for row in content.pop("rows")
    ]
    return Result(rows=rows, **content)
