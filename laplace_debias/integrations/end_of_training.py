"""Fit, tune and evaluate a posterior on the loaders of a training run when it ends."""

import copy
import itertools
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from laplace_debias.curvature.data.dataset_size import (
    fault_of_draws,
    inner_sampler,
    repeated_held_out,
)
from laplace_debias.curvature.data.shards import ShardedBatches, check_dispatched, with_batches
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.shared_copy import shared_copy
from laplace_debias.curvature.structures import curvature_structure
from laplace_debias.laplace import Laplace
from laplace_debias.laplace.fitting.auto import Auto
from laplace_debias.laplace.state.parameter_blocks import UnusedParametersError
from laplace_debias.laplace.tuning.result import Tuning
from laplace_debias.metrics import Report
from laplace_debias.system.ranks import process_group
from laplace_debias.system.shown import warn

NO_VALIDATION_DATA = (
    "The posterior is tuned on validation data, but the run has none. Pass validation data to "
    "the trainer, or `tune=False` to the callback."
)


def check_only_one(callbacks: Iterable[Any], kind: type) -> None:
    """Raise an error if a trainer has several callbacks of a kind, which would share one file."""
    number = sum(isinstance(callback, kind) for callback in callbacks)
    if number > 1:
        raise ValueError(
            f"The trainer has {number} LaplaceCallbacks, which would save their posteriors to the "
            "same file. Pass one of them, and fit the other posteriors with Laplace after the "
            "training."
        )


def copy_in_eval_mode(network: nn.Module) -> nn.Module:
    """Copy a network in eval mode; the copy shares the storage of the parameters."""
    copied = shared_copy(network)
    for parameter, original in zip(copied.parameters(), network.parameters(), strict=True):
        parameter.requires_grad_(original.requires_grad)
    return copied


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Compute float32 matrix products on a GPU in full precision, also if the training does not."""
    settings: Any = torch.backends.cuda.matmul
    # torch 2.8 does not have this attribute.
    earlier = getattr(settings, "fp32_precision", None)
    if earlier != "tf32":
        yield
        return
    settings.fp32_precision = "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = earlier


@contextmanager
def _unchanged_random_states(model: nn.Module) -> Iterator[None]:
    """Restore the global random states, so that the training draws the same random numbers."""
    devices = {parameter.device for parameter in model.parameters()}
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _first_batch(loader: Any, network: nn.Module) -> list[Any] | None:
    """Read the first batch of a loader without its workers, and without changing later batches.

    The sampler is copied, because it may have its own generator, and so is the collator, if it can
    be copied. The network, which a collator may refer to, is not copied.

    Returns:
        The batch in a list, which is empty if the loader has no batches. None if the batch cannot
        be read without changing the data of the training, as for a stream.
    """
    batches = getattr(loader, "batch_sampler", None)
    if batches is None or _is_stream(loader):
        return None
    dataset = loader.dataset
    shared_objects = {id(shared): shared for shared in (dataset, *network.modules())}
    # Copying attributes of a user's sampler or collator may raise any error.
    try:
        copied_batches = copy.deepcopy(batches, shared_objects)
    except Exception:
        return None
    try:
        collate = copy.deepcopy(loader.collate_fn, shared_objects)
    except Exception:
        collate = loader.collate_fn
    indices = list(itertools.islice(copied_batches, 1))
    return list(DataLoader(dataset, batch_sampler=indices, collate_fn=collate))


def _shared_loader(loader: Any) -> Any:
    """Return a loader through which the processes together read every example of the run once.

    This is needed because the samplers of a distributed run repeat some examples, so that all
    processes get equally many. If the sampler is weighted, all of its draws are read, including
    repetitions.
    """
    num_ranks = process_group().size
    batches = getattr(loader, "batch_sampler", None)
    batch_size = getattr(batches, "batch_size", None)
    has_length = isinstance(getattr(loader, "dataset", None), Sized)
    if num_ranks == 1 or _is_stream(loader) or not has_length:
        return loader
    if batch_size is None:
        # The batches are made by the data set or by a user's sampler, so leave the loader as it is.
        return loader
    indices = _indices_of_run(loader)
    dataset = loader.dataset if indices is None else Subset(loader.dataset, indices)
    shares = ShardedBatches(dataset, num_ranks * batch_size, shuffle=_is_shuffled(loader))
    return with_batches(loader, dataset, shares)


def _is_stream(loader: Any) -> bool:
    """Whether the loader reads a stream, which may have a length, but has no indices."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def _without_lightning(sampler: Any) -> Any:
    """Unwrap a sampler that Lightning has wrapped to divide its draws among the processes.

    Lightning's wrapper is a `DistributedSampler` whose data set contains the sampler.
    """
    return getattr(getattr(sampler, "dataset", None), "_sampler", sampler)


def _is_weighted(loader: Any) -> bool:
    """Whether the run draws examples from the data set with weights."""
    if getattr(loader, "batch_sampler", None) is None:
        return False
    return isinstance(_without_lightning(inner_sampler(loader)), WeightedRandomSampler)


def _is_shuffled(loader: Any) -> bool:
    """Whether the run reads the examples in random order.

    If so, the first batches, which some modes of `fit` are restricted to, contain all classes.
    """
    sampler = inner_sampler(loader)
    if isinstance(sampler, DistributedSampler):
        return sampler.shuffle
    return not isinstance(sampler, SequentialSampler)


def _indices_of_run(loader: Any) -> list[int] | None:
    """Return the indices of the examples that the run draws from, or None for the whole data set.

    For a weighted sampler, these are the examples that it draws in one pass.
    """
    ranks = process_group()
    inner = inner_sampler(loader)
    sampler = _without_lightning(inner)
    if sampler is not inner or isinstance(sampler, WeightedRandomSampler):
        return ranks.from_rank(list(sampler), 0)
    if isinstance(sampler, (RandomSampler, SequentialSampler, DistributedSampler)):
        return None
    indices_by_rank = ranks.exchange(list(sampler))
    return sorted(set(itertools.chain.from_iterable(indices_by_rank)))


def _num_data(loader: Any, mode: str) -> int | None:
    """Return the number of training examples to pass to `fit` as `num_data`.

    Users of the callbacks cannot pass this argument themselves.

    Returns:
        The number of examples that the loader draws from; None if `fit` can count them itself, or
        if the number is unknown.
    """
    dataset = getattr(loader, "dataset", None)
    batches = getattr(loader, "batch_sampler", None)
    if batches is None or not isinstance(dataset, Sized):
        return None
    if _is_stream(loader) and process_group().size > 1:
        # The length may be that of this process's part or of the whole stream.
        return None
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, RandomSampler) or _is_weighted(loader):
        # The sampler may draw with replacement, so its length can differ from the number of
        # examples.
        return len(dataset)
    if mode == "full" and not getattr(batches, "drop_last", False):
        return None
    return len(sampler) if isinstance(sampler, Sized) else len(dataset)


@dataclass(frozen=True)
class EndOfTraining:
    """The results of tuning and evaluating a posterior; empty if it was not tuned.

    Attributes:
        numbers: Numbers to log, by name.
        report: The evaluation on the validation data, which were also used for tuning.
        tuning: The result of the tuning.
    """

    numbers: Mapping[str, float] = field(default_factory=dict)
    report: Report | None = None
    tuning: Tuning | None = None


@dataclass(frozen=True)
class PosteriorAtEnd:
    """The settings of a posterior that is fitted when training ends.

    Attributes:
        likelihood: The likelihood; see `Laplace`.
        mode: The mode of the fit; see `Laplace.fit`.
        tune: Whether to tune and evaluate the posterior on validation data.
        options: The other arguments of `Laplace`.
    """

    likelihood: str | Likelihood
    mode: str
    tune: bool
    options: Mapping[str, Any]

    def describe_callback(self, posterior_path: Path | None) -> str:
        """Return the `repr` of a callback with these settings.

        Args:
            posterior_path: The file of the fitted posterior; None before the end of training.
        """
        arguments = {"likelihood": self.likelihood, "mode": self.mode, "tune": self.tune}
        listed = [f"{name}={value!r}" for name, value in {**arguments, **self.options}.items()]
        state = "not fitted" if posterior_path is None else f"saved to {posterior_path}"
        return f"LaplaceCallback({', '.join(listed)}): {state}"

    def unfitted(self, network: nn.Module) -> Laplace:
        """Return an unfitted `Laplace` for a network, which must be in eval mode."""
        return Laplace(network, self.likelihood, **self.options)

    def check(self, network: nn.Module, train_loader: Any, validation_loader: Any) -> None:
        """Check the loaders, and their first batches as a fit does, before training starts.

        The first batch of a stream is not read, because the training would then start without it.

        Args:
            network: The network, in training or eval mode.
            train_loader: The training loader.
            validation_loader: The validation loader; None without tuning.

        Raises:
            Exception: If `Laplace` rejects the options, or the fit would reject the data or the
                network.
        """
        la = self.unfitted(copy_in_eval_mode(network))
        self._check_loaders(train_loader, validation_loader)
        with _unchanged_random_states(network):
            train_batches = _first_batch(train_loader, network)
            if train_batches is not None:
                self._check_batches(la, train_batches, "training")
            validation_batches = _first_batch(validation_loader, network)
            if validation_batches is not None:
                self._check_batches(la, validation_batches, "validation")

    def _check_batches(self, la: Laplace, batches: list[Any], purpose: str) -> None:
        """Check batches by planning a fit to them, and warn if memory is likely to be too small."""
        try:
            # A fit with `mode="auto"` runs like cross-fitting, but cannot be planned.
            with warnings.catch_warnings():
                # The fit may read examples that use these parameters, and warns if it does not.
                warnings.filterwarnings("ignore", "The outputs of the first batch do not depend on")
                plan = la.plan(batches, "crossfit" if self.mode == "auto" else self.mode)
        except UnusedParametersError as error:
            # Other batches may use the parameters, as in a mixture of experts.
            warn(f"The fit at the end of training fails if its data is like this batch. {error}")
            return
        except Exception as error:
            error.add_note(f"The posterior was checked on the first batch of the {purpose} data.")
            raise
        try:
            plan.check()
        except ValueError as error:
            warn(f"The posterior may not fit into memory at the end of training. {error}")

    def _check_loaders(self, train_loader: Any, validation_loader: Any) -> None:
        """Check the loaders without reading them.

        Raises:
            ValueError: If the fit reads only a part of the data and the loader does not reveal the
                size of the data, if `mode="auto"` is not possible with the curvature or the order
                of the training data, if accelerate may repeat examples of a stream, or if the
                sampler of the validation data repeats examples.
        """
        if self.mode != "full" and _num_data(train_loader, self.mode) is None:
            raise ValueError(
                f'`mode="{self.mode}"` uses only part of the data, and the number of training '
                "examples cannot be inferred from the training loader. Pass "
                '`mode="full"` to the callback, or use Laplace after the training.'
            )
        if self.mode == "auto":
            curvature = self.options.get("curvature", "kfac")
            Auto(train_loader).check(curvature_structure(curvature, self.options.get("rank")))
        for loader in (train_loader, validation_loader):
            if _is_stream(loader):
                check_dispatched(loader)
        if self.tune and getattr(validation_loader, "batch_sampler", None) is not None:
            sampler = _without_lightning(inner_sampler(validation_loader))
            fault = fault_of_draws(sampler, allows_parts=True)
            if fault is not None:
                raise repeated_held_out(fault)

    @_without_tf32()
    def fit(self, la: Laplace, train_loader: Any, validation_loader: Any) -> EndOfTraining:
        """Fit, tune and evaluate a posterior."""
        shared_loader = _shared_loader(train_loader)
        # If the sampler is weighted, the shared loader contains only its draws, not the whole data
        # set.
        sized_loader = train_loader if _is_weighted(train_loader) else shared_loader
        la.fit(shared_loader, mode=self.mode, num_data=_num_data(sized_loader, self.mode))
        if not self.tune:
            return EndOfTraining()
        validation_loader = _shared_loader(validation_loader)
        tuning = la.tune(validation_loader)
        report = la.evaluate(validation_loader)
        # After `tune`, the network of a regression is evaluated with the same noise.
        network_report = la.evaluate(validation_loader, method="map", intervals=False)
        numbers = {f"network_{name}": metric.value for name, metric in network_report.items()}
        numbers |= {f"laplace_{name}": metric.value for name, metric in report.items()}
        numbers["laplace_prior_precision"] = float(la.prior_precision)
        if tuning.link is not None:
            numbers["laplace_temperature"] = tuning.link.temperature
        return EndOfTraining(numbers, report, tuning)
