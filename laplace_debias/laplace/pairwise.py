"""The mean-field softmax of Gaussian logits, which compares all pairs of classes.

The softmax is computed at several temperatures at once, in blocks of examples that fit into the
processor's cache. Several functions accept the variances of the differences between logits in
different forms.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

# The logistic function at x is close to the normal distribution function at x / √(8/π).
_SCALE = 8 / math.pi
# Up to this number of pairs, a call spends more time on the overhead of operations than on
# exponentials.
_FEW_PAIRS = 2**11
# The number of pairs of classes that are computed together, by device type.
_PAIRS_AT_ONCE = defaultdict(lambda: 2**24, cpu=2**16)
# The number of pairs of classes that are computed together on a CPU if each pair is computed in
# only one order, in memory that is reused.
_UNORDERED_PAIRS_AT_ONCE = 2**18

Logits = Float[Tensor, "*batch classes"]
Covariance = Float[Tensor, "*batch classes classes"]


def pairwise(
    mean: Logits, covariance: Covariance, temperatures: Sequence[float]
) -> Float[Tensor, "temperatures *batch classes"]:
    r"""Compute the mean-field softmax of the logits divided by each temperature T.

    At T = 1, the result is
    $$p_k \propto 1 / \sum_i \exp\big(-(\mu_k - \mu_i) / \sqrt{1 + \tfrac\pi8 s_{ki}}\big),\qquad
    s_{ki} = \Sigma_{kk} + \Sigma_{ii} - 2\Sigma_{ki},$$ which compares each pair of classes by the
    probit of the difference of their logits. Any part that is common to all logits cancels. For two
    classes, the result is the binary probit.

    All temperatures use the same differences of the means and the same variances, since
    $(\mu_k - \mu_i) / T / \sqrt{1 + \tfrac\pi8 s_{ki} / T^2} =
    (\mu_k - \mu_i) / \sqrt{T^2 + \tfrac\pi8 s_{ki}}$.

    Reference: Lu, Ie & Sha (2020), "Mean-field approximation to Gaussian-softmax integral with
    application to uncertainty estimation".
    """
    num_classes = mean.shape[-1]
    means = mean.reshape(-1, num_classes)
    covariances = covariance.reshape(-1, num_classes, num_classes)
    logits = _pairwise_in_blocks(means, covariances, difference_variances, temperatures)
    return logits.reshape(len(temperatures), *mean.shape)


def pairwise_of_differences(
    mean: Float[Tensor, "batch classes"],
    variances: Float[Tensor, "batch classes classes"],
    temperatures: Sequence[float],
) -> Float[Tensor, "temperatures batch classes"]:
    """Compute `pairwise` from the variances of the differences of all pairs of logits."""
    return _pairwise_in_blocks(mean, variances, lambda block: block, temperatures)


def pairwise_of_directions(
    mean: Float[Tensor, "batch classes"],
    variances: Float[Tensor, "batch directions"],
    squared_differences: Float[Tensor, "directions pairs"],
    temperatures: Sequence[float],
) -> Float[Tensor, "temperatures batch classes"]:
    """Compute `pairwise` from the variances along directions that all examples share.

    Args:
        mean: The means of the logits.
        variances: The variance along each direction.
        squared_differences: The squared difference of two outputs along each direction, with one
            column for each pair in `pairs_of_outputs`.
        temperatures: The temperatures.
    """
    has_fast_exponentials = mean.device.type == "cpu" and not variances.requires_grad
    if has_fast_exponentials and _exponentials_are_finite(mean, temperatures):
        return _pairwise_of_pairs(mean, variances, squared_differences, temperatures)
    num_classes = mean.shape[-1]
    first, second = pairs_of_outputs(num_classes, mean.device)

    def matrices(
        block: Float[Tensor, "block directions"],
    ) -> Float[Tensor, "block classes classes"]:
        pair_variances = block @ squared_differences
        symmetric = pair_variances.new_zeros(len(block), num_classes, num_classes)
        symmetric[:, first, second] = pair_variances
        symmetric[:, second, first] = pair_variances
        return symmetric

    return _pairwise_in_blocks(mean, variances, matrices, temperatures)


def pairs_of_outputs(
    num_outputs: int, device: torch.device
) -> tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"]]:
    """Return the indices of all pairs of outputs, in cyclic order.

    Each output is first paired with the next output, then with the one after that, and so on up to
    a distance of half the number of outputs, where the first output follows the last. If the number
    of outputs is even, the pairs at the largest distance occur twice, once in each order.
    """
    outputs = torch.arange(num_outputs, device=device)
    shifts = torch.arange(1, num_outputs // 2 + 1, device=device).unsqueeze(1)
    first = outputs.expand(len(shifts), -1)
    return first.flatten(), ((first + shifts) % num_outputs).flatten()


def difference_variances(
    covariances: Float[Tensor, "*batch classes classes"],
) -> Float[Tensor, "*batch classes classes"]:
    """Compute the variances of the differences of all pairs of logits."""
    # Double precision preserves the digits of the differences even if the logits have a large
    # variance in common.
    sigma = covariances.double()
    variances = sigma.diagonal(dim1=-2, dim2=-1)
    differences = (variances.unsqueeze(-1) + variances.unsqueeze(-2)).sub_(sigma, alpha=2)
    return differences.clamp_min_(0).to(covariances.dtype)


def _pairwise_in_blocks(
    means: Float[Tensor, "batch classes"],
    moments: Float[Tensor, "batch ..."],
    variances: Callable[[Float[Tensor, "block ..."]], Float[Tensor, "block classes classes"]],
    temperatures: Sequence[float],
) -> Float[Tensor, "temperatures batch classes"]:
    """Compute `pairwise` for a few examples at a time.

    Args:
        means: The means of the logits.
        moments: The second moments of each example.
        variances: A function from the moments of a block of examples to the variances of the
            differences of all pairs of logits.
        temperatures: The temperatures.
    """
    # Only a few examples are processed at a time, so that their pairs of classes stay in the
    # processor's cache. An exported program has no such loop, because it must accept any number of
    # examples.
    num_examples = max(1, _PAIRS_AT_ONCE[means.device.type] // means.shape[-1] ** 2)
    if torch.compiler.is_exporting() or len(means) <= num_examples:
        return _pairwise_block(means, variances(moments), temperatures)
    logits = means.new_empty(len(temperatures), *means.shape)
    for start in range(0, len(means), num_examples):
        examples = slice(start, start + num_examples)
        block = variances(moments[examples])
        logits[:, examples] = _pairwise_block(means[examples], block, temperatures)
    return logits


def _pairwise_block(
    means: Float[Tensor, "block classes"],
    variances: Float[Tensor, "block classes classes"],
    temperatures: Sequence[float],
) -> Float[Tensor, "temperatures block classes"]:
    r"""Compute `pairwise` for a block of examples at once.

    With $c = 8/\pi$, the exponents are $\sqrt{c}\,(\mu_i - \mu_k) / \sqrt{c T^2 + s_{ki}}$.

    Args:
        means: The means of the logits.
        variances: The variances $s_{ki}$ of the differences of all pairs of logits.
        temperatures: The temperatures.
    """
    differences = means.unsqueeze(-2) - means.unsqueeze(-1)
    needs_gradients = variances.requires_grad or differences.requires_grad
    # An exported program cannot branch on the sizes or values of tensors.
    can_branch = not (needs_gradients or torch.compiler.is_exporting())
    if (
        differences.device.type == "cpu"
        and can_branch
        and variances.numel() * len(temperatures) > _FEW_PAIRS
        and _exponentials_are_finite(means, temperatures)
    ):
        return _unshifted_pairwise(differences, variances, temperatures)
    differences = differences * math.sqrt(_SCALE)
    logits = []
    for temperature in temperatures:
        # The root must not be changed in place, because gradients need it.
        exponents = (variances + _SCALE * temperature**2).rsqrt_() * differences
        # The exponents on the diagonal are zero, so only the negative logarithm of the sum remains
        # there.
        logits.append(exponents.log_softmax(-1).diagonal(dim1=-2, dim2=-1))
    # In the most common case, a single temperature, no copy is needed.
    return torch.stack(logits) if len(logits) > 1 else logits[0].unsqueeze(0)


def _unshifted_pairwise(
    differences: Float[Tensor, "block classes classes"],
    variances: Float[Tensor, "block classes classes"],
    temperatures: Sequence[float],
) -> Float[Tensor, "temperatures block classes"]:
    r"""Compute the logits without subtracting the largest exponent; no exponential may overflow.

    Powers of 2 are used, because MKL's `exp` takes three times as long on AMD processors.

    Args:
        differences: $\mu_i - \mu_k$ in row k and column i.
        variances: $s_{ki}$.
        temperatures: The temperatures.
    """
    log_2_differences = differences * (math.sqrt(_SCALE) / math.log(2))
    terms = torch.empty_like(variances)
    sums = []
    for temperature in temperatures:
        torch.add(variances, _SCALE * temperature**2, out=terms)
        sums.append(terms.rsqrt_().mul_(log_2_differences).exp2_().sum(-1))
    return torch.stack(sums).log_().neg_()


def _exponentials_are_finite(
    means: Float[Tensor, "batch classes"], temperatures: Sequence[float]
) -> bool:
    """Whether sums of the exponentials of the differences of logits are finite.

    If so, the reciprocals of the exponentials are also finite.
    """
    if means.numel() == 0:
        return True
    lowest, highest = torch.aminmax(means)
    spread = (float(highest) - float(lowest)) / min(temperatures)
    return spread < math.log(torch.finfo(means.dtype).max / means.shape[-1]) - 1


def _pairwise_of_pairs(
    means: Float[Tensor, "batch classes"],
    variances: Float[Tensor, "batch directions"],
    squared_differences: Float[Tensor, "directions pairs"],
    temperatures: Sequence[float],
) -> Float[Tensor, "temperatures batch classes"]:
    """Compute `pairwise_of_directions` with only one exponential per pair of classes.

    The exponential of a pair (k, i) is a term in the sum of class k. For the opposite order (i, k),
    the exponential is the reciprocal, which is a term in the sum of class i.
    `_exponentials_are_finite` must be true for the means.
    """
    batch, num_classes = means.shape
    num_shifts = num_classes // 2
    # If the number of classes is even, the pairs at the largest distance already occur in both
    # orders, so they are not mirrored.
    num_mirrored = (num_classes - 1) // 2
    most_examples = max(1, _UNORDERED_PAIRS_AT_ONCE // max(1, num_shifts * num_classes))
    num_blocks = max(1, math.ceil(batch / most_examples))
    block_size = max(1, math.ceil(batch / num_blocks))  # All blocks have nearly the same size.
    log_2_means = means * (math.sqrt(_SCALE) / math.log(2))
    # The first classes follow the last class, because the pairs are in cyclic order.
    cyclic_means = torch.cat([log_2_means, log_2_means[:, :num_shifts]], 1)
    second_means = cyclic_means.unfold(1, num_classes, 1)[:, 1:]
    # Every block of examples uses the same memory, which stays in the processor's cache.
    pair_variances = means.new_empty(block_size, num_shifts * num_classes)
    all_differences = means.new_empty(block_size, num_shifts, num_classes)
    all_terms = torch.empty_like(all_differences)
    # The reciprocal for the pair (k, k + s + 1) is in row s and column k + s + 1. Columns from
    # `num_classes` on belong to the first classes, since the pairs are in cyclic order. `shifted`
    # is the view of these entries with s and k as its indices, so its next row begins one column
    # later. All other entries stay zero.
    width = num_classes + num_mirrored
    all_reciprocals = means.new_zeros(block_size, num_mirrored, width)
    all_shifted = all_reciprocals.as_strided(
        (block_size, num_mirrored, num_classes), (num_mirrored * width, width + 1, 1), 1
    )
    sums = means.new_empty(len(temperatures), batch, num_classes)
    for start in range(0, batch, block_size):
        examples = slice(start, min(start + block_size, batch))
        size = examples.stop - examples.start
        torch.mm(variances[examples], squared_differences, out=pair_variances[:size])
        block_variances = pair_variances[:size].unflatten(1, (num_shifts, num_classes))
        differences = all_differences[:size]
        torch.sub(second_means[examples], log_2_means[examples].unsqueeze(1), out=differences)
        terms = all_terms[:size]
        mirrored_terms = terms[:, :num_mirrored]
        reciprocals = all_reciprocals[:size]
        shifted = all_shifted[:size]
        for temperature, total in zip(temperatures, sums[:, examples], strict=True):
            torch.add(block_variances, _SCALE * temperature**2, out=terms)
            terms.rsqrt_().mul_(differences).exp2_()
            torch.sum(terms, 1, out=total)
            # Writing to `shifted` fills the entries of `reciprocals`.
            torch.reciprocal(mirrored_terms, out=shifted)
            mirrored_sums = reciprocals.sum(1)
            total += mirrored_sums[:, :num_classes]
            total[:, :num_mirrored] += mirrored_sums[:, num_classes:]
    # Add 1, the exponential of the difference between a class and itself.
    return sums.add_(1).log_().neg_()
