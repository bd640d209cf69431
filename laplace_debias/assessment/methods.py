"""Methods that are compared: the network as it is, its temperature, Laplace posteriors."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_KEY = re.compile(r"[a-z0-9][a-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class PosteriorChoice:
    """A posterior to fit and tune, or one that is in a file.

    Attributes:
        curvature: The posterior's structure, as `Laplace` takes it; so are the next five.
        params: Which parameters are Bayesian.
        fisher: How the curvature's columns are found.
        joint: Whether a layer's weight and bias make one block.
        sharing: How the positions of a convolution or a sequence share a weight.
        rank: Directions of `lowrank`.
        mode: What data it is fitted to, as `Laplace.fit` takes it.
        fit_examples: How many training examples it is fitted to; with `mode="full"` chosen at
            random to stand for all, otherwise the size of a batch. None for all, or for the
            loader's batches.
        path: A file of `Laplace.save`, which is used as it is: neither fitted nor tuned. The others
            are left at their defaults then.

    Raises:
        ValueError: For fewer than two `fit_examples`, or settings of a fit beside a file.
    """

    curvature: Literal["kfac", "ekfac", "diag", "lowrank", "full"] = "kfac"
    params: str | tuple[str, ...] = "all"
    fisher: Literal["exact", "mc", "empirical"] = "exact"
    joint: bool = False
    sharing: Literal["expand", "reduce"] = "expand"
    rank: int | None = None
    mode: Literal["full", "mini", "debiased", "crossfit"] = "full"
    fit_examples: int | None = None
    path: Path | None = None

    def __post_init__(self) -> None:
        if self.fit_examples is not None and self.fit_examples < 2:
            raise ValueError(f"fit_examples is {self.fit_examples}; expected at least 2")
        if self.path is not None and self != PosteriorChoice(path=self.path):
            raise ValueError(
                f"{self.path} is a posterior that is fitted already: leave out curvature, params "
                "and the other settings of a fit"
            )


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to get predictions from a trained network.

    Attributes:
        key: What its files are called: lower-case letters, digits, `.`, `_` and `-`.
        label: What people read.
        describes: What it does, in one sentence.
        posterior: The posterior that it predicts with; None for the network itself.
        has_temperature: Whether a temperature is fitted on the validation examples and divides the
            logarithms of the predicted probabilities.
        examples: How many examples of each set it predicts, chosen at random, the same ones for
            every method of that many; all if None. The validation set is limited likewise.

    Raises:
        ValueError: For a key that is no file name, or `examples` below 2.
    """

    key: str
    label: str
    describes: str
    posterior: PosteriorChoice | None = None
    has_temperature: bool = False
    examples: int | None = None

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise ValueError(
                f"a method's key names files: {self.key!r} should be lower-case letters, digits, "
                "'.', '_' and '-'"
            )
        if self.examples is not None and self.examples < 2:
            raise ValueError(f"{self.key}: examples is {self.examples}; expected at least 2")

    @property
    def is_laplace(self) -> bool:
        """Whether it has a posterior."""
        return self.posterior is not None


NETWORK = Method(
    key="network", label="Network", describes="The trained network's own probabilities."
)
TEMPERATURE = Method(
    key="temperature",
    label="Temperature scaling",
    describes="The network's logits divided by one number, fitted on the validation examples.",
    has_temperature=True,
)
LAST_LAYER = Method(
    key="last-layer",
    label="Laplace, last layer",
    describes="A Laplace approximation (K-FAC) over the last layer's parameters.",
    posterior=PosteriorChoice(params="last_layer"),
)
LAST_LAYER_TEMPERATURE = Method(
    key="last-layer-temperature",
    label="Laplace, last layer, temperature",
    describes=(
        "The last layer's Laplace predictive, the logarithms of its probabilities divided by one "
        "number, fitted on the validation examples."
    ),
    posterior=LAST_LAYER.posterior,
    has_temperature=True,
)
LAPLACE = Method(
    key="laplace",
    label="Laplace, all parameters",
    describes=(
        "A Laplace approximation (K-FAC) over all parameters: directions from one batch of "
        "training examples, curvature along them from another."
    ),
    posterior=PosteriorChoice(mode="debiased", fit_examples=256),
    examples=500,
)


def default_methods(task: str, has_validation: bool) -> tuple[Method, ...]:
    """What `report` compares unless it is told otherwise.

    Args:
        task: As in `Loaded`. A regression's noise is fitted in any case; it has no temperature.
        has_validation: Whether there are examples to fit a temperature on.
    """
    if task == "regression" or not has_validation:
        return NETWORK, LAST_LAYER, LAPLACE
    return NETWORK, TEMPERATURE, LAST_LAYER, LAST_LAYER_TEMPERATURE, LAPLACE


def check_methods(methods: Sequence[Method], task: str, has_validation: bool) -> None:
    """Refuse methods that cannot be compared, before any work.

    Raises:
        ValueError: If the first is not the network as it is, two have one key, or one needs
            validation examples or probabilities that there are none of.
    """
    if not methods or methods[0].posterior is not None or methods[0].has_temperature:
        raise ValueError(
            "the first method must be the network as it is, which the others are compared with: "
            "begin with NETWORK"
        )
    if methods[0].examples is not None:
        raise ValueError("the network predicts all examples: leave out examples of the first one")
    keys = [method.key for method in methods]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"two methods are called {', '.join(twice)}: give each a key of its own")
    tempered = [method.key for method in methods if method.has_temperature]
    if tempered and task == "regression":
        raise ValueError(
            f"a regression has no temperature, its noise is fitted: leave out {', '.join(tempered)}"
        )
    if tempered and not has_validation:
        raise ValueError(
            f"{', '.join(tempered)}: a temperature is fitted on validation examples, and there are "
            "none; give some, or leave the method out"
        )
