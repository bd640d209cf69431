"""Methods that share a posterior: predicted together, each in its own columns."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace_debias.assessment.methods import Method, PosteriorChoice
from laplace_debias.assessment.predictions import (
    Chosen,
    Predicted,
    entropy,
    network_outputs,
    of_laplace,
    of_network,
)
from laplace_debias.curvature.fits.passes import NOT_SAVED, Passes, Sums
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.inputs import take
from laplace_debias.laplace import Laplace
from laplace_debias.sources.loaded import Loaded
from laplace_debias.system.ranks import current


@dataclass(frozen=True)
class Family:
    """Methods with one posterior, or none, that differ in their temperature.

    Attributes:
        posterior: The posterior; None for the network itself.
        examples: How many examples of each set they predict; None for all.
        methods: They; the first one names the posterior's files.
    """

    posterior: PosteriorChoice | None
    examples: int | None
    methods: tuple[Method, ...]

    @property
    def key(self) -> str:
        """What the posterior's files are called."""
        return self.methods[0].key


def families_of(methods: Sequence[Method]) -> list[Family]:
    """The methods in families, in the order of their first ones."""
    found: dict[tuple[PosteriorChoice | None, int | None], list[Method]] = {}
    for method in methods:
        found.setdefault((method.posterior, method.examples), []).append(method)
    return [Family(*shared, tuple(members)) for shared, members in found.items()]


def chosen_positions(num_examples: int, wanted: int | None, seed: int) -> Tensor | None:
    """Which examples of a set a method predicts: ascending positions, or None for all.

    Sets of one size give the same positions, so that corrupted examples are those of the test set.

    Args:
        num_examples: How many the set has.
        wanted: How many are wanted.
        seed: Of the choice.
    """
    if wanted is None or wanted >= num_examples:
        return None
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_examples, generator=generator)[:wanted].sort().values


@dataclass(frozen=True)
class SetPredicted:
    """What one family predicts for one set.

    Attributes:
        predicted: The predictions, without a temperature.
        targets: Labels or targets, `[n]` or `[n, C]`.
        index: Positions in the set, `[n]`.
        seconds: Wall time of the predictions, without reading data; of several processes that of
            the slowest.
        network_seconds: What the network alone would have taken, by its time for the first batch.
    """

    predicted: Predicted
    targets: Tensor
    index: Tensor
    seconds: float
    network_seconds: float

    def of_network(self, task: str, sigma: float | None) -> "SetPredicted":
        """What the network predicts: a linearised network's mean are its outputs."""
        outputs = self.predicted.outputs
        assert outputs is not None
        return replace(
            self, predicted=of_network(outputs, task, sigma), seconds=self.network_seconds
        )


def predict_set(
    loaded: Loaded,
    batches: Batches,
    la: Laplace | None,
    positions: Tensor | None,
    sigma: float | None,
    seed: int,
    passes: Passes = NOT_SAVED,
) -> SetPredicted:
    """Predict a set with a posterior, or with the network itself.

    Args:
        loaded: The network.
        batches: The set.
        la: The posterior; None for the network itself.
        positions: Which examples; None for all.
        sigma: Noise of a regression's network.
        seed: Of the draws for the mutual information.
        passes: The pass over the set, which may be saved as it goes.

    Raises:
        ValueError: If the set is empty; as `network_outputs` and `Laplace.functional`.
    """
    # Tensors, so that they can be saved.
    columns: dict[str, list[Tensor]] = {}
    others: dict[str, list[Tensor]] = {"targets": [], "places": [], "network, an example": []}
    seconds = {"all": torch.zeros((), dtype=torch.float64)}
    num_outputs: int | None = None
    num_read = 0
    with passes.begin(Sums([columns, others, seconds], {}, lambda: None)) as one_pass:
        source = Chosen(loaded.model, batches, positions).placed()
        for place, all_x, all_y in one_pass.batches(source):
            left = one_pass.left(all_x, all_y, place)
            num_read += len(all_y)
            for part in left:
                x, start = take(all_x, part), time.perf_counter()
                if la is None or num_outputs is None:
                    outputs = network_outputs(loaded.model, x)
                    num_outputs = outputs.shape[1]
                    alone = (time.perf_counter() - start) / len(outputs)
                    others["network, an example"].append(torch.tensor([alone]).double())
                if la is None:
                    predicted = of_network(outputs, loaded.task, sigma)
                else:
                    start = time.perf_counter()
                    predicted = of_laplace(la, x, loaded.task, num_outputs, seed)
                seconds["all"] = seconds["all"] + (time.perf_counter() - start)
                for name, column in predicted.columns().items():
                    columns.setdefault(name, []).append(column)
                others["targets"].append(all_y[part].detach().cpu())
                others["places"].append(torch.arange(place + part.start, place + part.stop))
            if left:
                one_pass.done(num_read, 0.0, 0)
    own = {name: torch.cat(parts) for name, parts in (columns | others).items() if parts}
    found = _of_all_processes(own)
    spent = current().exchange(float(seconds["all"]))
    predicted = Predicted(**{name: found[name] for name in found if name not in others})
    index = torch.arange(len(predicted)) if positions is None else positions
    return SetPredicted(
        predicted,
        found["targets"],
        index,
        max(spent),
        float(found["network, an example"].max()) * len(predicted),
    )


def _of_all_processes(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What all processes have predicted, in the order of the examples' places.

    Args:
        own: What this one has, by name; empty if there was nothing for it.

    Raises:
        ValueError: If no process has anything.
    """
    of_ranks = [of_rank for of_rank in current().gather(own) if of_rank]
    if not of_ranks:
        raise ValueError("a set holds no example: give it some, or leave it out")
    found = {name: torch.cat([of_rank[name] for of_rank in of_ranks]) for name in of_ranks[0]}
    order = found["places"].argsort()
    # A time is no example's.
    return {name: of if name == "network, an example" else of[order] for name, of in found.items()}


def columns_of(
    found: SetPredicted, predicted: Predicted, task: str, has_labels: bool
) -> Mapping[str, Tensor | None]:
    """The columns of `predictions/METHOD/SET.parquet`.

    Args:
        found: What the family predicts.
        predicted: The same, at the method's temperature.
        task: As in `Loaded`.
        has_labels: Whether the targets mean something.
    """
    columns: dict[str, Tensor | None] = {"index": found.index}
    if task == "regression":
        assert predicted.mean is not None
        if has_labels:
            columns["target"] = _narrow(found.targets.double().reshape(predicted.mean.shape))
        for name in ("mean", "standard_deviation", "epistemic"):
            columns[name] = _narrow(getattr(predicted, name))
        return columns
    if has_labels:
        columns["label"] = _narrow(found.targets.long())
    probs = predicted.probs(task)
    columns |= {"probs": probs, "entropy": entropy(probs, task)}
    for name in ("aleatoric", "mutual_information", "variance"):
        columns[name] = getattr(predicted, name)
    return columns


def _narrow(values: Tensor) -> Tensor:
    """`[n]` of what has one column."""
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
