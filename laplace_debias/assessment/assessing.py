"""The assessment of a network by several methods, which are compared."""

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
from laplace_debias.curvature.network.batch_reader import BatchReader
from laplace_debias.curvature.network.batches import Batches
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

    In a process group the processes share the work: all of them call it with the same arguments and
    whole data, and have access to the folder, to which the first one writes.

    Every posterior is fitted to the training examples and tuned on the validation examples; without
    these by the marginal likelihood. A run that was interrupted resumes after its last complete
    part and ends with the same predictions. Checksums of the network and of the data that the run
    reads show that it is the same run. For folders of images, these are of the files' names, sizes
    and times, and of the first batch.

    Args:
        loaded: The network and its data.
        output: The folder, a new one or that of the same run.
        methods: Methods to compare, the network first; `default_methods` if None.
        title: Title of the page.
        settings: Further settings that identify a run, plain data: for example where the network
            and its data come from.
        config: The text of `config.yaml`, which repeats the run; no such file if None.
        seed: Seed of all random choices.
        seconds: Seconds of earlier stages by name, for `seconds` of `run.json`.
        overwrite: Whether an earlier run in the folder is removed first.
        log: Called with a line on what it does next, such as `print`.

    Raises:
        FileExistsError: If the folder holds other files, or a run of other settings.
        ValueError: If methods or data do not fit each other, or `Laplace` raises it.
        OSError: If the folder cannot be written; after a full disk the same call resumes.
    """
    if methods is None:
        methods = default_methods(loaded)
    methods = tuple(methods)
    check_methods(methods, loaded)
    identity = _identity(loaded, methods, settings or {}, seed)
    folder = RunFolder(output)
    ranks = process_group()
    # With several processes the first one prepares the folder, and writes to it.
    earlier = folder.open(identity, overwrite) if ranks.rank == 0 else None
    earlier = ranks.from_rank(earlier, 0)
    record = run_record(
        loaded, methods, identity, earlier, title=title, seed=seed, seconds=seconds or {}
    )
    run = Run(loaded, methods, folder, record, seed=seed, log=log or (lambda line: None))
    # `run.json` is written first and removed last: it marks a folder as that of a run.
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
    """The settings of a run, with checksums of the network and of the data that it reads."""
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
    """The settings of a method, by the keys that run folders have."""
    settings = dataclasses.asdict(method)
    settings["of_all"] = settings.pop("uses_all_checkpoints")
    if isinstance(method.posterior, Path):
        with method.posterior.open("rb") as file:
            settings["posterior checksum"] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return settings


def _num_read(methods: Sequence[Method]) -> int | None:
    """The number of training examples that a run reads, from the first on; None for all."""
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
    """Hash a set, or its first examples, in their order.

    Decoding all images of a folder, or corrupting all images of a set, may take as long as the
    predictions. So only the first batch of such a set is read, besides the properties of the files
    or the images before the change. A loader that shuffles is not compared.
    """
    digest = hashlib.blake2b(digest_size=8)
    # Out-of-distribution data may lack targets, and their checksum then has zeros.
    read = BatchReader(model, needs_targets=False)
    source = batches.source if isinstance(batches, Changed) else batches
    if random_samplers_of(source):
        # The order of the examples is another one in every pass.
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
    """A text for each batch that depends on all of its entries, until a number of examples."""
    num_examples = 0
    for loaded_batch in batches:
        batch = read(loaded_batch)
        yield batch.mark
        num_examples += batch.num_examples
        if limit is not None and num_examples >= limit:
            return
