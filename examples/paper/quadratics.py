"""Mini-batch quadratics along one batch's directions, for the experiments on the bias.

Along the columns of V, a quadratic is a polynomial (`Cut`), with slopes Vᵀg and curvatures VᵀHV. By
Eq. 5, the quadratic of the full set is the mean of the quadratics of a partition into batches of
equal size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from examples.paper.common import FULL, Batch, ExperimentSettings, Row, Trained, distinct, select
from laplace_debias.linalg import cg, eigsh
from laplace_debias.quadratic import Cut, Quadratic

SAME = "same mini-batch"
OTHER = "other mini-batches"
"""The data on which a slope or curvature was measured, relative to the batch of the direction.

The third kind of data is `FULL`, the full set.
"""


@dataclass(kw_only=True)
class BiasSettings(ExperimentSettings):
    """Settings of the experiments on the bias of mini-batches.

    Attributes:
        full_examples: The number of random training images in the full set; a multiple of the batch
            size.
        draws: The number of mini-batches of the full set on which directions are computed.
        num_directions: The number of directions per mini-batch.
        directions: `eigenvectors`, the top eigenvectors of the mini-batch's curvature, or `cg`, the
            search directions of CG on the mini-batch's quadratic, with slopes at the iterates of
            CG.
        curvature: The matrix of the quadratic.
        tol: Largest residual of an eigenpair, relative to the largest eigenvalue.
    """

    full_examples: int = 896
    draws: int = 1
    num_directions: int = 10
    directions: Literal["eigenvectors", "cg"] = "eigenvectors"
    curvature: Literal["ggn", "hessian"] = "ggn"
    tol: float = 1e-3

    def num_batches(self, size: int) -> int:
        """Return the number of batches of the full set."""
        if self.full_examples % size or self.full_examples <= self.draws * size:
            raise ValueError(
                f"full_examples is {self.full_examples}; expected a multiple of the batch size "
                f"{size}, of more batches than draws={self.draws}"
            )
        return self.full_examples // size


@dataclass(frozen=True)
class Directions:
    """Directions of one mini-batch's quadratic.

    Attributes:
        vectors: Unit vectors as columns, [D, k].
        coefficients: The points at which slopes are measured, [k, k]: for vector t, at θ₀ +
            V·coefficients[:, t]. They are zero for eigenvectors, and the step sizes of CG so far
            for search directions.
    """

    vectors: Tensor
    coefficients: Tensor

    def slopes(self, cut: Cut) -> Tensor:
        """Compute s(θ_t; d_t) on the quadratic of a cut along these directions (Eq. 10), [k]."""
        return cut.slopes + (cut.curvatures * self.coefficients).sum(0)


def quadratic_on(trained: Trained, batch: Batch, curvature: str) -> Quadratic:
    """Return the regularised quadratic of one mini-batch (Eq. 2)."""
    decay = trained.recipe.penalty
    loss = nn.CrossEntropyLoss()
    return Quadratic.from_data(trained.model, loss, [batch], curvature, weight_decay=decay)


def find_directions(quadratic: Quadratic, settings: BiasSettings) -> Directions:
    """Find the top eigenvectors of a quadratic's matrix, or the first search directions of CG.

    All directions point down the slope of the quadratic. CG may end early if the curvature is not
    positive.
    """
    A = quadratic.matrix
    g = quadratic.gradient
    k = settings.num_directions
    if settings.directions == "eigenvectors":
        generator = torch.Generator(A.device).manual_seed(settings.seed)
        vectors = eigsh(A, k, tol=settings.tol, generator=generator).vectors
        # The sign of an eigenvector is arbitrary.
        vectors = torch.where(vectors.T @ g > 0, -vectors, vectors)
        return Directions(vectors, vectors.new_zeros(k, k))
    solution = cg(A, -g, tol=1e-12, max_iter=k, keep_directions=True)
    assert solution.directions is not None
    num_steps = solution.directions.shape[1]
    # Step i contributes to every later position.
    coefficients = solution.step_sizes[:, None].expand(num_steps, num_steps).triu(1)
    return Directions(solution.directions, coefficients)


@dataclass(frozen=True)
class Measurement:
    """The directions of one mini-batch, and the quadratics of all mini-batches along them.

    Attributes:
        directions: The directions.
        cuts: The quadratic of each mini-batch of the full set.
    """

    directions: Directions
    cuts: list[Cut]


def measure(trained: Trained, size: int, settings: BiasSettings) -> list[Measurement]:
    """Find directions of the first mini-batches, and measure all mini-batches along them.

    Args:
        trained: The network and its data.
        size: Examples of a mini-batch.
        settings: The full set, and the directions.

    Returns:
        For each draw, the directions of the mini-batch with this index, and all measurements.
    """
    batches = trained.random_batches(size, settings.num_batches(size), settings.seed)
    drawn_batches = batches[: settings.draws]
    measurements = []
    for batch in tqdm(drawn_batches, "directions", disable=not settings.progress):
        quadratic = quadratic_on(trained, batch, settings.curvature)
        measurements.append(Measurement(find_directions(quadratic, settings), cuts=[]))
    # A batch is cut along the directions of all draws at once, which saves passes over its data.
    vectors_of_all = torch.cat([each.directions.vectors for each in measurements], dim=1)
    for batch in tqdm(batches, "measuring", disable=not settings.progress):
        cut = quadratic_on(trained, batch, settings.curvature).cut(vectors_of_all)
        start = 0
        for measurement in measurements:
            end = start + measurement.directions.vectors.shape[1]
            slopes = cut.slopes[start:end]
            curvatures = cut.curvatures[start:end, start:end]
            measurement.cuts.append(Cut(cut.value, slopes, curvatures))
            start = end
    return measurements


def mean_cut(cuts: Sequence[Cut]) -> Cut:
    """Compute the full set's quadratic from a partition into batches of equal size (Eq. 5)."""
    return Cut(
        value=torch.stack([cut.value for cut in cuts]).mean(0),
        slopes=torch.stack([cut.slopes for cut in cuts]).mean(0),
        curvatures=torch.stack([cut.curvatures for cut in cuts]).mean(0),
    )


def bias_rows(trained: Trained, size: int, settings: BiasSettings) -> list[Row]:
    """Return slopes and curvatures along each draw's directions, on all batches and the full set.

    Returns:
        A row for each draw, direction (`index`, from 1) and batch, and one for the full set.
    """
    rows: list[Row] = []
    for draw, measurement in enumerate(measure(trained, size, settings)):
        for batch_index, cut in enumerate(measurement.cuts):
            measured_on = SAME if batch_index == draw else OTHER
            rows += _rows_along(measurement.directions, cut, draw, measured_on)
        rows += _rows_along(measurement.directions, mean_cut(measurement.cuts), draw, FULL)
    return rows


def _rows_along(directions: Directions, cut: Cut, draw: int, measured_on: str) -> list[Row]:
    """Return a row for each direction, with the slope and the curvature along it."""
    slopes = directions.slopes(cut).tolist()
    curvatures = cut.curvatures.diagonal().tolist()
    return [
        {
            "draw": draw,
            "index": index,
            "measured_on": measured_on,
            "slope": slope,
            "curvature": curvature,
        }
        for index, (slope, curvature) in enumerate(zip(slopes, curvatures, strict=True), start=1)
    ]


def bias_summary(rows: Sequence[Row]) -> list[Row]:
    """Summarise the bias of each draw by relative errors (value − full) / |full| over directions.

    Returns:
        For each draw and quantity: the mean, the 10 % and the 90 % quantile of the relative errors
        on the batch itself; the medians of two ratios to the value of the full set, for the batch
        itself and for the mean of the other batches; and both ratios for the first direction alone.
    """
    summary = []
    for (draw,) in distinct(rows, "draw"):
        for quantity in ("slope", "curvature"):
            same = _values(select(rows, draw=draw, measured_on=SAME), quantity)[0]
            full = _values(select(rows, draw=draw, measured_on=FULL), quantity)[0]
            others = _values(select(rows, draw=draw, measured_on=OTHER), quantity).mean(0)
            errors = (same - full) / full.abs()
            same_to_full = same / full
            others_to_full = others / full
            summary.append(
                {
                    "draw": draw,
                    "quantity": quantity,
                    "mean error": float(errors.mean()),
                    "p10": float(errors.quantile(0.1)),
                    "p90": float(errors.quantile(0.9)),
                    "same/full": float(same_to_full.median()),
                    "others/full": float(others_to_full.median()),
                    "same/full, first": float(same_to_full[0]),
                    "others/full, first": float(others_to_full[0]),
                }
            )
    return summary


def _values(rows: Sequence[Row], quantity: str) -> Tensor:
    """Return a quantity on several batches along the same directions, [batches, directions]."""
    num_directions = max(row["index"] for row in rows)
    values = torch.tensor([row[quantity] for row in rows], dtype=torch.float64)
    return values.reshape(-1, num_directions)
