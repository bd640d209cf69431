"""The assessment of a network by several methods, which are compared."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from laplace_debias.assessment.measures import measure
from laplace_debias.assessment.methods import Method, check_methods, default_methods
from laplace_debias.assessment.run_writer import RunWriter, evaluation_sets
from laplace_debias.assessment.stages import fit, predict
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.fingerprints import checksum
from laplace_debias.curvature.network.inputs import tensors_of
from laplace_debias.runs.folder import RunFolder
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
    part and ends with the same predictions.

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
    sets = evaluation_sets(loaded)
    identity = {
        "task": loaded.task,
        "seed": seed,
        "settings": dict(settings or {}),
        "methods": {method.key: _identity(method) for method in methods},
        "model": checksum(loaded.model),
        "others": [checksum(model) for model in loaded.further_models],
        "data": {name: _first_batch_checksums(batches) for name, batches in sets.items()},
        "num_train": loaded.num_train,
    }
    folder = RunFolder(output)
    ranks = process_group()
    # With several processes the first one prepares the folder, and writes to it.
    earlier = folder.open(identity, overwrite) if ranks.rank == 0 else None
    earlier = ranks.from_rank(earlier, 0)
    run = RunWriter(loaded, folder, methods, sets, seed, log or (lambda line: None))
    # `run.json` is written first and removed last: it marks a folder as that of a run.
    run.begin(earlier, identity, title, seconds or {})
    if config is not None:
        folder.write_config(config)
    predict(run, fit(run))
    if ranks.rank == 0:
        with alone():
            measure(run)
    ranks.exchange(None)
    return folder.path


def _identity(method: Method) -> dict[str, Any]:
    """The settings of a method, by the keys that run folders have."""
    settings = dataclasses.asdict(method)
    settings["of_all"] = settings.pop("uses_all_checkpoints")
    return settings


def _first_batch_checksums(batches: Batches) -> list[int]:
    """Checksums of a set's first batch, which differ for other data under the same path."""
    batch: Any = next(iter(batches), ())
    entries = batch.values() if isinstance(batch, Mapping) else batch
    tensors = [x.detach().cpu().contiguous() for entry in entries for x in tensors_of(entry)]
    return [crc32(x.numpy().tobytes()) for x in tensors]
