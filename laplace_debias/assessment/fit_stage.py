"""The first stage of a run: noise, posteriors and temperatures, which predictions need."""

import time
from typing import Any

import torch
from torch import Tensor

from laplace_debias.assessment.families import Family, chosen_positions, predict_set
from laplace_debias.assessment.fitting import fitted, noise_of, tuned
from laplace_debias.assessment.predictions import Chosen, network_outputs, of_network
from laplace_debias.assessment.run_folder import write_json
from laplace_debias.assessment.run_state import Run
from laplace_debias.assessment.spectra import spectrum_of
from laplace_debias.assessment.temperature import fit_temperature, kind_of
from laplace_debias.laplace import Laplace


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
        return chosen_positions(len(self.validation()[1]), family.examples, self.run.seed)

    def _posterior(self, family: Family) -> None:
        """Fit, tune and save a posterior, or read the saved one."""
        assert family.posterior is not None
        path, loaded = self.run.folder.posterior(family.key), self.run.loaded
        if not path.exists():
            self.run.say(f"Fitting {family.methods[0].label}")
            start = time.perf_counter()
            la = fitted(loaded, family.posterior, self.run.said["sigma"], self.run.seed)
            fit_seconds = time.perf_counter() - start
            start = time.perf_counter()
            sweep = self._tune(la, family)
            tune_seconds = time.perf_counter() - start
            write_json(self.run.folder.sweep(family.key), sweep)
            write_json(self.run.folder.spectrum(family.key), spectrum_of(la))
            for method in family.methods:
                self.run.entry(method.key)["seconds"] |= {"fit": fit_seconds, "tune": tune_seconds}
            self.run.write()
            # The last of its files: where it is, they are.
            path.parent.mkdir(parents=True, exist_ok=True)
            la.save(path)
        # Read back also by the run that wrote it, so that one that goes on gives the same numbers.
        la = Laplace.load(path, loaded.model)
        self.posteriors[family.key] = la
        found = la.prior_precision
        for method in family.methods:
            entry = self.run.entry(method.key)
            entry["prior_precision"] = found.tolist()
            entry["bytes"] = path.stat().st_size

    def _tune(self, la: Laplace, family: Family) -> dict[str, Any]:
        assert family.posterior is not None
        validation = None
        if self.run.loaded.validation is not None:
            validation = Chosen(
                self.run.loaded.model,
                self.run.loaded.validation,
                self._validation_positions(family),
            )
        sweep, notes = tuned(la, family.posterior, validation)
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
            found = predict_set(
                self.run.loaded,
                self.run.loaded.validation,
                self.posteriors[family.key],
                self._validation_positions(family),
                self.run.said["sigma"],
                self.run.seed,
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
