"""Posteriors over a grid of prior precisions, and at the one with the least validation NLL."""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import nn

from laplace_debias.experiments.posteriors.fitting import Name
from laplace_debias.experiments.posteriors.predictions import (
    measured,
    predict_all,
    same_grid,
    severity_name,
)
from laplace_debias.experiments.shared.methods import METHODS
from laplace_debias.experiments.shared.store import Row
from laplace_debias.laplace import Laplace
from laplace_debias.problems import Images

Point = tuple[str, int, float | None]
"""A method, its draw and a prior precision."""


class TunedPredictions:
    """What all posteriors predict on clean images, and on others at the tuned prior precisions.

    Args:
        model: The trained network.
        posteriors: The fitted posteriors.
        validation: Images to tune on.
        test: Clean test images.
        prior_precisions: The grid of δ.
        chunk_size: Images predicted at a time.
        progress: Whether to show progress bars.

    Attributes:
        sweep: Metrics on the clean test images with the validation NLL, a row per method, draw and
            prior precision.
        best: For each method and draw the row of `sweep` with the least validation NLL.
        clean: Probabilities `[1, n, C]` of the clean test images there.
    """

    def __init__(
        self,
        model: nn.Module,
        posteriors: Mapping[Name, Laplace],
        validation: Images,
        test: Images,
        prior_precisions: Sequence[float],
        chunk_size: int,
        progress: bool,
    ) -> None:
        self._predict = partial(
            predict_all,
            model,
            lambda: posteriors,
            chunk_size=chunk_size,
            progress=progress,
        )
        grid = same_grid(prior_precisions)
        probs = self._predict(grid=grid, data={"validation": validation, "test": test})
        on_validation = measured("validation", probs["validation"], validation.labels, grid)
        self._validation_nll = {_point(row): row["nll"] for row in on_validation}
        on_test = measured("test", probs["test"], test.labels, grid)
        self.sweep = [self._with_validation(row) for row in on_test]
        self.best: dict[Name, Row] = {}
        for row in self.sweep:
            name = row["method"], row["draw"]
            least = self.best.setdefault(name, row)["validation_nll"]
            if row["validation_nll"] < least:
                self.best[name] = row
        self.clean = {
            name: probs["test"][name][[grid(name).index(row["prior_precision"])]]
            for name, row in self.best.items()
        }

    def rows(self, corrupted: Mapping[int, Images]) -> list[Row]:
        """Rows at the tuned prior precisions, by method, draw and severity.

        Args:
            corrupted: Corrupted images by severity.
        """

        def tuned(name: Name) -> tuple[float | None]:
            return (self.best[name]["prior_precision"],)

        found = [row | {"severity": 0, "auroc": None} for row in self.best.values()]
        data = {severity_name(severity): images for severity, images in corrupted.items()}
        probs = self._predict(grid=tuned, data=data)
        for (name, images), severity in zip(data.items(), corrupted, strict=True):
            for row in measured(name, probs[name], images.labels, tuned, self.clean):
                values = {"severity": severity, "auroc": row["auroc"]}
                found.append(self._with_validation(row) | values)
        return sorted(found, key=lambda r: (METHODS.index(r["method"]), r["draw"], r["severity"]))

    def _with_validation(self, row: Row) -> Row:
        return {
            **{key: row[key] for key in ("method", "draw", "prior_precision")},
            "validation_nll": self._validation_nll[_point(row)],
            **{key: row[key] for key in ("accuracy", "nll", "ece", "brier")},
        }


def _point(row: Row) -> Point:
    return row["method"], row["draw"], row["prior_precision"]
