"""Outputs of the linearised network, of a fit: which are asked for, and their moments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.network.chosen_positions import (
    ChosenPositions,
    Positions,
    choose_positions,
)
from laplace_debias.curvature.network.inputs import Inputs, Record, call
from laplace_debias.curvature.network.outputs import check_outputs, explaining_unbatched
from laplace_debias.curvature.network.shadow import shadow
from laplace_debias.laplace.fitted import Fitted
from laplace_debias.laplace.functional.joint import joint_moments
from laplace_debias.laplace.functional.moments import OutputRequest, functional_moments
from laplace_debias.laplace.functional.through_head import can_go_through, moments_through_head

OutputChoice = Tensor | Sequence[Sequence[int]] | int
"""Indices of outputs, one choice for each example `[B, k]`, or the number of the largest ones."""


def moments(
    fitted: Fitted,
    x: Inputs | Record,
    prior_precisions: Float[Tensor, " grid"] | Float[Tensor, "grid blocks"] | None = None,
    diagonal: bool = False,
    outputs: OutputChoice | None = None,
    positions: Positions | None = None,
) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "grid batch *covariance"]]:
    """Mean and covariances of the linearised network's outputs, exact.

    Args:
        fitted: The fit.
        x: Inputs, `[B, ...]`.
        prior_precisions: A grid; None for the fit's own prior precision alone.
        diagonal: Whether variances will do.
        outputs: Which outputs, as `Laplace.functional` takes them.
        positions: Which positions, as `Laplace.functional` takes them.

    Raises:
        ValueError: For a prior precision out of range; as `functional_moments`.
    """
    posterior, blocks = fitted.posterior, fitted.parameters.blocks
    if prior_precisions is None:
        prior_precisions = posterior.prior_precision.unsqueeze(0)
    else:
        for point in prior_precisions:
            posterior.check_prior_precision(point)
    num_blocks, num_points = len(fitted.parameters.block_names), len(prior_precisions)
    deltas = prior_precisions.reshape(num_points, -1).expand(-1, num_blocks).to(posterior.mean)
    with torch.inference_mode(False):
        x, network = fitted.moved(x), fitted.network
        with explaining_unbatched(network, x):
            asked = Asked.of(
                network,
                x,
                positions,
                lambda head: can_go_through(head, blocks, posterior),
            )
            chosen = asked.chosen(outputs)
            request = OutputRequest(diagonal, chosen, fitted.settings.memory_bound)
            moments_of = functional_moments
            if asked.head is not None:
                moments_of = partial(moments_through_head, head=asked.head)
            mean, covariances = moments_of(
                asked.network,
                blocks=blocks,
                posterior=posterior,
                x=asked.x,
                prior_precisions=deltas,
                request=request,
            )
    num_chosen = None if chosen is None else chosen.shape[1]
    covariances = asked.shaped(covariances, num_chosen) if diagonal else covariances
    return asked.shaped(mean, num_chosen), covariances


def joint(
    fitted: Fitted,
    x: Inputs | Record,
    outputs: OutputChoice | None = None,
    positions: Positions | None = None,
) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "batch m batch m"]]:
    """Mean and covariance of the linearised network's outputs for all inputs together, exact.

    Args:
        fitted: The fit.
        x: Inputs, `[B, ...]`.
        outputs: Which outputs, as `Laplace.functional` takes them.
        positions: Which positions, as `Laplace.functional` takes them.

    Raises:
        ValueError: As `joint_moments`.
    """
    posterior, num_blocks = fitted.posterior, len(fitted.parameters.block_names)
    with torch.inference_mode(False):
        x, network = fitted.moved(x), fitted.network
        with explaining_unbatched(network, x):
            asked = Asked.of(network, x, positions, lambda _: False)
            chosen = asked.chosen(outputs)
            mean, covariance = joint_moments(
                asked.network,
                fitted.parameters.blocks,
                posterior,
                asked.x,
                posterior.prior_precision.expand(num_blocks).to(posterior.mean),
                OutputRequest(False, chosen, fitted.settings.memory_bound),
            )
    return asked.shaped(mean, None if chosen is None else chosen.shape[1]), covariance


def map_outputs(model: nn.Module, x: Inputs) -> Float[Tensor, "batch *outputs"]:
    """The trained network's outputs, `[B, ..., C]`."""
    with torch.no_grad():
        outputs = call(shadow(model), x)
    check_outputs(outputs)
    return outputs


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
        """The request of a user.

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
        """The flattened outputs that are asked for.

        Args:
            outputs: As `Laplace.functional` takes them.

        Raises:
            ValueError: If there are no such outputs.
        """
        if outputs is None:
            return None
        values = map_outputs(self.network, self.x)
        if self.positions is None:
            return _chosen_outputs(values, outputs)
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
        found = _chosen_outputs(by_position, outputs)
    else:
        choice = torch.as_tensor(outputs)
        expected = f"({batch}, k)" if is_single else f"({batch}, {p}, k)"
        if choice.shape[:-1] != ((batch,) if is_single else (batch, p)):
            raise ValueError(
                f"outputs at chosen positions must be indices of shape {expected} in 0 … "
                f"{size - 1}, or a number; got shape {tuple(choice.shape)}."
            )
        found = _chosen_outputs(by_position, choice.reshape(batch * p, -1))
    starts = size * torch.arange(p, device=found.device)
    return (found.unflatten(0, (batch, p)) + starts[:, None]).flatten(1)


def _chosen_outputs(
    outputs: Float[Tensor, "batch *outputs"], choice: OutputChoice
) -> Int[Tensor, "batch k"]:
    """Indices of outputs: those given, checked, or those of the largest ones.

    Args:
        outputs: `[B, ..., C]`; indices are into the flattened outputs of an example.
        choice: Indices `[B, k]`, or a number k.

    Raises:
        ValueError: If there are no such outputs.
    """
    flat = outputs.flatten(1)
    batch, size = flat.shape
    if isinstance(choice, int):
        if not 1 <= choice <= size:
            raise ValueError(f"outputs={choice}: the model has {size} outputs per example.")
        return flat.topk(choice, dim=1).indices
    choice = torch.as_tensor(choice)
    is_index = not choice.is_floating_point() and choice.ndim == 2 and len(choice) == batch
    if not is_index or choice.numel() == 0 or choice.min() < 0 or choice.max() >= size:
        raise ValueError(
            f"outputs must be indices of shape ({batch}, k) in 0 … {size - 1}, or a number; got "
            f"{choice.dtype} of shape {tuple(choice.shape)}."
        )
    return choice.to(flat.device, torch.long)
