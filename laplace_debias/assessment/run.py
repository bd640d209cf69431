"""A run under way: network, data, methods, and `run.json`, which is written after each stage."""

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from laplace_debias.assessment.methods import Method
from laplace_debias.assessment.run_folder import table_says, write_json
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.report.run_folder import FORMAT, NAME, predictions_path
from laplace_debias.sources.loaded import Loaded
from laplace_debias.system.ranks import current
from laplace_debias.system.shown import plain

_PACKAGES = ("laplace-debias", "torch", "numpy", "torchmetrics", "backpack-for-pytorch", "timm")
_KEPT = ("created", "sets", "methods", "sigma", "training", "notes", "seconds")
"""Entries of `run.json` that a run keeps when it goes on."""


def sets_of(loaded: Loaded) -> dict[str, Batches]:
    """The sets that methods are judged on: the test set, its corrupted versions, the OOD sets."""
    sets = {"test": loaded.test}
    sets |= {f"shift-{severity}": loaded.shifts[severity] for severity in sorted(loaded.shifts)}
    for name, batches in loaded.ood.items():
        if name in sets or not NAME.fullmatch(name):
            raise ValueError(
                f"the OOD set {name!r} cannot be a file's name: rename it with letters, digits, "
                "'.', '_' and '-', and not test or shift-1 …"
            )
        sets[name] = batches
    return sets


@dataclass(eq=False)
class Run:
    """A run's network, data, methods and folder; `said` is the content of `run.json` so far.

    `say` is called with a line on what the run does next.
    """

    loaded: Loaded
    folder: Path
    methods: Sequence[Method]
    sets: Mapping[str, Batches]
    seed: int
    say: Callable[[str], object]
    said: dict[str, Any] = field(default_factory=dict)

    def begin(
        self,
        earlier: Mapping[str, Any],
        identity: Mapping[str, Any],
        title: str,
        seconds: Mapping[str, float],
    ) -> None:
        """Make `run.json`, or take that of a run that was broken off."""
        loaded = self.loaded
        self.said = {
            "format": FORMAT,
            "status": "running",
            "title": title or f"{type(loaded.model).__name__}",
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "task": loaded.task,
            "input_name": loaded.input_name,
            "target": loaded.target,
            "classes": None if loaded.classes is None else list(loaded.classes),
            "num_train": loaded.num_train,
            "num_parameters": sum(p.numel() for p in loaded.model.parameters()),
            "sets": [
                {"name": "test", "role": "test", "num_examples": None},
                *(
                    {"name": f"shift-{level}", "role": "shift", "severity": level}
                    | {"num_examples": None}
                    for level in sorted(loaded.shifts)
                ),
                *({"name": name, "role": "ood", "num_examples": None} for name in loaded.ood),
            ],
            "methods": [
                {
                    "key": method.key,
                    "label": method.label,
                    "describes": method.describes,
                    "is_laplace": method.posterior is not None,
                    "temperature": None,
                    "prior_precision": None,
                    "link": None,
                    "prior_precision_at_limit": False,
                    "posterior": method.key if method.posterior is not None else None,
                    "examples": method.examples,
                    "seconds": {},
                    "seconds_per_example": None,
                    "bytes": None,
                }
                for method in self.methods
            ],
            "sigma": None,
            "training": None,
            "notes": list(loaded.notes),
            "conclusion": [],
            "versions": _versions(),
            "seed": self.seed,
            "device": str(next(loaded.model.parameters()).device),
            "threads": torch.get_num_threads(),
            "seconds": dict(seconds),
            "identity": plain(identity),
        }
        self.said |= {key: earlier[key] for key in _KEPT if key in earlier}
        self.write()

    def write(self) -> None:
        """Write `run.json`."""
        write_json(self.folder / "run.json", self.said)

    def entry(self, key: str) -> dict[str, Any]:
        """A method's entry in `run.json`."""
        return next(entry for entry in self.said["methods"] if entry["key"] == key)

    @contextmanager
    def stage(self, name: str, method: Method | None = None) -> Iterator[None]:
        """Add the time of a stage, or a method's of it, to what earlier calls took for it."""
        start = time.perf_counter()
        yield
        seconds = (self.said if method is None else self.entry(method.key))["seconds"]
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
        self.write()

    def path(self, method: Method, name: str) -> Path:
        """Where a method's predictions for a set are written."""
        return predictions_path(self.folder, method.key, name)

    def told(self, method: Method, name: str) -> dict[str, Any]:
        """The description of a complete table of predictions; empty if there is none."""
        ranks = current()
        found = table_says(self.path(method, name)) if ranks.rank == 0 else None
        return ranks.from_rank(found, 0) or {}

    def note(self, what: str) -> None:
        """Add a line to the notes of the page, once."""
        if what not in self.said["notes"]:
            self.said["notes"].append(what)


def _versions() -> dict[str, str]:
    """Versions of Python and of the packages that the numbers depend on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
