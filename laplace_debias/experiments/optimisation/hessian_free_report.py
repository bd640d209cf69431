"""What Hessian-free training shows: a table and sentences."""

import math
from collections.abc import Sequence

from laplace_debias.experiments.shared.judge import METRICS, worst_if_nan
from laplace_debias.experiments.shared.store import Row


def ends(rows: Sequence[Row]) -> list[Row]:
    """Where the runs end: means over draws.

    Args:
        rows: Rows of `train_run`, of any number of runs.

    Returns:
        A row per variant and method: the metrics at the last measured step; the greatest training
        loss, relative to that at the start (NaN counts as infinite); the share of refused steps
        (step size 0); and the mean reduction ratio.
    """
    table = []
    for variant, method in dict.fromkeys((row["variant"], row["method"]) for row in rows):
        of_kind = [r for r in rows if (r["variant"], r["method"]) == (variant, method)]
        runs = [
            [r for r in of_kind if r["draw"] == draw]
            for draw in dict.fromkeys(r["draw"] for r in of_kind)
        ]
        taken = [row for run in runs for row in run[1:] if row["step_size"] is not None]
        means = {m: sum(worst_if_nan(run[-1][m]) for run in runs) / len(runs) for m in METRICS}
        worst = max(
            worst_if_nan(row["train_loss"] / run[0]["train_loss"]) for run in runs for row in run
        )
        table.append(
            {
                "variant": variant,
                "method": method,
                "runs": len(runs),
                **means,
                "greatest loss": worst,
                "refused": _mean([float(row["step_size"] == 0) for row in taken]),
                "reduction ratio": _mean([row["reduction_ratio"] for row in taken]),
            }
        )
    return table


def findings(table: Sequence[Row]) -> list[str]:
    """Findings, a sentence per variant, made from the numbers.

    Args:
        table: Rows of `ends`.
    """
    return [
        f"{variant}: "
        + "; ".join(
            f"{row['method']} ends at a training loss of {row['train_loss']:.4g} and a test "
            f"accuracy of {row['test_accuracy']:.3f}; its loss was at most "
            f"{row['greatest loss']:.3g} times that of the start"
            for row in table
            if row["variant"] == variant
        )
        + "."
        for variant in dict.fromkeys(row["variant"] for row in table)
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
