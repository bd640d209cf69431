"""A trained network with its data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtyping import UInt8
from torch import Tensor, nn

from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.laplace import Laplace
from laplace_debias.sources.likelihoods import task_name


@dataclass(frozen=True, eq=False)
class Loaded:
    """A trained network and its data.

    Every loader can be read any number of times, gives the same examples in the same order each
    time, and leaves them on the CPU.

    Attributes:
        model: The network, in evaluation mode, on its device.
        further_models: The same network with the weights of other trainings, to predict with
            all of them.
        likelihood: The likelihood of its outputs.
        train: The training examples, batches `(x, y)` in an order that mixes the classes.
        num_train: N, the number of training examples in all; `train` may have fewer
            (`train_examples`), which then represent all.
        validation: Examples that the network was not trained on, to tune on; None if there are
            none.
        test: Examples to judge it on.
        ood: Out-of-distribution examples by name.
        shifts: The test examples again, corrupted, by severity 1 … 5.
        classes: Names of the classes, in the order of the outputs; None if they have none.
        picture: From one input `[C, H, W]` as the network takes it to what a person sees, `[H, W,
            3]`; None where inputs are not images.
        row: From one input to a table's columns by name, in its units; None where there are none.
        read: From a path and its name in messages to more inputs of the network; None where none
            can be read.
        target: A table's column that the network predicts.
        input_name: Name of an input, in the singular: `image`, `row` or `example`.
        notes: Notes on network and data, sentences.
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
            ValueError: If it was fitted with a likelihood of a different name. Also raises the
                errors of `Laplace.load`.
        """
        own_likelihood = self.likelihood if self.likelihood.name is None else None
        la = Laplace.load(path, model or self.model, likelihood=own_likelihood)
        if la.likelihood.name != self.likelihood.name:
            raise ValueError(
                f"{path} was fitted with --task={la.likelihood.name}, but this command has "
                f"--task={self.task}. Pass the task of the fit."
            )
        return la
