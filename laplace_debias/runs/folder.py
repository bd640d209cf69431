"""The folder of a run. Its files are written atomically, and checked when they are read."""

import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import UInt8

from laplace_debias.runs.records import (
    FORMAT,
    ExampleGroups,
    Measurements,
    PredictionsSummary,
    RunRecord,
    Sweep,
    from_json,
    to_json,
)
from laplace_debias.system.files import differences, written_atomically
from laplace_debias.system.ranks import process_group
from laplace_debias.system.shown import first_names, plain

Record = TypeVar("Record")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Pattern for names of methods and sets, which also name files and parts of figures."""
_METADATA = b"laplace_debias"
_AGAIN = "Run `laplace-debias report` again with the same settings to resume the run"
_OURS = (
    "config.yaml",
    "metrics.json",
    "examples.json",
    "report.html",
    "predictions",
    "posteriors",
    "sweeps",
    "spectra",
    "examples",
    "pictures",
    "state",
    # Remove `run.json` last, because the folder is not recognised as a run without it.
    "run.json",
)


class RunFolder:
    """The folder that contains a run.

    If there are several processes, the first one writes each file while the others wait.

    Attributes:
        path: The folder.
        page: The HTML page of the run.
        config: The settings file with which the run can be repeated.
        state: The folder in which fits save their state, so that they can be resumed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.page = self.path / "report.html"
        self.config = self.path / "config.yaml"
        self.state = self.path / "state"
        self._record = self.path / "run.json"
        self._measurements = self.path / "metrics.json"
        self._examples = self.path / "examples.json"

    # ----------------------------------------------------------------------------- paths

    def predictions(self, method: str, set_name: str) -> Path:
        """Return the path of the table of a method's predictions for a set."""
        return self.path / "predictions" / method / f"{set_name}.parquet"

    def posterior(self, name: str) -> Path:
        """Return the path of a posterior's file."""
        return self.path / "posteriors" / f"{name}.safetensors"

    def sweep(self, name: str) -> Path:
        """Return the path where the search for a posterior's prior precision is recorded."""
        return self.path / "sweeps" / f"{name}.json"

    def example(self, index: int) -> Path:
        """Return the path of the image of a test example."""
        return self.path / "examples" / f"{index}.png"

    def figure(self, name: str) -> Path:
        """Return the path of a figure of the page."""
        return self.path / "pictures" / f"{name}.svg"

    # --------------------------------------------------------------------------- reading

    def read_record(self) -> RunRecord:
        """Read the `run.json` of a run, which may be incomplete.

        Raises:
            FileNotFoundError: If there is no run.
            ValueError: If the file has a different format version or is damaged.
        """
        if not self._record.is_file():
            state = "does not exist"
            if self.path.is_file():
                state = "is a file, not a run folder"
            elif self.path.is_dir():
                state = "is not a run folder, because it has no run.json"
            raise FileNotFoundError(
                f"{self.path} {state}. Pass a folder that `laplace-debias report --output` wrote."
            )
        content = read_json(self._record)
        if content.get("format") != FORMAT:
            raise ValueError(
                f"{self._record} has format {content.get('format')!r}, but this version "
                f"supports format {FORMAT}. Use the version of the library that wrote "
                "this folder, or pass a different folder."
            )
        with _naming_damaged_file(self._record):
            return from_json(RunRecord, content)

    def read_complete_record(self) -> RunRecord:
        """Read the `run.json` of a complete run, from which the page can be drawn.

        Raises:
            FileNotFoundError: If there is no run, or the run has no metrics.
            ValueError: If the run is not complete or is damaged.
        """
        record = self.read_record()
        if record.status != "complete":
            raise ValueError(f"The run in {self.path} is not complete ({record.status}). {_AGAIN}.")
        if not self._measurements.is_file():
            raise FileNotFoundError(f"{self.path} has no metrics.json. {_AGAIN}.")
        with _naming_damaged_file(self._record):
            if not record.methods or not record.sets_of("test"):
                raise ValueError('it has no methods, or no data set whose role is "test"')
            names = [method.key for method in record.methods]
            names += [dataset.name for dataset in record.sets]
            for name in names:
                if not NAME.fullmatch(name):
                    raise ValueError(
                        f"the name {name!r} contains characters other than letters, digits, '.', "
                        "'_' and '-'"
                    )
        return record

    def read_measurements(self) -> Measurements:
        """Read `metrics.json`."""
        return self._read_record_file(Measurements, self._measurements)

    def read_sweep(self, name: str) -> Sweep:
        """Read the record of a search for a prior precision; it is empty if there is no file."""
        return self._read_or_empty(Sweep, self.sweep(name))

    def read_examples(self) -> ExampleGroups:
        """Read the groups of notable examples; they are empty if there is no file."""
        return self._read_or_empty(ExampleGroups, self._examples)

    def _read_record_file(self, kind: type[Record], path: Path) -> Record:
        content = read_json(path)
        with _naming_damaged_file(path):
            return from_json(kind, content)

    def _read_or_empty(self, kind: type[Record], path: Path) -> Record:
        return self._read_record_file(kind, path) if path.is_file() else kind()

    def read_predictions(self, method: str, set_name: str, *columns: str) -> dict[str, np.ndarray]:
        """Read the named columns of a table of predictions, or all columns; nulls become NaN.

        Returns:
            The columns by name, as arrays `[n]` or `[n, k]`. Columns that do not exist are left
            out.
        """
        path = self.predictions(method, set_name)
        arrays: dict[str, np.ndarray] = {}
        with _naming_damaged_file(path):
            names = [name for name in pq.read_schema(path).names if name in columns or not columns]
            table = pq.read_table(path, columns=names)
            for name in table.column_names:
                arrays[name] = _to_array(table[name].combine_chunks())
        return arrays

    def predictions_summary(self, method: str, set_name: str) -> PredictionsSummary | None:
        """Return the summary of a complete table, or None if there is no such table."""
        ranks = process_group()
        content = None
        if ranks.rank == 0:
            content = _metadata(self.predictions(method, set_name))
        content = ranks.from_rank(content, 0)
        return None if content is None else from_json(PredictionsSummary, content)

    # --------------------------------------------------------------------------- writing

    def open(self, identity: Mapping[str, Any], overwrite: bool) -> RunRecord | None:
        """Prepare the folder for a run before work begins.

        Returns:
            The earlier record if the folder already contains this run, otherwise None.

        Raises:
            FileExistsError: If the path is a file, or if the folder contains other files or a run
                with different settings.
        """
        if self.path.is_dir() and overwrite and self._record.exists():
            self._remove_run()
            return None
        if self.path.exists() and not self.path.is_dir():
            raise FileExistsError(f"{self.path} is a file. Pass the path of a folder as --output.")
        if not self._record.exists():
            names = sorted(path.name for path in self.path.glob("[!.]*"))
            if names:
                raise FileExistsError(
                    f"{self.path} contains other files ({first_names(names)}). Pass an empty "
                    "folder as --output."
                )
            return None
        record = self.read_record()
        unknown = [name for name in identity if name not in record.identity]
        if unknown:
            raise FileExistsError(
                f"{self.path} contains a run of an earlier version, whose {' and '.join(unknown)} "
                "cannot be compared with this run. Pass a different --output, or add "
                "--overwrite to start again in this folder."
            )
        changed = differences(record.identity, plain(identity))
        if changed:
            raise FileExistsError(
                f"{self.path} contains a run with different settings ({changed}). Pass a "
                "different --output, or add --overwrite to start again in this folder."
            )
        for path in self.path.rglob(".*.partial"):  # A killed run leaves partial files.
            path.unlink(missing_ok=True)
        return record

    def _remove_run(self) -> None:
        """Remove the files of a run, but no other files."""
        for name in _OURS:
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def write_record(self, record: RunRecord) -> None:
        """Write `run.json`."""
        write_json(self._record, record)

    def write_config(self, text: str) -> None:
        """Write `config.yaml`."""
        write_bytes(self.config, text.encode())

    def write_measurements(self, measurements: Measurements) -> None:
        """Write `metrics.json`."""
        write_json(self._measurements, measurements)

    def write_sweep(self, name: str, sweep: Sweep) -> None:
        """Write the record of a search for a prior precision."""
        write_json(self.sweep(name), sweep)

    def write_examples(self, examples: ExampleGroups) -> None:
        """Write the groups of notable examples."""
        write_json(self._examples, examples)

    def write_example_image(self, index: int, pixels: UInt8[np.ndarray, "height width 3"]) -> None:
        """Write the image of an example as PNG."""
        from PIL import Image

        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        write_bytes(self.example(index), buffer.getvalue())

    def write_predictions(
        self,
        method: str,
        set_name: str,
        columns: Mapping[str, np.ndarray],
        summary: PredictionsSummary,
    ) -> None:
        """Write columns `[n]` or `[n, k]` and their summary as a table, and replace NaN by null."""
        arrays = {
            name: pa.array(list(values) if values.ndim == 2 else values, from_pandas=True)
            for name, values in columns.items()
        }
        metadata = {_METADATA: json.dumps(to_json(summary)).encode()}
        table = pa.table(arrays).replace_schema_metadata(metadata)
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        write_bytes(self.predictions(method, set_name), buffer.getvalue())

    def remove_state(self) -> None:
        """Remove the state that fits have saved for resuming."""
        shutil.rmtree(self.state, ignore_errors=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically in the first process.

    The other processes wait until the file is complete.
    """
    ranks = process_group()
    if ranks.rank == 0:
        with written_atomically(path) as temporary:
            temporary.write_bytes(data)
    ranks.exchange(None)


def write_json(path: Path, record: Any) -> None:
    """Write a record as JSON; a number that is not finite becomes null."""
    text = json.dumps(plain(to_json(record)), indent=1, ensure_ascii=False, allow_nan=False)
    write_bytes(path, f"{text}\n".encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: If the file is damaged. The message names the file.
    """
    with _naming_damaged_file(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError("it is not a JSON object")
        return content


def _to_array(column: pa.Array) -> np.ndarray:
    """Convert a column of numbers to an array `[n]`, or a column of lists to an array `[n, k]`."""
    if not pa.types.is_nested(column.type):
        return column.to_numpy(zero_copy_only=False)
    entries = column.flatten().to_numpy(zero_copy_only=False)
    return np.array(entries).reshape(len(column), -1)


def _metadata(path: Path) -> dict[str, Any] | None:
    """Return the summary in a table, or None if it cannot be read."""
    try:
        metadata = pq.read_schema(path).metadata or {}
        return json.loads(metadata[_METADATA])
    except (OSError, KeyError, ValueError, pa.ArrowException):
        return None


@contextmanager
def _naming_damaged_file(path: Path) -> Iterator[None]:
    """If reading a file fails, raise an error that names the file and the remedy."""
    try:
        yield
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
    ) as error:
        reason = type(error).__name__
        if str(error):
            reason = str(error).splitlines()[0]
        if isinstance(error, KeyError):
            reason += " is missing"
        raise ValueError(f"{path} is damaged ({reason}). Delete it. {_AGAIN}.") from error
