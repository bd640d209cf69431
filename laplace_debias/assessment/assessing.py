"""Assess a network by comparing several methods."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from laplace_debias.assessment.measures import measure
from laplace_debias.assessment.methods import (
    Method,
    PosteriorChoice,
    check_methods,
    default_methods,
)
from laplace_debias.assessment.posteriors import TRAINING_EXAMPLES
from laplace_debias.assessment.run import Run, evaluation_sets, run_record
from laplace_debias.assessment.stages import fit, predict
from laplace_debias.curvature.data.batch_reader import BatchReader
from laplace_debias.curvature.data.batches import Batches
from laplace_debias.curvature.network.fingerprints import checksum
from laplace_debias.laplace.fitting.resuming import likelihood_identity, random_samplers_of
from laplace_debias.runs.folder import RunFolder
from laplace_debias.sources.changed import Changed
from laplace_debias.sources.image_files import files_of
from laplace_debias.sources.loaded import Loaded
from laplace_debias.system.ranks import alone, process_group


def assess(
    loaded: Loaded,
    output: str | Path,
    methods: Sequence[Method] | None = None,
    *,
    title: str = "",
    settings: Mapping[str, Any] | None = None,
    config: str | None = None,
    seed: int = 0,
    seconds: Mapping[str, float] | None = None,
    overwrite: bool = False,
    log: Callable[[str], object] | None = None,
) -> Path:
    """Compare methods on a network's data and write the results into a run folder.

    In a process group, the processes share the work. All processes must call this function with the
    same arguments and the complete data, and must have access to the folder. Only the first process
    writes to the folder.

    Every posterior is fitted to the training examples and tuned on the validation examples. If
    there are no validation examples, it is tuned by the marginal likelihood. To resume an
    interrupted run, make the same call again: the run continues after its last complete part, and
    ends with the same predictions. A run is identified by its settings and by checksums of the
    network and of the data that it reads. For folders of images, the checksum uses the files'
    names, sizes and times, and the first batch.

    Args:
        loaded: The network and its data.
        output: The run folder: a new folder, or the folder of the same run, which is then resumed.
        methods: Methods to compare; the first one must be the network. Default: `default_methods`.
        title: Title of the page.
        settings: Further settings that identify the run, as plain data, such as the source of the
            network and its data.
        config: The text of `config.yaml`, with which the run can be repeated; None to write no such
            file.
        seed: Seed of all random choices.
        seconds: Times of earlier stages by name, in seconds, to be added to `seconds` in
            `run.json`.
        overwrite: Whether to remove an earlier run in the folder first.
        log: A function that is called with a line of text before each step, such as `print`.

    Raises:
        FileExistsError: If the folder contains other files, or a run with other settings.
        ValueError: If the methods and the data do not match. Also raises the errors of `Laplace`.
        OSError: If the folder cannot be written to. If the disk was full, the same call resumes the
            run.
    """
    if methods is None:
        methods = default_methods(loaded)
    methods = tuple(methods)
    check_methods(methods, loaded)
    identity = _identity(loaded, methods, settings or {}, seed)
    folder = RunFolder(output)
    ranks = process_group()
    # If there are several processes, only the first one prepares the folder and writes to it.
    earlier = folder.open(identity, overwrite) if ranks.rank == 0 else None
    earlier = ranks.from_rank(earlier, 0)
    record = run_record(
        loaded, methods, identity, earlier, title=title, seed=seed, seconds=seconds or {}
    )
    run = Run(loaded, methods, folder, record, seed=seed, log=log or (lambda line: None))
    # Write `run.json` first, because it marks the folder as a run folder. (For the same reason, it
    # is removed last.)
    run.write()
    if config is not None:
        folder.write_config(config)
    predict(run, fit(run))
    if ranks.rank == 0:
        with alone():
            measure(run)
    ranks.exchange(None)
    return folder.path


def _identity(
    loaded: Loaded, methods: Sequence[Method], settings: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """Return the settings of a run, including checksums of the network and of the data it reads."""
    identity = {
        "task": loaded.task,
        "seed": seed,
        "settings": dict(settings),
        "methods": {method.key: _method_identity(method) for method in methods},
        "model": checksum(loaded.model),
        "others": [checksum(model) for model in loaded.further_models],
        "likelihood": likelihood_identity(loaded.likelihood),
        "data": {
            name: _data_checksum(batches, loaded.model)
            for name, batches in evaluation_sets(loaded).items()
        },
        "training data": _data_checksum(loaded.train, loaded.model, _num_read(methods)),
        "validation data": None,
        "num_train": loaded.num_train,
    }
    if loaded.validation is not None:
        identity["validation data"] = _data_checksum(loaded.validation, loaded.model)
    return identity


def _method_identity(method: Method) -> dict[str, Any]:
    """Return the settings of a method under the keys that run folders use."""
    settings = dataclasses.asdict(method)
    settings["of_all"] = settings.pop("uses_all_checkpoints")
    if isinstance(method.posterior, Path):
        with method.posterior.open("rb") as file:
            settings["posterior checksum"] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return settings


def _num_read(methods: Sequence[Method]) -> int | None:
    """Return how many training examples a run reads, or None if it reads all of them."""
    largest = TRAINING_EXAMPLES
    for method in methods:
        choice = method.posterior
        if not isinstance(choice, PosteriorChoice):
            continue
        if choice.num_read is None:
            return None
        largest = max(largest, choice.num_read)
    return largest


def _data_checksum(batches: Batches, model: nn.Module, limit: int | None = None) -> str:
    """Compute a checksum of a set, or of its first examples, which depends on their order.

    Decoding all images of a folder, or corrupting all images of a set, can take as long as
    predicting them. Therefore, only the first batch of such a set is read, in addition to the
    properties of the files or the uncorrupted images. A loader that shuffles gets no checksum.
    """
    digest = hashlib.blake2b(digest_size=8)
    # Out-of-distribution data may lack targets; the checksum then uses zeros.
    read = BatchReader(model, needs_targets=False)
    source = batches.source if isinstance(batches, Changed) else batches
    if random_samplers_of(source):
        # The order of the examples differs in every pass, so the checksum would differ, too.
        return "in random order"
    files = files_of(source)
    if files is not None or isinstance(batches, Changed):
        for batch in islice(batches, 1):
            digest.update(read(batch).mark.encode())
    if files is None:
        for mark in _marks(source, read, limit):
            digest.update(mark.encode())
    else:
        for file, label in files[:limit]:
            status = file.stat()
            mark = f"{file} {label} {status.st_size} {status.st_mtime_ns}\n"
            digest.update(mark.encode())
    return digest.hexdigest()


def _marks(batches: Batches, read: BatchReader, limit: int | None) -> Iterator[str]:
    """Yield a string per batch that depends on all its entries, until `limit` examples are read."""
    num_examples = 0
    for loaded_batch in batches:
        batch = read(loaded_batch)
        yield batch.mark
        num_examples += batch.num_examples
        if limit is not None and num_examples >= limit:
            return
