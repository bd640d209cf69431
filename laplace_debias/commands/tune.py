"""`laplace-debias tune`: the prior precision of a saved posterior."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor

from laplace_debias.commands.network import (
    check_output,
    check_posterior,
    not_for,
    plain,
    posterior_of,
    print_notes,
    save,
)
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.reader import BatchReader
from laplace_debias.experiments.shared.held_out import check_held_out
from laplace_debias.experiments.shared.setup import plain_console
from laplace_debias.laplace import Laplace
from laplace_debias.laplace.files.folder_reader import is_folder
from laplace_debias.laplace.tuning import Tuning
from laplace_debias.report.tables import print_table
from laplace_debias.sources import Loaded, SourceSettings, load
from laplace_debias.sources.shares import dealt, in_order, share


@dataclass(frozen=True, kw_only=True)
class Settings(SourceSettings):
    """How a posterior's prior precision is tuned.

    Attributes:
        posterior: The file, or the folder of parts, of `laplace-debias fit`.
        output: Where the tuned posterior goes, in parts if it was; back to its place if None.
        overwrite: Whether something else that exists there is replaced.
        method: `grid`, the best on validation examples; `marglik`, the largest marginal likelihood.
        metric: What is best on the grid: `nll`, `ece`, `brier` or `accuracy`.
        prior_precisions: The grid; if None, 31 values from 1e-4 to 1e8, where a search begins.
        extend: Whether the search goes on from the end of the grid and refines it; if None, from
            the default grid alone.
        sigma: Whether the noise of a regression is tuned, too; if None, where it was never given.
        resume: A folder in which a search on validation examples saves their scores, every minute
            and at Ctrl-C; the same command goes on from there. It is emptied when the search ends.
        per: With `method=marglik` one prior precision for each `kind` of layer or each `block`; one
            for all if None.

    Raises:
        ValueError: As `SourceSettings`; if an option does not belong to the method.
    """

    posterior: Path
    output: Path | None = None
    overwrite: bool = False
    method: Literal["grid", "marglik"] = "grid"
    metric: Literal["nll", "ece", "brier", "accuracy"] = "nll"
    prior_precisions: tuple[float, ...] | None = None
    extend: bool | None = None
    sigma: bool | None = None
    resume: Path | None = None
    per: Literal["kind", "block"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        of_grid = (self.prior_precisions, self.extend, self.validation_examples, self.resume)
        is_given = any(one is not None for one in of_grid)
        if self.method == "marglik" and (is_given or self.metric != "nll"):
            raise ValueError(
                "method=marglik needs no data: leave out metric, prior_precisions, extend, "
                "resume and validation_examples"
            )
        if self.method == "grid" and self.per is not None:
            raise ValueError(
                f"per is {self.per} with method=grid; give it with method=marglik alone"
            )

    def without_effect(self) -> dict[str, str]:
        """As `SourceSettings.without_effect`."""
        found = not_for("tune", "train_examples")
        if self.method == "marglik":
            found["test_examples"] = "method=marglik reads no data"
        return found


def run(settings: Settings, console: Console | None = None) -> Tuning:
    """Tune a saved posterior's prior precision and save it again.

    Returns:
        What was tried and what was best.

    Raises:
        FileNotFoundError: If there is no such posterior.
        FileExistsError: If the output exists.
        ValueError: As `load`, `Laplace.load` and `Laplace.tune`; if there is no validation data, or
            the network seems to have been trained on it.
        OSError: If the file cannot be written.
    """
    console = console or plain_console()
    output, parts = settings.output or settings.posterior, is_folder(settings.posterior)
    # Without an output the posterior is meant to go back into its own file.
    check_output(output, settings.overwrite or settings.output is None, parts)
    check_posterior(settings.posterior)
    loaded = load(settings.without_comparison())
    print_notes(loaded, console)
    la = posterior_of(settings.posterior, loaded.model)
    if settings.method == "marglik":
        found = la.tune(method="marglik", sigma=settings.sigma, per=settings.per)
    else:
        found = _tune_on_grid(la, loaded, settings, console)
    save(la, output, parts)
    console.print(found.message, soft_wrap=True)
    console.print(f"Posterior: {output}", soft_wrap=True)
    return found


def as_json(settings: Settings, found: Tuning) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "posterior": str(settings.output or settings.posterior),
        "metric": found.metric,
        "prior_precision": plain(found.prior_precision),
        "value": plain(found.value),
        "table": plain(found.table),
        "flat": plain(found.flat),
        "sigma": plain(found.sigma),
        "message": found.message,
    }


def _tune_on_grid(la: Laplace, loaded: Loaded, settings: Settings, console: Console) -> Tuning:
    """Tune on validation examples, after a check that the network was not trained on them."""
    if loaded.validation is None:
        raise ValueError(
            "there is no validation data to tune on: add val/, x_val or validation to the data, or "
            "tune by the marginal likelihood, which needs none: --method=marglik"
        )
    if loaded.task == "classification":
        of_validation = _hits(loaded, loaded.validation)
        # Tuned on examples that the network was trained on, the posterior would be over-confident.
        check_held_out(_hits(loaded, loaded.test, len(of_validation)), of_validation)
    found = la.tune(
        *(share(loaded.validation, loaded.model), settings.metric, settings.prior_precisions),
        progress=settings.progress,
        extend=settings.extend,
        sigma=settings.sigma,
        resume=settings.resume,
    )
    print_table(found.table, "Validation data", console=console)
    return found


@torch.no_grad()
def _hits(loaded: Loaded, batches: Batches, most: int | None = None) -> Tensor:
    """Whether the network's first choice is the label, float64 `[N]`, of at most so many."""
    device = next(loaded.model.parameters()).device
    hits: list[tuple[int, Tensor]] = []
    for number, first, x, y in dealt(batches, BatchReader(loaded.model)):
        if not isinstance(x, Tensor) or (most is not None and first >= most):
            break
        outputs = loaded.model(x.to(device))
        if not isinstance(outputs, Tensor) or outputs.ndim != 2:
            break
        hits.append((number, outputs.argmax(1).cpu() == y))
    of_all = in_order(hits)
    return torch.cat([some for _, some in of_all]).double()[:most] if of_all else torch.ones(0)
