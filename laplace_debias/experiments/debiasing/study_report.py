"""Table and picture of the debiasing study: distances to full-batch with confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console

from laplace_debias.experiments.debiasing.schemes import EKFAC, FULL, MINI
from laplace_debias.experiments.shared.confidence import half_width
from laplace_debias.experiments.shared.store import Row
from laplace_debias.report.interval_plot import interval_figure
from laplace_debias.report.tables import markdown_table, print_table, write_csv
from laplace_debias.system.atomic import written_atomically


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How far one method is from full-batch: means over draws, and 95 % confidence intervals.

    Attributes:
        method: The method.
        draws: Over how many draws.
        nll: |test NLL − full-batch's|, in nats, mean over prior precisions.
        nll_error: Half the width of its interval; None for a single draw, as below.
        signed_nll: The same without the absolute value.
        ratio: `nll` over the mini-batch's in the same draws.
        ratio_error: Half the width of its interval, by the jackknife over draws.
        worst_ratio: The largest such ratio at a single prior precision.
        log_variance: |mean log variance of the logits − full-batch's|, at the least, a middle and
            the greatest prior precision.
        log_variance_error: Half the widths of their intervals.
    """

    method: str
    draws: int
    nll: float
    nll_error: float | None
    signed_nll: float
    ratio: float
    ratio_error: float | None
    worst_ratio: float
    log_variance: tuple[float, ...]
    log_variance_error: tuple[float | None, ...]


@dataclass(frozen=True)
class StudyResult:
    """What the study measured.

    Attributes:
        rows: A row per method, draw and prior precision.
        summaries: One for each method, K-FAC's first.
        picture: Path of the picture.
    """

    rows: list[Row]
    summaries: list[Summary]
    picture: Path


def report(rows: list[Row], folder: Path, console: Console) -> StudyResult:
    """Print the table; write the table, all measurements and a picture.

    Args:
        rows: Result of `study`.
        folder: Where the files go.
        console: Where to print.
    """
    summaries = summarise_study(rows)
    write_csv(rows, folder / "results.csv")
    write_csv([_flat(summary) for summary in summaries], folder / "summary.csv")
    table = [_told(summary) for summary in summaries]
    title = "Distance to full-batch at equal data, ± half a 95 % confidence interval over draws"
    print_table(table, title, console=console)
    with written_atomically(folder / "table.md") as temporary:
        temporary.write_text(f"**{title}**\n\n{markdown_table(table)}\n", encoding="utf-8")
    picture = folder / "distances.png"
    interval_figure(
        [_flat(summary) for summary in summaries],
        picture,
        {
            "nll": "|NLL − full-batch NLL| (nats) ↓",
            "log_variance_0": "|log variance − full-batch's|, least δ ↓",
        },
        highlight=MINI,
    )
    return StudyResult(rows, summaries, picture)


def summarise_study(rows: Sequence[Row]) -> list[Summary]:
    """Distances of every method to full-batch, those of EKFAC to full-batch EKFAC.

    Args:
        rows: With `method`, `draw` (None for full-batch), `prior_precision`, `nll`, `log_variance`.

    Raises:
        ValueError: If there is no full-batch row.
    """
    reference = {
        (row["method"], row["prior_precision"]): row for row in rows if row["draw"] is None
    }
    if not reference:
        raise ValueError("no full-batch row is among the rows; expected at least one")
    gaps: dict[str, dict[int, dict[float, tuple[float, float]]]] = {}
    for row in rows:
        if row["draw"] is None:
            continue
        full = EKFAC + FULL if row["method"].startswith(EKFAC) else FULL
        other = reference[full, row["prior_precision"]]
        gap = (row["nll"] - other["nll"], row["log_variance"] - other["log_variance"])
        by_draw = gaps.setdefault(row["method"], {}).setdefault(row["draw"], {})
        by_draw[row["prior_precision"]] = gap
    return [_summary(method, of_method, gaps) for method, of_method in gaps.items()]


def _summary(
    method: str,
    gaps: dict[int, dict[float, tuple[float, float]]],
    of_all: dict[str, dict[int, dict[float, tuple[float, float]]]],
) -> Summary:
    mini = of_all[EKFAC + MINI if method.startswith(EKFAC) else MINI]
    draws = list(gaps)
    grid = sorted(gaps[draws[0]])

    def nll(of_method: dict[int, dict[float, tuple[float, float]]], draw: int) -> float:
        return fmean([abs(of_method[draw][delta][0]) for delta in grid])

    def ratio(chosen: Sequence[int], deltas: Sequence[float] = grid) -> float:
        own, others = (
            math.fsum(abs(of_method[draw][delta][0]) for draw in chosen for delta in deltas)
            for of_method in (gaps, mini)
        )
        return own / others if others > 0 else (1.0 if own == 0 else math.inf)

    ends = (grid[0], grid[len(grid) // 2], grid[-1])
    variances = [[abs(gaps[draw][delta][1]) for draw in draws] for delta in ends]
    return Summary(
        method=method,
        draws=len(draws),
        nll=fmean([nll(gaps, draw) for draw in draws]),
        nll_error=half_width(draws, lambda chosen: fmean([nll(gaps, d) for d in chosen])),
        signed_nll=fmean([gaps[draw][delta][0] for draw in draws for delta in grid]),
        ratio=ratio(draws),
        ratio_error=half_width(draws, ratio),
        worst_ratio=max(ratio(draws, [delta]) for delta in grid),
        log_variance=tuple(map(fmean, variances)),
        log_variance_error=tuple(half_width(values, fmean) for values in variances),
    )


def _flat(summary: Summary) -> Row:
    row = asdict(summary)
    for key in ("log_variance", "log_variance_error"):
        for position, value in enumerate(row.pop(key)):
            row[f"{key}_{position}"] = value
    # The figure finds a column's interval by this name.
    for position in range(len(summary.log_variance)):
        row[f"log_variance_{position}_error"] = row.pop(f"log_variance_error_{position}")
    return row


def _told(summary: Summary) -> Row:
    return {
        "method": summary.method,
        "draws": summary.draws,
        "NLL": _with_error(summary.nll, summary.nll_error),
        "signed": f"{summary.signed_nll:+.4f}",
        "ratio to mini-batch": _with_error(summary.ratio, summary.ratio_error, 2),
        "worst": f"{summary.worst_ratio:.2f}",
        "log variance": " / ".join(f"{value:.2f}" for value in summary.log_variance),
    }


def _with_error(value: float, error: float | None, digits: int = 4) -> str:
    text = f"{value:.{digits}f}"
    return text if error is None else f"{text} ± {error:.{digits}f}"
