"""What trajectories of conjugate gradients show: a table and sentences."""

from collections.abc import Sequence

from laplace_debias.experiments.shared.judge import worst_if_nan
from laplace_debias.experiments.shared.store import Row


def stability(rows: Sequence[Row]) -> list[Row]:
    """Each run's losses at the start, at their best and at the end.

    Args:
        rows: Rows of `trajectory`, of any number of runs.

    Returns:
        A row per run: for training (`train`) and test loss the first value, the least, its
        iteration, and the last.
    """
    table = []
    for of_run in _by_run(rows):
        found: Row = {"method": of_run[0]["method"], "draw": of_run[0]["draw"]}
        for part in ("train", "test"):
            values = [worst_if_nan(row[f"{part}_loss"]) for row in of_run]
            best = min(range(len(values)), key=values.__getitem__)
            found |= {
                f"{part} start": values[0],
                f"{part} best": values[best],
                f"{part} best at": of_run[best]["iteration"],
                f"{part} end": values[-1],
            }
        table.append(found)
    return table


def findings(rows: Sequence[Row]) -> list[str]:
    """Findings, a sentence per method, made from the numbers.

    Args:
        rows: Rows of `trajectory`, of any number of runs.
    """
    table = stability(rows)
    sentences = []
    for method in dict.fromkeys(row["method"] for row in table):
        of_method = [row for row in table if row["method"] == method]
        told = []
        for part, name in (("train", "training"), ("test", "test")):
            start, best, end = (
                sum(row[f"{part} {when}"] for row in of_method) / len(of_method)
                for when in ("start", "best", "end")
            )
            rise = max(row[f"{part} end"] - row[f"{part} best"] for row in of_method)
            told.append(
                f"the {name} loss goes from {start:.3f} to {best:.3f} at its best and {end:.3f} at "
                f"the end (at most {rise:.3f} above a run's best)"
            )
        count = f", mean of {len(of_method)} runs" if len(of_method) > 1 else ""
        sentences.append(f"{method}{count}: {'; '.join(told)}.")
    return sentences


def _by_run(rows: Sequence[Row]) -> list[list[Row]]:
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row["method"], row["draw"]), []).append(row)
    return list(found.values())
