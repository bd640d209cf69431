"""`laplace-debias tune`: the prior precision of a saved posterior."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from torch import nn

from laplace_debias.commands.network import NetworkSettings, check_output, some_indices
from laplace_debias.experiments.shared.checks import check_at_least
from laplace_debias.experiments.shared.held_out import check_held_out, hits_of
from laplace_debias.experiments.shared.setup import plain_console
from laplace_debias.laplace import Laplace
from laplace_debias.laplace.files import posterior_file
from laplace_debias.laplace.tuning import Tuning
from laplace_debias.problems import ImageBatches, ProblemData
from laplace_debias.report.tables import print_table


@dataclass(frozen=True, kw_only=True)
class Settings(NetworkSettings):
    """How a posterior's prior precision is tuned.

    Attributes:
        posterior: The file of `laplace-debias fit`.
        output: Where the tuned posterior goes; back into its file if None.
        overwrite: Whether another existing file is replaced.
        method: `grid`, the best on validation images; `marglik`, the largest marginal likelihood.
        metric: What is best on the grid: `nll`, `ece`, `brier` or `accuracy`.
        prior_precisions: The grid; 21 values from 1e-4 to 1e4 if None.
        validation_examples: How many validation images, chosen at random; all if None.

    Raises:
        ValueError: If the problem is unknown, a number out of range, or an option does not belong
            to the method.
    """

    posterior: Path
    output: Path | None = None
    overwrite: bool = False
    method: Literal["grid", "marglik"] = "grid"
    metric: Literal["nll", "ece", "brier", "accuracy"] = "nll"
    prior_precisions: tuple[float, ...] | None = None
    validation_examples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "validation_examples")
        of_grid = (self.prior_precisions, self.validation_examples)
        if self.method == "marglik" and (of_grid != (None, None) or self.metric != "nll"):
            raise ValueError(
                "method=marglik needs no data: leave out metric, prior_precisions and "
                "validation_examples"
            )


def run(settings: Settings, console: Console | None = None) -> Tuning:
    """Tune a saved posterior's prior precision and save it again.

    Returns:
        What was tried and what was best.

    Raises:
        FileNotFoundError: If there is no such posterior.
        FileExistsError: If the output exists.
        ValueError: If data, checkpoint or posterior is missing, damaged or of another network; if
            the network seems to have been trained on the validation images; as `Laplace.tune`.
        OSError: If the file cannot be written.
    """
    console = console or plain_console()
    if not settings.posterior.exists():
        raise FileNotFoundError(
            f"there is no posterior {settings.posterior}; make it with `laplace-debias fit`"
        )
    output = settings.output or settings.posterior
    # Without an output the posterior is meant to go back into its own file.
    check_output(output, overwrite=settings.overwrite or settings.output is None)
    # Reading data can take minutes, so a damaged posterior is refused before.
    posterior_file.load(settings.posterior)
    model, data = settings.load()
    la = Laplace.load(settings.posterior, model)
    if settings.method == "marglik":
        found = la.tune(method="marglik")
    else:
        found = _tune_on_grid(la, model, data, settings, console)
    output.parent.mkdir(parents=True, exist_ok=True)
    la.save(output)
    name = found.metric.replace("_", " ")
    console.print(f"Prior precision {found.prior_precision:.4g}: {name} {found.value:.4f}")
    console.print(f"Posterior: {output}", soft_wrap=True)
    return found


def _tune_on_grid(
    la: Laplace, model: nn.Module, data: ProblemData, settings: Settings, console: Console
) -> Tuning:
    """Tune on validation images, after a check that the network was not trained on them."""
    generator = torch.Generator().manual_seed(settings.seed)
    seen = some_indices(data.val, settings.validation_examples, generator, "validation_examples")
    compared = torch.randperm(len(data.test), generator=generator)[: len(seen)]
    of_test, of_validation = (
        hits_of(model, images.subset(chosen), settings.batch_size, settings.progress)
        for images, chosen in ((data.test, compared), (data.val, seen))
    )
    # Tuned on images that the network was trained on, the posterior would be over-confident.
    check_held_out(of_test, of_validation)
    batches = ImageBatches(data.val, seen, settings.batch_size)
    found = la.tune(batches, settings.metric, settings.prior_precisions, progress=settings.progress)
    print_table(found.table, f"Validation images: {len(seen):,}", console=console)
    tried = [row["prior_precision"] for row in found.table]
    if len(tried) > 1 and found.prior_precision in (min(tried), max(tried)):
        console.print("The best is at the end of the grid: widen prior_precisions.")
    return found
