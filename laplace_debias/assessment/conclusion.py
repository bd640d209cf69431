"""What a run shows, in words."""

from collections.abc import Mapping
from typing import Any


def conclude(run: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """The page's first paragraph, a sentence an entry.

    Args:
        run: `run.json`.
        found: `metrics.json`.
    """
    test = next(part for part in run["sets"] if part["role"] == "test")
    names = ", ".join(method["label"] for method in run["methods"])
    return [f"{test['num_examples']:,} test {run['input_name']}s were predicted by: {names}."]
