"""Tables: CSV and Parquet."""

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from laplace_debias.sources.settings import SourceSettings, nearest
from laplace_debias.sources.splits import (
    Columns,
    Examples,
    Splits,
    check_complete,
    numbers,
    split_indices,
)
from laplace_debias.sources.targets import as_targets
from laplace_debias.sources.task import REGRESSIONS, Task

SUFFIXES = (".csv", ".parquet")
MOST_CLASSES = 20
"""Whole numbers with at most so many different values are taken for classes."""


def table_files(path: Path) -> dict[str, Path] | None:
    """The tables of a path by split, `all` for one table without; None if it is no table."""
    if path.suffix in SUFFIXES and path.is_file():
        return {"all": path}
    files = {
        split: path / f"{split}{suffix}"
        for split in ("train", "val", "test")
        for suffix in SUFFIXES
        if (path / f"{split}{suffix}").is_file()
    }
    return files or None


def read_table(path: Path) -> Any:
    """A table as a pandas data frame."""
    import pandas

    try:
        table = pandas.read_csv(path) if path.suffix == ".csv" else pandas.read_parquet(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8 ({error}); save it in UTF-8") from error
    except Exception as error:
        raise ValueError(f"{path} is damaged or no {path.suffix} table ({error})") from error
    if len(table) == 0:
        raise ValueError(f"{path} has no rows; expected at least one")
    table.columns = [str(name) for name in table.columns]
    return table.reset_index(drop=True)


def table_splits(files: dict[str, Path], settings: SourceSettings) -> Splits:
    """The splits of a table, standardised by its training rows."""
    first = next(iter(files.values()))
    missing = [split for split in ("train", "test") if split not in files and "all" not in files]
    if missing:
        raise ValueError(f"{first.parent} has no {missing[0]}.csv or {missing[0]}.parquet")
    tables = {split: read_table(path) for split, path in files.items()}
    notes: tuple[str, ...] = ()
    target = _target(tables, files, settings)
    features = settings.features or tuple(
        name for name in next(iter(tables.values())).columns if name != target
    )
    for split, table in tables.items():
        check_complete(table, (*features, target), str(files[split]))
    undivided = tables.pop("all", None)
    if undivided is not None:
        indices, note = split_indices(len(undivided), settings, str(first), "rows")
        tables = {split: undivided.iloc[i.numpy()] for split, i in indices.items()}
        notes = (note,)
    train = tables["train"]
    if target in features:
        raise ValueError(f"target {target} is one of the features; leave it out of them")
    values = numbers(train, features, str(first))
    mean = np.zeros(len(features))
    std = np.ones(len(features))
    if settings.standardise:
        mean = values.mean(0)
        deviation = values.std(0)
        std = np.where(deviation > 1e-12 * np.abs(mean).clip(1e-300), deviation, 1.0)
    columns = Columns(features, mean, std, target)
    classes, task = _meaning(train[target], settings.task, target)
    examples = {
        split: Examples(
            columns.inputs(table, str(files.get(split, first))),
            _targets(table[target], classes, task, f"{target} of {files.get(split, first)}"),
        )
        for split, table in tables.items()
    }
    return Splits(
        train=examples["train"],
        validation=examples.get("val"),
        test=examples["test"],
        task=task,
        num_outputs=_num_outputs(task, classes),
        classes=None if classes is None else tuple(map(str, classes)),
        input_name="row",
        columns=columns,
        was_whole=undivided is not None,
        notes=notes,
    )


def _target(tables: dict[str, Any], files: dict[str, Path], settings: SourceSettings) -> str:
    names = list(next(iter(tables.values())).columns)
    if settings.target is None:
        raise ValueError(
            f"which column of {next(iter(files.values()))} is predicted is not known; give "
            f"--target, one of {', '.join(names[:20])}"
        )
    for split, table in tables.items():
        if settings.target not in table.columns:
            raise ValueError(
                f"{files[split]} has no column {settings.target}"
                f"{nearest(settings.target, list(table.columns))}; its columns are "
                f"{', '.join(list(table.columns)[:20])}: give another --target"
            )
    return settings.target


def _meaning(column: Any, task: Task | None, name: str) -> tuple[list[Any] | None, Task]:
    """The classes of a target's training rows, None if it is a number; and the task."""
    if task == "multilabel":
        raise ValueError("a table has one target; give several labels as a .npz file")
    is_number = column.dtype.kind in "iuf"
    values = sorted(column.unique().tolist())
    if task is None:
        if column.dtype.kind == "f":
            task = "regression"
        elif is_number and len(values) > MOST_CLASSES:
            raise ValueError(
                f"target {name} has {len(values)} different whole numbers; say what they are by "
                "--task=regression or --task=classification"
            )
        else:
            task = "classification"
    if task in REGRESSIONS:
        if not is_number:
            raise ValueError(f"target {name} holds {column.dtype}; expected numbers ({task})")
        return None, task
    if len(values) < 2 or (task == "binary" and len(values) != 2):
        raise ValueError(
            f"target {name} has {len(values)} different values; expected "
            f"{'two' if task == 'binary' else 'at least two'} (task={task})"
        )
    return values, task


def _num_outputs(task: Task, classes: list[Any] | None) -> int:
    """Number of outputs of a network for one target."""
    if task == "classification" and classes is not None:
        return len(classes)
    return 2 if task == "heteroscedastic" else 1


def _targets(column: Any, classes: list[Any] | None, task: Task, source: str) -> Tensor:
    if classes is None:
        return as_targets(column.to_numpy(dtype=np.float64), task, source)
    number = {value: label for label, value in enumerate(classes)}
    unknown = [value for value in column.unique().tolist() if value not in number]
    if unknown:
        raise ValueError(
            f"{source} has {unknown[0]!r}, which no training row has; expected "
            f"{', '.join(map(str, classes[:10]))}"
        )
    return as_targets(column.map(number).to_numpy(dtype=np.int64), task, source)
