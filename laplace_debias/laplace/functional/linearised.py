"""Outputs of the linearised network, of a fit: which are asked for, and their moments."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.fits.dense import DENSE_BLOCK
from laplace_debias.curvature.layers.jacobians import joint_jacobians
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.chosen_positions import (
    ChosenPositions,
    Positions,
    choose_positions,
)
from laplace_debias.curvature.network.inputs import Inputs, Record, call, take
from laplace_debias.curvature.network.outputs import check_outputs, explaining_unbatched
from laplace_debias.laplace.functional.blocks import BlockMoments
from laplace_debias.laplace.functional.dense import DenseMoments
from laplace_debias.laplace.functional.moments import (
    OutputRequest,
    can_go_through,
    check_covariance,
    columns_at_once,
    functional_moments,
    unit_columns,
)
from laplace_debias.laplace.posterior import Fitted

OutputChoice = Tensor | Sequence[Sequence[int]] | int
"""Indices of outputs, one choice for each example `[B, k]`, or the number of the largest ones."""


def moments(
    fitted: Fitted,
    x: Inputs | Record,
    prior_precisions: Float[Tensor, " grid"] | Float[Tensor, "grid blocks"] | None = None,
    diagonal: bool = False,
    outputs: OutputChoice | None = None,
    positions: Positions | None = None,
    differences: bool = False,
) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "grid batch *covariance"]]:
    """Mean and covariances of the linearised network's outputs, exact.

    Raises:
        ValueError: As `functional_moments`.
    """
    posterior, blocks = fitted.posterior, fitted.subject.known.blocks
    if prior_precisions is None:
        prior_precisions = posterior.prior_precision.unsqueeze(0)
    num_blocks, num_points = len(fitted.subject.known.block_names), len(prior_precisions)
    deltas = prior_precisions.reshape(num_points, -1).expand(-1, num_blocks).to(posterior.mean)
    may_be_early = partial(can_go_through, blocks=blocks, posterior=posterior)
    with asked_of(fitted, x, positions, may_be_early) as asked:
        chosen = None if outputs is None else asked.chosen(outputs)
        memory_bound = fitted.subject.settings.memory_bound
        request = OutputRequest(diagonal, chosen, memory_bound, differences)
        of_request = posterior, asked.x, deltas, request, asked.head
        mean, covariances = functional_moments(asked.network, blocks, *of_request)
    num_chosen = None if chosen is None else chosen.shape[1]
    covariances = asked.shaped(covariances, num_chosen) if diagonal else covariances
    return asked.shaped(mean, num_chosen), covariances


def joint(
    fitted: Fitted,
    x: Inputs | Record,
    outputs: OutputChoice | None = None,
    positions: Positions | None = None,
) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "batch m batch m"]]:
    r"""Mean and joint covariance of the linearised network's outputs for all inputs, exact.

    $\mathrm{Cov}(f(x_n), f(x_m)) = J(x_n) P^{-1} J(x_m)^\top$, block by block in its eigenbasis as
    `functional_moments` has it. Inputs whose Jacobians do not fit into the memory bound together
    are taken in groups, every two of which go through the network together.

    Returns:
        The outputs at the mean, `[B, ..., C]` (of those asked for `[B, k]`), and the covariance
        `[B, M, B, M]` for M outputs per example.

    Raises:
        ValueError: If the outputs are not finite or have no batch dimension, or if two examples do
            not fit into the memory bound.
    """
    posterior, known = fitted.posterior, fitted.subject.known
    deltas = posterior.prior_precision.expand(len(known.block_names)).to(posterior.mean)
    with asked_of(fitted, x, positions) as asked:
        chosen = None if outputs is None else asked.chosen(outputs)
        tap, inputs = Tap(asked.network, known.blocks), asked.x
        # One example tells how much memory each takes.
        tap.forward(take(inputs, slice(0, 1)))
        in_bytes = tap.output_bytes
        tap.forget()
        of_all = map_outputs(asked.network, inputs)
        mean = of_all.flatten(1) if chosen is None else of_all.flatten(1).gather(1, chosen)
        batch, num_columns = mean.shape
        covariance = mean.new_zeros(batch, num_columns, batch, num_columns)
        accumulator = DenseMoments if DENSE_BLOCK in posterior.curvature.blocks else BlockMoments
        moments = accumulator(known.blocks, posterior, deltas[None], False, joint_jacobians)
        least = min(batch, 2)
        what, remedy = f"a joint covariance of {least} example(s)", ", or ask for some outputs"
        request = OutputRequest(False, chosen, fitted.subject.settings.memory_bound)
        of_least = request, least * num_columns, in_bytes, known.blocks, mean, remedy, what
        for part in _groups(batch, columns_at_once(*of_least)[0] // num_columns):
            part = part.to(mean.device)
            of_part = tap.forward(take(inputs, part))
            check_outputs(of_part)
            columns = unit_columns(of_part, None if chosen is None else chosen[part])
            total = mean.new_zeros(1, 1, *[len(part) * num_columns] * 2)
            moments.add(total, tap.backward(of_part, columns))
            by_example = total.view(*[len(part), num_columns] * 2)
            covariance[part[:, None], :, part] = by_example.permute(0, 2, 1, 3)
        check_covariance(covariance, deltas)
    flat = covariance.flatten(2).flatten(0, 1)
    covariance = ((flat + flat.mT) / 2).view(covariance.shape)
    if chosen is None:
        return asked.shaped(of_all, None), covariance
    return asked.shaped(mean, num_columns), covariance


def _groups(batch: int, fitting: int) -> Iterator[Int[Tensor, " some"]]:
    """Numbers of examples that go together, so many at most, so that every two are in one group."""
    if fitting >= batch:
        yield torch.arange(batch)
        return
    for pair in combinations(torch.arange(batch).split(fitting // 2), 2):
        yield torch.cat(pair)


@contextmanager
def asked_of(
    fitted: Fitted,
    x: Inputs | Record,
    positions: Positions | None = None,
    may_be_early: Callable[[str], bool] = lambda _: False,
) -> Iterator["Asked"]:
    """The network and the inputs of a user's request, which are explained where they fail.

    Args:
        fitted: The fit.
        x: Inputs as the user gave them.
        positions: Which; None for all.
        may_be_early: Whether the head, given by its path, may see the chosen positions alone.
            Where layers are measured one by one, not every one of them may.
    """
    with torch.inference_mode(False):
        x = fitted.subject.read_batch.inputs(x, fitted.posterior.mean.device)
        network = fitted.subject.network
        with explaining_unbatched(network, x):
            if positions is None:
                yield Asked(network, x)
                return
            found = choose_positions(network, x, positions)
            head = found.head if found.head is not None and may_be_early(found.head) else None
            yield Asked(found.network(network, head is not None), found.inputs(x), found, head)


def map_outputs(network: nn.Module, x: Inputs) -> Float[Tensor, "batch *outputs"]:
    """The trained network's outputs, `[B, ..., C]`."""
    with torch.no_grad():
        outputs = call(network, x)
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

    def chosen(self, outputs: OutputChoice) -> Int[Tensor, "batch k"]:
        """The flattened outputs that are asked for, those of one position after the other.

        Raises:
            ValueError: If there are no such outputs.
        """
        values, at = map_outputs(self.network, self.x), self.positions
        # A row of an example, or of each of its positions.
        rows = values.flatten(1) if at is None else values.flatten(0, 1)
        shape = values.shape[: 1 if at is None or at.is_single else 2]
        size = rows.shape[1]
        if isinstance(outputs, int):
            if not 1 <= outputs <= size:
                raise ValueError(f"outputs={outputs}: the model has {size} outputs per example.")
            found = rows.topk(outputs, dim=1).indices
        else:
            choice = torch.as_tensor(outputs)
            is_index = not choice.is_floating_point() and choice.shape[:-1] == shape
            if not is_index or choice.numel() == 0 or choice.min() < 0 or choice.max() >= size:
                raise ValueError(
                    f"outputs must be indices of shape ({', '.join(map(str, shape))}, k) in 0 … "
                    f"{size - 1}, or a number; got {choice.dtype} of shape {tuple(choice.shape)}."
                )
            found = choice.to(rows.device, torch.long).flatten(0, -2)
        if at is None:
            return found
        by_position = found.unflatten(0, (len(values), -1))
        starts = size * torch.arange(by_position.shape[1], device=found.device)
        return (by_position + starts[:, None]).flatten(1)

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
