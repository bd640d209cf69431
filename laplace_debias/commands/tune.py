"""`laplace-debias tune`: tune the prior precision of a saved posterior."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from laplace_debias.commands.network import check_output, likelihood_of, not_for, print_notes, save
from laplace_debias.sources.settings import SourceSettings
from laplace_debias.system.settings import option

if TYPE_CHECKING:
    from laplace_debias.laplace.tuning.result import Tuning


@dataclass(frozen=True, kw_only=True)
class Settings(SourceSettings):
    """Options of `laplace-debias tune`.

    Attributes:
        posterior: The file that `laplace-debias fit` wrote.
        output: The file of the tuned posterior. By default, it replaces the original file.
        overwrite: Replace a different existing file.
        method: The criterion: `grid` chooses the best values on validation examples, and `marglik`
            chooses the largest marginal likelihood.
        metric: The metric that is minimised on the grid, `nll` or `brier`.
        prior_precisions: The grid of prior precisions. By default, it has 49 values, four per
            decade from 1e-4 to 1e8.
        sigma: Also tune the noise of a regression. By default, it is tuned if no noise was passed
            to the fit.
        per: With `method=marglik`, use one prior precision for each layer type (`kind`) or for each
            block (`block`). By default, all parameters have the same one.
    """

    heading: ClassVar = "Tuning"
    unused: ClassVar = not_for("tune", "train_examples", "test_examples")
    usage: ClassVar = (
        "laplace-debias tune --model my_pkg.models:build --checkpoint net.pt --data images "
        "--posterior posterior.safetensors",
    )

    posterior: Path = field(metadata=option(is_input=True))
    output: Path | None = field(default=None, metadata=option(heading="Output"))
    overwrite: bool = field(default=False, metadata=option(heading="Output"))
    method: Literal["grid", "marglik"] = "grid"
    metric: Literal["nll", "brier"] = "nll"
    prior_precisions: tuple[float, ...] | None = None
    sigma: bool | None = None
    per: Literal["kind", "block"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        grid = self.prior_precisions
        if grid is not None and not all(0 < value < math.inf for value in grid):
            raise ValueError(
                f"prior_precisions is {', '.join(f'{value:g}' for value in grid)}. Pass positive, "
                "finite numbers."
            )
        takes_data = self.prior_precisions is not None or self.validation_examples is not None
        if self.method == "marglik" and (takes_data or self.metric != "nll"):
            raise ValueError(
                "`method=marglik` uses no data. Remove metric, prior_precisions and "
                "validation_examples."
            )
        if self.method == "grid" and self.per is not None:
            raise ValueError(
                f"`per={self.per}` has no effect with `method=grid`. Remove it, or use "
                "`method=marglik`."
            )


def run(settings: Settings) -> "Tuning":
    """Tune the prior precision of a saved posterior, and save the tuned posterior."""
    from laplace_debias.report.tables import print_table
    from laplace_debias.sources import load
    from laplace_debias.sources.shares import share

    output = settings.output or settings.posterior
    # If no output is given, the tuned posterior replaces the original file.
    check_output(output, settings.overwrite or settings.output is None)
    # Read the file first, because reading the data can take minutes.
    likelihood = likelihood_of(settings, [settings.posterior])
    loaded = load(settings.without_comparison(), likelihood)
    print_notes(loaded)
    la = loaded.posterior(settings.posterior)
    if settings.method == "marglik":
        tuning = la.tune_evidence(sigma=settings.sigma, per=settings.per)
    else:
        if loaded.validation is None:
            raise ValueError(
                "There is no validation data for tuning. Add val/, x_val or validation to the "
                "data. Or tune by the marginal likelihood, which needs no validation data: "
                "--method=marglik."
            )
        tuning = la.tune(
            share(loaded.validation, loaded.model),
            settings.metric,
            settings.prior_precisions,
            progress=settings.progress,
            sigma=settings.sigma,
        )
        # Tables have three decimals, which do not distinguish small prior precisions.
        rows = [{**row, "prior_precision": f"{row['prior_precision']:.3g}"} for row in tuning.table]
        print_table(rows, "Validation data")
    save(la, output)
    print(tuning)
    print(f"Posterior: {output}")
    return tuning


def as_json(settings: Settings, tuning: "Tuning") -> dict[str, Any]:
    """Return the object that `--json` prints."""
    from laplace_debias.system.shown import plain

    return {
        "posterior": str(settings.output or settings.posterior),
        "metric": tuning.metric,
        "prior_precision": plain(tuning.prior_precision),
        "value": plain(tuning.value),
        "table": plain(tuning.table),
        "flat": plain(tuning.flat),
        "sigma": plain(tuning.sigma),
        "link": None if tuning.link is None else asdict(tuning.link),
        "compared": plain(tuning.compared),
        "message": tuning.message,
    }
