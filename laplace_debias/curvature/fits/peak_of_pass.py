"""The most memory that one pass over data holds at once: its sums, and those of a chunk."""

import math

from laplace_debias.curvature.fits.costs import sides, table_numbers
from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.fits.working import Working
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.uses import SLICE


def of_factor_pass(
    problem: Problem, working: Working, num_batches: int | None, projected: int = 0
) -> int:
    """Bytes of a pass that sums factors, or projects them.

    Args:
        problem: The network and its blocks.
        working: A chunk of it.
        num_batches: How many batches there are; None if it is not known.
        projected: Of factors that are projected and not summed, how many products of their size are
            made.
    """
    wide = problem.factor_dtype.itemsize
    G, A = (wide * sum(sides(block)[side] for block in problem.blocks) for side in (0, 1))
    is_single = num_batches == 1
    most = [wide * max(sides(block)[side] for block in problem.blocks) for side in (0, 1)]
    extra_G, extra_A = (projected * number for number in most)
    summed = G if is_single else G + A
    before = 0 if projected or (is_single and working.is_whole) else summed
    # Gradients of all layers are there at once, then they are measured block by block.
    through, after = before + working.chunk, before
    for block, held in working.measured.items():
        through = max(
            through, after + held + _of_gradient_factor(problem, working, block) + extra_G
        )
        after += 0 if projected or before else wide * sides(block)[0]
    of_inputs = _of_inputs(problem, working, is_single, extra_A)
    return max(working.kept_before + through, (0 if projected else G) + of_inputs)


def _of_inputs(problem: Problem, working: Working, is_single: bool, extra: int) -> int:
    """While A is computed at the end of a batch: the inputs that are left, and sums of A.

    Args:
        problem: The network and its blocks.
        working: A chunk.
        is_single: Whether there are no sums of A before.
        extra: Bytes for what is projected, and not summed.
    """
    wide, narrow = problem.factor_dtype.itemsize, problem.dtype.itemsize
    of_A = {block: wide * sides(block)[1] for block in working.input_factors}
    held = working.kept + (0 if is_single or extra else sum(of_A.values()))
    most = held
    for block in problem.blocks:
        if block not in working.input_factors:
            continue
        inputs = working.inputs[block] * working.batch
        # The parts of a batch are joined.
        joined = inputs if working.batch > working.examples else 0
        A = of_A[block]
        converted = A * narrow // wide + (A if narrow != wide else 0)
        making = max(narrow * working.input_factors[block], converted + extra)
        most = max(most, held + joined + making)
        held += (A if is_single and not extra else 0) - inputs
    return most


def _of_gradient_factor(problem: Problem, working: Working, block: Block) -> int:
    """What is made of a block's output gradients for G: of a weight a copy, or their products."""
    wide, narrow = problem.factor_dtype.itemsize, problem.dtype.itemsize
    # A new factor in the model's dtype, and converted.
    made = sides(block)[0] * (narrow + (wide if narrow != wide else 0))
    columns = working.examples * working.at_once
    if block.is_exact:
        return made + narrow * min(columns * block.size, SLICE)
    d, T = block.shape[0], working.positions[block]
    return made + narrow * columns * block.num_groups * d * min(d, T)


def of_exact_pass(problem: Problem, working: Working, table: int, num_batches: int | None) -> int:
    """Bytes of a pass for exact curvature: rotated Jacobians of some examples of one block.

    Args:
        problem: The network and its blocks.
        working: A chunk.
        table: Bytes of the sums.
        num_batches: How many batches there are; None if it is not known.
    """
    before = 0 if num_batches == 1 and working.is_whole else table
    most, after = before + working.chunk, before
    for block, held in working.measured.items():
        # By the weight: the layer itself may be in the shadow alone (an attention's projections).
        is_convolution = problem.model.get_parameter(block.parameters[0]).ndim > 2
        numbers = _numbers_of_jacobians(working, block, is_convolution)
        made = problem.dtype.itemsize * numbers
        most = max(most, after + held + made)
        after += 0 if before else problem.factor_dtype.itemsize * table_numbers(block)
    return most


def _numbers_of_jacobians(working: Working, block: Block, is_convolution: bool) -> int:
    """What is made of a block's inputs and output gradients for the curvature along directions."""
    columns, positions = working.at_once, working.positions[block]
    jacobian = columns * block.size
    if block.is_exact:
        # Rows, rotated ones and their squares.
        return 3 * min(working.examples * jacobian, SLICE)
    gradients = columns * positions * block.num_groups * block.shape[0]
    if block.role == "table":
        # Of the tokens that occur, which are as many as positions at most.
        step = max(1, math.isqrt(SLICE // max(1, gradients)))
        examples = min(working.examples, step)
        tokens = min(examples * positions, block.shape[1])
        return examples * (2 * columns * block.shape[0] * tokens + 2 * gradients)
    unfolded = positions * block.num_groups * block.shape[1]
    if positions > 1 or is_convolution:
        # The Jacobians and their squares, what is unfolded, and the gradients.
        examples = min(working.examples, max(1, SLICE // (unfolded + jacobian)))
        return examples * (2 * jacobian + unfolded + gradients)
    return block.size + working.examples * 2 * (unfolded + gradients)
