"""A run in progress, and its folder with a `run.json` that each stage updates."""

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch

from laplace_debias.assessment.methods import Method
from laplace_debias.curvature.data.batches import Batches
from laplace_debias.runs.folder import NAME, RunFolder
from laplace_debias.runs.records import (
    FORMAT,
    TEST,
    MethodRecord,
    PredictionsSummary,
    RunRecord,
    SetRecord,
)
from laplace_debias.sources.loaded import Loaded
from laplace_debias.system.shown import plain

_PACKAGES = ("laplace-debias", "torch", "numpy", "torchmetrics", "backpack-for-pytorch", "timm")


class Run:
    """A run in progress: its network, data, methods and folder, and the record so far.

    Attributes:
        methods: The methods, the network first.
        sets: The sets on which the methods are evaluated, by name.
        folder: The run folder.
        record: The content of `run.json`.
        seed: Seed of all random choices.
        log: A function that is called with a line of text before each step.
    """

    def __init__(
        self,
        loaded: Loaded,
        methods: Sequence[Method],
        folder: RunFolder,
        record: RunRecord,
        *,
        seed: int,
        log: Callable[[str], object],
    ) -> None:
        self._loaded = loaded
        self.methods = methods
        self.sets = evaluation_sets(loaded)
        self.folder = folder
        self.record = record
        self.seed = seed
        self.log = log

    @property
    def loaded(self) -> Loaded:
        """The network and its data, including the noise that the run has estimated."""
        sigma = self.record.sigma
        if sigma is None:
            return self._loaded
        return replace(self._loaded, likelihood=self._loaded.likelihood.with_sigma(sigma))

    def write(self) -> None:
        """Write `run.json`."""
        self.folder.write_record(self.record)

    def method_record(self, method: Method) -> MethodRecord:
        """Return the record of a method."""
        return self.record.method(method.key)

    @contextmanager
    def stage(self, name: str, method: Method | None = None) -> Iterator[None]:
        """Measure the time of a block, and add it to the record of the run or of a method."""
        start = time.perf_counter()
        yield
        seconds = self.record.seconds
        if method is not None:
            seconds = self.method_record(method).seconds
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
        self.write()

    def summary(self, method: Method, set_name: str) -> PredictionsSummary | None:
        """Return the summary of a complete table of predictions, or None if there is no table."""
        return self.folder.predictions_summary(method.key, set_name)

    def note(self, text: str) -> None:
        """Add a note to the page, unless it is already there."""
        if text not in self.record.notes:
            self.record.notes.append(text)


def evaluation_sets(loaded: Loaded) -> dict[str, Batches]:
    """Return the test set, its corrupted versions and the OOD sets."""
    sets = {TEST: loaded.test}
    sets |= {f"shift-{severity}": loaded.shifts[severity] for severity in sorted(loaded.shifts)}
    for name, batches in loaded.ood.items():
        if name in sets or not NAME.fullmatch(name):
            raise ValueError(
                f"The name {name!r} of an OOD set cannot be used for a file. Use letters, "
                "digits, '.', '_' and '-'. These names are reserved: test, shift-1, "
                "shift-2, ..."
            )
        sets[name] = batches
    return sets


def run_record(
    loaded: Loaded,
    methods: Sequence[Method],
    identity: Mapping[str, Any],
    earlier: RunRecord | None,
    *,
    title: str,
    seed: int,
    seconds: Mapping[str, float],
) -> RunRecord:
    """Return the record of a new run, or the updated record of an interrupted run.

    Args:
        loaded: The network and its data.
        methods: The methods, the network first.
        identity: The settings that identify a run when it is resumed.
        earlier: The record of the interrupted run; None for a new run.
        title: The title of the page; if empty, the type of the network is used.
        seed: Seed of all random choices.
        seconds: The times of earlier stages by name, in seconds.
    """
    new = RunRecord(
        format=FORMAT,
        title=title or type(loaded.model).__name__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        task=loaded.task,
        targets=loaded.likelihood.targets or "numbers",
        input_name=loaded.input_name,
        target=loaded.target,
        classes=None if loaded.classes is None else list(loaded.classes),
        num_train=loaded.num_train,
        num_parameters=sum(p.numel() for p in loaded.model.parameters()),
        sets=_set_records(loaded),
        methods=[_method_record(method) for method in methods],
        notes=list(loaded.notes),
        versions=_versions(),
        seed=seed,
        device=str(next(loaded.model.parameters()).device),
        threads=torch.get_num_threads(),
        seconds=dict(seconds),
        identity=plain(identity),
    )
    if earlier is None:
        return new
    return replace(
        new,
        created=earlier.created,
        sets=earlier.sets,
        methods=earlier.methods,
        sigma=earlier.sigma,
        training=earlier.training,
        notes=earlier.notes,
        seconds=earlier.seconds,
    )


def _set_records(loaded: Loaded) -> list[SetRecord]:
    shifts = [
        SetRecord(f"shift-{severity}", "shift", severity) for severity in sorted(loaded.shifts)
    ]
    return [SetRecord(TEST, "test"), *shifts, *(SetRecord(name, "ood") for name in loaded.ood)]


def _method_record(method: Method) -> MethodRecord:
    """Return the initial record of a method, before anything is measured."""
    return MethodRecord(
        key=method.key,
        label=method.label,
        describes=method.describes,
        is_laplace=method.posterior is not None,
        posterior=None if method.posterior is None else method.key,
        examples=method.examples,
    )


def _versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that the results depend on."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
