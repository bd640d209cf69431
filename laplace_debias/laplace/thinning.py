"""A posterior made thin: kept are the directions by which outputs differ from those of the prior.

Where N Λ / T is small beside δ all directions have the same variance 1/δ, and a basis of them is
stored for nothing.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.network.chosen_positions import Positions
from laplace_debias.curvature.network.inputs import Inputs, Record, num_examples, take
from laplace_debias.laplace.file import tensors_of
from laplace_debias.laplace.functional.linearised import moments
from laplace_debias.laplace.state import FittedPosterior
from laplace_debias.linalg.results import half_width
from laplace_debias.operators import BlockDiagonal, EigenKronecker, LinearOperator
from laplace_debias.system.checks import real

# The search ends when the threshold is known to this factor.
_FACTOR = 1.1


@dataclass(frozen=True)
class Thinning:
    """A posterior made thin, and what that costs.

    The error of an input is the largest relative error of a standard deviation of its outputs.

    Attributes:
        share: Bytes of the thin posterior over those that it had before.
        error: Mean error of the inputs that the directions were not chosen by.
        half_width: Half of the 95 % interval of that mean; infinite for one input.
        largest: The largest error of these inputs.
        num_inputs: How many these are.
    """

    share: float
    error: float
    half_width: float
    largest: float
    num_inputs: int

    @property
    def message(self) -> str:
        """The same in words."""
        return (
            f"Kept is {self.share:.1%} of the posterior. Relative error of standard deviations on "
            f"{self.num_inputs} further input(s): {self.error:.2g} ± {self.half_width:.1g}, "
            f"at most {self.largest:.2g}."
        )


def thinned(
    fitted: FittedPosterior, x: Inputs | Record, error: float, positions: Positions | None
) -> tuple[FittedPosterior, Thinning]:
    """The fit with as few directions as an error allows, as `Laplace.thin` describes it."""
    bound = real(error, "error")
    if bound.ndim or not 0 < float(bound) < math.inf:
        raise ValueError(f"error must be one positive finite number, got {error}: 1e-3, say.")
    if not fitted.config.structure.has_factors:
        raise ValueError(
            f"Only curvature 'kfac' and 'ekfac' have directions that can be left out, this is "
            f"{fitted.config.structure.name!r}: fit one of these."
        )
    inputs = fitted.spec.read_batch.inputs(x, fitted.posterior.mean.device)
    if num_examples(inputs) < 2:
        raise ValueError(
            "Directions are chosen on half of the inputs and the error is measured on the others: "
            "pass two inputs or more."
        )
    of_each = positions is not None and torch.as_tensor(positions).ndim == 2

    def variances(of: FittedPosterior, half: slice) -> Tensor:
        here = torch.as_tensor(positions)[half] if of_each else positions
        return moments(of, take(inputs, half), None, True, None, here)[1][0].double()

    def errors(of: FittedPosterior, half: slice, of_whole: Tensor) -> Float[Tensor, " half"]:
        # An output that no parameter changes has no variance in either.
        ratios = (variances(of, half) / of_whole).nan_to_num(nan=1.0)
        return (ratios.sqrt() - 1).abs().flatten(1).amax(1)

    # Every other one: inputs may be sorted.
    first, second = slice(0, None, 2), slice(1, None, 2)
    of_first, of_second = (variances(fitted, half) for half in (first, second))
    # Pooled curvatures below 2 ε δ change no standard deviation by more than ε.
    ratios, widest = _in_deltas(fitted).values(), max(fitted.posterior.curvature.sizes)
    low = float(_gain(torch.as_tensor(2 * float(bound)))) / widest
    high = max(float(_gain(of_block).sum()) for of_block in ratios)
    while high > _FACTOR * low:
        middle = math.sqrt(low * high)
        if bool((errors(at_threshold(fitted, middle), first, of_first) <= bound).all()):
            low = middle
        else:
            high = middle
    thin = at_threshold(fitted, low)
    found = errors(thin, second, of_second)
    standard_error = found.std() / math.sqrt(len(found)) if len(found) > 1 else found[0] + math.inf
    return thin, Thinning(
        _size(thin) / _size(fitted),
        float(found.mean()),
        float(half_width(standard_error, max(1, len(found) - 1), 0.95)),
        float(found.max()),
        len(found),
    )


def at_threshold(fitted: FittedPosterior, threshold: float) -> FittedPosterior:
    r"""The fit with the directions that bring more than so much for each number that they take.

    With x = N Λ / (T δ) a direction of variance 1 / (δ (1 + x)) has x / (1 + x) / δ less than the
    prior, and outputs vary along it about in proportion to x: it brings the sum of x² / (1 + x)
    over the other side, and takes as many numbers as its vector has.
    """
    posterior, ratios = fitted.posterior, _in_deltas(fitted)
    blocks: dict[str, LinearOperator] = {
        name: _thin_block(block, ratios[name], threshold)
        for name, block in posterior.curvature.blocks.items()
    }
    curvature = BlockDiagonal(blocks)
    bounds = posterior.largest_curvatures  # No magnitude grows.
    thin = posterior.changed(curvature=curvature, curvature_bounds=bounds)
    deltas = posterior.deltas().tolist()
    if fitted.thinned_at is not None:
        deltas = [max(pair) for pair in zip(deltas, fitted.thinned_at, strict=True)]
    return replace(fitted, posterior=thin, thinned_at=tuple(deltas))


def _thin_block(block: LinearOperator, ratios: Tensor, threshold: float) -> EigenKronecker:
    """A block of fewer directions; of a side that would keep half of them or more, as many.

    A fit to few examples is thin already. If what its directions leave is above the threshold, none
    may join it.
    """
    assert isinstance(block, EigenKronecker)
    for side, U in enumerate((block.U_G, block.U_A)):
        if U is None:
            continue
        d, r = U.shape[-2:]
        # Debiased magnitudes are not sorted.
        scores = _gain(ratios).sum(-1 - side) / d
        rank = int((scores[..., :r] > threshold).sum(-1).amax())
        if 2 * rank >= d or bool((scores[..., r:] > threshold).any()):
            continue
        block = block.keep_directions(side, scores[..., :r].argsort(-1, descending=True), rank)
    return block


def _gain(ratios: Tensor) -> Tensor:
    return ratios.square() / (1 + ratios)


def _in_deltas(fitted: FittedPosterior) -> dict[str, Tensor]:
    """N Λ / (T δ) of every block."""
    posterior = fitted.posterior
    blocks = posterior.curvature.blocks
    deltas = posterior.prior_precision.to(posterior.mean).expand(len(blocks))
    return {
        name: posterior.data_weight / delta * block.magnitudes
        for (name, block), delta in zip(blocks.items(), deltas, strict=True)
    }


def _size(fitted: FittedPosterior) -> int:
    tensors = tensors_of(fitted.posterior, fitted.config.structure)
    return sum(tensor.nbytes for tensor in tensors.values())
