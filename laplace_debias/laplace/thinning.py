"""Compression of a posterior to the directions that affect predictions.

All directions in which N Λ / T is small compared with δ have a variance close to 1/δ, so their
eigenvectors need not be stored.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.network.chosen_positions import Positions
from laplace_debias.curvature.network.inputs import Inputs, Record, num_examples, take
from laplace_debias.laplace.functional.linearised import moments
from laplace_debias.laplace.saving.file import tensors_of
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.linalg.results import half_width
from laplace_debias.operators import BlockDiagonal, EigenKronecker, LinearOperator
from laplace_debias.system.checks import real

# The search for the threshold ends when its bounds differ by less than this factor.
_FACTOR = 1.1


@dataclass(frozen=True)
class Thinning:
    """The size and the error of a compressed posterior.

    The error at an input is the largest relative error among the standard deviations of its
    outputs. It is measured at inputs that were not used to choose the directions.

    Attributes:
        share: The size of the compressed posterior in bytes, as a fraction of the full posterior.
        error: Mean error over the inputs.
        half_width: Half the width of the 95 % confidence interval of the mean error; infinite for a
            single input.
        largest: Largest error over the inputs.
        num_inputs: Number of inputs.
    """

    share: float
    error: float
    half_width: float
    largest: float
    num_inputs: int

    @property
    def message(self) -> str:
        """The result as a sentence."""
        return (
            f"Kept {100 * self.share:.1f} % of the posterior. The relative error of the standard "
            f"deviations is {self.error:.2g} ± {self.half_width:.1g} on average and at most "
            f"{self.largest:.2g}, measured on {self.num_inputs} inputs that were not used to "
            "choose the directions."
        )


def thin_posterior(
    fitted: FittedPosterior, x: Inputs | Record, error: float, positions: Positions | None
) -> tuple[FittedPosterior, Thinning]:
    """Compress a posterior to as few directions as an error bound allows; see `Laplace.thin`.

    A threshold on the effect of each direction is bisected on half of the inputs.

    Args:
        fitted: The fit, with K-FAC factors.
        x: At least two inputs.
        error: The largest allowed relative change of an output's standard deviation.
        positions: Positions of outputs `[B, T, C]`; None for all.

    Returns:
        The fit with the compressed posterior, and its size and error on the other half of the
        inputs.

    Raises:
        ValueError: For an error that is not positive and finite, a curvature without factors, or
            fewer than two inputs.
    """
    bound = real(error, "error")
    if bound.ndim or not 0 < float(bound) < math.inf:
        raise ValueError(
            f"`error` must be positive and finite, got {error}. Pass for example 1e-3."
        )
    if not fitted.config.structure.has_factors:
        raise ValueError(
            'Only posteriors with curvature "kfac" or "ekfac" can be thinned, but this posterior '
            f"has {fitted.config.structure.name!r}. Fit with one of them."
        )
    inputs = fitted.spec.read_batch.inputs(x, fitted.posterior.mean.device)
    if num_examples(inputs) < 2:
        raise ValueError(
            "There are too few inputs. Half of the inputs are used to choose the "
            "eigenvectors to keep, and the other half to measure the resulting "
            "error. Pass at least two inputs."
        )
    # Inputs go to the two halves alternately, because they may be sorted.
    search_errors = _Errors(fitted, inputs, slice(0, None, 2), positions)
    test_errors = _Errors(fitted, inputs, slice(1, None, 2), positions)
    compressed = compress(fitted, _largest_threshold(fitted, bound, search_errors))
    errors = test_errors(compressed)
    num_inputs = len(errors)
    standard_error = errors.new_tensor(math.inf)
    if num_inputs > 1:
        standard_error = errors.std() / math.sqrt(num_inputs)
    return compressed, Thinning(
        share=_num_bytes(compressed) / _num_bytes(fitted),
        error=float(errors.mean()),
        half_width=float(half_width(standard_error, num_inputs - 1, 0.95)),
        largest=float(errors.max()),
        num_inputs=num_inputs,
    )


class _Errors:
    """A function that returns the error of a compressed posterior at each input; see `Thinning`."""

    def __init__(
        self, full: FittedPosterior, inputs: Inputs, examples: slice, positions: Positions | None
    ) -> None:
        self._inputs = take(inputs, examples)
        self._positions = positions
        if positions is not None and torch.as_tensor(positions).ndim == 2:
            # Every input has positions of its own.
            self._positions = torch.as_tensor(positions)[examples]
        self._full_variances = self._variances(full)

    def __call__(self, compressed: FittedPosterior) -> Float[Tensor, " inputs"]:
        # An output that depends on no parameter has variance 0 under both posteriors, so its ratio
        # 0/0 counts as 1.
        ratios = (self._variances(compressed) / self._full_variances).nan_to_num(nan=1.0)
        return (ratios.sqrt() - 1).abs().flatten(1).amax(1)

    def _variances(self, fitted: FittedPosterior) -> Tensor:
        _, covariances = moments(fitted, self._inputs, kind="variances", positions=self._positions)
        return covariances[0].double()


def _largest_threshold(fitted: FittedPosterior, bound: Tensor, errors: _Errors) -> float:
    """Find the largest threshold of `compress` with which no error exceeds the bound."""
    # Pooled curvatures below 2 ε δ change no standard deviation by more than ε.
    largest_block = max(fitted.posterior.curvature.sizes)
    low = float(_gain(2 * bound.double())) / largest_block
    # The square of a very small error underflows to 0, and a bisection by ratios would never leave
    # 0.
    low = max(low, torch.finfo(torch.float64).tiny)
    high = max(float(_gain(ratios).sum()) for ratios in _curvature_ratios(fitted).values())
    while high > _FACTOR * low:
        middle = math.sqrt(low) * math.sqrt(high)
        if bool((errors(compress(fitted, middle)) <= bound).all()):
            low = middle
        else:
            high = middle
    return low


def compress(fitted: FittedPosterior, threshold: float) -> FittedPosterior:
    r"""Keep the directions whose benefit per stored number exceeds a threshold.

    With x = N Λ / (T δ), the variance of a direction, 1 / (δ (1 + x)), is smaller than the prior
    variance by x / (1 + x) / δ, and the outputs vary along the direction by an amount that is
    roughly proportional to x. The gain of a direction is therefore the sum of x² / (1 + x) over all
    directions of the other Kronecker factor. The benefit is this gain divided by the number of
    entries of the eigenvector, which would have to be stored.
    """
    posterior = fitted.posterior
    ratios = _curvature_ratios(fitted)
    blocks: dict[str, LinearOperator] = {
        name: _compress_block(block, ratios[name], threshold)
        for name, block in posterior.curvature.blocks.items()
    }
    # The bounds remain valid, because merged directions have the mean of their magnitudes.
    compressed = posterior.changed(
        curvature=BlockDiagonal(blocks), curvature_bounds=posterior.largest_curvatures
    )
    deltas = posterior.deltas().tolist()
    if fitted.thinned_at is not None:
        deltas = [max(pair) for pair in zip(deltas, fitted.thinned_at, strict=True)]
    return replace(fitted, posterior=compressed, thinned_at=tuple(deltas))


def _compress_block(block: LinearOperator, ratios: Tensor, threshold: float) -> EigenKronecker:
    """Keep each factor's directions above the threshold, or all if half or more are above it.

    After a fit to few examples, the rank is already reduced. If the directions orthogonal to the
    stored ones have a gain above the threshold, no further direction may be merged with them.
    """
    assert isinstance(block, EigenKronecker)
    for side, U in enumerate((block.U_G, block.U_A)):
        if U is None:
            continue
        d, r = U.shape[-2:]
        # The directions are sorted by their scores, because debiased magnitudes are in no
        # particular order.
        scores = _gain(ratios).sum(-1 - side) / d
        rank = int((scores[..., :r] > threshold).sum(-1).amax())
        if 2 * rank >= d or bool((scores[..., r:] > threshold).any()):
            continue
        block = block.keep_directions(side, scores[..., :r].argsort(-1, descending=True), rank)
    return block


def _gain(ratios: Tensor) -> Tensor:
    """Compute x² / (1 + x) without x², which could overflow."""
    return ratios * (ratios / (1 + ratios))


def _curvature_ratios(fitted: FittedPosterior) -> dict[str, Tensor]:
    """Compute x = N Λ / (T δ) for every block in float64, because sums of x can exceed float32."""
    posterior = fitted.posterior
    blocks = posterior.curvature.blocks
    deltas = posterior.prior_precision.to(posterior.mean.device).double().expand(len(blocks))
    return {
        name: posterior.curvature_weight / delta * block.magnitudes.double()
        for (name, block), delta in zip(blocks.items(), deltas, strict=True)
    }


def _num_bytes(fitted: FittedPosterior) -> int:
    """Count the bytes that a posterior occupies in a file."""
    tensors = tensors_of(fitted.posterior, fitted.config.structure)
    return sum(tensor.nbytes for tensor in tensors.values())
