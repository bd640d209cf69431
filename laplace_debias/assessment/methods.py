"""The methods of a comparison: the network, temperature scaling and Laplace posteriors."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from laplace_debias.curvature.structures import CurvatureName
from laplace_debias.laplace.fitting.modes import MODES, ModeName
from laplace_debias.system.settings import check_at_least

if TYPE_CHECKING:
    from laplace_debias.sources.loaded import Loaded

RecalibrationName = Literal["vector", "platt", "isotonic"]
_KEY = re.compile(r"[a-z0-9][a-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class PosteriorChoice:
    """A posterior to fit and tune.

    Attributes:
        curvature: Structure of the posterior's curvature. This attribute, `params`, `fisher`,
            `joint` and `sharing` are arguments of `Laplace`.
        params: Bayesian parameters: `all`, `weights`, `supported`, `last_layer`, or comma-separated
            names.
        fisher: Labels at which the curvature is computed: the exact expectation over labels
            (`exact`), an estimate of it from sampled labels (`mc`) or random signs (`signs`), or
            the true labels (`empirical`).
        joint: Combine a layer's weight and bias in one block.
        sharing: Approximation for weights that are shared by several positions, in convolutions and
            sequences.
        mode: Which training data the fit uses; an argument of `Laplace.fit`.
        fit_examples: Largest number of training examples for the fit. With `mode="full"`, the fit
            uses a random subset of this size, and the likelihood is rescaled to the full size. In
            other modes, this is the size of a batch. By default, the fit uses all examples or, in
            other modes, the loader's batches. Not available with `mode="auto"`, which chooses the
            number itself.

    Raises:
        ValueError: If `fit_examples` is less than two, or is passed with `mode="auto"`.
    """

    curvature: CurvatureName = "kfac"
    params: str = "last_layer"
    fisher: Literal["exact", "mc", "signs", "empirical"] = "exact"
    joint: bool = False
    sharing: Literal["expand", "reduce"] = "expand"
    mode: ModeName = "full"
    fit_examples: int | None = None

    def __post_init__(self) -> None:
        check_at_least(self, 2, "fit_examples")
        if self.fit_examples is not None and self.mode == "auto":
            raise ValueError("`mode=auto` decides how many examples it uses. Remove fit_examples.")

    @property
    def num_read(self) -> int | None:
        """The maximum number of training examples that a fit reads, or None for all."""
        if self.fit_examples is None:
            return None
        return self.fit_examples * (MODES[self.mode].num_first_batches or 1)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of predicting with a trained network, such as a temperature or a posterior.

    Attributes:
        key: The name in file names, which consists of lower-case letters, digits, `.`, `_` and `-`.
        label: The name on the page.
        describes: A description in one sentence.
        posterior: The posterior to fit and tune, or a file that `Laplace.save` wrote, which is
            neither fitted nor tuned again; None for the network itself.
        has_temperature: Whether to divide the network's logits by a temperature that is fitted on
            the validation examples; only for the network itself.
        recalibration: A map to apply to the network's logits, which is fitted on the validation
            examples; only for the network itself.
        examples: The number of examples to predict from each set. They are chosen at random, and
            methods with the same number predict the same examples. By default, all examples are
            predicted; a posterior over more than the last layer predicts as many as it can in about
            ten minutes. The validation set is limited in the same way.
        uses_all_checkpoints: Whether to average the predictives over the networks of all
            checkpoints; if there is a posterior, each network gets its own.

    Raises:
        ValueError: If the key cannot be used in file names.
    """

    key: str
    label: str
    describes: str
    posterior: PosteriorChoice | Path | None = None
    has_temperature: bool = False
    recalibration: RecalibrationName | None = None
    examples: int | None = None
    uses_all_checkpoints: bool = False

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise ValueError(
                f"The key {self.key!r} of a method is used in file names. Use only lower-case "
                "letters, digits, '.', '_' and '-'."
            )


NETWORK = Method(
    key="network", label="Network", describes="The trained network's own probabilities."
)
TEMPERATURE = Method(
    key="temperature",
    label="Temperature scaling",
    describes="The network's logits divided by one number, fitted on the validation examples.",
    has_temperature=True,
)
VECTOR = Method(
    key="vector",
    label="Vector scaling",
    describes=(
        "The network's logits, each multiplied by a factor and shifted by an offset, which are "
        "fitted on the validation examples."
    ),
    recalibration="vector",
)
PLATT = Method(
    key="platt",
    label="Platt scaling",
    describes=(
        "The network's logit, multiplied by a factor and shifted by an offset, which are fitted on "
        "the validation examples."
    ),
    recalibration="platt",
)
ISOTONIC = Method(
    key="isotonic",
    label="Isotonic regression",
    describes=(
        "A monotone function of the network's probability of each class, fitted on the validation "
        "examples."
    ),
    recalibration="isotonic",
)
LAST_LAYER = Method(
    key="last-layer",
    label="Laplace, last layer",
    describes="A Laplace approximation (K-FAC) over the last layer's parameters.",
    posterior=PosteriorChoice(),
)
LAPLACE = Method(
    key="laplace",
    label="Laplace, all parameters",
    describes=(
        "A Laplace approximation (K-FAC) over all parameters, cross-fitted on at most 512 training "
        "examples."
    ),
    posterior=PosteriorChoice(params="all", mode="crossfit", fit_examples=512),
)
ENSEMBLE = Method(
    key="ensemble",
    label="Ensemble",
    describes="The mean of the predictions of all checkpoints' networks.",
    uses_all_checkpoints=True,
)
MIXTURE = Method(
    key="mixture",
    label="Mixture, last layers",
    describes="The mean of the predictions of last-layer posteriors, one for each checkpoint.",
    posterior=LAST_LAYER.posterior,
    uses_all_checkpoints=True,
)


BUILT_IN = {
    method.key: method
    for method in (NETWORK, TEMPERATURE, VECTOR, PLATT, ISOTONIC, LAST_LAYER, LAPLACE)
}
"""The built-in methods, keyed by name."""


def default_methods(loaded: "Loaded") -> tuple[Method, ...]:
    """Return the methods that `report` compares by default.

    A posterior over all parameters is compared only on request. In `examples/study`, its NLL is
    better than the NLL of temperature scaling on three of 14 problems; the NLL of a posterior over
    the last layer is better on four.

    Temperature scaling is included if there are logits and validation examples. For a regression,
    the noise is always fitted.
    """
    has_temperature = loaded.likelihood.activation is not None and loaded.validation is not None
    default = (NETWORK, TEMPERATURE, LAST_LAYER)
    return tuple(method for method in default if has_temperature or not method.has_temperature)


def chosen_methods(
    names: Sequence[str] | None,
    posteriors: Mapping[str, PosteriorChoice],
    examples: int | None,
    loaded: "Loaded",
) -> tuple[Method, ...]:
    """Return the named methods, and one method per posterior; the network is first."""
    unknown = [name for name in names or () if name not in BUILT_IN]
    if unknown:
        raise ValueError(
            f"There is no method {', '.join(unknown)}. Use {', '.join(BUILT_IN)}, or define a "
            "posterior in `posteriors`."
        )
    if names is None:
        methods = list(default_methods(loaded))
    else:
        methods = [
            replace(method, examples=examples) if method is LAPLACE else method
            for method in BUILT_IN.values()
            if method.key in {NETWORK.key, *names}
        ]
    for key, choice in posteriors.items():
        if key in BUILT_IN:
            raise ValueError(
                f"`posteriors` contains {key}, which is the name of a built-in method. Choose a "
                "different name."
            )
        limit = None if choice.params == "last_layer" else examples
        methods.append(posterior_method(key, f"Laplace, {key}", choice, limit))
    return tuple(methods)


def posterior_method(
    key: str, label: str, posterior: PosteriorChoice | Path, examples: int | None
) -> Method:
    """Make a method that uses a posterior."""
    if isinstance(posterior, Path):
        description = "The posterior as it was saved in a file."
    else:
        limit = ""
        if posterior.fit_examples is not None:
            limit = f" (at most {posterior.fit_examples:,} examples)"
        description = (
            f"A Laplace approximation ({posterior.curvature}) over the parameters "
            f"{posterior.params!r}, mode {posterior.mode!r}{limit}."
        )
    return Method(
        key=key, label=label, describes=description, posterior=posterior, examples=examples
    )


def check_methods(methods: Sequence[Method], loaded: "Loaded") -> None:
    """Raise an error if the methods cannot be compared on the data."""
    scaled = [method.key for method in methods if method.has_temperature]
    if scaled and loaded.likelihood.activation is None:
        raise ValueError(
            f"The task {loaded.task} has no logits, so a temperature cannot be "
            f"applied. Remove {', '.join(scaled)}."
        )
    if scaled and loaded.validation is None:
        raise ValueError(
            "There are no validation examples for fitting the temperature of "
            f"{', '.join(scaled)}. Add validation examples, or remove these methods."
        )
    recalibrated = [method for method in methods if method.recalibration is not None]
    names = ", ".join(method.key for method in recalibrated)
    if recalibrated and (
        loaded.likelihood.activation is None or loaded.likelihood.targets != "class"
    ):
        raise ValueError(
            f"{names}: these methods need class logits, which the task {loaded.task} "
            "does not have. Remove these methods."
        )
    if recalibrated and loaded.validation is None:
        raise ValueError(
            f"{names}: these methods are fitted to validation examples, but there are none. Add "
            "validation examples, or remove these methods."
        )
    applicable, inapplicable = "platt", "vector"
    if loaded.likelihood.activation == "softmax":
        applicable, inapplicable = "vector", "platt"
    if any(method.recalibration == inapplicable for method in recalibrated):
        raise ValueError(
            f"{inapplicable} does not apply to the task {loaded.task}. Use {applicable}."
        )
