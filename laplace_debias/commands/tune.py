"""`laplace-debias tune`: the prior precision of a saved posterior."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from laplace_debias.commands.network import (
    check_output,
    not_for,
    print_notes,
    save,
)
from laplace_debias.laplace import Laplace, file
from laplace_debias.laplace.tuning import Tuning
from laplace_debias.report.tables import print_table
from laplace_debias.sources import SourceSettings, load
from laplace_debias.sources.shares import share
from laplace_debias.system.shown import plain


@dataclass(frozen=True, kw_only=True)
class Settings(SourceSettings):
    """Options of `laplace-debias tune`.

    Attributes:
        posterior: The file that `laplace-debias fit` wrote.
        output: File of the tuned posterior; the same file by default.
        overwrite: Replace another existing file.
        method: Criterion: `grid`, the best on validation examples; `marglik`, the largest marginal
            likelihood.
        metric: Metric that is best on the grid: `nll` or `brier`.
        prior_precisions: The grid; 31 values from 1e-4 to 1e8 by default, and finer ones around the
            best.
        sigma: Tune the noise of a regression too; by default if it was never given.
        per: With `method=marglik`, one prior precision for each `kind` of layer or each `block`;
            one for all by default.
    """

    posterior: Path
    output: Path | None = None
    overwrite: bool = False
    method: Literal["grid", "marglik"] = "grid"
    metric: Literal["nll", "brier"] = "nll"
    prior_precisions: tuple[float, ...] | None = None
    sigma: bool | None = None
    per: Literal["kind", "block"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        takes_data = self.prior_precisions is not None or self.validation_examples is not None
        if self.method == "marglik" and (takes_data or self.metric != "nll"):
            raise ValueError(
                "method=marglik needs no data: leave out metric, prior_precisions "
                "and validation_examples"
            )
        if self.method == "grid" and self.per is not None:
            raise ValueError(
                f"per is {self.per} with method=grid; give it with method=marglik alone"
            )

    def without_effect(self) -> dict[str, str]:
        """As `SourceSettings.without_effect`."""
        unused = not_for("tune", "train_examples")
        if self.method == "marglik":
            unused["test_examples"] = "method=marglik reads no data"
        return unused


def run(settings: Settings) -> Tuning:
    """Tune a saved posterior's prior precision and save it again."""
    output = settings.output or settings.posterior
    # Without an output the posterior is meant to go back into its own file.
    check_output(output, settings.overwrite or settings.output is None)
    # Before the data, which can take minutes.
    file.read(settings.posterior)
    loaded = load(settings.without_comparison())
    print_notes(loaded)
    la = Laplace.load(settings.posterior, loaded.model)
    if settings.method == "marglik":
        found = la.tune_evidence(sigma=settings.sigma, per=settings.per)
    else:
        if loaded.validation is None:
            raise ValueError(
                "there is no validation data to tune on: add val/, x_val or validation to the "
                "data, or tune by the marginal likelihood, which needs none: --method=marglik"
            )
        found = la.tune(
            *(share(loaded.validation, loaded.model), settings.metric, settings.prior_precisions),
            progress=settings.progress,
            sigma=settings.sigma,
        )
        print_table(found.table, "Validation data")
    save(la, output)
    print(found.message)
    print(f"Posterior: {output}")
    return found


def as_json(settings: Settings, found: Tuning) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "posterior": str(settings.output or settings.posterior),
        "metric": found.metric,
        "prior_precision": plain(found.prior_precision),
        "value": plain(found.value),
        "table": plain(found.table),
        "flat": plain(found.flat),
        "sigma": plain(found.sigma),
        "link": None if found.link is None else asdict(found.link),
        "compared": plain(found.compared),
        "message": found.message,
    }
