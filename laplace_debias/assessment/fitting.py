"""Posteriors fitted and tuned for a loaded network."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laplace_debias.assessment.methods import PosteriorChoice
from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.inputs import Inputs, join, num_examples, take
from laplace_debias.curvature.network.reader import BatchReader
from laplace_debias.laplace import Laplace
from laplace_debias.laplace.tuning import Tuning
from laplace_debias.sources.loaded import Loaded
from laplace_debias.sources.shares import share

_SELECTIONS = ("all", "weights", "supported", "last_layer")
_LEVEL = 1.959963984540054
"""Standard errors on each side of a 95 % interval."""
_BATCHES = {"mini": 1, "debiased": 2, "crossfit": 1}
"""How many batches a way to fit that sees few of them takes."""


def fitted(
    loaded: Loaded, choice: PosteriorChoice, sigma: float | None, seed: int, resume: Path
) -> Laplace:
    """A posterior fitted to the training examples, or read from its file; not tuned.

    Args:
        loaded: The network and its data.
        choice: Which posterior.
        sigma: Standard deviation of a regression's noise.
        seed: Of the labels that `fisher="mc"` draws.
        resume: The folder of a long fit's state, as `Laplace.fit` takes it.

    Raises:
        ValueError: If there are fewer training examples than it is to be fitted to; as
            `Laplace.fit` and `Laplace.load`.
    """
    if choice.path is not None:
        return Laplace.load(choice.path, loaded.model, replicate=True)
    likelihood = Gaussian(sigma) if loaded.task == "regression" else loaded.task
    names = [name.strip() for name in choice.params.split(",")]
    params = choice.params if choice.params in _SELECTIONS else names
    la = Laplace(
        loaded.model,
        likelihood,
        curvature=choice.curvature,
        params=params,
        fisher=choice.fisher,
        joint=choice.joint,
        sharing=choice.sharing,
        rank=choice.rank,
    )
    batches = loaded.train
    if choice.fit_examples is not None:
        times = _BATCHES.get(choice.mode)
        batches = _first(loaded, choice.fit_examples, times, choice.or_fewer)
    generator = torch.Generator().manual_seed(seed)
    batches = share(batches, loaded.model)
    # Each process predicts for batches of its own, so each has the whole posterior.
    return la.fit(
        *(batches, choice.mode),
        num_data=loaded.num_train,
        generator=generator,
        resume=resume,
        replicate=True,
    )


def _first(loaded: Loaded, number: int, times: int | None, or_fewer: bool) -> Batches:
    """The first training examples, whose order mixes the classes.

    Args:
        loaded: Has them.
        number: How many in all, or in a batch.
        times: How many batches of them; None to leave the batches as they come.
        or_fewer: Whether all are taken where there are not as many.

    Raises:
        ValueError: If there are not as many.
    """
    wanted = number * (times or 1)
    read, pairs, missing = BatchReader(loaded.model), [], wanted
    for batch in loaded.train:
        x, y = read(batch)
        size = min(num_examples(x), missing)
        pairs.append((take(x, slice(size)), y[:size]))
        missing -= size
        if not missing:
            break
    if missing and or_fewer:
        number, wanted = (wanted - missing) // (times or 1), wanted - missing
    elif missing:
        raise ValueError(
            f"the fit is to see {wanted} training examples, and the training data holds "
            f"{wanted - missing}: lower fit_examples"
        )
    if times is None:
        return pairs
    x, y = _joined(pairs)
    parts = [slice(part * number, (part + 1) * number) for part in range(times)]
    return [(take(x, part), y[part]) for part in parts]


def _joined(pairs: Sequence[tuple[Inputs, Tensor]]) -> tuple[Inputs, Tensor]:
    return join([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def tuned(
    la: Laplace, choice: PosteriorChoice, validation: Batches | None, resume: Path | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Tune a posterior's prior precision, and a regression's noise with it.

    On validation examples by the negative log-likelihood; without any by the marginal likelihood,
    and where that has no optimum not at all. A posterior that was read from a file stays as it is.

    Args:
        la: The posterior, which is changed.
        choice: What it is.
        validation: Batches; None if there are none.
        resume: The folder of a long search's state, as `Laplace.tune` takes it; None for none.

    Returns:
        As `sweeps/METHOD.json` has it; and what a reader should know of the search.

    Raises:
        ValueError: As `Laplace.tune`.
    """
    if choice.path is not None:
        return _untuned(la), ()
    is_regression = isinstance(la.likelihood, Gaussian)
    if validation is not None:
        # Of the empirical Fisher the best noise has no closed form: it stays the network's.
        with_noise = is_regression and choice.fisher != "empirical"
        found = la.tune(validation, sigma=with_noise, resume=resume)
        return _sweep_of(found), found.notes
    try:
        found = la.tune(method="marglik", sigma=is_regression)
    except ValueError as error:
        return _untuned(la), (f"The prior precision was not tuned and is 1: {error}",)
    return _sweep_of(found), found.notes


def _sweep_of(found: Tuning) -> dict[str, Any]:
    rows = []
    for row in found.table:
        value, error = row[found.metric], row.get("standard_error")
        half = None if error is None else _LEVEL * error
        rows.append(
            {
                "prior_precision": row["prior_precision"],
                "value": value,
                "low": None if half is None else value - half,
                "high": None if half is None else value + half,
            }
        )
    return {
        "metric": found.metric,
        "rows": rows,
        "chosen": found.prior_precision,
        "flat": None if found.flat is None else list(found.flat),
        "sigma": found.sigma,
    }


def _untuned(la: Laplace) -> dict[str, Any]:
    chosen = la.prior_precision.tolist()
    return {"metric": None, "rows": [], "chosen": chosen, "flat": None, "sigma": None}


def noise_of(residuals: Tensor) -> float:
    """The standard deviation of a constant Gaussian noise that residuals are most likely under.

    Args:
        residuals: Targets less outputs.

    Raises:
        ValueError: If they are all zero.
    """
    sigma = math.sqrt(residuals.double().square().mean().item())
    if sigma == 0:
        raise ValueError(
            "the network meets every target exactly, so that there is no noise to estimate: check "
            "that the targets are not among the inputs"
        )
    return sigma
