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

from examples.paper.common import Batch, Row, Settings, Trained
from laplace_debias.linalg import cg, eigsh
from laplace_debias.quadratic import Cut, Quadratic

SAME, OTHER, FULL = "same mini-batch", "other mini-batches", "full-batch"
"""The data on which a slope or curvature was measured, relative to the batch of the direction."""


@dataclass(kw_only=True)
class BiasSettings(Settings):
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
    A, g, number = quadratic.matrix, quadratic.gradient, settings.num_directions
    if settings.directions == "eigenvectors":
        generator = torch.Generator(A.device).manual_seed(settings.seed)
        vectors = eigsh(A, number, tol=settings.tol, generator=generator).vectors
        # The sign of an eigenvector is arbitrary.
        vectors = torch.where(vectors.T @ g > 0, -vectors, vectors)
        return Directions(vectors, vectors.new_zeros(number, number))
    solution = cg(A, -g, tol=1e-12, max_iter=number, keep_directions=True)
    assert solution.directions is not None
    count = solution.directions.shape[1]
    # Step i contributes to every later position.
    coefficients = solution.step_sizes[:, None].expand(count, count).triu(1)
    return Directions(solution.directions, coefficients)


def measure(
    trained: Trained, size: int, settings: BiasSettings
) -> tuple[list[Directions], list[list[Cut]]]:
    """Find directions of the first batches; for each, return all batches' quadratics along them."""
    batches = trained.batches(size, settings.num_batches(size), settings.seed)
    found = [
        find_directions(quadratic_on(trained, batch, settings.curvature), settings)
        for batch in tqdm(batches[: settings.draws], "directions", disable=not settings.progress)
    ]
    together = torch.cat([directions.vectors for directions in found], dim=1)
    cuts: list[list[Cut]] = [[] for _ in found]
    for batch in tqdm(batches, "measuring", disable=not settings.progress):
        cut = quadratic_on(trained, batch, settings.curvature).cut(together)
        start = 0
        for directions, of_draw in zip(found, cuts, strict=True):
            part = slice(start, start + directions.vectors.shape[1])
            of_draw.append(Cut(cut.value, cut.slopes[part], cut.curvatures[part, part]))
            start = part.stop
    return found, cuts


def mean_cut(cuts: Sequence[Cut]) -> Cut:
    """Compute the full set's quadratic from a partition into batches of equal size (Eq. 5)."""
    parts = [(cut.value, cut.slopes, cut.curvatures) for cut in cuts]
    return Cut(*(torch.stack(values).mean(0) for values in zip(*parts, strict=True)))


def bias_rows(trained: Trained, size: int, settings: BiasSettings) -> list[Row]:
    """Return slopes and curvatures along each draw's directions, on all batches and the full set.

    Returns:
        A row for each draw, direction (`index`, from 1) and batch, and one for the full set.
    """
    rows = []
    for draw, (directions, cuts) in enumerate(zip(*measure(trained, size, settings), strict=True)):
        measured = [(SAME if i == draw else OTHER, cut) for i, cut in enumerate(cuts)]
        for name, cut in [*measured, (FULL, mean_cut(cuts))]:
            slopes, curvatures = directions.slopes(cut), cut.curvatures.diagonal()
            pairs = zip(slopes.tolist(), curvatures.tolist(), strict=True)
            rows += [
                {"draw": draw, "index": i, "measured_on": name, "slope": s, "curvature": c}
                for i, (s, c) in enumerate(pairs, start=1)
            ]
    return rows


def summary_of(rows: Sequence[Row]) -> list[Row]:
    """Summarise the bias of each draw by relative errors (value − full) / |full| over directions.

    Returns:
        For each draw and quantity: the mean, the 10 % and the 90 % quantile of the relative errors
        on the batch itself; the medians of two ratios to the value of the full set, for the batch
        itself and for the mean of the other batches; and both ratios for the first direction alone.
    """
    found = []
    for draw in sorted({row["draw"] for row in rows}):
        for quantity in ("slope", "curvature"):

            def values(name: str, draw: int = draw, quantity: str = quantity) -> Tensor:
                chosen = [r for r in rows if (r["draw"], r["measured_on"]) == (draw, name)]
                listed = torch.tensor([r[quantity] for r in chosen], dtype=torch.float64)
                return listed.reshape(-1, max(r["index"] for r in chosen))

            full, same = values(FULL)[0], values(SAME)[0]
            errors = (same - full) / full.abs()
            own, others = same / full, values(OTHER).mean(0) / full
            found.append(
                {
                    "draw": draw,
                    "quantity": quantity,
                    "mean error": float(errors.mean()),
                    "p10": float(errors.quantile(0.1)),
                    "p90": float(errors.quantile(0.9)),
                    "same/full": float(own.median()),
                    "others/full": float(others.median()),
                    "same/full, first": float(own[0]),
                    "others/full, first": float(others[0]),
                }
            )
    return found
