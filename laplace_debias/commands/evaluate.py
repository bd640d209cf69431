"""`laplace-debias evaluate`: print a table that compares saved posteriors with the network."""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from laplace_debias.commands.network import likelihood_of
from laplace_debias.sources.settings import SourceSettings
from laplace_debias.system.settings import check_at_least, option


@dataclass(frozen=True, kw_only=True)
class Settings(SourceSettings):
    """Options of `laplace-debias evaluate`.

    Attributes:
        posterior: A file that `laplace-debias fit` or `tune` wrote. The option may be repeated.
            Each posterior is used without further tuning, under the name of its file.
        examples: The number of randomly chosen examples of each set that the posteriors predict. By
            default, it is limited so that the predictions take about ten minutes.
    """

    heading: ClassVar = "What to compare"
    usage: ClassVar = (
        "laplace-debias evaluate --model my_pkg.models:build --checkpoint net.pt --data images "
        "--posterior posterior.safetensors",
    )

    posterior: list[Path] = field(default_factory=list, metadata=option(is_input=True))
    examples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 2, "examples")
        names = [path.stem.lower() for path in self.posterior]
        if len(set(names)) < len(names):
            raise ValueError(
                f"`posterior` contains two files with the same name, {', '.join(names)}. Rename "
                "one of them."
            )

    def without_effect(self) -> dict[str, str]:
        """Return the options that have no effect with these settings, each with the reason."""
        return {} if self.posterior else {"examples": "there is no --posterior"}


def run(settings: Settings) -> dict[str, Any]:
    """Compare the methods, and print the table and the conclusion."""
    from laplace_debias.assessment import assess
    from laplace_debias.assessment.methods import NETWORK, TEMPERATURE, posterior_method
    from laplace_debias.commands.compared import identity_of, print_results, results_of
    from laplace_debias.sources import load
    from laplace_debias.system.ranks import process_group

    # Read the files first, because reading the data can take minutes.
    likelihood = likelihood_of(settings, settings.posterior)
    loaded = load(settings, likelihood)
    methods = [NETWORK]
    if loaded.validation is not None and loaded.likelihood.activation is not None:
        methods.append(TEMPERATURE)
    for key, path in _keys(settings.posterior).items():
        methods.append(posterior_method(key, path.stem, path, settings.examples))
    with tempfile.TemporaryDirectory(prefix="laplace-debias-") as own_folder:
        shared_folder = Path(process_group().from_rank(own_folder, 0))
        if not shared_folder.is_dir():
            raise FileNotFoundError(
                f"Rank 0 uses the temporary folder {shared_folder}, which does not exist "
                f"on rank {process_group().rank}. Start all processes on one machine, or "
                "set TMPDIR to a folder that all machines share."
            )
        folder = assess(
            loaded,
            shared_folder / "run",
            methods,
            settings=identity_of(settings),
            seed=settings.seed,
            log=print,
        )
        if process_group().rank == 0:
            print_results(folder, has_page=False)
        results = results_of(folder)
        # Wait until all processes have read the folder, because the first process then removes it.
        process_group().exchange(None)
        return results


def _keys(posteriors: Sequence[Path]) -> dict[str, Path]:
    """Make a unique key for each posterior from its file name; keys are valid in paths and HTML."""
    keys: dict[str, Path] = {}
    for path in posteriors:
        key = re.sub(r"[^a-z0-9._-]", "-", f"posterior-{path.stem.lower()}")
        candidates = [key, *(f"{key}-{number}" for number in range(2, len(posteriors) + 1))]
        keys[next(name for name in candidates if name not in keys)] = path
    return keys


def as_json(settings: Settings, results: dict[str, Any]) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    return results
