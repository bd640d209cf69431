"""The second stage of a run: the predictions of every method for every set."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from laplace_debias.assessment.families import (
    Family,
    SetPredicted,
    chosen_positions,
    columns_of,
    predict_set,
)
from laplace_debias.assessment.methods import Method
from laplace_debias.assessment.run_folder import write_table
from laplace_debias.assessment.run_state import Run
from laplace_debias.assessment.sets import DataSet
from laplace_debias.curvature.fits.passes import Passes
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.laplace import Laplace


class PredictStage:
    """Writes the tables of predictions that a run's folder does not hold yet.

    Args:
        run: The run.
        posteriors: The fitted posteriors by their families' keys.
    """

    def __init__(self, run: Run, posteriors: Mapping[str, Laplace]) -> None:
        self.run, self.posteriors = run, posteriors

    def predict(self) -> None:
        """The predictions of every method for every set, but for those that are complete."""
        for part in self.run.sets:
            with self.run.stage("predict"):
                self._predict_network(part)
                for family in self.run.families:
                    self._predict(family, part)
                num_examples = self.run.told(self.run.methods[0], part)["num_examples"]
                for entry in self.run.said["sets"]:
                    if entry["name"] == part.name:
                        entry["num_examples"] = num_examples

    def _missing(self, family: Family, part: DataSet) -> list[Method]:
        return [
            method
            for method in family.methods
            if self.run.told(method, part).get("digest") != self.run.digest
        ]

    def _predict_network(self, part: DataSet) -> None:
        """Write what the network predicts together with the first posterior that predicts all.

        The posterior's predictions begin with the network's outputs, so one pass serves both.
        """
        network = self.run.families[0]
        shared = [f for f in self.run.families if f.posterior is not None and f.examples is None]
        missing = self._missing(network, part)
        if not missing or not shared:
            return
        self.run.say(f"Predicting {part.name}: {_labels([*network.methods, *shared[0].methods])}")
        with self.run.saved(f"{shared[0].key}.{part.name}") as passes:
            found = self._predicted(shared[0], part.batches, None, passes)
            for method in missing:
                self._write(
                    method, part, found.of_network(self.run.loaded.task, self.run.said["sigma"])
                )
            for method in self._missing(shared[0], part):
                self._write(method, part, found)

    def _predict(self, family: Family, part: DataSet) -> None:
        missing = self._missing(family, part)
        if not missing:
            return
        self.run.say(f"Predicting {part.name}: {_labels(missing)}")
        positions = None
        if family.examples is not None:
            # The network comes first and predicts all: its table knows how many there are.
            size = self.run.told(self.run.methods[0], part)["num_examples"]
            positions = chosen_positions(size, family.examples, self.run.seed)
        with self.run.saved(f"{family.key}.{part.name}") as passes:
            found = self._predicted(family, part.batches, positions, passes)
            for method in missing:
                self._write(method, part, found)

    def _predicted(
        self, family: Family, batches: Batches, positions: Tensor | None, passes: Passes
    ) -> SetPredicted:
        la, sigma = self.posteriors.get(family.key), self.run.said["sigma"]
        return predict_set(self.run.loaded, batches, la, positions, sigma, self.run.seed, passes)

    def _write(self, method: Method, part: DataSet, found: SetPredicted) -> None:
        entry, predicted = self.run.entry(method.key), found.predicted
        if method.has_temperature:
            predicted = predicted.with_temperature(entry["temperature"], self.run.loaded.task)
        columns = columns_of(found, predicted, self.run.loaded.task, part.role != "ood")
        told = {
            "digest": self.run.digest,
            "num_examples": len(found.index),
            "seconds": found.seconds,
        }
        write_table(self.run.path(method, part), columns, told)


def _labels(methods: Sequence[Method]) -> str:
    return ", ".join(method.label for method in methods)
