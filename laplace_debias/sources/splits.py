"""Training, validation and test splits of data, and batches of their examples."""

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from laplace_debias.curvature.data.batches import Batches, total_size
from laplace_debias.curvature.data.dataset_size import dataset_size
from laplace_debias.curvature.data.shards import reading_options
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.sources.image_files import View
from laplace_debias.sources.pixels import Pixels
from laplace_debias.sources.settings import SourceSettings, nearest
from laplace_debias.system.shown import counted

ExampleSource = Dataset[Any] | Iterable[Any]
"""A data set of single examples, or an iterable of batches."""

SPLIT_NAMES = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
"""The names that a folder or file of each split can have."""
USUAL_BATCH = 64


@dataclass(frozen=True)
class Columns:
    """How table rows are converted to inputs: (value − mean) / std for each column."""

    names: tuple[str, ...]
    mean: np.ndarray
    std: np.ndarray
    target: str

    def row(self, x: Float[Tensor, " columns"]) -> dict[str, float]:
        """Convert an input back to the values of the columns by name, in the units of the table."""
        values = x.double().numpy() * self.std + self.mean
        return dict(zip(self.names, values.tolist(), strict=True))

    def inputs(self, table: Any, source: str) -> Float[Tensor, "rows columns"]:
        """Convert rows to float32 inputs."""
        return self.standardised(numbers(table, self.names, source))

    def standardised(self, values: np.ndarray) -> Float[Tensor, "rows columns"]:
        """Convert values in the units of the table to float32 inputs."""
        return torch.from_numpy(((values - self.mean) / self.std).astype(np.float32))


def numbers(table: Any, names: tuple[str, ...], source: str) -> np.ndarray:
    """Convert columns of a table to a float64 array `[rows, columns]`."""
    for name in names:
        if name not in table.columns:
            raise ValueError(
                f"{source} has no column {name}.{nearest(name, list(table.columns))} The network "
                f"needs the columns {', '.join(names[:20])}."
            )
        if table[name].dtype.kind not in "iufb":
            raise ValueError(
                f"The column {name} of {source} contains {table[name].dtype}, not "
                "numbers. Encode it as numbers, or use --features to select the columns "
                "that the network takes."
            )
    check_complete(table, names, source)
    return table[list(names)].to_numpy(dtype=np.float64)


def check_complete(table: Any, names: Iterable[str], source: str) -> None:
    """Raise an error if columns contain missing or infinite values.

    Columns that do not exist are ignored.
    """
    columns = [name for name in dict.fromkeys(names) if name in table.columns]
    is_bad = table[columns].isna() | table[columns].isin([np.inf, -np.inf])
    counts = is_bad.sum()
    if not counts.any():
        return
    listed = ", ".join(f"{count:,} in {name}" for name, count in counts.items() if count)
    # The message counts rows from 1, without the header.
    first_row = int(is_bad.any(axis=1).to_numpy().argmax())
    raise ValueError(
        f"{source} has missing or infinite values: {listed}. The first is in data row "
        f"{int(table.index[first_row]) + 1}. Fill in these values, or remove the rows."
    )


@dataclass(frozen=True, eq=False)
class Splits:
    """The training, validation, test and OOD data before batching.

    If `was_whole` is true, the data was not split, so the validation and test examples were chosen
    at random by the seed. `num_targets` is the number of classes, labels or target columns.
    """

    train: ExampleSource
    validation: ExampleSource | None
    test: ExampleSource
    ood: Mapping[str, ExampleSource] = field(default_factory=dict)
    likelihood: Likelihood | None = None
    num_targets: int | None = None
    classes: tuple[str, ...] | None = None
    input_name: str = "example"
    pixels: Pixels | None = None
    view: View | None = None
    columns: Columns | None = None
    was_whole: bool = False
    notes: tuple[str, ...] = ()

    @property
    def num_outputs(self) -> int | None:
        """The number of outputs that a network for this data has, or None if it is unknown."""
        if self.num_targets is None or self.likelihood is None:
            return self.num_targets
        return self.likelihood.num_outputs(self.num_targets)


@dataclass(frozen=True, eq=False)
class Examples(Dataset[tuple[Tensor, Tensor]]):
    """A data set in memory. Images stored as bytes are normalised when they are fetched."""

    inputs: Tensor
    targets: Tensor
    pixels: Pixels | None = None

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the input and the target of one example."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Return several examples at once; a `DataLoader` calls this method for each batch."""
        x = self.inputs[indices]
        x = x if self.pixels is None else self.pixels.inputs(x)
        return list(zip(x, self.targets[indices], strict=True))


def split_by_seed(
    number: int, seed: int = 0, held_out: float = 0.2
) -> tuple[Int64[Tensor, " train"], Int64[Tensor, " validation"], Int64[Tensor, " test"]]:
    """Split data into training, validation and test sets in the same way as the command line.

    If you train a network only on the first part, the other two are held out when you then use the
    command line with the same seed and fraction.

    Args:
        number: The number of examples, in the order of the file or of the sorted paths of a folder.
        seed: The seed of the random choice, as for `--seed`.
        held_out: Fraction of the examples in each of the second and the third part.

    Returns:
        The disjoint indices of the training, validation and test examples, each in ascending order.

    Raises:
        ValueError: If a part would be empty.
    """
    num_held_out = round(number * held_out)
    num_train = number - 2 * num_held_out
    if num_held_out < 1 or num_train < 1:
        raise ValueError(
            f"The data has only {counted(number, 'example')}. A fraction {held_out:g} of them is "
            "held out for validation, and another fraction of the same size is held out "
            "for the test. Add examples, or pass data that is already split."
        )
    order = torch.randperm(number, generator=torch.Generator().manual_seed(seed))
    train, validation, test = order.split([num_train, num_held_out, num_held_out])
    return train.sort().values, validation.sort().values, test.sort().values


def split_indices(
    number: int, settings: SourceSettings, source: str, unit: str
) -> tuple[dict[str, Int64[Tensor, " split"]], str]:
    """Draw the indices of `train`, `val` and `test`, and return them with a note for the reader.

    `unit` is the name of an example in the singular.
    """
    train, validation, test = split_by_seed(number, settings.seed, settings.held_out)
    note = (
        f"{source} is not split, so the seed {settings.seed} chooses {counted(len(test), unit)} "
        f"for the test and {counted(len(validation), unit)} for validation. The network must not "
        "have been trained on them."
    )
    return {"train": train, "val": validation, "test": test}, note


def batches_of(
    examples: ExampleSource,
    settings: SourceSettings,
    limit: str | None = None,
    *,
    mixed: bool = False,
) -> tuple[Batches, int | None]:
    """Return batches of the examples in a fixed order, and the total number of examples.

    `limit` is the name of the setting that limits the number of examples to use. The returned
    number includes examples that are left out, and is None if it is unknown. If `mixed` is true,
    the seed determines a random order.
    """
    name = "data" if limit is None else f"{limit.removesuffix('_examples')} data"
    max_examples = None if limit is None else getattr(settings, limit)
    options: dict[str, Any] = {}
    size = settings.batch_size
    workers = settings.workers
    dataset: Any = examples
    if isinstance(examples, DataLoader):
        if not _is_reorderable(examples):
            return _batches_of_user(examples, settings, limit, name)
        dataset = examples.dataset
        options = reading_options(examples)
        size = size or examples.batch_size
        workers = workers or examples.num_workers
    elif not (hasattr(examples, "__getitem__") and isinstance(examples, Dataset)):
        return _batches_of_user(examples, settings, limit, name)
    number = len(dataset)
    if number == 0:
        raise ValueError(f"The {name} is empty. Add at least one example.")
    # All OOD sets share one limit, so a set that is smaller than the limit is not an error.
    if max_examples is not None and max_examples > number and limit != "ood_examples":
        raise ValueError(
            f"{limit} is {max_examples}, but the {name} has only {counted(number, 'example')}. "
            "Pass a smaller number."
        )
    generator = torch.Generator().manual_seed(settings.seed)
    indices = torch.randperm(number, generator=generator)[:max_examples]
    indices = indices if mixed else indices.sort().values
    loader: DataLoader[Any] = DataLoader(
        Subset(dataset, indices.tolist()),
        batch_size=size or USUAL_BATCH,
        num_workers=workers,
        # Give the loader its own generator, so that reading does not advance torch's global one.
        generator=torch.Generator().manual_seed(settings.seed),
        **options,
    )
    return loader, number


def _is_reorderable(loader: DataLoader[Any]) -> bool:
    """Whether a loader yields exactly its data set's examples, so they can be reordered."""
    sampler = loader.sampler
    return (
        isinstance(sampler, RandomSampler | SequentialSampler)
        and loader.batch_size is not None
        # A subclass with its own `__iter__` may yield examples that are not in the data set.
        and type(loader).__iter__ is DataLoader.__iter__
        and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    )


def _number_of_examples(loader: DataLoader[Any]) -> int | None:
    """Return the number of examples from which a loader draws, or None if it is unknown."""
    number = None
    is_of_sampler = True
    try:
        number = dataset_size(loader)
    except ValueError:
        # The sampler draws with replacement, or only a part of the data in each pass.
        is_of_sampler = False
    if number is None and is_of_sampler and type(loader.batch_sampler) is BatchSampler:
        number = len(loader.sampler) if isinstance(loader.sampler, Sized) else None
    if number is None and isinstance(loader.dataset, Sized):
        number = len(loader.dataset)
    return number


def _batches_of_user(
    batches: Any, settings: SourceSettings, limit: str | None, name: str
) -> tuple[Batches, int | None]:
    """Return the user's batches, which cannot be reordered, with the number of examples."""
    for option in (limit, "batch_size", "workers"):
        if option is not None and getattr(settings, option) not in (None, 0):
            raise ValueError(
                f"{option} cannot be used with the {name}, because your function returns the "
                f"{name} as a {type(batches).__name__}. Return a data set or a plain DataLoader "
                "of a data set, or remove this option."
            )
    if not isinstance(batches, Iterable):
        raise ValueError(
            f"The {name} is of type {type(batches).__name__}. Return a DataLoader, a data set or "
            "a list of batches."
        )
    if iter(batches) is batches:
        raise ValueError(
            f"The {name} is an iterator, which can be read only once. Return a DataLoader, a "
            "data set or a list of batches."
        )
    if isinstance(batches, DataLoader):
        return batches, _number_of_examples(batches)
    dataset = getattr(batches, "dataset", None)
    if isinstance(dataset, Sized):
        return batches, len(dataset)
    if isinstance(batches, Sequence):
        # A list of batches is in memory, so counting the examples costs nothing.
        return batches, total_size(batches)
    return batches, None
