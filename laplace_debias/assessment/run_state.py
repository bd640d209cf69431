"""A run under way: what its stages share, and `run.json`, which is written after each."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from laplace_debias.assessment import circumstances
from laplace_debias.assessment.families import Family, families_of
from laplace_debias.assessment.methods import Method
from laplace_debias.assessment.run_folder import FORMAT, RunFolder, digest, table_says, write_json
from laplace_debias.assessment.sets import DataSet
from laplace_debias.curvature.fits.passes import Passes
from laplace_debias.curvature.fits.saved_passes import SavedPasses
from laplace_debias.laplace.files.fit_state import FitStates
from laplace_debias.sources.loaded import Loaded
from laplace_debias.system.console import Printer
from laplace_debias.system.ranks import current


class Run:
    """A run's network, data, methods and folder, and what `run.json` says of it so far.

    Args:
        loaded: The network and its data.
        folder: Where the run is written.
        methods: What is compared, the network first.
        sets: The sets that are predicted.
        identity: What makes two runs the same.
        seed: Of everything that is drawn.
        console: Where the stages print what they do; nowhere if None.

    Attributes:
        said: What `run.json` says, as plain data.
        families: The methods by the posterior that they share.
        digest: Of the identity.
    """

    def __init__(
        self,
        loaded: Loaded,
        folder: RunFolder,
        methods: Sequence[Method],
        sets: Sequence[DataSet],
        identity: dict[str, Any],
        seed: int,
        console: Printer | None,
    ) -> None:
        self.loaded, self.folder, self.methods, self.sets = loaded, folder, methods, sets
        self.identity, self.seed, self.console = identity, seed, console
        self.digest = digest(identity)
        self.families = families_of(methods)
        self.said: dict[str, Any] = {}

    def begin(
        self, earlier: dict[str, Any] | None, title: str, seconds: Mapping[str, float]
    ) -> None:
        """Make `run.json`, or take that of a run that was broken off."""
        loaded = self.loaded
        num_parameters = sum(p.numel() for p in loaded.model.parameters())
        self.said = {
            "format": FORMAT,
            "status": "running",
            "title": title or f"{type(loaded.model).__name__}",
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "task": loaded.task,
            "input_name": loaded.input_name,
            "classes": None if loaded.classes is None else list(loaded.classes),
            "num_train": loaded.num_train,
            "num_parameters": num_parameters,
            "sets": [part.described(None) for part in self.sets],
            "methods": [_entry(method, self.families) for method in self.methods],
            "sigma": None,
            "notes": list(loaded.notes),
            "conclusion": [],
            "versions": circumstances.versions(),
            "seed": self.seed,
            "git": circumstances.git_revision(),
            "device": str(next(loaded.model.parameters()).device),
            "threads": torch.get_num_threads(),
            "seconds": dict(seconds),
            "peak_bytes": None,
            "identity": json.loads(json.dumps(self.identity, default=str)),
        }
        if earlier is not None:
            found = ("created", "sets", "methods", "sigma", "notes", "seconds")
            self.said |= {key: earlier[key] for key in found if key in earlier}
        self.write()

    def write(self) -> None:
        """Write `run.json`."""
        peak = circumstances.peak_bytes()
        before = self.said["peak_bytes"]
        self.said["peak_bytes"] = max((p for p in (peak, before) if p is not None), default=None)
        write_json(self.folder.path / "run.json", self.said)

    def entry(self, key: str) -> dict[str, Any]:
        """A method's entry in `run.json`."""
        return next(entry for entry in self.said["methods"] if entry["key"] == key)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of a stage to what earlier calls took for it."""
        start = time.perf_counter()
        yield
        seconds = self.said["seconds"]
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
        self.write()

    @contextmanager
    def saved(self, name: str) -> Iterator[Passes]:
        """A pass over a set that is saved as it goes, until the block ends well.

        Args:
            name: Its own among those of the run.
        """
        ranks, what = current(), "set of predictions"
        told = {"run": self.digest, "of": name}
        states = FitStates(self.folder.state(name), told, ranks.rank, ranks.size, what)
        states.check()
        yield SavedPasses(states, torch.device("cpu"), ranks, what)
        # The first process has written the set by then.
        ranks.exchange(None)
        states.remove()

    def path(self, method: Method, part: DataSet) -> Path:
        """Where a method's predictions for a set are written."""
        return self.folder.predictions(method.key, part.name)

    def told(self, method: Method, part: DataSet) -> dict[str, Any]:
        """What a table of predictions that is complete says of itself; empty if there is none."""
        ranks = current()
        found = table_says(self.path(method, part)) if ranks.rank == 0 else None
        return ranks.from_rank(found, 0) or {}

    def say(self, what: str) -> None:
        """Print a line for the person who waits."""
        if self.console is not None:
            self.console.print(what)

    def note(self, what: str) -> None:
        """Add a line to the notes of the page, once."""
        if what not in self.said["notes"]:
            self.said["notes"].append(what)


def _entry(method: Method, families: Sequence[Family]) -> dict[str, Any]:
    family = next(family for family in families if method in family.methods)
    return {
        "key": method.key,
        "label": method.label,
        "describes": method.describes,
        "is_laplace": method.is_laplace,
        "temperature": None,
        "prior_precision": None,
        "posterior": family.key if method.is_laplace else None,
        "examples": method.examples,
        "seconds": {},
        "seconds_per_example": None,
        "bytes": None,
    }
