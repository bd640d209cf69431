"""`laplace-debias report`: assess a network's uncertainty on one page."""

import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from laplace_debias.assessment.methods import PosteriorChoice
from laplace_debias.sources.settings import SourceSettings
from laplace_debias.system.settings import check_at_least, option


@dataclass(frozen=True, kw_only=True)
class Settings(SourceSettings):
    """Options of `laplace-debias report`.

    Attributes:
        checkpoint: The trained weights, a `.safetensors`, `.pt`, `.pth`, `.ckpt` or `.bin` file.
            Repeat the option for further networks of the same architecture, with other seeds or
            epochs. The page then has two more rows: `ensemble`, the mean of the networks'
            predictions, and `mixture`, the mean over their last-layer posteriors.
        output: The run folder, for predictions, metrics, posteriors, figures and `report.html`.
        from_run: The folder of a completed run. Only its page is drawn again; nothing else is
            computed.
        title: The title of the page. By default, it is the network's name.
        more_checkpoints: The weights of the further networks.
        methods: The methods to compare: `network`, `temperature`, `vector` (scaling of each logit),
            `platt` (for a single logit), `isotonic`, `last-layer`, and `laplace` (all parameters,
            which takes minutes to hours). By default, these are `network`, `temperature` and
            `last-layer`, as far as the data allows.
        posteriors: Further posteriors by name, each as JSON such as '{"params": "all", "mode":
            "debiased", "fit_examples": 256}', or in a YAML file.
        examples: The number of randomly chosen examples of each set that posteriors over more than
            the last layer predict. By default, it is limited so that the predictions take about ten
            minutes.
        overwrite: Replace an earlier run in the folder.
    """

    heading: ClassVar = "What to compare"
    resumes: ClassVar = True
    usage: ClassVar = (
        "laplace-debias report --model my_pkg.models:build --checkpoint net.safetensors "
        "--data images --ood digits=builtin:digits --output runs/mine",
        "laplace-debias report --timm resnet18 --checkpoint a.pt --checkpoint b.pt --data images "
        "--methods network,temperature,last-layer,laplace --output runs/two",
    )

    output: Path = field(default=Path("results/report"), metadata=option(heading="Output"))
    from_run: Path | None = field(
        default=None, metadata=option(heading="Output", metavar="RUN", name="from", is_input=True)
    )
    title: str = field(default="", metadata=option(heading="Output"))
    more_checkpoints: list[Path] = field(
        default_factory=list,
        metadata=option(heading="Network", is_input=True, repeats="checkpoint"),
    )
    methods: tuple[str, ...] | None = None
    posteriors: dict[str, PosteriorChoice] = field(
        default_factory=dict, metadata=option(metavar="NAME=JSON")
    )
    examples: int | None = None
    overwrite: bool = field(default=False, metadata=option(heading="Output"))

    def __post_init__(self) -> None:
        if self.from_run is None:
            super().__post_init__()
        check_at_least(self, 2, "examples")

    def without_effect(self) -> dict[str, str]:
        """Return the options that have no effect with these settings, each with the reason."""
        if self.from_run is not None:
            names = [field.name for field in fields(self)]
            reason = "`--from` draws the page of a completed run"
            return {name: reason for name in names if name not in ("from_run", "json")}
        selections = {choice.params for choice in self.posteriors.values()}
        if selections - {"last_layer"} or "laplace" in (self.methods or ()):
            return {}
        return {"examples": "no posterior over more than the last layer is compared"}


def run(settings: Settings) -> Path:
    """Compare the methods, write the run folder and its page, and print the conclusion."""
    from laplace_debias.commands.compared import print_results
    from laplace_debias.report.page import write_page
    from laplace_debias.runs.folder import RunFolder
    from laplace_debias.system.files import check_target
    from laplace_debias.system.ranks import process_group

    if settings.from_run is not None:
        folder = settings.from_run
        RunFolder(folder).read_complete_record()
        check_target(RunFolder(folder).page)
    else:
        folder = _compare(settings)
    page = RunFolder(folder).page
    if process_group().rank > 0:
        return page
    write_page(folder)
    print_results(folder)
    print(f"Page: {page}")
    return page


def _compare(settings: Settings) -> Path:
    """Compare the methods, and return the path of the run folder."""
    import yaml

    from laplace_debias.assessment import assess
    from laplace_debias.assessment.methods import ENSEMBLE, MIXTURE, chosen_methods
    from laplace_debias.commands.compared import identity_of
    from laplace_debias.sources import load
    from laplace_debias.sources.weights import with_weights
    from laplace_debias.system.files import check_target
    from laplace_debias.system.shown import plain

    check_target(settings.output / "run.json", make_folders=True)
    start = time.perf_counter()
    loaded = load(settings)
    further_models = [with_weights(loaded.model, path) for path in settings.more_checkpoints]
    seconds = time.perf_counter() - start
    methods = chosen_methods(settings.methods, settings.posteriors, settings.examples, loaded)
    if further_models:
        methods += (ENSEMBLE, MIXTURE)
    # Leave out the folder, which is passed on the command line together with `--config`.
    left_out = {"output", "from_run", "overwrite", "json"}
    config = {name: v for name, v in plain(asdict(settings)).items() if name not in left_out}
    return assess(
        replace(loaded, further_models=tuple(further_models)),
        settings.output,
        methods,
        title=settings.title or settings.timm or settings.torchvision or settings.model or "",
        settings=identity_of(settings),
        config=yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        seed=settings.seed,
        seconds={"load": seconds},
        overwrite=settings.overwrite,
        log=print,
    )


def as_json(settings: Settings, page: Path) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    from laplace_debias.commands.compared import results_of

    return {"page": str(page), **results_of(page.parent)}
