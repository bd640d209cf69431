"""How far slopes and curvatures on a mini-batch are from the full set's: rows and summaries."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laplace_debias.experiments.bias.cuts import (
    BiasSettings,
    Directions,
    Kind,
    mean_cut,
    stored_cuts,
    stored_directions,
)
from laplace_debias.experiments.shared.setup import Trained
from laplace_debias.experiments.shared.store import Rows, Store
from laplace_debias.quadratic import Cut

SAME, OTHER, FULL = "same mini-batch", "other mini-batches", "full-batch"
"""What a slope or curvature was measured on, relative to the batch of the direction."""

PERCENTILES = (10, 90)
"""The ends of the bars. Those of the paper are not known."""

QUANTITIES = ("slope", "curvature")


def bias_rows(draw: int, directions: Directions, cuts: Sequence[Cut]) -> Rows:
    """Slopes and curvatures along one batch's directions on every batch and on the full set.

    Both are those of Eq. 10; the full set's are the means over all batches (Eq. 5).

    Args:
        draw: Which batch the directions are of.
        directions: The directions.
        cuts: Every batch's quadratic along them; the batches are a partition of the full set.

    Returns:
        A row for each direction (`index`, from 1) and batch, and one for the full set, whose
        `batch` is None.
    """
    measured: list[tuple[str, int | None, Cut]] = [
        (SAME if batch == draw else OTHER, batch, cut) for batch, cut in enumerate(cuts)
    ]
    measured.append((FULL, None, mean_cut(cuts)))
    rows = []
    for name, batch, cut in measured:
        slopes, curvatures = directions.slopes(cut), cut.curvatures.diagonal()
        for index, (slope, curvature) in enumerate(
            zip(slopes.tolist(), curvatures.tolist(), strict=True), start=1
        ):
            rows.append(
                {
                    "draw": draw,
                    "index": index,
                    "measured_on": name,
                    "batch": batch,
                    "slope": slope,
                    "curvature": curvature,
                }
            )
    return rows


def values_of(rows: Sequence[dict[str, Any]], measured_on: str, quantity: str) -> Tensor:
    """What was measured on the same batch or the full set `[k]`, or on the others `[m, k]`."""
    chosen = [row for row in rows if row["measured_on"] == measured_on]
    count = max(row["index"] for row in chosen)
    values = torch.tensor([row[quantity] for row in chosen], dtype=torch.float64)
    return values.reshape(-1, count) if measured_on == OTHER else values


def summary_of(rows: Sequence[dict[str, Any]]) -> Rows:
    """The bias of each draw: relative errors over its directions, (value − full) / |full|.

    For two batches of equal spectra Eq. 7 gives the sign of the error of curvatures: they are too
    large along the batch's own first eigenvector. For gradients of equal norm Eq. 19 gives that of
    the slope along CG's first direction −g/‖g‖: it is too steep.

    Args:
        rows: Those of `bias_rows`, of one or several draws.

    Returns:
        For each draw and quantity: mean, median and percentiles of the relative error on the
        batch itself, and on the other batches; the median ratio of the batch's own value to the
        full set's, and that of the mean over the others to the full set's; both of the first
        direction alone (`top_…`).
    """
    found = []
    for draw in sorted({row["draw"] for row in rows}):
        of_draw = [row for row in rows if row["draw"] == draw]
        for quantity in QUANTITIES:
            full = values_of(of_draw, FULL, quantity)
            same = values_of(of_draw, SAME, quantity)
            others = values_of(of_draw, OTHER, quantity)
            row: dict[str, Any] = {"draw": draw, "quantity": quantity}
            for name, values in (("same", same), ("other", others)):
                row |= _distribution(name, ((values - full) / full.abs()).flatten())
            ratio, of_others = same / full, others.mean(0) / full
            row["same_over_full"] = float(ratio.median())
            row["others_mean_over_full"] = float(of_others.median())
            row["top_same_over_full"] = float(ratio[0])
            row["top_others_mean_over_full"] = float(of_others[0])
            found.append(row)
    return found


def _distribution(name: str, errors: Tensor) -> dict[str, float]:
    low, high = (torch.quantile(errors, p / 100) for p in PERCENTILES)
    return {
        f"{name}_mean_error": float(errors.mean()),
        f"{name}_median_error": float(errors.median()),
        f"{name}_p{PERCENTILES[0]}": float(low),
        f"{name}_p{PERCENTILES[1]}": float(high),
    }


def measure_bias(
    store: Store,
    name: str,
    trained: Trained,
    batch_size: int,
    kind: Kind,
    settings: BiasSettings,
    draws: int | None = None,
    number: int | None = None,
) -> Rows:
    """The rows of `bias_rows` for all draws; every part is computed once per run and stored.

    Args:
        store: The run's store.
        name: Name under which the parts are stored.
        trained: The network.
        batch_size: Examples of a mini-batch.
        kind: Which directions.
        settings: Curvature, weight decay, seed and so on.
        draws: On how many mini-batches directions are computed; the settings' number if None.
        number: How many directions; the settings' number if None.
    """
    batches, directions = stored_directions(
        store, f"{name}-directions", trained, batch_size, kind, settings, draws, number
    )
    cuts = stored_cuts(store, f"{name}-cuts", trained, batches, directions, settings)
    cpu = [Directions(d.vectors.cpu(), d.coefficients.cpu().double()) for d in directions]
    return [
        row
        for draw, (found, of_draw) in enumerate(zip(cpu, cuts, strict=True))
        for row in bias_rows(draw, found, of_draw)
    ]
