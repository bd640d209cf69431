"""Posteriors of a loaded network: fitted, tuned, looked into; and how the network itself does."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from laplace_debias import metrics
from laplace_debias.assessment.methods import PosteriorChoice
from laplace_debias.assessment.predictions import Chosen, network_outputs, of_network, probs_of
from laplace_debias.curvature.kinds import WITH_FACTORS
from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.curvature.network.batches import Batches, BatchReader
from laplace_debias.curvature.network.inputs import join, take
from laplace_debias.laplace import Laplace
from laplace_debias.metrics.intervals import normal_quantile
from laplace_debias.sources.loaded import Loaded
from laplace_debias.sources.shares import share
from laplace_debias.sources.task import REGRESSIONS
from laplace_debias.system.ranks import alone

_SELECTIONS = ("all", "weights", "supported", "last_layer")
_JUDGED = 1000
"""Training examples that the network is judged on."""
_CHOOSING = 32
"""Validation examples by which directions are chosen, and their error is measured."""
_ERROR = 1e-3
"""Largest relative error of a standard deviation that fewer directions may bring."""
_BATCHES = {"mini": 1, "debiased": 2, "crossfit": 1}
"""How many batches a way to fit that sees few of them takes."""


def fitted(
    loaded: Loaded, choice: PosteriorChoice | Path, sigma: float | None, seed: int, resume: Path
) -> Laplace:
    """A posterior fitted to the training examples, or read from its file; not tuned."""
    if isinstance(choice, Path):
        return Laplace.load(choice, loaded.model)
    names = [name.strip() for name in choice.params.split(",")]
    la = Laplace(
        loaded.model,
        Gaussian(sigma) if loaded.task == "regression" else loaded.task,
        curvature=choice.curvature,
        params=choice.params if choice.params in _SELECTIONS else names,
        fisher=choice.fisher,
        joint=choice.joint,
        sharing=choice.sharing,
    )
    batches = loaded.train
    if choice.fit_examples is not None:
        batches = _first(loaded, choice.fit_examples, _BATCHES.get(choice.mode))
    generator = torch.Generator().manual_seed(seed)
    saved = None if choice.mode == "auto" else resume
    batches = share(batches, loaded.model)
    return la.fit(batches, choice.mode, loaded.num_train, generator, resume=saved)


def _first(loaded: Loaded, size: int, times: int | None) -> Batches:
    """The first training examples, whose order mixes the classes.

    In as many batches of a size, or as they come up to that size.
    """
    missing = size * (times or 1)
    read, pairs = BatchReader(loaded.model), []
    for batch in loaded.train:
        x, y = read(batch)
        pairs.append((take(x, slice(missing)), y[:missing]))
        missing -= len(pairs[-1][1])
        if not missing:
            break
    if times is None:
        return pairs
    x, y = join([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
    size = len(y) // times
    parts = [slice(part * size, (part + 1) * size) for part in range(times)]
    return [(take(x, part), y[part]) for part in parts]


def tuned(
    la: Laplace, choice: PosteriorChoice | Path, validation: Batches | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Tune a posterior's prior precision, and a regression's noise with it.

    On validation examples by the negative log-likelihood; without any by the marginal likelihood,
    and where that has no optimum not at all. A posterior that was read from a file stays as it is.
    Returns the content of `sweeps/METHOD.json`, and notes for the reader.
    """
    sweep: dict[str, Any] = {"metric": None, "rows": [], "chosen": la.prior_precision.tolist()}
    sweep |= {"flat": None, "sigma": None}
    if isinstance(choice, Path):
        return sweep, ()
    # Of the empirical Fisher the best noise has no closed form: it stays the network's.
    with_noise = isinstance(la.likelihood, Gaussian) and choice.fisher != "empirical"
    if validation is not None:
        found = la.tune(validation, sigma=with_noise)
    else:
        try:
            found = la.tune_evidence(sigma=with_noise)
        except ValueError as error:
            return sweep, (f"The prior precision was not tuned and is 1: {error}",)
    rows = []
    for row in found.table:
        value = row[found.metric]
        half = normal_quantile(0.95) * row.get("standard_error", math.nan)
        ends = {"low": value - half, "high": value + half}
        rows.append({"prior_precision": row["prior_precision"], "value": value, **ends})
    flat = None if found.flat is None else list(found.flat)
    sweep |= {"metric": found.metric, "rows": rows, "chosen": found.prior_precision}
    return sweep | {"flat": flat, "sigma": found.sigma}, found.notes


def thinned(la: Laplace, choice: PosteriorChoice | Path, loaded: Loaded) -> tuple[str, ...]:
    """Make a posterior over more than the last layer thin: it predicts faster. Returns notes."""
    if isinstance(choice, Path) or choice.params == "last_layer":
        return ()
    if choice.curvature not in WITH_FACTORS or loaded.validation is None:
        return ()
    with alone():
        some = Chosen(loaded.model, loaded.validation, torch.arange(_CHOOSING))
        inputs = [x for x, _ in some]
    return (la.thin(join(inputs), _ERROR).message,)


def is_at_limit(sweep: Mapping[str, Any]) -> bool:
    """Whether a search ended at its range's end, and still got better there."""
    rows = sweep["rows"]
    at = [row["prior_precision"] for row in rows]
    if len(rows) < 2 or sweep["chosen"] not in (at[0], at[-1]) or rows[0]["low"] is None:
        return False
    best, inner = (rows[0], rows[1]) if sweep["chosen"] == at[0] else (rows[-1], rows[-2])
    return abs(best["value"] - inner["value"]) > 0.05 * (best["high"] - best["value"])


def of_training(loaded: Loaded) -> dict[str, Any]:
    """How well the network fits the first of its own training examples.

    `num_examples` and `rows` are as `metrics.json` has them; `uniform_nll` is a guess's, in
    nats.
    """
    outputs, targets = [], []
    with alone():
        for x, y in Chosen(loaded.model, loaded.train, torch.arange(_JUDGED)):
            outputs.append(network_outputs(loaded.model, x))
            targets.append(y.cpu())
    f, y = torch.cat(outputs), torch.cat(targets)
    if loaded.task in REGRESSIONS:
        f = of_network(f, loaded.task, 1.0)["mean"]
        y = y.double().reshape(f.shape)
        error, spread = (f - y).square().mean(0), (y - y.mean(0)).square().mean(0)
        value = (1 - error / spread).mean().item()
        rows = [{"metric": "explained", "value": value, "low": None, "high": None}]
        return {"num_examples": len(y), "rows": rows}
    probs = probs_of(of_network(f, loaded.task, None)["log_probs"], loaded.task)
    evaluate = metrics.evaluate_multilabel if loaded.task == "multilabel" else metrics.evaluate
    kept = ("accuracy", "nll", "overconfidence")
    rows = [row for row in evaluate(probs, y.long()).rows() if row["metric"] in kept]
    classes = probs.shape[1]
    guess = classes * math.log(2) if loaded.task == "multilabel" else math.log(classes)
    return {"num_examples": len(y), "rows": rows, "num_classes": classes, "uniform_nll": guess}
