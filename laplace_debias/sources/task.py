"""The meaning of a network's outputs."""

from typing import Literal

Task = Literal["classification", "regression", "heteroscedastic", "binary", "multilabel"]
"""The meaning of a network's outputs, as `Laplace` takes it for `likelihood`."""

REGRESSIONS: tuple[Task, ...] = ("regression", "heteroscedastic")
"""Tasks whose targets are numbers; the network of the second one also predicts the noise."""
