"""Data from CSV and Parquet tables."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from laplace_debias.curvature.losses.likelihoods import Categorical, Gaussian, Likelihood
from laplace_debias.sources.likelihoods import task_name
from laplace_debias.sources.settings import SourceSettings, nearest
from laplace_debias.sources.splits import (
    SPLIT_NAMES,
    Columns,
    Examples,
    Splits,
    check_complete,
    numbers,
    split_indices,
)
from laplace_debias.sources.targets import as_targets
from laplace_debias.system.shown import counted

SUFFIXES = (".csv", ".parquet")
MOST_CLASSES = 20
"""An integer target with at most this many different values is treated as a class."""


def table_files(path: Path) -> dict[str, Path] | None:
    """Return the table files at a path, keyed by split, or None if there are no tables.

    A single file, which is not split, has the key `all`.
    """
    if path.suffix in SUFFIXES and path.is_file():
        return {"all": path}
    files: dict[str, Path] = {}
    for split, names in SPLIT_NAMES.items():
        candidates = [path / f"{name}{suffix}" for name in names for suffix in reversed(SUFFIXES)]
        file = next(filter(Path.is_file, candidates), None)
        if file is not None:
            files[split] = file
    return files or None


def read_table(path: Path, text_columns: Sequence[str] = ()) -> Any:
    """Read a table as a pandas data frame; `text_columns` are read as strings."""
    import pandas

    types = dict.fromkeys(text_columns, str)
    try:
        if path.suffix == ".csv":
            table = pandas.read_csv(path, dtype=types)
            # `read_csv` renames repeated columns, so their names are read once more.
            names = pandas.read_csv(path, header=None, nrows=1, dtype=str).iloc[0].dropna()
        else:
            table = pandas.read_parquet(path).astype(types)
            names = table.columns
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not encoded in UTF-8 ({error}). Save it in UTF-8.") from error
    except Exception as error:
        raise ValueError(
            f"{path} is damaged, or is not a {path.suffix} table ({error}). Write it again."
        ) from error
    if len(table) == 0:
        raise ValueError(f"{path} has no rows. Add at least one row.")
    repeated = sorted(set(names[names.duplicated()]))
    if repeated:
        raise ValueError(
            f"{path} has several columns with the same name: {', '.join(repeated)}. Give each "
            "column its own name."
        )
    table.columns = [str(name) for name in table.columns]
    separator = re.search(r"[;\t|]", table.columns[0])
    if path.suffix == ".csv" and table.shape[1] == 1 and separator is not None:
        raise ValueError(
            f"The columns of {path} are separated by {separator[0]!r}. Save it with commas."
        )
    return table.reset_index(drop=True)


def table_splits(
    files: dict[str, Path], settings: SourceSettings, chosen: Likelihood | None
) -> Splits:
    """Read the splits of a table, whose features can be standardised by the training rows.

    If no likelihood was chosen, it is inferred from the target.
    """
    first = next(iter(files.values()))
    missing = [split for split in ("train", "test") if split not in files and "all" not in files]
    if missing:
        raise ValueError(
            f"{first.parent} has no {missing[0]}.csv or {missing[0]}.parquet. Add this file."
        )
    tables, target = _read_tables(files, settings)
    features = settings.features or tuple(
        name for name in next(iter(tables.values())).columns if name != target
    )
    if target in features:
        raise ValueError(
            f"The target {target} is also one of the features. Remove it from the features."
        )
    for split, table in tables.items():
        check_complete(table, (*features, target), str(files[split]))
    notes: tuple[str, ...] = ()
    undivided = tables.pop("all", None)
    if undivided is not None:
        indices, note = split_indices(len(undivided), settings, str(first), "row")
        tables = {split: undivided.iloc[i.numpy()] for split, i in indices.items()}
        notes = (note,)
    train = tables["train"]
    columns = _columns(train, features, target, settings, str(first))
    likelihood = _likelihood(train[target], chosen, target)
    classes = _classes(train[target], likelihood, target)
    examples = {
        split: Examples(
            columns.inputs(table, str(files.get(split, first))),
            _targets(table[target], classes, likelihood, f"{target} of {files.get(split, first)}"),
        )
        for split, table in tables.items()
    }
    return Splits(
        train=examples["train"],
        validation=examples.get("val"),
        test=examples["test"],
        likelihood=likelihood,
        num_targets=1 if classes is None else len(classes),
        classes=None if classes is None else tuple(map(str, classes)),
        input_name="row",
        columns=columns,
        was_whole=undivided is not None,
        notes=notes,
    )


def _read_tables(files: dict[str, Path], settings: SourceSettings) -> tuple[dict[str, Any], str]:
    """Read the tables by split, and find the name of the target."""
    tables = {split: read_table(path) for split, path in files.items()}
    target = _target(tables, files, settings)
    kinds = {table[target].dtype.kind for table in tables.values()}
    if len(kinds - set("iufb")) > 0 and len(kinds) > 1:
        # Read class names that look like numbers in one file as strings, to match the other files.
        tables = {split: read_table(path, [target]) for split, path in files.items()}
    return tables, target


def _columns(
    train: Any, features: tuple[str, ...], target: str, settings: SourceSettings, source: str
) -> Columns:
    """Return the features, with their mean and standard deviation over the training rows."""
    values = numbers(train, features, source)
    mean = np.zeros(len(features))
    std = np.ones(len(features))
    if settings.standardise:
        mean = values.mean(0)
        deviation = values.std(0)
        std = np.where(deviation > 1e-12 * np.abs(mean).clip(1e-300), deviation, 1.0)
    return Columns(features, mean, std, target)


def _target(tables: dict[str, Any], files: dict[str, Path], settings: SourceSettings) -> str:
    """Return the name of the target column, which every table must contain."""
    names = list(next(iter(tables.values())).columns)
    if settings.target is None:
        raise ValueError(
            f"The target column of {next(iter(files.values()))} cannot be inferred. Pass "
            f"--target with one of {', '.join(names[:20])}."
        )
    for split, table in tables.items():
        if settings.target not in table.columns:
            raise ValueError(
                f"{files[split]} has no column "
                f"{settings.target}.{nearest(settings.target, list(table.columns))} Its columns "
                f"are {', '.join(list(table.columns)[:20])}. Pass a different --target."
            )
    return settings.target


def _likelihood(column: Any, chosen: Likelihood | None, name: str) -> Likelihood:
    """Return the likelihood of a target, inferred from its training rows if none was chosen."""
    if chosen is not None:
        return chosen
    if column.dtype.kind == "f":
        return Gaussian()
    num_values = column.nunique()
    if column.dtype.kind in "iu" and num_values > MOST_CLASSES:
        raise ValueError(
            f"The target {name} has {num_values} different whole numbers, so the task cannot be "
            "inferred. Pass --task=regression, --task=poisson (counts) or --task=classification."
        )
    return Categorical()


def _classes(column: Any, likelihood: Likelihood, name: str) -> list[Any] | None:
    """Return the classes of a target's training rows, or None if the target is a number."""
    task = task_name(likelihood)
    if likelihood.targets == "labels":
        raise ValueError("A table can have only one target. For several labels, use a .npz file.")
    if likelihood.targets != "class":
        if column.dtype.kind not in "iuf":
            raise ValueError(
                f"The target {name} has dtype {column.dtype}, but the task {task} needs numbers. "
                "Encode the target as numbers."
            )
        return None
    values = sorted(column.unique().tolist())
    if len(values) < 2:
        raise ValueError(
            f"The target {name} has {counted(len(values), 'different value')}, but {task} needs "
            "at least two. Check the target."
        )
    try:
        likelihood.num_outputs(len(values))
    except ValueError as error:
        raise ValueError(f"target {name}: {error}") from error
    return values


def _targets(column: Any, classes: list[Any] | None, likelihood: Likelihood, source: str) -> Tensor:
    """Convert the target column to a tensor; class names become class indices."""
    if classes is None:
        return as_targets(column.to_numpy(dtype=np.float64), likelihood, source)
    number = {value: label for label, value in enumerate(classes)}
    unknown = [value for value in column.unique().tolist() if value not in number]
    if unknown:
        raise ValueError(
            f"{source} contains the value {unknown[0]!r}, which does not occur in the "
            f"training rows. Use only {', '.join(map(str, classes[:10]))}."
        )
    return as_targets(column.map(number).to_numpy(dtype=np.int64), likelihood, source)
