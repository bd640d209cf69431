"""The sets of examples that methods are judged on."""

import re
from dataclasses import dataclass
from typing import Any

from laplace_debias.curvature.network.batches import Batches
from laplace_debias.sources.loaded import Loaded

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class DataSet:
    """A set that methods are judged on, as `sets` of `run.json` has it, with its batches."""

    name: str
    role: str
    batches: Batches
    severity: int | None = None
    kind: str | None = None

    def described(self, num_examples: int | None) -> dict[str, Any]:
        """Its entry in `run.json`."""
        entry: dict[str, Any] = {"name": self.name, "role": self.role}
        if self.severity is not None:
            entry["severity"] = self.severity
        if self.kind is not None:
            entry["kind"] = self.kind
        return entry | {"num_examples": num_examples}


def sets_of(loaded: Loaded) -> list[DataSet]:
    """The test set, its corrupted versions, the OOD sets.

    Raises:
        ValueError: If an OOD set is called as one of the others, or has no name for a file.
    """
    sets = [DataSet("test", "test", loaded.test)]
    for severity, batches in sorted(loaded.shifts.items()):
        sets.append(DataSet(f"shift-{severity}", "shift", batches, severity=severity))
    taken = {part.name for part in sets}
    for name, data in loaded.ood.items():
        if name in taken or not _NAME.fullmatch(name):
            raise ValueError(
                f"an OOD set is called {name!r}; its name names files: give it one of letters, "
                "digits, '.', '_' and '-' that is neither test nor shift-1 …"
            )
        sets.append(DataSet(name, "ood", data.batches, kind=data.kind))
    return sets
