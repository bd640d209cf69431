"""What is asked of a prediction: which positions, and which outputs there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.network.chosen_positions import (
    ChosenPositions,
    Positions,
    choose_positions,
)
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.laplace import predictive

OutputChoice = Tensor | Sequence[Sequence[int]] | int
"""Indices of outputs, one choice for each example `[B, k]`, or the number of the largest ones."""


@dataclass(frozen=True)
class Asked:
    """A network whose outputs are those that are asked for, at chosen positions.

    Attributes:
        network: The network, with outputs `[B, ..., C]`, or `[B, p, C]` of chosen positions.
        x: Its inputs.
        positions: The positions; None for all.
        head: Path of the head that sees the chosen positions alone; None where they are chosen from
            all outputs.
    """

    network: nn.Module
    x: Inputs
    positions: ChosenPositions | None = None
    head: str | None = None

    @classmethod
    def of(
        cls,
        network: nn.Module,
        x: Inputs,
        positions: Positions | None,
        may_be_early: Callable[[str], bool],
    ) -> "Asked":
        """What a user asks for.

        Args:
            network: The network, with outputs `[B, ..., C]`.
            x: Inputs on the model's device.
            positions: Which; None for all.
            may_be_early: Whether the head, given by its path, may see the chosen positions alone.
                Where layers are measured one by one, not every one of them may.

        Raises:
            ValueError: As `choose_positions`.
            TypeError: As `choose_positions`.
        """
        if positions is None:
            return cls(network, x)
        found = choose_positions(network, x, positions)
        head = found.head if found.head is not None and may_be_early(found.head) else None
        return cls(found.network(network, head is not None), found.inputs(x), found, head)

    def chosen(self, outputs: OutputChoice | None) -> Int[Tensor, "batch k"] | None:
        """Which of the flattened outputs are asked for.

        Args:
            outputs: As `Laplace.functional` takes them.

        Raises:
            ValueError: If there are no such outputs.
        """
        if outputs is None:
            return None
        values = predictive.map_outputs(self.network, self.x)
        if self.positions is None:
            return predictive.chosen_outputs(values, outputs)
        return _chosen_of_each(values, outputs, self.positions.is_single)

    def shaped(self, values: Float[Tensor, "..."], num_chosen: int | None) -> Float[Tensor, "..."]:
        """Means or variances as the positions have them: `[..., B, p, k]`, of one `[..., B, k]`.

        Args:
            values: `[..., B, p · k]`, or `[..., B, p, C]` of all outputs.
            num_chosen: p · k outputs that were chosen; None for all.
        """
        if self.positions is None:
            return values
        if num_chosen is not None:
            values = values.unflatten(-1, (self.positions.columns.shape[1], -1))
        return values.squeeze(-2) if self.positions.is_single else values


def _chosen_of_each(
    values: Float[Tensor, "batch p outputs"], outputs: OutputChoice, is_single: bool
) -> Int[Tensor, "batch k"]:
    """Indices into the outputs of all chosen positions, from those at each position."""
    batch, p, size = values.shape
    by_position = values.flatten(0, 1)
    if isinstance(outputs, int):
        found = predictive.chosen_outputs(by_position, outputs)
    else:
        choice = torch.as_tensor(outputs)
        expected = f"({batch}, k)" if is_single else f"({batch}, {p}, k)"
        if choice.shape[:-1] != ((batch,) if is_single else (batch, p)):
            raise ValueError(
                f"outputs at chosen positions must be indices of shape {expected} in 0 … "
                f"{size - 1}, or a number; got shape {tuple(choice.shape)}."
            )
        found = predictive.chosen_outputs(by_position, choice.reshape(batch * p, -1))
    starts = size * torch.arange(p, device=found.device)
    return (found.unflatten(0, (batch, p)) + starts[:, None]).flatten(1)
