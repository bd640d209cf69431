r"""The prior precision by the marginal likelihood, one number or one for each group of blocks.

With the precisions h = N Λ of the data along a group's directions, its D parameters and their
squared distance S from the prior's mean, the group's part of the log marginal likelihood is
$$\tfrac D2 \log\delta - \tfrac{\delta S}2 - \tfrac12\sum_i \log(h_i + \delta),$$
whose slope in log δ is half of $\sum_i h_i / (h_i + \delta) - \delta S$: the number of parameters
that the data determine, less δ S (MacKay's fixed point). The first falls in δ, the second rises. So
there is one optimum, the slope's only root, and groups do not see each other.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.network.layer_types import CONVOLUTIONS, NORMS, TRANSPOSED
from laplace_debias.curvature.network.shadow import unwrapped
from laplace_debias.laplace.fitted import Fitted
from laplace_debias.laplace.posterior import counted
from laplace_debias.laplace.tuning import OF_EVIDENCE, Row, Tuning

PER = ("kind", "block")


def kind_of(model: nn.Module, block: Block) -> str:
    """The kind of a block's parameters.

    `"linear"` and `"convolution"` weights (with their biases where they make one block),
    `"embedding"` tables, `"normalisation"` scales and shifts, `"bias"`, or `"other"`.
    """
    if block.role == "entries":
        return "other"
    layer = model.get_submodule(block.parameters[0].rpartition(".")[0])
    if isinstance(layer, NORMS):
        return "normalisation"
    if block.role == "table":
        return "embedding"
    if block.role == "bias":
        return "bias"
    return "convolution" if isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)) else "linear"


BOUNDS = (1e-8, 1e8)
"""The range of δ that is searched."""


def maximise_marginal_likelihood(
    log_marginal_likelihood: Callable[[Tensor], Tensor], bounds: tuple[float, float] = BOUNDS
) -> Tuning:
    """Maximise the log marginal likelihood over one prior precision, on a logarithmic scale."""
    # Here, as it takes a third of a second to import.
    from scipy.optimize import minimize_scalar

    table: list[Row] = []

    def loss(log_delta: float) -> float:
        delta = torch.tensor(10.0**log_delta, dtype=torch.float64)
        value = log_marginal_likelihood(delta).item()
        table.append({"prior_precision": delta.item(), OF_EVIDENCE: value})
        return -value

    low, high = (torch.tensor(bounds).log10()).tolist()
    result = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-3})
    if min(result.x - low, high - result.x) < 1e-2:
        raise ValueError(
            f"The marginal likelihood has no optimum between {bounds[0]:g} and {bounds[1]:g} "
            f"(the search ended at {10**result.x:.3g}): tune on validation data instead."
        )

    table.sort(key=lambda row: row["prior_precision"])
    near = [row["prior_precision"] for row in table if row[OF_EVIDENCE] >= -result.fun - 0.5]
    return Tuning(10.0**result.x, OF_EVIDENCE, -result.fun, table, flat=(near[0], near[-1]))


def tune_groups(fitted: Fitted, per: str) -> Tuning:
    """The largest log marginal likelihood over a prior precision for each group.

    Without curvature the marginal likelihood of a group rises towards δ = 0, a prior without any
    scale, and no data say how far: such a group takes the δ that is best for all together. A group
    whose parameters are all at the prior's mean has an optimum at infinity, and takes the largest
    δ of the range.

    Reference:
        MacKay (1992), "A practical Bayesian framework for backpropagation networks".
    """
    if per not in PER:
        raise ValueError(f"Unknown per={per!r}: use 'kind', 'block' or None.")
    if (kind := fitted.subject.settings.kind).is_dense:
        raise ValueError(
            f"curvature={kind.name!r} is one block of all parameters, which has "
            f"one prior precision: leave out per={per!r}, or fit with 'kfac', 'ekfac' or 'diag'."
        )
    groups, posterior = dict[str, list[int]](), fitted.posterior
    model = unwrapped(fitted.subject.model)
    for index, block in enumerate(fitted.subject.known.blocks):
        name = block.name if per == "block" else kind_of(model, block)
        groups.setdefault(name, []).append(index)
    together = maximise_marginal_likelihood(fitted.log_marginal_likelihood).prior_precision
    assert isinstance(together, float)
    blocks, squares = list(posterior.curvature.blocks.values()), posterior.squared_distances()
    of_blocks = torch.zeros(len(blocks), dtype=torch.float64)
    rows: list[Row] = []
    beyond: dict[float, list[str]] = {end: [] for end in BOUNDS}
    for name, members in groups.items():
        parts = [counted(blocks[index]) for index in members]
        counts = torch.cat([of_block.flatten() for _, of_block in parts])
        # h along the directions that have curvature; along the others it is zero.
        h = torch.cat([posterior.data_weight * along.flatten() for along, _ in parts])
        delta = _best(h, counts, float(squares[members].sum()))
        if delta in beyond:
            beyond[delta].append(name)
        delta = together if delta == BOUNDS[0] else delta
        of_blocks[members] = delta
        row = {"name": name, "prior_precision": delta}
        row["num_parameters"] = sum(blocks[index].shape[0] for index in members)
        rows.append({**row, "num_determined": num_determined(h, counts, delta)})
    notes = []
    if low := beyond[BOUNDS[0]]:
        notes.append(
            f"{', '.join(low)}: almost no curvature, so the data do not determine the prior "
            f"precision, and the marginal likelihood rises towards 0. It is set to the best value "
            f"for all parameters together, {together:.3g}."
        )
    if high := beyond[BOUNDS[1]]:
        notes.append(
            f"{', '.join(high)}: almost no distance from the prior's mean, so the marginal "
            f"likelihood rises up to the end of the search range, {BOUNDS[1]:g}."
        )
    value = fitted.log_marginal_likelihood(of_blocks).item()
    return Tuning(of_blocks.tolist(), OF_EVIDENCE, value, rows, notes=tuple(notes))


def num_determined(
    h: Float[Tensor, " directions"], counts: Float[Tensor, " directions"], delta: float
) -> float:
    """γ = Σ h / (h + δ), how many parameters the data determine."""
    return float((counts * (h / (h + delta))).sum())


def _best(h: Tensor, counts: Tensor, square: float) -> float:
    """The root of Σ h / (h + δ) − δ S, or the end of the range that it lies beyond."""
    from scipy.optimize import brentq

    def slope(log_delta: float) -> float:
        delta = math.exp(log_delta)
        return num_determined(h, counts, delta) - delta * square

    low, high = map(math.log, BOUNDS)
    if slope(low) <= 0:
        return BOUNDS[0]
    if slope(high) >= 0:
        return BOUNDS[1]
    return math.exp(brentq(slope, low, high, xtol=1e-10))
