"""Mean and covariance of a fit's linearised network, exact; whole Jacobians are never held."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.fits.dense import DENSE_BLOCK
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.chosen_positions import (
    ChosenPositions,
    LinearCalls,
    Positions,
    choose_positions,
)
from laplace_debias.curvature.network.inputs import Inputs, Record, call, num_examples, take
from laplace_debias.curvature.network.outputs import (
    MEMORY_BOUND,
    MOST_GRANTED,
    check_outputs,
    explain_unbatched,
    granted,
)
from laplace_debias.laplace.functional.blocks import BlockMoments
from laplace_debias.laplace.functional.dense import DenseMoments
from laplace_debias.laplace.functional.head_products import (
    Wanted,
    can_go_through,
    contracted,
    head_products,
)
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.laplace.state import FittedPosterior
from laplace_debias.system.memory import ROOM

OutputChoice = Tensor | Sequence[Sequence[int]] | int
"""Indices of outputs, one choice for each example `[B, k]`, or the number of the largest ones."""
# A chunk's output gradients take the memory bound, beside the forward pass and slices of Jacobians.
# More bytes of them for each block make calls no cheaper.
_WORTH = 2**21


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


@contextmanager
def asked_of(
    fitted: FittedPosterior,
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
        x = fitted.spec.read_batch.inputs(x, fitted.posterior.mean.device)
        network = fitted.network()
        try:
            if positions is None:
                yield Asked(network, x)
                return
            found = choose_positions(network, x, positions)
            head = found.head if found.head is not None and may_be_early(found.head) else None
            yield Asked(found.network(network, head is not None), found.inputs(x), found, head)
        except Exception as error:
            explain_unbatched(error, network, x)
            raise


def map_outputs(network: nn.Module, x: Inputs) -> Float[Tensor, "batch *outputs"]:
    """The trained network's outputs, `[B, ..., C]`."""
    with torch.no_grad():
        outputs = call(network, x)
    check_outputs(outputs)
    return outputs


@dataclass(frozen=True)
class OutputRequest:
    """The part of the outputs' covariance that is asked for.

    Attributes:
        diagonal: The variances alone.
        outputs: Which outputs, one choice for every example, `[B, k]`; None for all.
        memory_bound: Bytes that output gradients, or one block's Jacobian, may take at a time;
            None as `granted` takes it.
        differences: Whether a covariance will do that has those of all differences of outputs, as
            a softmax takes them: one output fewer is pushed back.
    """

    diagonal: bool
    outputs: Int[Tensor, "batch k"] | None
    memory_bound: int | None
    differences: bool = False


def moments(
    fitted: FittedPosterior,
    x: Inputs | Record,
    prior_precisions: Float[Tensor, " grid"] | Float[Tensor, "grid blocks"] | None = None,
    diagonal: bool = False,
    outputs: OutputChoice | None = None,
    positions: Positions | None = None,
    differences: bool = False,
    may_overflow: bool = False,
) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "grid batch *covariance"]]:
    r"""Mean and covariances of the linearised network's outputs, exact.

    $\Sigma_f(x) = J(x) P^{-1} J(x)^\top$ without ever holding $J$ `[B, C, D]`: layer by layer,
    the rotated Jacobian $\hat J$ of a few examples is weighed by $1/(N\Lambda + \delta)$. One
    rotation serves every prior precision, which enters the weights alone. Of a linear layer that
    gives the outputs themselves, $J = I \otimes \phi^\top$ with its input φ, nothing but
    $U_A^\top\phi$ is computed.

    Args:
        fitted: The fit.
        x: Inputs, `[B, ...]`.
        prior_precisions: δ at every grid point, one number or one for every block; None for the
            fit's own.
        diagonal: Whether to give variances alone.
        outputs: Which outputs; None for all.
        positions: Which positions; None for all.
        differences: As `OutputRequest` has it.
        may_overflow: Whether covariances may hold infinities, as those of a search's smallest prior
            precisions do; if not, they raise an error.

    Returns:
        The outputs at the mean, `[B, ..., C]` (of those asked for `[B, k]`). And the covariances
        `[P, B, M, M]` for M outputs per example, or their diagonals, `[P, B, ..., C]`.

    Raises:
        ValueError: If the outputs are not finite or have no batch dimension, or if what is
            requested does not fit into the memory bound.
    """
    posterior, known = fitted.posterior, fitted.parameters
    if prior_precisions is None:
        prior_precisions = posterior.prior_precision.unsqueeze(0)
    deltas = prior_precisions.reshape(len(prior_precisions), -1).to(posterior.mean)
    deltas = deltas.expand(-1, len(known.block_names))
    may_be_early = partial(can_go_through, blocks=known.blocks, posterior=posterior)
    with asked_of(fitted, x, positions, may_be_early) as asked:
        chosen = None if outputs is None else asked.chosen(outputs)
        request = OutputRequest(diagonal, chosen, fitted.config.memory_bound, differences)
        mean, covariances = _in_chunks(asked, known.blocks, posterior, deltas, request)
    if not may_overflow:
        check_covariance(covariances, deltas)
    num_chosen = None if chosen is None else chosen.shape[1]
    covariances = asked.shaped(covariances, num_chosen) if diagonal else covariances
    return asked.shaped(mean, num_chosen), covariances


def _in_chunks(
    asked: Asked,
    blocks: Sequence[Block],
    posterior: GaussianPosterior,
    deltas: Float[Tensor, "grid blocks"],
    request: OutputRequest,
) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "grid batch *covariance"]]:
    """The moments, of as many examples at a time as fit into the memory bound.

    The blocks are those of the parameters also where the posterior has a single one of all.
    """
    calls = None if asked.head is None else LinearCalls(asked.network, asked.head)
    tap, batch = Tap(asked.network, blocks), num_examples(asked.x)
    accumulator = DenseMoments if DENSE_BLOCK in posterior.curvature.blocks else BlockMoments
    of_blocks = accumulator(blocks, posterior, deltas, request.diagonal)
    means, covariances = [], []
    start, chunk = 0, 1  # The first example shows how much memory one takes.
    while start < batch:
        part = slice(start, start + chunk)
        outputs = tap.forward(take(asked.x, part))
        check_outputs(outputs)
        chosen = None if request.outputs is None else request.outputs[part]
        flat = outputs.detach().flatten(1)
        means.append(flat if chosen is None else flat.gather(1, chosen))
        num_outputs = means[-1].shape[1]
        if num_outputs**2 * outputs.element_size() > MOST_GRANTED:
            check_size(num_outputs, outputs, request, free_positions=0 if calls is None else 1)
        size = [num_outputs] * (1 if request.diagonal else 2)
        total = outputs.new_zeros(len(deltas), len(flat), *size)
        if calls is None:
            chunk = _add(total, tap, of_blocks, outputs, chosen, request, batch - start)
            if len(flat) == 1 < min(chunk, batch - start):
                means.pop()
                continue
        else:
            weight = asked.network.get_parameter(f"{calls.path}.weight".lstrip(".")).detach()
            wanted = Wanted.of(weight, calls.x, chosen)
            assert isinstance(of_blocks, BlockMoments)
            chunk = _add_through(total, tap, of_blocks, calls, wanted, request) or chunk
        covariances.append(total)
        start += len(flat)
    mean, covariance = torch.cat(means), torch.cat(covariances, dim=1)
    if request.outputs is None:
        mean = mean.unflatten(1, outputs.shape[1:])
    if request.diagonal:
        return mean, covariance.reshape(len(covariance), *mean.shape)
    return mean, (covariance + covariance.mT) / 2


def _add(
    total: Float[Tensor, "grid batch m *again"],
    tap: Tap,
    of_blocks: BlockMoments | DenseMoments,
    outputs: Float[Tensor, "batch *outputs"],
    chosen: Int[Tensor, "batch m"] | None,
    request: OutputRequest,
    left: int,
) -> int:
    """Add the covariance of some examples' outputs; returns how many examples to take next.

    Where these are more than a single example that came, and are `left`, they begin with it again.
    """
    blocks, added = of_blocks.blocks, of_blocks.add_last_layer(total, tap, outputs, chosen)
    num_columns = total.shape[2] - (request.differences and total.shape[2] > 1)
    gradients, at_once = tap.output_bytes, num_columns
    bound = request.memory_bound or MEMORY_BOUND * ROOM[outputs.device.type]
    if len(added) < len(blocks):
        at_once, bound = columns_at_once(request, num_columns, gradients, blocks, outputs)
        at_once = min(num_columns, at_once)
    chunk = max(
        1, min(bound, _WORTH * ROOM[outputs.device.type] * len(blocks)) // (gradients * at_once)
    )
    if len(outputs) == 1 < min(chunk, left):
        return chunk
    skipped = blocks[added[0]].site if added else None
    for begin in range(0, num_columns, at_once):
        some = slice(begin, min(begin + at_once, num_columns))
        columns = unit_columns(outputs, chosen, some)
        if request.differences:
            columns = columns - unit_columns(outputs, chosen, slice(-1, None))
        into = total[:, :, some] if request.diagonal else total[:, :, some, some]
        of_blocks.add(into, tap.backward(outputs, columns, some.stop < num_columns, skipped))
    return chunk


def _add_through(
    total: Float[Tensor, "grid batch m *again"],
    tap: Tap,
    of_blocks: BlockMoments,
    calls: LinearCalls,
    wanted: Wanted,
    request: OutputRequest,
) -> int | None:
    r"""As `_add`, for outputs that a linear head gives, by way of its inputs.

    With $f_{tc} = w_c^\top h_t + b_c$, parameters below the head act on the outputs through $h$
    `[B, p, d]` alone. So no cotangent of size T·C is pushed back: for k outputs those of $h$ are
    the rows $w_c$; where these are more than $p \cdot d$, the covariance $\Sigma_h$ is computed,
    and $w_c^\top \Sigma_h w_{c'}$ of it.
    """
    blocks, chunk = of_blocks.blocks, None
    in_head = [i for i, block in enumerate(blocks) if block.layer == calls.path]
    if calls.x.requires_grad:
        below = [block for i, block in enumerate(blocks) if i not in in_head]
        without = blocks[in_head[0]].site if in_head else None
        of_h = replace(request, diagonal=request.diagonal and not wanted.by_inputs)
        num_columns = wanted.h[0].numel() if wanted.by_inputs else wanted.num_outputs
        gradients, remedy = tap.output_bytes, ", or ask for fewer outputs"
        most, bound = columns_at_once(of_h, num_columns, gradients, below, wanted.h, remedy)
        at_once = min(num_columns, most)
        of_columns = BlockMoments(
            blocks, of_blocks.posterior, of_blocks.prior_precisions, of_h.diagonal
        )
        for begin in range(0, num_columns, at_once):
            some = slice(begin, min(begin + at_once, num_columns))
            size = [some.stop - begin] * (1 if of_h.diagonal else 2)
            found = total.new_zeros(*total.shape[:2], *size)
            columns, more = wanted.columns(some), some.stop < num_columns
            of_columns.add(found, tap.backward(calls.x, columns, more, without))
            # Without the diagonal alone all columns are one part.
            outputs = wanted.of_columns(some) if of_h.diagonal else wanted
            into = total[..., some] if of_h.diagonal else total
            into += contracted(found, outputs, request.diagonal)
        chunk = max(
            1, min(bound, _WORTH * ROOM[calls.x.device.type] * len(blocks)) // (gradients * at_once)
        )
    tap.forget()
    for index in in_head:
        deltas = of_blocks.prior_precisions[:, index]
        total += head_products(blocks[index], of_blocks.posterior, deltas, wanted, request.diagonal)
    return chunk


def check_size(
    size: int,
    outputs: Float[Tensor, "batch *outputs"],
    request: OutputRequest,
    free_positions: int,
) -> None:
    """Require many outputs that are asked for to be such as can be computed.

    Raises:
        ValueError: If an example's covariance does not fit into memory, or if it has so many
            positions and outputs at each that differentiating them all takes hours.
    """
    needed, shape = size**2 * outputs.element_size(), tuple(outputs.shape[1:])
    if outputs.ndim > 2 and outputs.shape[1] > free_positions and request.outputs is None:
        raise ValueError(
            f"The model has {size} outputs an example, of shape {shape}, and each would be "
            "differentiated by itself: ask for some positions (positions=-1 is the last token) or "
            "for some outputs (functional(x, positions=-1, outputs=k) for the k largest). Where an "
            "embedding shares the head's weight, leave that weight out of params."
        )
    if not request.diagonal:
        raise ValueError(
            f"The covariance of {size} outputs takes {needed} bytes an example: ask for variances "
            "(diagonal=True) or for some outputs (outputs=k for the k largest)."
        )


def check_covariance(covariance: Tensor, prior_precisions: Tensor) -> None:
    """Require finite covariances.

    Raises:
        ValueError: Otherwise: the posterior is in range, but its products with the Jacobian of
            these inputs are not.
    """
    if not torch.stack(torch.aminmax(covariance)).isfinite().all():
        raise ValueError(
            f"The covariance of the outputs overflows {covariance.dtype}: the squared Jacobian of "
            f"these inputs over the prior precision (from {float(prior_precisions.min()):.3g}) is "
            "too large. Rescale the inputs, use a larger prior precision, or convert the model to "
            "a wider dtype."
        )


def unit_columns(
    outputs: Float[Tensor, "batch *outputs"],
    chosen: Int[Tensor, "batch k"] | None,
    some: slice = slice(None),
) -> Float[Tensor, "columns batch *outputs"]:
    """Unit cotangents, one for each of some of the outputs that are asked for."""
    batch, size = len(outputs), outputs[0].numel()
    if chosen is None:
        of_outputs = torch.arange(size, device=outputs.device)[some].unsqueeze(1)
        units = outputs.new_zeros(len(of_outputs), size).scatter_(1, of_outputs, 1.0)
        columns = units.unsqueeze(1).expand(-1, batch, -1)
    else:
        at = chosen.T[some].unsqueeze(2)
        columns = outputs.new_zeros(len(at), batch, size).scatter_(2, at, 1.0)
    return columns.unflatten(2, outputs.shape[1:])


def columns_at_once(
    request: OutputRequest,
    num_columns: int,
    gradients: int,
    blocks: Sequence[Block],
    like: Tensor,
    remedy: str = "",
    what: str = "an example's output gradients and Jacobians",
) -> tuple[int, int]:
    """How many outputs of one example can be differentiated together, and the bytes for it.

    Raises:
        ValueError: If the memory bound does not allow one, or not those that must be together.
    """
    # Of each its output gradients, or a block's Jacobian.
    each = gradients
    for block in blocks:
        # Of a table only the rows that are looked up have a Jacobian.
        if block.role != "table":
            each = max(each, block.size * like.element_size())
    if not remedy and not request.diagonal:
        remedy = ", ask for variances (diagonal=True) or for some outputs"
    needed = each if request.diagonal else num_columns * each
    bound = granted(request.memory_bound, needed, what, like.device, remedy)
    return bound // each, bound
