"""`laplace-debias predict`: write the predictions of a posterior as a table."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from laplace_debias.commands.network import check_output, likelihood_of, not_for, print_notes
from laplace_debias.sources.settings import SourceSettings
from laplace_debias.system.settings import check_at_least, option

_SUFFIXES = (".parquet", ".csv")


@dataclass(frozen=True, kw_only=True)
class Settings(SourceSettings):
    """Options of `laplace-debias predict`.

    Attributes:
        posterior: The file that `laplace-debias fit` or `tune` wrote.
        inputs: The inputs to predict, as a folder of images, a `.npz` file with `x`, a table or an
            import path. By default, the test data is predicted.
        output: The `.parquet` or `.csv` file of the predictions, with one row per input, in the
            order of `inputs`.
        overwrite: Replace an existing file.
        method: The prediction method, as in `Laplace.predict`. With `map`, the trained network
            itself predicts. With `temperature`, its logits are divided by the temperature that
            `tune` chose for it.
        samples: The number of samples. By default, `glm` uses its closed form, and `glm-mc` and
            `nn` use 100 samples.
    """

    heading: ClassVar = "Predictions"
    unused: ClassVar = not_for("predict", "train_examples", "validation_examples")
    usage: ClassVar = (
        "laplace-debias predict --model my_pkg.models:build --checkpoint net.pt --data images "
        "--posterior posterior.safetensors --inputs new_images --output new.parquet",
    )

    posterior: Path = field(metadata=option(is_input=True))
    output: Path = field(metadata=option(heading="Output"))
    inputs: str | Path | None = field(default=None, metadata=option(metavar="PATH", is_input=True))
    overwrite: bool = field(default=False, metadata=option(heading="Output"))
    method: Literal["glm", "glm-mc", "nn", "map", "temperature"] = "glm"
    samples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "samples")
        if self.output.suffix not in _SUFFIXES:
            raise ValueError(
                f"`output` is {self.output}. Use a name that ends with .parquet or .csv."
            )
        if self.samples is not None and self.method in ("map", "temperature"):
            raise ValueError(
                f"`samples` has no effect with `method={self.method}`, which draws no samples. "
                "Remove it."
            )

    def without_effect(self) -> dict[str, str]:
        """Return the options that have no effect with these settings, each with the reason."""
        return {} if self.inputs is None else {"test_examples": "--inputs are predicted instead"}


def run(settings: Settings) -> Any:
    """Predict, write the table, and return it as a pandas data frame.

    The columns are `name` (the path of an image in the folder of `inputs`) or `row` (the index of
    the input, from 0); for test images in a folder, `name` (the path in the folder of `data`); the
    `label` or `target` of test data; and

    - for classification, `prediction`, `probability_CLASS` and `entropy` (nats); for one logit,
      `probability` and `entropy`; for several labels, `probability_NUMBER` and `entropy`. These are
      followed by the posterior's scores, as far as they are available: `mutual_information` (nats),
      `variance` of the logits and `instability` of the decision (`method=glm`), as in
      `Laplace.uncertainty`;
    - for regression, in the unit of the target, `mean`, `standard_deviation` (including the noise),
      `lower` and `upper` (the ends of the 95 % interval), and `epistemic` (the standard deviation
      without the noise). If there are several targets, `_NUMBER` is appended to these names.
    """
    import pandas

    from laplace_debias.assessment.prediction_table import prediction_columns
    from laplace_debias.report.tables import not_a_formula
    from laplace_debias.sources import load
    from laplace_debias.sources.image_files import files_of
    from laplace_debias.sources.splits import batches_of
    from laplace_debias.system.files import written_atomically
    from laplace_debias.system.ranks import process_group
    from laplace_debias.system.shown import counted

    check_output(settings.output, settings.overwrite)
    # Check the files first, because reading the data can take minutes.
    likelihood = likelihood_of(settings, [settings.posterior])
    loaded = load(settings.without_comparison(), likelihood)
    print_notes(loaded)
    batches = loaded.test
    names = None
    if settings.inputs is not None and loaded.read is not None:
        inputs = loaded.read(settings.inputs, "inputs")
        for note in inputs.notes:
            print(note)
        batches, _ = batches_of(inputs.examples, settings)
        names = inputs.names
    la = loaded.posterior(settings.posterior)
    columns = prediction_columns(
        la,
        loaded,
        batches,
        method=settings.method,
        samples=settings.samples,
        seed=settings.seed,
        has_targets=settings.inputs is None,
        progress=settings.progress,
    )
    first: dict[str, Any] = {"row": range(len(next(iter(columns.values()))))}
    files = files_of(batches)
    if names is not None:
        first = {"name": names}
    elif files is not None:
        first["name"] = [str(file.relative_to(str(settings.data))) for file, _ in files]
    table = pandas.DataFrame({**first, **columns})
    if process_group().rank > 0:
        return table
    with written_atomically(settings.output) as temporary:
        if settings.output.suffix == ".csv":
            table.map(not_a_formula).to_csv(temporary, index=False)
        else:
            table.to_parquet(temporary, index=False)
    print(f"{counted(len(table), 'prediction')}: {settings.output}")
    return table


def as_json(settings: Settings, table: Any) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    return {
        "output": str(settings.output),
        "num_predictions": len(table),
        "columns": list(table.columns),
    }
