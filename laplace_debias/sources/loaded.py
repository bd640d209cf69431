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

    Every loader can be read repeatedly. Each time, it yields the same examples in the same order,
    on the CPU.

    Attributes:
        model: The network, in evaluation mode, on its device.
        further_models: The same network with the weights of other training runs, for predicting
            with all of them.
        likelihood: The likelihood of the network's outputs.
        train: The training examples, as batches `(x, y)` in an order that mixes the classes.
        num_train: N, the total number of training examples. `train` may contain only a part of them
            (`train_examples`), which then represents all N.
        validation: Examples for tuning, which the network was not trained on; None if there are no
            such examples.
        test: Examples for evaluating the network.
        ood: Out-of-distribution sets, by name.
        shifts: Corrupted copies of the test examples, by severity 1 … 5.
        classes: Names of the classes, in the order of the outputs; None if they are unknown.
        picture: A function that converts an input of the network, `[C, H, W]`, to a picture that
            can be shown, `[H, W, 3]`; None if the inputs are not images.
        row: A function that converts an input to the values of the table's columns by name, in the
            units of the table; None if the data is not a table.
        read: A function that reads additional inputs of the network, given a path and the name of
            the option for messages; None if no inputs can be read.
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
        """Read a saved posterior of the network.

        Raises:
            ValueError: If the posterior was fitted with a different likelihood, according to its
                name. Also raises the errors of `Laplace.load`.
        """
        own_likelihood = self.likelihood if self.likelihood.name is None else None
        la = Laplace.load(path, model or self.model, likelihood=own_likelihood)
        if la.likelihood.name != self.likelihood.name:
            raise ValueError(
                f"{path} was fitted with --task={la.likelihood.name}, but this command uses "
                f"--task={self.task}. Leave out --task, or pass the task of the fit."
            )
        return la
