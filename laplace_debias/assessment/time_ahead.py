"""How long a posterior's predictions will take, told before they begin."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from laplace_debias.assessment.predictions import Chosen, network_outputs, of_laplace
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.inputs import num_examples, take
from laplace_debias.laplace import Laplace
from laplace_debias.sources.changed import Cast, Changed
from laplace_debias.sources.loaded import Loaded
from laplace_debias.system.ranks import alone, current

WORTH_TELLING = 60.0
"""Seconds from which on it is told."""
SHORT = 300.0
"""Seconds that the number of examples in the advice takes."""
_TIMED = 4
_PASSES_OF_TUNING = 2
_FEWEST = 20


def seconds_an_example(la: Laplace, loaded: Loaded, seed: int) -> float:
    """What predicting one example takes, by the first few test examples.

    Args:
        la: The fitted posterior.
        loaded: The network and its data.
        seed: As `of_laplace` takes it.
    """
    with alone():
        x, _ = next(iter(Chosen(loaded.model, loaded.test)))
    x = take(x, slice(_TIMED))
    outputs = network_outputs(loaded.model, x).shape[1]
    # Once before: first calls also choose algorithms and allocate.
    of_laplace(la, take(x, slice(1)), loaded.task, outputs, seed)
    start = time.perf_counter()
    of_laplace(la, x, loaded.task, outputs, seed)
    return (time.perf_counter() - start) / num_examples(x)


def predictions_ahead(
    sets: Iterable[Batches], validation: Batches | None, examples: int | None, passes: int
) -> int:
    """How many predictions are made in all; sets that do not tell their size count as nothing.

    Args:
        sets: The sets that are predicted.
        validation: The set that is tuned on; None if none is.
        examples: How many examples of each set; None for all.
        passes: How often the validation set is predicted.
    """
    of_sets = [(batches, 1) for batches in sets]
    if validation is not None:
        of_sets.append((validation, passes))
    return sum(times * _number(batches, examples) for batches, times in of_sets)


def _number(batches: Any, examples: int | None) -> int:
    while isinstance(batches, Cast | Changed):
        batches = batches.source
    size = None
    if isinstance(batches, DataLoader) and batches.batch_size is not None:
        size = len(batches.dataset)  # type: ignore[arg-type]
    elif isinstance(batches, Sequence):
        size = sum(len(batch[1]) for batch in batches if isinstance(batch, Sequence))
    if size is None:
        return examples or 0
    return size if examples is None else min(size, examples)


def passes_of_tuning(is_tuned: bool, has_temperature: bool) -> int:
    """How often the validation set is predicted: to search and to refine, and for a temperature."""
    return _PASSES_OF_TUNING * is_tuned + has_temperature


def told(label: str, seconds: float, number: int, examples: int | None) -> str | None:
    """A line on the time that predictions will take; None where that is short.

    Args:
        label: What the posterior is called.
        seconds: An example takes.
        number: How many are predicted in all.
        examples: How many of each set; None for all.
    """
    total = seconds * number / current().size
    if total < WORTH_TELLING:
        return None
    line = (
        f"{label}: an example takes about {seconds:.2g} s, so tuning and predicting "
        f"({number:,} predictions) will take about {in_words(total)}"
    )
    if examples is None:
        return f"{line}; a limit, examples, makes it shorter."
    fewer = examples // 4 if total <= SHORT else int(examples * SHORT / total)
    fewer = max(_FEWEST, fewer)
    if fewer >= examples:
        return f"{line}."
    return (
        f"{line}; with examples={fewer} instead of {examples} about "
        f"{in_words(total * fewer / examples)}."
    )


def in_words(seconds: float) -> str:
    """A time to one or two digits, e.g. `90 s`, `25 minutes`, `3.4 hours`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"
