"""`laplace-debias fit`: fit the posterior of a trained network and save it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from laplace_debias.commands.network import check_output, not_for, print_notes, save
from laplace_debias.curvature.structures import CurvatureName
from laplace_debias.laplace.fitting.modes import ModeName, check_mode
from laplace_debias.sources.settings import SourceSettings
from laplace_debias.system.settings import option

if TYPE_CHECKING:
    from laplace_debias.laplace import Laplace, Plan


@dataclass(frozen=True, kw_only=True)
class Settings(SourceSettings):
    """Options of `laplace-debias fit`.

    Attributes:
        output: The `.safetensors` file of the posterior.
        mode: The training data of the fit, as in `Laplace.fit`: `full` uses all examples; `mini`
            uses one batch, only for comparisons; `debiased` uses two batches; `crossfit` divides
            one batch into folds; `auto` uses as many examples as are needed for an error of 5 % in
            the standard deviations of the outputs.
        curvature: The structure of the posterior's curvature, as in `Laplace`.
        params: The Bayesian parameters. A fit of `all` takes longer (see docs/choosing.md).
        fisher: The labels at which the curvature is computed: the exact expectation over labels, an
            estimate of it by sampled labels (`mc`) or random signs (`signs`), or the true labels
            (`empirical`).
        joint: Combine a layer's weight and bias in one block. Not available for `lowrank`, `full`
            and `gp`.
        inducing: The number of inducing examples for `gp`. By default, all examples are used.
        sharing: The approximation for weights that are shared by several positions, in convolutions
            and sequences.
        prior_precision: The prior precision δ, before it is tuned.
        sigma: The standard deviation of a regression's noise, in the units of the target. The
            default is 1.
        folds: The number of folds of `mode=crossfit`, 2 by default.
        overwrite: Replace an existing file.
        resume: A folder to which the fit saves its state once a minute. To resume an interrupted
            fit, run the same command again. The state is removed once the posterior has been saved.
        plan: Only print the memory and time that the fit would need, without fitting.
    """

    heading: ClassVar = "Posterior"
    unused: ClassVar = not_for("fit", "validation_examples", "test_examples")
    usage: ClassVar = (
        "laplace-debias fit --model my_pkg.models:build --checkpoint net.pt --data images "
        "--output posterior.safetensors",
        "laplace-debias fit --timm resnet18 --checkpoint net.safetensors --data images "
        "--params all --mode auto --output posterior.safetensors",
    )

    output: Path = field(metadata=option(heading="Output"))
    mode: ModeName = "full"
    curvature: CurvatureName = "kfac"
    params: Literal["all", "weights", "supported", "last_layer"] = "last_layer"
    fisher: Literal["exact", "mc", "signs", "empirical"] = "exact"
    joint: bool = False
    inducing: int | None = None
    sharing: Literal["expand", "reduce"] = "expand"
    prior_precision: float = 1.0
    sigma: float | None = None
    folds: int | None = None
    overwrite: bool = field(default=False, metadata=option(heading="Output"))
    resume: Path | None = field(default=None, metadata=option(heading="Output"))
    plan: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mode(self.mode, self.folds)
        if self.inducing is not None and self.curvature != "gp":
            raise ValueError(
                f"`inducing={self.inducing}` applies only to `curvature=gp`, got "
                f"`curvature={self.curvature}`. Remove inducing."
            )
        if self.mode == "auto" and self.resume is not None:
            raise ValueError("A fit with `mode=auto` cannot be resumed. Remove --resume.")

    def without_effect(self) -> dict[str, str]:
        """Return the options that have no effect with these settings, each with the reason."""
        return dict.fromkeys(("resume", "overwrite"), "`plan` fits nothing") if self.plan else {}


def run(settings: Settings) -> "Laplace | Plan":
    """Fit a posterior to the training examples and save it; with `plan`, only plan it."""
    import torch

    from laplace_debias.curvature.fits.checkpoint import check_folder, states_kept
    from laplace_debias.laplace import Laplace
    from laplace_debias.sources import load
    from laplace_debias.sources.shares import share
    from laplace_debias.system.shown import counted

    output = settings.output
    if not settings.plan:
        check_output(output, settings.overwrite)
    if settings.resume is not None:
        check_folder(settings.resume)
    loaded = load(settings.without_comparison())
    likelihood = loaded.likelihood
    if settings.sigma is not None:
        likelihood = likelihood.with_sigma(settings.sigma)
    print_notes(loaded)
    la = Laplace(
        loaded.model,
        likelihood=likelihood,
        curvature=settings.curvature,
        params=settings.params,
        prior_precision=settings.prior_precision,
        fisher=settings.fisher,
        joint=settings.joint,
        inducing=settings.inducing,
        sharing=settings.sharing,
    )
    train = share(loaded.train, loaded.model)
    if settings.plan:
        plan = la.plan(train, settings.mode, folds=settings.folds)
        print(str(plan))
        plan.check()
        return plan
    with states_kept():
        la.fit(
            train,
            settings.mode,
            num_data=loaded.num_train,
            generator=torch.Generator().manual_seed(settings.seed),
            progress=settings.progress,
            folds=settings.folds,
            resume=settings.resume,
        )
        save(la, output)
    print(
        f"{settings.curvature}, {settings.mode}: {counted(len(la.mean), 'parameter')} in "
        f"{counted(len(la.block_names), 'block')}, N = {la.num_data:,}, prior precision "
        f"{settings.prior_precision:g}"
    )
    if settings.mode == "auto":
        print(str(la.fit_report))
    print(f"Posterior: {output}")
    return la


def as_json(settings: Settings, la: "Laplace | Plan") -> dict[str, Any]:
    """Return the object that `--json` prints."""
    from laplace_debias.laplace import Plan
    from laplace_debias.system.shown import plain

    if isinstance(la, Plan):
        return la.summary()
    return {
        "posterior": str(settings.output),
        "curvature": settings.curvature,
        "mode": settings.mode,
        "num_parameters": len(la.mean),
        "num_blocks": len(la.block_names),
        "num_data": la.num_data,
        "prior_precision": plain(la.prior_precision),
        "estimated_error": plain(la.fit_report.error) if settings.mode == "auto" else None,
    }
