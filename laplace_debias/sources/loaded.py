"""A trained network with its data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtyping import UInt8
from torch import Tensor, nn

from laplace_debias.curvature.data.batches import Batches
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.laplace import Laplace
from laplace_debias.sources.likelihoods import task_name


@dataclass(frozen=True, eq=False)
class Loaded:
    """A trained network and its data.

    Every loader can be read any number of times, yields the same examples in the same order each
    time, and leaves them on the CPU.

    Attributes:
        model: The network, in evaluation mode, on its device.
        further_models: The same network with the weights of other trainings, to predict with
            all of them.
        likelihood: The likelihood of the network's outputs.
        train: The training examples, batches `(x, y)` in an order that mixes the classes.
        num_train: N, the total number of training examples. `train` may have fewer examples
            (`train_examples`), which then represent all N.
        validation: Examples that the network was not trained on, to tune on; None without such
            examples.
        test: Examples on which to evaluate the network.
        ood: Out-of-distribution examples by name.
        shifts: The test examples again, corrupted, by severity 1 … 5.
        classes: Names of the classes, in the order of the outputs; None if they have no names.
        picture: Converts an input of the network, `[C, H, W]`, to a picture for people,
            `[H, W, 3]`; None if inputs are not images.
        row: Converts an input to the columns of a table by name, in the units of the table; None if
            the data is not a table.
        read: Reads further inputs of the network from a path, which has a name for messages; None
            if no inputs can be read.
        target: The column of a table that the network predicts.
        input_name: Name of an input, in the singular: `image`, `row` or `example`.
        notes: Sentences about the network and the data.
    """

    model: nn.Module
    likelihood: Likelihood
    train: Batches
    num_train: int
    validation: Batches | None
    test: Batches
    ood: Mapping[str, Batches] = field(default_factory=dict)
    shifts: Mapping[int, Batches] = field(default_factory=dict)
    further_models: tuple[nn.Module, ...] = ()
    classes: tuple[str, ...] | None = None
    picture: Callable[[Tensor], UInt8[Tensor, "height width 3"]] | None = None
    row: Callable[[Tensor], Mapping[str, float]] | None = None
    read: Callable[[str | Path, str], Any] | None = None
    target: str | None = None
    input_name: str = "example"
    notes: tuple[str, ...] = ()

    @property
    def task(self) -> str:
        """The name of the likelihood."""
        return task_name(self.likelihood)

    def posterior(self, path: Path, model: nn.Module | None = None) -> Laplace:
        """Read a saved posterior for the network.

        Raises:
            ValueError: If the posterior was fitted with a likelihood of a different name. Also
                raises the errors of `Laplace.load`.
        """
        own_likelihood = self.likelihood if self.likelihood.name is None else None
        la = Laplace.load(path, model or self.model, likelihood=own_likelihood)
        if la.likelihood.name != self.likelihood.name:
            raise ValueError(
                f"{path} was fitted with --task={la.likelihood.name}, but this command has "
                f"--task={self.task}. Pass the task of the fit."
            )
        return la
