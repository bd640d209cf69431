"""`laplace-debias report`: is a network's uncertainty any good, in one page."""

import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import yaml

from laplace_debias.assessment import PosteriorChoice, assess
from laplace_debias.assessment.methods import ENSEMBLE, LAPLACE, MIXTURE, chosen_methods
from laplace_debias.commands.compared import found_in, identity_of, tell
from laplace_debias.report.page import write_page
from laplace_debias.report.run_folder import read_run
from laplace_debias.sources import SourceSettings, load
from laplace_debias.sources.weights import with_weights
from laplace_debias.system.checks import check_at_least
from laplace_debias.system.files import check_target
from laplace_debias.system.ranks import current
from laplace_debias.system.shown import plain


@dataclass(frozen=True, kw_only=True)
class Settings(SourceSettings):
    """Options of `laplace-debias report`.

    Attributes:
        output: Run folder: predictions, metrics, posteriors, pictures and `report.html`.
        from_run: Run folder whose page is drawn again, without computing: `--from RUN`.
        title: Title of the page; the network's name by default.
        more_checkpoints: Weights of more networks of the same architecture, of other seeds or
            epochs: `--checkpoint` given again adds one. They give the rows `ensemble`, the mean of
            the networks' predictions, and `mixture`, that of a last-layer posterior of each.
        methods: Methods to compare: `network`, `temperature`, `last-layer`, `laplace` (all
            parameters, minutes to hours); by default all but the last that the data allows.
        posteriors: More posteriors by name: `--posteriors.NAME '{"params": "all", "mode":
            "debiased", "fit_examples": 256}'`, or in a YAML file.
        examples: Number of examples of each set, chosen at random, that posteriors over more than
            the last layer predict; by default as many as take about ten minutes.
        overwrite: Replace an earlier run in the folder.
        spelled: Other names of options, where Python reserves the word.
        again: Names of options that are given again.
        goes_on: The same command goes on with a run that was broken off.
    """

    spelled: ClassVar = {"--from": "--from_run"}
    again: ClassVar = {"--checkpoint": "--more_checkpoints+"}
    goes_on: ClassVar = True

    output: Path = Path("results/report")
    from_run: Path | None = None
    title: str = ""
    more_checkpoints: list[Path] = field(default_factory=list)
    methods: tuple[str, ...] | None = None
    posteriors: dict[str, PosteriorChoice] = field(default_factory=dict)
    examples: int | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.from_run is None:
            super().__post_init__()
        check_at_least(self, 2, "examples")

    def without_effect(self) -> dict[str, str]:
        """As `SourceSettings.without_effect`."""
        if self.from_run is not None:
            names = (field.name for field in fields(self))
            why = "`--from` draws the page of a run as it is"
            return {name: why for name in names if name not in ("from_run", "json")}
        selections = {choice.params for choice in self.posteriors.values()}
        if selections - {"last_layer"} or LAPLACE.key in (self.methods or ()):
            return {}
        return {"examples": "no posterior over more than the last layer is compared"}


def run(settings: Settings) -> Path:
    """Compare methods, write the run folder and its page, print table and conclusion."""
    if settings.from_run is not None:
        folder = read_run(settings.from_run).folder
        check_target(folder / "report.html")
    else:
        check_target(settings.output / "run.json", make_folders=True)
        start = time.perf_counter()
        loaded = load(settings)
        others = [with_weights(loaded.model, path) for path in settings.more_checkpoints]
        seconds = time.perf_counter() - start
        methods = chosen_methods(
            settings.methods,
            settings.posteriors,
            settings.examples,
            loaded.task,
            loaded.validation is not None,
        )
        if others:
            methods += (ENSEMBLE, MIXTURE)
        # The folder is given beside the file that `--config` takes.
        left_out = {"output", "from_run", "overwrite", "json"}
        config = {name: v for name, v in plain(asdict(settings)).items() if name not in left_out}
        folder = assess(
            replace(loaded, others=tuple(others)),
            settings.output,
            methods,
            title=settings.title or settings.timm or settings.torchvision or settings.model or "",
            settings=identity_of(settings),
            config=yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
            seed=settings.seed,
            seconds={"load": seconds},
            overwrite=settings.overwrite,
            told=print,
        )
    page = folder / "report.html"
    if current().rank > 0:
        return page
    write_page(folder)
    tell(folder)
    print(f"Page: {page}")
    return page


def as_json(settings: Settings, page: Path) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {"page": str(page), **found_in(page.parent)}
