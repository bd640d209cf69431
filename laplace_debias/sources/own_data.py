"""Data that a callable of the user's returns."""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from laplace_debias.sources.imports import called, imported
from laplace_debias.sources.loaded import OodData
from laplace_debias.sources.parts import Parts
from laplace_debias.sources.pixels import Pixels
from laplace_debias.sources.settings import SourceSettings, ood_name

_KEYS = ("train", "validation", "test", "ood", "classes")


def own_parts(path: str, settings: SourceSettings) -> Parts:
    """What the callable at an import path returns: a dict, or an object with these attributes.

    `train` and `test` are needed; `validation`, `ood` (by name) and `classes` are not. Each part
    is a data set, a `DataLoader` or a list of batches `(x, y)`. A data set, and a plain
    `DataLoader` of one, is read in an order that is the same each time.

    Raises:
        ValueError: If it raises, or returns something else.
    """
    made = called(path, imported(path, "data"), {}, "data")
    found = made if isinstance(made, Mapping) else _attributes(made)
    unknown = [str(key) for key in found if key not in _KEYS]
    missing = [key for key in ("train", "test") if found.get(key) is None]
    if unknown or missing:
        raise ValueError(
            f"data {path} returned {type(made).__name__} "
            f"{f'without {missing[0]}' if missing else f'with {unknown[0]}'}; expected a dict or "
            f"an object with {', '.join(_KEYS)} (train and test are needed)"
        )
    classes = found.get("classes")
    if classes is None:
        classes = getattr(_dataset(found["train"]), "classes", None)
    has_pixels = settings.mean is not None or settings.std is not None
    return Parts(
        train=found["train"],
        validation=found.get("validation"),
        test=found["test"],
        ood={name: _ood(name, part) for name, part in (found.get("ood") or {}).items()},
        num_outputs=None if classes is None else len(classes),
        classes=None if classes is None else tuple(map(str, classes)),
        # Inputs are as they were normalised; by what, only the user knows.
        pixels=Pixels(settings.mean or (0.0,), settings.std or (1.0,)) if has_pixels else None,
    )


def _attributes(made: Any) -> dict[str, Any]:
    return {key: getattr(made, key) for key in _KEYS if hasattr(made, key)}


def _dataset(part: Any) -> Any:
    return part.dataset if isinstance(part, DataLoader) else part


def _ood(name: str, part: Any) -> OodData:
    if isinstance(part, OodData):
        return part
    return OodData(part, ood_name(name)[1])
