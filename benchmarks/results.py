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


def make_result(settings: Settings, network: str, rows: list[Row]) -> Result:
    """Make a result for measurements of this process."""
    versions = installed_versions(("torch", *PACKAGES))
    return Result(network, describe_machine(settings), versions, rows, settings.quick)


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def describe_machine(settings: Settings) -> str:
    """Describe the processor, the device and the threads."""
    machine = f"{_processor()}, {os.cpu_count()} cores, {settings.threads} threads"
    if settings.device == "cuda":
        machine = f"{torch.cuda.get_device_name()}; {machine}"
    return machine


def _processor() -> str:
    """Return the name of the processor; Linux has it only in a file."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def join_rounds(first: Result, second: Result) -> Result:
    """Join the rounds of two runs of one comparison.

    Raises:
        ValueError: If the runs differ in the contenders, the machine, the network or the versions.
    """
    first_names = [row.contender for row in first.rows]
    second_names = [row.contender for row in second.rows]
    if first_names != second_names or replace(first, rows=[]) != replace(second, rows=[]):
        raise ValueError(
            "The earlier rounds were measured on another set-up: run without --append to replace "
            "them."
        )
    rows = []
    for row, added in zip(first.rows, second.rows, strict=True):
        seconds = row.seconds + added.seconds
        megabytes = row.megabytes + added.megabytes
        rows.append(replace(added, seconds=seconds, megabytes=megabytes))
    return replace(first, rows=rows)


def write(path: Path, result: Result) -> None:
    """Write a result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=1, ensure_ascii=False) + "\n")


def read(path: Path) -> Result:
    """Read a result that `write` wrote."""
    content = json.loads(path.read_text())
    rows = []
    for fields in content.pop("rows"):
        # JSON has lists in place of tuples.
        fields["seconds"] = tuple(fields["seconds"])
        fields["megabytes"] = tuple(fields["megabytes"])
        rows.append(Row(**fields))
    return Result(rows=rows, **content)
