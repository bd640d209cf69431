"""Mean and covariance of the linearised network's outputs, exact, without a Jacobian."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.fits.dense import WHOLE
from laplace_debias.curvature.fits.kfac import check_outputs
from laplace_debias.curvature.fits.magnitudes import rotated_jacobians
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.tap import Tap, Use
from laplace_debias.curvature.layers.uses import Uses
from laplace_debias.curvature.network.inputs import Inputs, num_examples, take
from laplace_debias.curvature.network.shadow import shadow
from laplace_debias.laplace.functional.dense import WholeMoments, orthonormalisers, places_of
from laplace_debias.laplace.functional.weights import weighted_gram, weighted_squares
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.operators import EigenKronecker

# A chunk's output gradients take this share of the memory bound: the Jacobians that are made of
# them take more, and larger chunks are no faster.
_SHARE = 8


@dataclass(frozen=True)
class Wanted:
    """What is asked of the outputs' covariance.

    Attributes:
        diagonal: The variances alone.
        outputs: Which outputs, one choice for every example, `[B, k]`; None for all.
        memory_bound: Bytes that output gradients, or one block's Jacobian, may take at a time.
    """

    diagonal: bool
    outputs: Int[Tensor, "batch k"] | None
    memory_bound: int


def functional_moments(
    model: nn.Module,
    blocks: Sequence[Block],
    posteriors: Sequence[GaussianPosterior],
    x: Inputs,
    prior_precisions: Float[Tensor, "posteriors grid blocks"],
    wanted: Wanted,
) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "posteriors grid batch *covariance"]]:
    r"""Mean and covariance of the linearised network's outputs, exact.

    $\Sigma_f(x) = J(x) P^{-1} J(x)^\top$ without ever holding $J$ `[B, C, D]`: layer by layer,
    the rotated Jacobian $\hat J$ of a few examples is weighed by $1/(N\Lambda + \delta)$. One
    rotation serves every prior precision, which enters the weights alone, and one backward pass
    every posterior. Of a linear layer that gives the outputs themselves, $J = I \otimes \phi^\top$
    with its input φ, nothing but $U_A^\top\phi$ is computed.

    Args:
        model: The trained network.
        blocks: The blocks of the posteriors, in their order; those of the parameters also where the
            posteriors have a single one of all parameters.
        posteriors: Posteriors of the model over the same blocks.
        x: Inputs, `[B, ...]`.
        prior_precisions: δ of every block at every grid point, `[posteriors, P, blocks]`.
        wanted: Covariance or variances, of which outputs.

    Returns:
        The outputs at the mean, `[B, ..., C]` (of the wanted ones `[B, k]`); and the covariances
        `[posteriors, P, B, M, M]` for M outputs an example, or their diagonals, of the mean's shape
        behind `[posteriors, P]`.

    Raises:
        ValueError: If the outputs are not finite or have no batch dimension, or if what is wanted
            does not fit into the memory bound.
    """
    network = shadow(model)
    tap = Tap(network, list(dict.fromkeys(block.layer for block in blocks)))
    is_whole = WHOLE in posteriors[0].curvature.blocks
    places = places_of(blocks)
    roots = orthonormalisers(posteriors) if is_whole else []
    means, covariances = [], []
    start, chunk = 0, 1  # The first example shows how much memory one takes.
    while start < num_examples(x):
        part = slice(start, start + chunk)
        outputs = tap.forward(take(x, part))
        check_outputs(outputs)
        chosen = None if wanted.outputs is None else wanted.outputs[part]
        columns = _columns(outputs, chosen)
        last = tap.last_layer(outputs)
        by_products = [] if is_whole else _by_products(network, blocks, last, outputs)
        at_once = len(columns)
        if last is None or len(by_products) < len(blocks):
            gradients = tap.output_bytes()
            at_once = _columns_at_once(wanted, len(columns), gradients, blocks, outputs)
            chunk = max(1, wanted.memory_bound // (_SHARE * gradients * at_once))
        flat = outputs.detach().flatten(1)
        means.append(flat if chosen is None else flat.gather(1, chosen))
        size = [len(columns)] if wanted.diagonal else [len(columns)] * 2
        total = outputs.new_zeros(*prior_precisions.shape[:2], len(flat), *size)
        for index in by_products:
            grids = zip(total, posteriors, prior_precisions[:, :, index], strict=True)
            for covariances_of, posterior, deltas in grids:
                operator = posterior.curvature.blocks[blocks[index].name]
                precisions = _precisions(posterior, operator, deltas)
                assert last is not None
                _add_last_layer(covariances_of, blocks[index], last, chosen, operator, precisions)
        skipped = last.layer if last is not None and by_products else None
        for begin in range(0, len(columns), at_once):
            some = slice(begin, min(begin + at_once, len(columns)))
            more = some.stop < len(columns)
            into = total[:, :, :, some]
            whole = None
            if is_whole:
                whole = WholeMoments(posteriors, prior_precisions[:, :, 0], wanted.diagonal, roots)
            for path, uses in tap.backward(outputs, columns[some], again=more, without=skipped):
                of_layer = [(i, block) for i, block in enumerate(blocks) if block.layer == path]
                layer = network.get_submodule(path)
                if whole is not None:
                    for index, block in of_layer:
                        whole.add(layer, block, uses, places[index])
                    continue
                _add_layer(into, layer, of_layer, uses, posteriors, prior_precisions, wanted)
            if whole is not None:
                into += whole.moments()
        covariances.append(total)
        start += num_examples(take(x, part))
    mean, covariance = torch.cat(means), torch.cat(covariances, dim=2)
    _check_covariance(covariance, prior_precisions)
    if wanted.outputs is None:
        mean = mean.unflatten(1, outputs.shape[1:])
    if wanted.diagonal:
        return mean, covariance.reshape(*covariance.shape[:2], *mean.shape)
    return mean, (covariance + covariance.mT) / 2


def _check_covariance(covariance: Tensor, prior_precisions: Tensor) -> None:
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


def _columns(
    outputs: Float[Tensor, "batch *outputs"], chosen: Int[Tensor, "batch k"] | None
) -> Float[Tensor, "columns batch *outputs"]:
    """Unit cotangents, one for each output that is asked for."""
    size = outputs[0].numel()
    units = torch.eye(size, dtype=outputs.dtype, device=outputs.device)
    if chosen is None:
        columns = units.unsqueeze(1).expand(-1, len(outputs), -1)
    else:
        columns = units[chosen].transpose(0, 1)
    return columns.unflatten(2, outputs.shape[1:])


def _columns_at_once(
    wanted: Wanted, num_columns: int, gradients: int, blocks: Sequence[Block], like: Tensor
) -> int:
    """How many outputs are differentiated together.

    Raises:
        ValueError: If the memory bound does not allow one, or not those that must be together.
    """
    # Of a table only the rows that are looked up have a Jacobian.
    sizes = [block.size for block in blocks if block.role != "table"]
    jacobian = max(sizes, default=0) * like.element_size()
    fitting = wanted.memory_bound // max(gradients, jacobian)
    needed = 1 if wanted.diagonal else num_columns
    if fitting < needed:
        remedy = (
            "" if wanted.diagonal else ", ask for variances (diagonal=True) or for some outputs"
        )
        raise ValueError(
            f"memory_bound={wanted.memory_bound} is too small: the output gradients and Jacobians "
            f"of one example take {needed * max(gradients, jacobian)} bytes. Pass at least as "
            f"many{remedy}."
        )
    return min(num_columns, fitting)


def _by_products(
    network: nn.Module, blocks: Sequence[Block], last: Use | None, outputs: Tensor
) -> list[int]:
    """Blocks of a linear layer whose outputs are the network's, `[B, C]`."""
    if (
        last is None
        or outputs.ndim != 2
        or not isinstance(network.get_submodule(last.layer), nn.Linear)
    ):
        return []
    of_layer = [i for i, block in enumerate(blocks) if block.layer == last.layer]
    return of_layer if all(blocks[i].role in ("weight", "bias") for i in of_layer) else []


def _precisions(
    posterior: GaussianPosterior, operator: EigenKronecker, deltas: Float[Tensor, " grid"]
) -> Float[Tensor, "grid d_out d_in"]:
    return posterior.num_data * operator.magnitudes + deltas[:, None, None]


def _add_last_layer(
    total: Float[Tensor, "grid batch columns *again"],
    block: Block,
    last: Use,
    chosen: Int[Tensor, "batch k"] | None,
    operator: EigenKronecker,
    precisions: Float[Tensor, "grid d_out d_in"],
) -> None:
    r"""Add $U_G\,\mathrm{diag}\big(\sum_j (U_A^\top\phi)_j^2 / P_{ij}\big)_i\,U_G^\top$."""
    phi = last.x if not block.is_vector else last.x.new_ones(len(last.x), 1)
    if block.is_joint:
        phi = torch.nn.functional.pad(phi, (0, 1), value=1.0)
    phi = phi if operator.U_A is None else phi @ operator.U_A
    along = phi.square() @ precisions.reciprocal().mT  # [P, B, d_out]
    U_G = operator.U_G
    if U_G is None:
        U_G = torch.eye(block.shape[0], dtype=phi.dtype, device=phi.device)
    # [C, d_out] for every example alike, or its own choice of rows [B, k, d_out].
    rows = U_G if chosen is None else U_G[chosen]
    if total.ndim == 3:
        total += (rows.square() @ along.unsqueeze(-1)).squeeze(-1)
    else:
        for point, variances in zip(total, along, strict=True):
            point += (rows * variances.unsqueeze(1)) @ rows.mT


def _add_layer(
    total: Float[Tensor, "posteriors grid batch columns *again"],
    layer: nn.Module,
    blocks: Sequence[tuple[int, Block]],
    uses: Uses,
    posteriors: Sequence[GaussianPosterior],
    prior_precisions: Float[Tensor, "posteriors grid blocks"],
    wanted: Wanted,
) -> None:
    """Add what one layer's blocks (with their positions) give to the functional covariances."""
    for index, block in blocks:
        for members in _with_same_directions(posteriors, block.name):
            operators = [posteriors[member].curvature.blocks[block.name] for member in members]
            curvature = torch.stack(
                [
                    posteriors[member].num_data * operator.magnitudes
                    for member, operator in zip(members, operators, strict=True)
                ]
            )
            grids = prior_precisions[members, :, index]
            U_G, U_A = operators[0].U_G, operators[0].U_A
            for part, J, columns in rotated_jacobians(layer, block, uses, U_G, U_A):
                seen = curvature if columns is None else curvature[..., columns]
                rows, seen = J.flatten(2), seen.flatten(1)
                if wanted.diagonal:
                    total[members, :, part] += weighted_squares(rows, seen, grids)
                    continue
                for member, of_member, grid in zip(members, seen, grids, strict=True):
                    total[member, :, part] += weighted_gram(rows, of_member, grid)


def _with_same_directions(posteriors: Sequence[GaussianPosterior], block: str) -> list[list[int]]:
    """Positions of the posteriors, those together that hold the very same directions of a block."""
    groups: dict[tuple[int, int], list[int]] = {}
    for position, posterior in enumerate(posteriors):
        operator = posterior.curvature.blocks[block]
        groups.setdefault((id(operator.U_G), id(operator.U_A)), []).append(position)
    return list(groups.values())
