"""A network's uncertainty assessed: methods fitted, tuned, predicted with and compared."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from laplace_debias.assessment.measures import measure
from laplace_debias.assessment.methods import Method, check_methods, default_methods
from laplace_debias.assessment.run import Run, sets_of
from laplace_debias.assessment.run_folder import open_folder, write_bytes
from laplace_debias.assessment.stages import fit, predict
from laplace_debias.curvature.network.fingerprints import checksum
from laplace_debias.curvature.network.inputs import tensors_of
from laplace_debias.sources.loaded import Loaded
from laplace_debias.system.ranks import alone, current


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
    told: Callable[[str], object] | None = None,
) -> Path:
    """Compare methods on a network's data and write what was found into a run folder.

    In a process group the processes share the work: all of them call it with the same arguments and
    whole data, and see the folder, to which the first one writes.

    Every posterior is fitted to the training examples and tuned on the validation examples; without
    these by the marginal likelihood. A run that was broken off goes on with what is complete and
    ends with the same predictions.

    Args:
        loaded: The network and its data.
        output: The folder, a new one or that of the same run.
        methods: Methods to compare, the network first; `default_methods` if None.
        title: Title of the page.
        settings: Further settings that identify a run, plain data: where the network and its data
            come from, say.
        config: The text of `config.yaml`, which repeats the run; no such file if None.
        seed: Of everything that is drawn.
        seconds: Seconds of earlier stages by name, for `seconds` of `run.json`.
        overwrite: Whether an earlier run in the folder is removed first.
        told: Called with a line on what it does next, such as `print`.

    Raises:
        FileExistsError: If the folder holds other files, or a run of other settings.
        ValueError: If methods or data do not fit each other; as `Laplace`.
        OSError: If the folder cannot be written; after a full disk the same call goes on.
    """
    has_validation = loaded.validation is not None
    methods = default_methods(loaded.task, has_validation) if methods is None else tuple(methods)
    check_methods(methods, loaded.task, has_validation)
    sets, marks = sets_of(loaded), dict[str, list[int]]()
    for name, batches in sets.items():
        # Of the first batch: other data under the same path are found.
        batch: Any = next(iter(batches), ())
        parts = batch.values() if isinstance(batch, Mapping) else batch
        found = [x.detach().cpu().contiguous() for part in parts for x in tensors_of(part)]
        marks[name] = [crc32(x.numpy().tobytes()) for x in found]
    identity = {
        "task": loaded.task,
        "seed": seed,
        "settings": dict(settings or {}),
        "methods": {method.key: dataclasses.asdict(method) for method in methods},
        "model": checksum(loaded.model),
        "others": [checksum(model) for model in loaded.others],
        "data": marks,
        "num_train": loaded.num_train,
    }
    folder, ranks = Path(output), current()
    # Of several processes the first one looks at the folder, and writes to it.
    earlier = open_folder(folder, identity, overwrite) if ranks.rank == 0 else None
    earlier = ranks.from_rank(earlier, 0) or {}
    run = Run(loaded, folder, methods, sets, seed, told or (lambda line: None))
    # `run.json` comes first and goes last: a folder with it is known for a run's.
    run.begin(earlier, identity, title, seconds or {})
    if config is not None:
        write_bytes(folder / "config.yaml", config.encode())
    predict(run, fit(run))
    if ranks.rank == 0:
        with alone():
            measure(run)
    ranks.exchange(None)
    return folder
