"""How a plan is made: shapes by formula, a chunk by running two examples, time by one batch."""

from dataclasses import replace

from torch import nn

from laplace_debias.curvature.fits.costs import (
    BlockCosts,
    costs_of,
    message_bytes,
    network_flops,
    posterior_numbers,
)
from laplace_debias.curvature.fits.kinds import CurvatureKind
from laplace_debias.curvature.fits.over_ranks import owners_of_blocks
from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.fits.working import Working
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.laplace.plan import Pass, Plan, refusal
from laplace_debias.laplace.plan_seconds import eigh_seconds, timed_pass
from laplace_debias.laplace.planned import Planned, fewer_blocks
from laplace_debias.laplace.schemes import FOLDS
from laplace_debias.system.available import available_memory


def plan_of(planned: Planned, timed: bool, available: int | None) -> Plan:
    """The plan of a fit.

    Args:
        planned: What is to be fitted.
        timed: Whether a batch and an eigendecomposition are timed.
        available: Bytes that it may take; None for those that the device has.
    """
    problem, kind, mode = planned.problem, planned.settings.kind, planned.mode
    workings = planned.workings()
    working = max(workings, key=lambda of: of.chunk)
    blocks = _costs(planned, workings[0])
    available = available_memory(problem.device) if available is None else available
    of_stages = planned.stages(workings)
    folds = planned.folds or FOLDS
    messages = {}
    if problem.ranks.size > 1 and not kind.is_dense:
        dtype = problem.factor_dtype
        messages = message_bytes(problem.blocks, kind.name, mode, folds, dtype, problem.replicate)
    passes = passes_of(planned, workings[0], timed)
    eigh_flops = sum(block.eigh_flops for block in blocks)
    of_eigh = 0.0 if eigh_flops == 0 and not kind.is_dense else None
    if timed and eigh_flops:
        of_eigh = eigh_seconds(planned, workings[0])
    too_much = available is not None and max(of_stages.values()) > available
    size = sum(block.size for block in problem.blocks)
    return Plan(
        *(kind.name, mode, size, blocks, working, of_stages),
        posterior_bytes(problem, kind),
        *(passes, eigh_flops, of_eigh, problem.ranks.size, messages, available),
        planned.alternatives() if too_much else {},
    )


def posterior_bytes(problem: Problem, kind: CurvatureKind) -> int:
    """Bytes of a fitted posterior, its curvature and its mean; of a sharded one the most on one."""
    if problem.is_sharded and not kind.is_dense:
        owners = owners_of_blocks(problem)
        of_ranks = [
            [block for block in problem.blocks if owners[block] == rank]
            for rank in range(problem.ranks.size)
        ]
    else:
        of_ranks = [list(problem.blocks)]
    of_curvature = max(
        posterior_numbers(blocks, kind.name, kind.num_directions) for blocks in of_ranks
    )
    return problem.dtype.itemsize * (of_curvature + sum(block.size for block in problem.blocks))


def is_too_large(problem: Problem, kind: CurvatureKind) -> bool:
    """Whether a posterior takes more than the memory that is left."""
    available = available_memory(problem.device)
    return available is not None and posterior_bytes(problem, kind) > available


def too_large(
    model: nn.Module, problem: Problem, kind: CurvatureKind, x: Inputs | None
) -> ValueError:
    """What is raised for a posterior that is too large: it names those that fit, with their bytes.

    Args:
        model: The user's model, unwrapped.
        problem: The network and its blocks.
        kind: The curvature.
        x: Inputs of the first batch; None where this process has none.
    """
    available = available_memory(problem.device) or 0
    found = {}
    for other in (CurvatureKind("diag"), CurvatureKind("lowrank")):
        if other.name != kind.name:
            found[f'curvature="{other.name}"'] = posterior_bytes(problem, other)
    for name, blocks in fewer_blocks(model, problem.blocks, x):
        found[name] = posterior_bytes(replace(problem, blocks=blocks), kind)
    what = f"The posterior of curvature={kind.name!r} takes"
    needed = posterior_bytes(problem, kind)
    return ValueError(f"{refusal(what, needed, available, found)} Nothing was fitted.")


def _costs(planned: Planned, working: Working) -> tuple[BlockCosts, ...]:
    problem, kind = planned.problem, planned.settings.kind
    if kind.is_dense:
        return ()
    owners = owners_of_blocks(problem)
    return tuple(
        costs_of(
            *(block, kind.name, working.positions[block], working.columns),
            *(problem.factor_dtype, problem.dtype, owners[block]),
        )
        for block in problem.blocks
    )


def passes_of(planned: Planned, working: Working, timed: bool) -> tuple[Pass, ...]:
    """The passes over data of a curvature and a mode.

    Args:
        planned: What is to be fitted.
        working: A chunk of a pass for factors or rows.
        timed: Whether a batch is timed.
    """
    passes = _passes(planned, working)
    if not timed:
        return passes
    turned = sum(block.rotation_flops for block in _costs(planned, working))
    return tuple(timed_pass(planned, of, turned) for of in passes)


def _passes(planned: Planned, working: Working) -> tuple[Pass, ...]:
    kind, mode = planned.settings.kind, planned.mode
    costs = _costs(planned, working)
    of_network = {b: network_flops(b, positions) for b, positions in working.positions.items()}
    # Cotangents go back to the first layer that is measured.
    reached = list(of_network)[list(of_network).index(planned.problem.blocks[0]) :]
    back = working.columns * sum(of_network[block] for block in reached)
    through = sum(of_network.values()) + back
    size = sum(block.size for block in planned.problem.blocks)
    read = planned.batches_read, planned.examples_read
    of_factors = Pass("factors", *read, through + sum(b.factor_flops for b in costs))
    of_table = Pass("magnitudes", *read, through + sum(b.rotation_flops for b in costs))
    if kind.name == "diag":
        return (of_table,)
    if kind.name == "kfac":
        measured = replace(of_factors, what="magnitudes")
        return (of_factors, measured) if mode == "debiased" else (of_factors,)
    if kind.name == "ekfac":
        return (of_factors, of_table)
    of_rows = through + 2 * working.columns * size * (size if kind.name == "full" else 0)
    rows = Pass("Jacobian rows", *read, of_rows)
    return (rows, replace(rows, what="magnitudes")) if mode == "debiased" else (rows,)
