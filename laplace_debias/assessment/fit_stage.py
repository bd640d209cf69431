"""The first stage of a run: noise, posteriors and temperatures, which predictions need."""

import time
from typing import Any

import torch
from torch import Tensor

from laplace_debias.assessment import time_ahead
from laplace_debias.assessment.families import Family, chosen_positions, predict_set
from laplace_debias.assessment.fitting import fitted, noise_of, tuned
from laplace_debias.assessment.predictions import Chosen, network_outputs, of_network
from laplace_debias.assessment.run_folder import write_json
from laplace_debias.assessment.run_state import Run
from laplace_debias.assessment.spectra import spectrum_of
from laplace_debias.assessment.temperature import fit_temperature, kind_of
from laplace_debias.laplace import Laplace
from laplace_debias.sources.shares import in_order
from laplace_debias.system.ranks import current


class FitStage:
    """Fits, tunes and saves what a run's folder does not hold yet.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.posteriors: dict[str, Laplace] = {}
        self._validation: tuple[Tensor, Tensor] | None = None

    def fit(self) -> dict[str, Laplace]:
        """Find the noise, posteriors and temperatures; the posteriors by their families' keys."""
        with self.run.stage("fit"):
            if self.run.loaded.task == "regression" and self.run.said["sigma"] is None:
                outputs, targets = self.validation()
                self.run.said["sigma"] = noise_of(targets.double().reshape(outputs.shape) - outputs)
                self.run.write()
            for family in self.run.families:
                if family.posterior is not None:
                    self._posterior(family)
                self._temperatures(family)
                self.run.write()
        return self.posteriors

    def validation(self) -> tuple[Tensor, Tensor]:
        """The network's outputs and the targets of the validation (else training) examples."""
        if self._validation is None:
            loaded = self.run.loaded
            data = loaded.train if loaded.validation is None else loaded.validation
            parts = [
                (place, network_outputs(loaded.model, x), y.cpu())
                for place, x, y in Chosen(loaded.model, data).placed()
            ]
            parts = in_order(parts)
            if not parts:
                raise ValueError(
                    "the validation set holds no example: give it some, or leave it out"
                )
            _, outputs, targets = zip(*parts, strict=True)
            self._validation = torch.cat(outputs), torch.cat(targets)
        return self._validation

    def _validation_positions(self, family: Family) -> Tensor | None:
        if family.examples is None:
            return None
        return chosen_positions(len(self.validation()[1]), family.examples, self.run.seed)

    def _posterior(self, family: Family) -> None:
        """Fit, tune and save a posterior, or read the saved one."""
        path, loaded = self.run.folder.posterior(family.key), self.run.loaded
        if not current().from_rank(path.exists(), 0):
            la = self._fitted(family)
            self._tell_time(la, family)
            start = time.perf_counter()
            sweep = self._tune(la, family)
            write_json(self.run.folder.sweep(family.key), sweep)
            write_json(self.run.folder.spectrum(family.key), spectrum_of(la))
            self._took(family, "tune", start)
            # The last of its files: where it is, they are.
            if current().rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
            la.save(path)
        # Read back also by the run that wrote it, so that one that goes on gives the same numbers.
        if not path.exists():
            raise FileNotFoundError(
                f"{path}, which rank 0 has written, is not seen by rank {current().rank}: give a "
                "folder that all machines share"
            )
        la = Laplace.load(path, loaded.model)
        self.posteriors[family.key] = la
        found = la.prior_precision
        for method in family.methods:
            entry = self.run.entry(method.key)
            entry["prior_precision"] = found.tolist()
            entry["bytes"] = path.stat().st_size

    def _tell_time(self, la: Laplace, family: Family) -> None:
        """Print how long the predictions of a posterior will take, where that is long."""
        assert family.posterior is not None
        seconds = time_ahead.seconds_an_example(la, self.run.loaded, self.run.seed)
        passes = time_ahead.passes_of_tuning(
            family.posterior.path is None, any(method.has_temperature for method in family.methods)
        )
        number = time_ahead.predictions_ahead(
            [part.batches for part in self.run.sets],
            self.run.loaded.validation,
            family.examples,
            passes,
        )
        line = time_ahead.told(family.methods[0].label, seconds, number, family.examples)
        if line is not None:
            self.run.say(line)

    def _fitted(self, family: Family) -> Laplace:
        """A posterior that is not tuned yet: a search that is broken off needs no other fit."""
        assert family.posterior is not None
        loaded, folder = self.run.loaded, self.run.folder
        untuned = folder.state(f"{family.key}.untuned.safetensors")
        if not current().from_rank(untuned.exists(), 0):
            self.run.say(f"Fitting {family.methods[0].label}")
            start, resume = time.perf_counter(), folder.state(f"{family.key}.fit")
            la = fitted(loaded, family.posterior, self.run.said["sigma"], self.run.seed, resume)
            self._took(family, "fit", start)
            if family.posterior.path is not None:
                return la
            if current().rank == 0:
                untuned.parent.mkdir(parents=True, exist_ok=True)
            la.save(untuned)
        # Read back also by the run that wrote it.
        return Laplace.load(untuned, loaded.model)

    def _took(self, family: Family, what: str, start: float) -> None:
        seconds = time.perf_counter() - start
        for method in family.methods:
            self.run.entry(method.key)["seconds"][what] = seconds
        self.run.write()

    def _tune(self, la: Laplace, family: Family) -> dict[str, Any]:
        assert family.posterior is not None
        validation = None
        if self.run.loaded.validation is not None:
            validation = Chosen(
                self.run.loaded.model,
                self.run.loaded.validation,
                self._validation_positions(family),
            )
        # As many processes go on with a search; another number begins it anew.
        size = current().size
        number = f"-{size}" if size > 1 else ""
        resume = self.run.folder.state(f"{family.key}.tune{number}")
        sweep, notes = tuned(la, family.posterior, validation, resume)
        for note in notes:
            self.run.note(f"{family.methods[0].label}: {note}")
        return sweep

    def _temperatures(self, family: Family) -> None:
        """Fit the temperatures of the methods that have one."""
        missing = [
            method
            for method in family.methods
            if method.has_temperature and self.run.entry(method.key)["temperature"] is None
        ]
        if not missing:
            return
        task, start = self.run.loaded.task, time.perf_counter()
        if family.posterior is None:
            outputs, targets = self.validation()
            positions = self._validation_positions(family)
            if positions is not None:
                outputs, targets = outputs[positions], targets[positions]
            log_probs = of_network(outputs, task, None).log_probs
        else:
            assert self.run.loaded.validation is not None
            with self.run.saved(f"{family.key}.temperature") as passes:
                found = predict_set(
                    self.run.loaded,
                    self.run.loaded.validation,
                    self.posteriors[family.key],
                    self._validation_positions(family),
                    self.run.said["sigma"],
                    self.run.seed,
                    passes,
                )
            log_probs, targets = found.predicted.log_probs, found.targets
        assert log_probs is not None
        best = fit_temperature(log_probs, targets, kind_of(task))
        for method in missing:
            entry = self.run.entry(method.key)
            entry["temperature"] = best.value
            seconds = entry["seconds"]
            seconds["tune"] = seconds.get("tune", 0.0) + time.perf_counter() - start
            if best.is_at_limit:
                self.run.note(
                    f"The temperature of {method.label} is {best.value:g}, the end of the range "
                    "that is searched: its validation examples are too few or too easy, or the "
                    "network is no better than chance."
                )
