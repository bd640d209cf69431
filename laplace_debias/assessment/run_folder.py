"""The run folder: whether a run there can be gone on with; its files, each written whole."""

import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from laplace_debias.report.run_folder import read_meta, read_table
from laplace_debias.system.files import differences, written_atomically
from laplace_debias.system.ranks import current
from laplace_debias.system.shown import plain

_METADATA = b"laplace_debias"
_OURS = (
    *("config.yaml", "metrics.json", "examples.json", "report.html"),
    *("predictions", "posteriors", "sweeps", "spectra", "examples", "pictures", "state"),
    # The last one that is removed: without it the rest is somebody else's files.
    "run.json",
)


def open_folder(
    folder: Path, identity: Mapping[str, Any], overwrite: bool
) -> dict[str, Any] | None:
    """Look at the folder before work begins: `run.json` of the same run, or None."""
    if folder.is_dir() and overwrite and (folder / "run.json").exists():
        for name in _OURS:  # Other files stay.
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return None
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; name a folder as --output")
    run = read_meta(folder) if (folder / "run.json").exists() else None
    if run is None:
        if others := sorted(path.name for path in folder.glob("[!.]*")):
            raise FileExistsError(
                f"{folder} holds other files ({', '.join(others[:3])}"
                f"{', …' if len(others) > 3 else ''}); name an empty folder as --output"
            )
        return None
    if different := differences(run.get("identity", {}), plain(identity)):
        raise FileExistsError(
            f"{folder} holds a run of other settings ({different}); give another --output, "
            "or --overwrite to begin anew there"
        )
    for path in folder.rglob(".*.partial"):  # A run that was killed left them.
        path.unlink(missing_ok=True)
    return run


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all.

    Of several processes the first one writes, and the others wait for it.
    """
    ranks = current()
    if ranks.rank == 0:
        with written_atomically(path) as temporary:
            temporary.write_bytes(data)
    ranks.exchange(None)


def write_json(path: Path, value: Any) -> None:
    """Write JSON; a number that is not finite becomes null."""
    text = json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False)
    write_bytes(path, f"{text}\n".encode())


def write_table(path: Path, columns: Mapping[str, Tensor], told: Mapping[str, Any]) -> None:
    """Write a Parquet table of columns `[n]` or `[n, k]`, NaN as null; `told` is its metadata."""
    import pyarrow as pa
    from pyarrow import parquet

    arrays = {
        name: pa.array(list(x.numpy()) if x.ndim == 2 else x.numpy(), from_pandas=True)
        for name, x in columns.items()
    }
    table = pa.table(arrays).replace_schema_metadata({_METADATA: json.dumps(told).encode()})
    buffer = io.BytesIO()
    parquet.write_table(table, buffer)
    write_bytes(path, buffer.getvalue())


def table_says(path: Path) -> dict[str, Any] | None:
    """The table's own description; None if there is none, or none that can be read."""
    from pyarrow import ArrowException, parquet

    try:
        found = parquet.read_schema(path).metadata or {}
        return json.loads(found[_METADATA])
    except (OSError, KeyError, ValueError, ArrowException):
        return None


def read_predictions(path: Path) -> dict[str, Tensor]:
    """The columns of a table of predictions."""
    return {name: torch.from_numpy(np.array(x)) for name, x in read_table(path).items()}


def write_picture(path: Path, pixels: UInt8[Tensor, "height width 3"]) -> None:
    """Write a PNG."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels.cpu().numpy()).save(buffer, "PNG")
    write_bytes(path, buffer.getvalue())
