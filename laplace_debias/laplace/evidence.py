r"""The prior precision by the marginal likelihood, one number or one for each group of blocks.

With the precisions h = N Λ of the data along a group's directions, its D parameters and their
squared distance S from the prior's mean, the group's part of the log marginal likelihood is
$$\tfrac D2 \log\delta - \tfrac{\delta S}2 - \tfrac12\sum_i \log(h_i + \delta),$$
whose slope in log δ is half of $\sum_i h_i / (h_i + \delta) - \delta S$: the number of parameters
that the data determine, less δ S (MacKay's fixed point). The first falls in δ, the second rises. So
there is one optimum, the slope's only root, and groups do not see each other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.network.layer_types import CONVOLUTIONS, NORMS, TRANSPOSED
from laplace_debias.curvature.network.wrappers import unwrapped
from laplace_debias.laplace.fitted import Fitted
from laplace_debias.laplace.posterior import GaussianPosterior, counted
from laplace_debias.laplace.tuning import OF_EVIDENCE, Row, Tuning

PER = ("kind", "block")


@dataclass(frozen=True)
class Group:
    """Blocks with one prior precision.

    Attributes:
        name: The kind of their layers, or the block's name.
        blocks: Their numbers.
    """

    name: str
    blocks: tuple[int, ...]


def groups_of(fitted: Fitted, per: str) -> list[Group]:
    """The groups of a fit's blocks, in the order of their first ones.

    Args:
        fitted: The fit.
        per: `"kind"`: those of one kind of layer; `"block"`: each block by itself.

    Raises:
        ValueError: If `per` is none of these, or if the curvature is one block of all parameters.
    """
    names = fitted.parameters.block_names
    if per not in PER:
        raise ValueError(f"Unknown per={per!r}: use 'kind', 'block' or None.")
    if fitted.settings.kind.is_dense:
        raise ValueError(
            f"curvature={fitted.settings.kind.name!r} is one block of all parameters, which has "
            f"one prior precision: leave out per={per!r}, or fit with 'kfac', 'ekfac' or 'diag'."
        )
    if per == "block":
        return [Group(name, (index,)) for index, name in enumerate(names)]
    kinds: dict[str, list[int]] = {}
    for index, block in enumerate(fitted.parameters.blocks):
        kinds.setdefault(kind_of(unwrapped(fitted.model), block), []).append(index)
    return [Group(kind, tuple(members)) for kind, members in kinds.items()]


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


def spread(groups: Sequence[Group], values: Sequence[float]) -> list[float]:
    """The groups' values, one for each block."""
    of_blocks = {
        index: value for group, value in zip(groups, values, strict=True) for index in group.blocks
    }
    return [of_blocks[index] for index in range(len(of_blocks))]


BOUNDS = (1e-8, 1e8)
"""The range of δ that is searched."""


def maximise_marginal_likelihood(
    log_marginal_likelihood: Callable[[Tensor], Tensor], bounds: tuple[float, float] = BOUNDS
) -> Tuning:
    """Maximise the log marginal likelihood over one prior precision, on a logarithmic scale.

    Args:
        log_marginal_likelihood: From a scalar δ to the log marginal likelihood.
        bounds: The range searched.

    Raises:
        ValueError: If the optimum lies on the range's edge.
    """
    # Here, as it takes a third of a second to import.
    from scipy.optimize import brentq, minimize_scalar

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

    def above_half_a_nat(log_delta: float) -> float:
        delta = torch.tensor(10.0**log_delta, dtype=torch.float64)
        return log_marginal_likelihood(delta).item() + result.fun + 0.5

    ends = [
        10.0**edge
        if above_half_a_nat(edge) >= 0
        else 10.0 ** brentq(above_half_a_nat, result.x, edge, xtol=1e-3)
        for edge in (low, high)
    ]
    table.sort(key=lambda row: row["prior_precision"])
    return Tuning(10.0**result.x, OF_EVIDENCE, -result.fun, table, flat=(ends[0], ends[1]))


@dataclass(frozen=True, eq=False)
class GroupEvidence:
    """The numbers that the marginal likelihood sees of a group of blocks.

    Attributes:
        precisions: h = N Λ along the directions that have curvature, float64.
        counts: How many directions each is that of.
        num_parameters: D; along those without a precision h is zero.
        square: S, the squared distance of the parameters from the prior's mean.
    """

    precisions: Float[Tensor, " directions"]
    counts: Float[Tensor, " directions"]
    num_parameters: int
    square: float

    @classmethod
    def of(cls, posterior: GaussianPosterior, group: Group) -> "GroupEvidence":
        """The evidence of a posterior's blocks, at its σ."""
        blocks = list(posterior.curvature.blocks.values())
        nothing = posterior.mean.new_zeros(0, dtype=torch.float64)
        found, counts, size = [nothing], [nothing], 0
        for index in group.blocks:
            block = blocks[index]
            size += block.shape[0]
            magnitudes, of_block = counted(block)
            found.append(posterior.data_weight * magnitudes.flatten())
            counts.append(of_block.flatten())
        squares = posterior.squared_distances()[list(group.blocks)]
        return cls(torch.cat(found), torch.cat(counts), size, float(squares.sum()))

    def num_determined(self, delta: float) -> float:
        """γ = Σ h / (h + δ), how many parameters the data determine."""
        return float((self.counts * (self.precisions / (self.precisions + delta))).sum())

    def best(self, low: float, high: float) -> float:
        """The root of Σ h / (h + δ) − δ S, or the end of the range that it lies beyond."""
        from scipy.optimize import brentq

        def slope(log_delta: float) -> float:
            delta = math.exp(log_delta)
            return self.num_determined(delta) - delta * self.square

        ends = math.log(low), math.log(high)
        if slope(ends[0]) <= 0:
            return low
        if slope(ends[1]) >= 0:
            return high
        return math.exp(brentq(slope, *ends, xtol=1e-10))


def tune_groups(fitted: Fitted, per: str) -> Tuning:
    """The largest log marginal likelihood over a prior precision for each group.

    Without curvature the marginal likelihood of a group rises towards δ = 0, a prior without any
    scale, and no data say how far: such a group takes the δ that is best for all together. A group
    whose parameters are all at the prior's mean has an optimum at infinity, and takes the largest
    δ of the range.

    Args:
        fitted: A fit.
        per: As `groups_of` takes it.

    Raises:
        ValueError: As `groups_of`; if there is no optimum for all together.

    Reference:
        MacKay (1992), "A practical Bayesian framework for backpropagation networks".
    """
    groups = groups_of(fitted, per)
    seen = [GroupEvidence.of(fitted.posterior, group) for group in groups]
    together = maximise_marginal_likelihood(fitted.log_marginal_likelihood).prior_precision
    assert isinstance(together, float)
    deltas = [of_group.best(*BOUNDS) for of_group in seen]
    notes = notes_of(groups, deltas, together)
    deltas = [together if delta == BOUNDS[0] else delta for delta in deltas]
    of_blocks = torch.tensor(spread(groups, deltas), dtype=torch.float64)
    value = fitted.log_marginal_likelihood(of_blocks).item()
    rows = [
        {
            "name": group.name,
            "prior_precision": delta,
            "num_parameters": of_group.num_parameters,
            "num_determined": of_group.num_determined(delta),
        }
        for group, of_group, delta in zip(groups, seen, deltas, strict=True)
    ]
    return Tuning(of_blocks.tolist(), OF_EVIDENCE, value, rows, notes=notes)


def notes_of(groups: Sequence[Group], deltas: Sequence[float], together: float) -> tuple[str, ...]:
    """Notes on groups whose optimum lies beyond the range."""
    notes = []
    if low := [g.name for g, delta in zip(groups, deltas, strict=True) if delta == BOUNDS[0]]:
        notes.append(
            f"{', '.join(low)}: almost no curvature, so the data do not determine the prior "
            f"precision, and the marginal likelihood rises towards 0. It is set to the best value "
            f"for all parameters together, {together:.3g}."
        )
    if high := [g.name for g, delta in zip(groups, deltas, strict=True) if delta == BOUNDS[1]]:
        notes.append(
            f"{', '.join(high)}: almost no distance from the prior's mean, so the marginal "
            f"likelihood rises up to the end of the search range, {BOUNDS[1]:g}."
        )
    return tuple(notes)
