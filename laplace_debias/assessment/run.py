"""A network's uncertainty assessed: methods fitted, tuned, predicted with and compared."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laplace_debias.assessment import circumstances, measures
from laplace_debias.assessment.conclusion import conclude
from laplace_debias.assessment.examples import write_examples
from laplace_debias.assessment.families import (
    Family,
    SetPredicted,
    chosen_positions,
    columns_of,
    families_of,
    predict_set,
)
from laplace_debias.assessment.fitting import fitted, noise_of, tuned
from laplace_debias.assessment.methods import Method, check_methods, default_methods
from laplace_debias.assessment.predictions import Chosen, network_outputs, of_network
from laplace_debias.assessment.run_folder import (
    FORMAT,
    RunFolder,
    digest,
    read_json,
    read_table,
    table_says,
    telling_how_to_go_on,
    write_bytes,
    write_json,
    write_table,
)
from laplace_debias.assessment.sets import DataSet, sets_of
from laplace_debias.assessment.spectra import spectrum_of
from laplace_debias.assessment.temperature import fit_temperature, kind_of
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.fingerprint import fingerprint
from laplace_debias.curvature.network.inputs import tensors_of
from laplace_debias.laplace import Laplace
from laplace_debias.sources.loaded import Loaded
from laplace_debias.system.console import Printer


def assess(
    loaded: Loaded,
    output: str | Path,
    methods: Sequence[Method] | None = None,
    *,
    title: str = "",
    settings: Mapping[str, Any] | None = None,
    config: str | None = None,
    seed: int = 0,
    seconds: Mapping[str, float] | None = None,
    num_resamples: int = 500,
    overwrite: bool = False,
    console: Printer | None = None,
) -> RunFolder:
    """Compare methods on a network's data and write what was found into a run folder.

    Every posterior is fitted to the training examples and tuned on the validation examples; without
    these by the marginal likelihood. A run that was broken off goes on with what is complete and
    ends with the same predictions.

    Args:
        loaded: The network and its data.
        output: The folder, a new one or that of the same run.
        methods: What is compared, the network first; `default_methods` if None.
        title: What the page is called.
        settings: What else makes two runs the same, as plain data: where the network and its data
            come from, say.
        config: The text of `config.yaml`; the settings in YAML if None.
        seed: Of everything that is drawn.
        seconds: What was done before and how long it took, for `seconds` of `run.json`.
        num_resamples: Draws for the intervals of metrics that have no closed form.
        overwrite: Whether an earlier run in the folder is removed first.
        console: Where it prints what it does; nowhere if None.

    Returns:
        The folder.

    Raises:
        FileExistsError: If the folder holds other files, or a run of other settings.
        ValueError: If methods or data do not fit each other; as `Laplace`.
        OSError: If the folder cannot be written; after a full disk the same call goes on.
    """
    has_validation = loaded.validation is not None
    methods = default_methods(loaded.task, has_validation) if methods is None else tuple(methods)
    check_methods(methods, loaded.task, has_validation)
    sets = sets_of(loaded)
    settings = dict(settings or {})
    identity = {
        "task": loaded.task,
        "seed": seed,
        "settings": settings,
        "methods": {method.key: dataclasses.asdict(method) for method in methods},
        "model": _digest_of_model(loaded),
        "data": {part.name: _digest_of_batch(part.batches) for part in sets},
        "num_train": loaded.num_train,
        "num_resamples": num_resamples,
    }
    folder = RunFolder(Path(output))
    with telling_how_to_go_on():
        earlier = folder.open(identity, overwrite)
        if earlier is None:
            write_bytes(folder.path / "config.yaml", _yaml(settings, config).encode())
        run = _Run(loaded, folder, methods, sets, identity, seed, console)
        run.begin(earlier, title, seconds or {})
        run.fit()
        run.predict()
        run.measure()
        run.finish()
    return folder


def _digest_of_model(loaded: Loaded) -> str:
    found = fingerprint(loaded.model, ())
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def _digest_of_batch(batches: Batches) -> str:
    """Of the first batch's tensors: other data under the same path are found."""
    for batch in batches:
        parts = batch.values() if isinstance(batch, Mapping) else batch
        tensors = [tensor for part in parts for tensor in tensors_of(part)]
        hashed = hashlib.sha256()
        for tensor in tensors:
            hashed.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return hashed.hexdigest()[:16]
    return "empty"


def _yaml(settings: Mapping[str, Any], config: str | None) -> str:
    if config is not None:
        return config
    import yaml

    return yaml.safe_dump(json.loads(json.dumps(settings, default=str)), sort_keys=False)


class _Run:
    """One run, stage by stage; `run.json` is written after each."""

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
        self.posteriors: dict[str, Laplace] = {}
        self.run: dict[str, Any] = {}
        self._validation: tuple[Tensor, Tensor] | None = None

    # --------------------------------------------------------------- run.json

    def begin(
        self, earlier: dict[str, Any] | None, title: str, seconds: Mapping[str, float]
    ) -> None:
        """Make `run.json`, or take that of a run that was broken off."""
        loaded = self.loaded
        num_parameters = sum(p.numel() for p in loaded.model.parameters())
        self.run = {
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
            self.run |= {key: earlier[key] for key in found if key in earlier}
        self.write()

    def write(self) -> None:
        peak = circumstances.peak_bytes()
        before = self.run["peak_bytes"]
        self.run["peak_bytes"] = max((p for p in (peak, before) if p is not None), default=None)
        write_json(self.folder.path / "run.json", self.run)

    def entry(self, key: str) -> dict[str, Any]:
        """A method's entry in `run.json`."""
        return next(entry for entry in self.run["methods"] if entry["key"] == key)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of a stage to what earlier calls took for it."""
        start = time.perf_counter()
        yield
        seconds = self.run["seconds"]
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
        self.write()

    def say(self, what: str) -> None:
        if self.console is not None:
            self.console.print(what)

    def note(self, what: str) -> None:
        if what not in self.run["notes"]:
            self.run["notes"].append(what)

    # ---------------------------------------------------------------- fitting

    def fit(self) -> None:
        """Noise, posteriors and temperatures: what predictions need."""
        with self.stage("fit"):
            if self.loaded.task == "regression" and self.run["sigma"] is None:
                outputs, targets = self.validation()
                self.run["sigma"] = noise_of(targets.double().reshape(outputs.shape) - outputs)
                self.write()
            for family in self.families:
                if family.posterior is not None:
                    self._posterior(family)
                self._temperatures(family)
                self.write()

    def validation(self) -> tuple[Tensor, Tensor]:
        """The network's outputs and the targets of the validation (else training) examples."""
        if self._validation is None:
            loaded = self.loaded
            data = loaded.train if loaded.validation is None else loaded.validation
            outputs, targets = [], []
            for x, y in Chosen(loaded.model, data):
                outputs.append(network_outputs(loaded.model, x))
                targets.append(y.cpu())
            if not outputs:
                raise ValueError(
                    "the validation set holds no example: give it some, or leave it out"
                )
            self._validation = torch.cat(outputs), torch.cat(targets)
        return self._validation

    def _validation_positions(self, family: Family) -> Tensor | None:
        if family.examples is None:
            return None
        return chosen_positions(len(self.validation()[1]), family.examples, self.seed)

    def _posterior(self, family: Family) -> None:
        """Fit, tune and save a posterior, or read the saved one."""
        assert family.posterior is not None
        path, loaded = self.folder.posterior(family.key), self.loaded
        if not path.exists():
            self.say(f"Fitting {family.methods[0].label}")
            start = time.perf_counter()
            la = fitted(loaded, family.posterior, self.run["sigma"], self.seed)
            fit_seconds = time.perf_counter() - start
            start = time.perf_counter()
            sweep = self._tune(la, family)
            tune_seconds = time.perf_counter() - start
            write_json(self.folder.sweep(family.key), sweep)
            write_json(self.folder.spectrum(family.key), spectrum_of(la))
            for method in family.methods:
                self.entry(method.key)["seconds"] |= {"fit": fit_seconds, "tune": tune_seconds}
            self.write()
            # The last of its files: where it is, they are.
            path.parent.mkdir(parents=True, exist_ok=True)
            la.save(path)
        # Read back also by the run that wrote it, so that one that goes on gives the same numbers.
        la = Laplace.load(path, loaded.model)
        self.posteriors[family.key] = la
        found = la.prior_precision
        for method in family.methods:
            entry = self.entry(method.key)
            entry["prior_precision"] = found.tolist()
            entry["bytes"] = path.stat().st_size

    def _tune(self, la: Laplace, family: Family) -> dict[str, Any]:
        assert family.posterior is not None
        validation = None
        if self.loaded.validation is not None:
            validation = Chosen(
                self.loaded.model, self.loaded.validation, self._validation_positions(family)
            )
        sweep, notes = tuned(la, family.posterior, validation)
        for note in notes:
            self.note(f"{family.methods[0].label}: {note}")
        return sweep

    def _temperatures(self, family: Family) -> None:
        """Fit the temperatures of the methods that have one."""
        missing = [
            method
            for method in family.methods
            if method.has_temperature and self.entry(method.key)["temperature"] is None
        ]
        if not missing:
            return
        task, start = self.loaded.task, time.perf_counter()
        if family.posterior is None:
            outputs, targets = self.validation()
            positions = self._validation_positions(family)
            if positions is not None:
                outputs, targets = outputs[positions], targets[positions]
            log_probs = of_network(outputs, task, None).log_probs
        else:
            assert self.loaded.validation is not None
            found = self._predicted(
                family, self.loaded.validation, self._validation_positions(family)
            )
            log_probs, targets = found.predicted.log_probs, found.targets
        assert log_probs is not None
        best = fit_temperature(log_probs, targets, kind_of(task))
        for method in missing:
            entry = self.entry(method.key)
            entry["temperature"] = best.value
            seconds = entry["seconds"]
            seconds["tune"] = seconds.get("tune", 0.0) + time.perf_counter() - start
            if best.is_at_limit:
                self.note(
                    f"The temperature of {method.label} is {best.value:g}, the end of the range "
                    "that is searched: its validation examples are too few or too easy, or the "
                    "network is no better than chance."
                )

    # ------------------------------------------------------------- predicting

    def predict(self) -> None:
        """The predictions of every method for every set, but for those that are complete."""
        for part in self.sets:
            with self.stage("predict"):
                self._predict_network(part)
                for family in self.families:
                    self._predict(family, part)
                num_examples = self._told(self.methods[0], part)["num_examples"]
                for entry in self.run["sets"]:
                    if entry["name"] == part.name:
                        entry["num_examples"] = num_examples

    def _path(self, method: Method, part: DataSet) -> Path:
        return self.folder.predictions(method.key, part.name)

    def _told(self, method: Method, part: DataSet) -> dict[str, Any]:
        """What a table that is complete says of itself."""
        return table_says(self._path(method, part)) or {}

    def _missing(self, family: Family, part: DataSet) -> list[Method]:
        paths = {method: self._path(method, part) for method in family.methods}
        told = {method: table_says(path) for method, path in paths.items()}
        return [m for m in family.methods if (told[m] or {}).get("digest") != self.digest]

    def _predict_network(self, part: DataSet) -> None:
        """Write what the network predicts together with the first posterior that predicts all.

        The posterior's predictions begin with the network's outputs, so one pass serves both.
        """
        network = self.families[0]
        shared = [f for f in self.families if f.posterior is not None and f.examples is None]
        missing = self._missing(network, part)
        if not missing or not shared:
            return
        self.say(f"Predicting {part.name}: {_labels([*network.methods, *shared[0].methods])}")
        found = self._predicted(shared[0], part.batches, None)
        for method in missing:
            self._write(method, part, found.of_network(self.loaded.task, self.run["sigma"]))
        for method in self._missing(shared[0], part):
            self._write(method, part, found)

    def _predict(self, family: Family, part: DataSet) -> None:
        missing = self._missing(family, part)
        if not missing:
            return
        self.say(f"Predicting {part.name}: {_labels(missing)}")
        positions = None
        if family.examples is not None:
            # The network comes first and predicts all: its table knows how many there are.
            size = self._told(self.methods[0], part)["num_examples"]
            positions = chosen_positions(size, family.examples, self.seed)
        found = self._predicted(family, part.batches, positions)
        for method in missing:
            self._write(method, part, found)

    def _predicted(
        self, family: Family, batches: Batches, positions: Tensor | None
    ) -> SetPredicted:
        la = self.posteriors.get(family.key)
        return predict_set(self.loaded, batches, la, positions, self.run["sigma"], self.seed)

    def _write(self, method: Method, part: DataSet, found: SetPredicted) -> None:
        entry, predicted = self.entry(method.key), found.predicted
        if method.has_temperature:
            predicted = predicted.with_temperature(entry["temperature"], self.loaded.task)
        columns = columns_of(found, predicted, self.loaded.task, part.role != "ood")
        told = {"digest": self.digest, "num_examples": len(found.index), "seconds": found.seconds}
        write_table(self._path(method, part), columns, told)

    # -------------------------------------------------------------- measuring

    def measure(self) -> None:
        """Metrics and differences of what is written, and the examples to look at."""
        with self.stage("measure"):
            tables = {
                (method.key, part.name): read_table(self._path(method, part))
                for method in self.methods
                for part in self.sets
            }
            network = self.methods[0].key
            scaled = [m for m in self.methods if m.posterior is None and m.has_temperature]
            references = [network, *(method.key for method in scaled[:1])]
            roles = {part.name: part.role for part in self.sets}
            compared = measures.Comparison(
                tables,
                roles,
                references,
                self.loaded.task,
                self.identity["num_resamples"],
                self.seed,
            )
            found = {"rows": compared.rows(), "differences": compared.differences()}
            write_json(self.folder.path / "metrics.json", found)
            of_test = {method.key: tables[method.key, "test"] for method in self.methods}
            write_examples(self.folder, self.loaded, of_test, network)
            for method in self.methods:
                told = [self._told(method, part) for part in self.sets]
                seconds = sum(part["seconds"] for part in told)
                predicted = sum(part["num_examples"] for part in told)
                entry = self.entry(method.key)
                entry["seconds"]["predict"] = seconds
                entry["seconds_per_example"] = seconds / predicted

    def finish(self) -> None:
        """The conclusion, and the mark that all is there."""
        found = read_json(self.folder.path / "metrics.json")
        self.run["conclusion"] = conclude(self.run, found)
        self.run["status"] = "complete"
        self.write()


def _labels(methods: Sequence[Method]) -> str:
    return ", ".join(method.label for method in methods)


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
