"""`laplace-debias fit`: the posterior of a test problem's network, in a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from laplace_debias.commands.network import NetworkSettings, check_output, some_indices
from laplace_debias.experiments.shared.checks import check_at_least
from laplace_debias.laplace import Laplace
from laplace_debias.problems import ImageBatches
from laplace_debias.system.console import Lines, Printer


@dataclass(frozen=True, kw_only=True)
class Settings(NetworkSettings):
    """What is fitted.

    Attributes:
        output: The posterior, a `.safetensors` file.
        mode: What data it is fitted to, as in `Laplace.fit`: `full`, all training images; `mini`,
            one batch of them; `debiased`, two; `crossfit`, one in folds.
        curvature: The posterior's structure, as `Laplace` takes it; so are the next five.
        params: Which parameters are Bayesian.
        fisher: How the curvature's columns are found.
        joint: Whether a layer's weight and bias make one block.
        sharing: How the positions of a convolution or a sequence share a weight.
        prior_precision: δ, before it is tuned.
        full_examples: How many training images, chosen at random, stand for all of them with
            `mode=full`; all if None.
        scale: Whether the curvature of few images is scaled by forward passes over all of them; not
            with `mode=full`.
        folds: How many folds `mode=crossfit` cuts its batch into, 2 if None.
        overwrite: Whether an existing file is replaced.

    Raises:
        ValueError: If the problem is unknown, a number out of range, or an option does not belong
            to the mode.
    """

    output: Path
    mode: Literal["full", "mini", "debiased", "crossfit"] = "full"
    curvature: Literal["kfac", "ekfac", "diag", "lowrank", "full"] = "kfac"
    params: Literal["all", "weights", "supported", "last_layer"] = "all"
    fisher: Literal["exact", "mc", "empirical"] = "exact"
    joint: bool = False
    sharing: Literal["expand", "reduce"] = "expand"
    prior_precision: float = 1.0
    full_examples: int | None = None
    scale: bool = False
    folds: int | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "full_examples")
        if self.full_examples is not None and self.mode != "full":
            raise ValueError(
                f"full_examples is {self.full_examples} with mode={self.mode}; give it with "
                "mode=full alone: the other modes see batches of batch_size"
            )
        if self.folds is not None and self.mode != "crossfit":
            raise ValueError(
                f"folds is {self.folds} with mode={self.mode}; give it with mode=crossfit alone"
            )
        if self.scale and self.mode == "full":
            raise ValueError("scale is true with mode=full, which sees all images: leave scale out")


def run(settings: Settings, console: Printer | None = None) -> Laplace:
    """Fit a posterior to the training images and save it.

    Returns:
        The posterior.

    Raises:
        FileExistsError: If the file exists.
        ValueError: If data or checkpoint is missing, damaged or of another problem; as `Laplace`.
        OSError: If the file cannot be written.
    """
    console = console or Lines()
    output = settings.output
    check_output(output, settings.overwrite)
    output.parent.mkdir(parents=True, exist_ok=True)
    model, data = settings.load()
    la = Laplace(
        model,
        curvature=settings.curvature,
        params=settings.params,
        prior_precision=settings.prior_precision,
        fisher=settings.fisher,
        joint=settings.joint,
        sharing=settings.sharing,
    )
    generator = torch.Generator().manual_seed(settings.seed)
    seen = some_indices(data.train, settings.full_examples, generator, "full_examples")
    batches = ImageBatches(data.train, seen, settings.batch_size)
    la.fit(
        *(batches, settings.mode, len(data.train), generator, settings.progress),
        scale=settings.scale,
        folds=settings.folds,
    )
    la.save(output)
    console.print(
        f"{settings.curvature}, {settings.mode}: {len(la.mean):,} parameters in "
        f"{len(la.block_names)} blocks, N = {la.num_data:,}, prior precision "
        f"{settings.prior_precision:g}"
    )
    console.print(f"Posterior: {output}", soft_wrap=True)
    return la
