"""A table's columns as inputs."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.sources.settings import nearest


@dataclass(frozen=True)
class Columns:
    """How rows become inputs: (value − mean) / std, column by column; `target` is predicted."""

    names: tuple[str, ...]
    mean: np.ndarray
    std: np.ndarray
    target: str

    def row(self, x: Float[Tensor, " columns"]) -> dict[str, float]:
        """An input's columns by name, in the units of the table."""
        values = x.double().numpy() * self.std + self.mean
        return dict(zip(self.names, values.tolist(), strict=True))

    def inputs(self, table: Any, where: str) -> Float[Tensor, "rows columns"]:
        """Rows as inputs, float32."""
        values = numbers(table, self.names, where)
        return torch.from_numpy(((values - self.mean) / self.std).astype(np.float32))


def numbers(table: Any, names: tuple[str, ...], where: str) -> np.ndarray:
    """Columns as float64 `[rows, columns]`."""
    for name in names:
        if name not in table.columns:
            raise ValueError(
                f"{where} has no column {name}{nearest(name, list(table.columns))}; expected the "
                f"columns {', '.join(names[:20])}"
            )
        if table[name].dtype.kind not in "iufb":
            raise ValueError(
                f"column {name} of {where} holds {table[name].dtype}, no numbers; encode it, or "
                "name the columns that the network takes by --features"
            )
    values = table[list(names)].to_numpy(dtype=np.float64)
    bad = ~np.isfinite(values)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise ValueError(
            f"column {names[column]} of {where} has {int(bad[:, column].sum())} values that are "
            f"missing or infinite, the first in row {table.index[row]}; fill them in or remove "
            "these rows"
        )
    return values
