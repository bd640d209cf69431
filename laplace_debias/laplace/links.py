"""Links, which turn Gaussian logits into probabilities.

A link is a formula and a temperature T: the formula takes the logits divided by T, N(μ/T, Σ/T²).
T = 1 is plain Laplace, and with δ → ∞ the family ends in temperature scaling. The formula is only
for the closed form; the temperature divides the logits wherever they become probabilities.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Distribution
from torch.quasirandom import SobolEngine

from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.losses.likelihoods.base import probit
from laplace_debias.operators.eigh import eigh

MOST_CLASSES = 100
"""With more classes than this, the default is the probit link, as covariances cost too much."""
NUM_DRAWS = 128
"""Sobol points of the `"exact"` link."""

# The logistic function at x is close to the normal distribution function at x / √(8/π).
_SCALE = 8 / math.pi
# Up to this number of pairs, the time of a call is that of its operations, not of exponentials.
_FEW_PAIRS = 2**11
# Pairs of classes that are computed together, by device type.
_PAIRS_AT_ONCE = defaultdict(lambda: 2**24, cpu=2**16)
# Pairs of classes that are computed together on a CPU in only one order, in memory that is reused.
_UNORDERED_PAIRS_AT_ONCE = 2**18

Logits = Float[Tensor, "*batch classes"]
Covariance = Float[Tensor, "*batch classes classes"]


def pairwise(mean: Logits, covariance: Covariance) -> Logits:
    r"""Compute the mean-field softmax with the full covariance of the logits.

    $$p_k \propto 1 / \sum_i \exp\big(-(\mu_k - \mu_i) / \sqrt{1 + \tfrac\pi8 s_{ki}}\big),\qquad
    s_{ki} = \Sigma_{kk} + \Sigma_{ii} - 2\Sigma_{ki},$$ which compares every two classes by the
    probit of their difference. A part that all logits share cancels. For two classes, the result is
    the binary probit.

    Reference: Lu, Ie & Sha (2020), "Mean-field approximation to Gaussian-softmax integral with
    application to uncertainty estimation".
    """
    return tempered_pairwise(mean, covariance, [1.0])[0]


def tempered_pairwise(
    mean: Logits, covariance: Covariance, temperatures: Sequence[float]
) -> Float[Tensor, "temperatures *batch classes"]:
    r"""Compute `pairwise` of the logits divided by each temperature T.

    All temperatures share the differences of the means and their variances, since
    $(\mu_k - \mu_i) / T / \sqrt{1 + \tfrac\pi8 s_{ki} / T^2} =
    (\mu_k - \mu_i) / \sqrt{T^2 + \tfrac\pi8 s_{ki}}$.
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
    """Compute `tempered_pairwise` from the variances of the differences of every two logits."""
    return _pairwise_in_blocks(mean, variances, lambda block: block, temperatures)


def pairwise_of_directions(
    mean: Float[Tensor, "batch classes"],
    variances: Float[Tensor, "batch directions"],
    squared_differences: Float[Tensor, "directions pairs"],
    temperatures: Sequence[float],
) -> Float[Tensor, "temperatures batch classes"]:
    """Compute `tempered_pairwise` from the variances along directions that all examples share.

    Args:
        mean: The means of the logits.
        variances: The variance along each direction.
        squared_differences: The squared difference of two outputs along each direction, with a
            column for each of the `pairs_of_outputs`.
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
    """Return the indices of every two outputs, in cyclic order.

    Each output is paired with the next one, then with the one after that, up to half of the
    outputs further on; the first output follows the last. If the number of outputs is even, the
    pairs that are half of them apart occur twice, once in each order.
    """
    outputs = torch.arange(num_outputs, device=device)
    shifts = torch.arange(1, num_outputs // 2 + 1, device=device).unsqueeze(1)
    first = outputs.expand(len(shifts), -1)
    return first.flatten(), ((first + shifts) % num_outputs).flatten()


def difference_variances(
    covariances: Float[Tensor, "*batch classes classes"],
) -> Float[Tensor, "*batch classes classes"]:
    """Compute the variances of the differences of every two logits."""
    # In double precision: a large common variance leaves the differences their digits.
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
    """Compute `tempered_pairwise` of a few examples at a time.

    Args:
        means: The means of the logits.
        moments: The second moments of each example.
        variances: From the moments of some examples to the variances of the differences of every
            two logits.
        temperatures: The temperatures.
    """
    # A few examples at a time, so that their pairs of classes stay in the processor's cache. A
    # program takes any number of examples, so it has no loop over blocks of them.
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
    r"""Compute `tempered_pairwise` of a block of examples at once.

    With $c = 8/\pi$ the exponents are $\sqrt{c}\,(\mu_i - \mu_k) / \sqrt{c T^2 + s_{ki}}$.

    Args:
        means: The means of the logits.
        variances: The variances $s_{ki}$ of the differences of every two logits.
        temperatures: The temperatures.
    """
    differences = means.unsqueeze(-2) - means.unsqueeze(-1)
    needs_gradients = variances.requires_grad or differences.requires_grad
    # An exported program cannot branch on the sizes and the values of tensors.
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
        # The root is not changed in place: gradients need it.
        exponents = (variances + _SCALE * temperature**2).rsqrt_() * differences
        # An exponent on the diagonal is zero, so that only the logarithm of the sum is left there.
        logits.append(exponents.log_softmax(-1).diagonal(dim1=-2, dim2=-1))
    # A single temperature is common, and needs no copy.
    return torch.stack(logits) if len(logits) > 1 else logits[0].unsqueeze(0)


def _unshifted_pairwise(
    differences: Float[Tensor, "block classes classes"],
    variances: Float[Tensor, "block classes classes"],
    temperatures: Sequence[float],
) -> Float[Tensor, "temperatures block classes"]:
    r"""Compute the logits without the maximum of the exponents, if no exponential can overflow.

    Powers of 2 take a third of the time of `exp` where that is computed by MKL on AMD processors.

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

    The reciprocals of the exponentials then are finite, too.
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
    """Compute `pairwise_of_directions` from exponentials of every two classes in one order only.

    The exponential of the other order is the reciprocal. It belongs to the second class of the
    pair, so it is written as many columns further on as the two classes are apart. The means are
    those for which `_exponentials_are_finite`.
    """
    batch, num_classes = means.shape
    num_shifts = num_classes // 2
    # The pairs that are half of an even number of classes apart occur in both orders.
    num_mirrored = (num_classes - 1) // 2
    width = num_classes + num_mirrored
    most_examples = _UNORDERED_PAIRS_AT_ONCE // max(1, num_shifts * num_classes)
    num_blocks = math.ceil(batch / max(1, most_examples))
    block_size = math.ceil(batch / max(1, num_blocks))  # Blocks of nearly the same size.
    log_2_means = means * (math.sqrt(_SCALE) / math.log(2))
    # The first classes follow the last one.
    cyclic_means = torch.cat([log_2_means, log_2_means[:, :num_shifts]], 1)
    second_means = cyclic_means.unfold(1, num_classes, 1)[:, 1:]
    # Every block of examples uses the same memory, which stays in the processor's cache.
    pair_variances = means.new_empty(block_size, num_shifts * num_classes)
    all_differences = means.new_empty(block_size, num_shifts, num_classes)
    all_terms = torch.empty_like(all_differences)
    # Only the entries of `shifted` are written, so that the others stay zero.
    all_reciprocals = means.new_zeros(block_size, num_mirrored, width)
    all_shifted = all_reciprocals.as_strided(
        (block_size, num_mirrored, num_classes), (num_mirrored * width, width + 1, 1), 1
    )
    sums = means.new_empty(len(temperatures), batch, num_classes)
    for block in range(num_blocks):
        examples = slice(block * block_size, min((block + 1) * block_size, batch))
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
            torch.reciprocal(mirrored_terms, out=shifted)
            mirrored_sums = reciprocals.sum(1)
            torch.sum(terms, 1, out=total)
            total += mirrored_sums[:, :num_classes]
            total[:, :num_mirrored] += mirrored_sums[:, num_classes:]
    # The exponential of the difference of a class and itself is 1.
    return sums.add_(1).log_().neg_()


def tempered_probit(
    mean: Logits, covariance: Float[Tensor, "..."], temperatures: Sequence[float]
) -> Float[Tensor, "temperatures *batch classes"]:
    r"""Compute `probit` of the logits divided by each temperature T.

    It is $\mu_k / \sqrt{T^2 + \tfrac\pi8 \Sigma_{kk}}$.

    Args:
        mean: The means μ.
        covariance: Covariances, or only variances.
        temperatures: The temperatures.
    """
    is_matrix = covariance.ndim > mean.ndim
    variances = covariance.diagonal(dim1=-2, dim2=-1) if is_matrix else covariance
    squares = torch.tensor(temperatures, dtype=mean.dtype, device=mean.device).square()
    squares = squares.view(-1, *[1] * mean.ndim)
    return mean / (squares + math.pi / 8 * variances).sqrt_()


def exact(mean: Logits, covariance: Covariance) -> Logits:
    """Compute the logarithm of the expected softmax from 128 fixed Sobol points.

    Its divergence from 10⁵ draws is about 1e-4 for 10 classes and 1e-3 for 100, ten times that for
    standard deviations of 3.
    """
    # A part that all logits share cancels: without it a large one takes no point for itself.
    mu = mean.double()
    sigma = covariance.double()
    sigma = sigma - sigma.mean(-1, keepdim=True)
    sigma = sigma - sigma.mean(-2, keepdim=True)
    values, vectors = eigh((sigma + sigma.mT) / 2, "the functional covariance")
    # The leading directions get the best points; their signs do not depend on the order of the
    # classes.
    signs = torch.where((vectors * mu.unsqueeze(-1)).sum(-2, keepdim=True) < 0, -1.0, 1.0)
    root = (vectors * signs * values.clamp_min(0).sqrt().unsqueeze(-2)).flip(-1)
    z = normal_points(mean.shape[-1]).to(mu)
    log_p = (mu + torch.einsum("...ij,sj->s...i", root, z)).log_softmax(-1)
    return (torch.logsumexp(log_p, 0) - math.log(len(z))).to(mean.dtype)


def bridge(mean: Logits, covariance: Covariance) -> Logits:
    r"""Compute the logarithms of the Dirichlet parameters of the Laplace bridge.

    $$\alpha_k = \frac1{\Sigma_{kk}} \Big(1 - \frac2C + \frac{e^{\mu_k}}{C^2} \sum_l
    e^{-\mu_l}\Big)$$ for logits that are conditioned on a sum of zero. Probabilities are the mean
    $\alpha_k / \sum_l \alpha_l$. Use it only for comparisons with other libraries: for small
    variances, its probabilities do not approach the probabilities of the network.

    Reference: Hobbhahn, Kristiadi & Hennig (2022), "Fast predictive uncertainty for classification
    with Bayesian deep networks".
    """
    mu, variances = _with_zero_sum(mean.double(), covariance.double())
    return _log_bridge(mu, variances).to(mean.dtype)


def bridge_norm(mean: Logits, covariance: Covariance) -> Logits:
    r"""Compute the Laplace bridge of logits scaled to a mean variance of $\sqrt{C / 2}$.

    See `bridge`. Without the scaling the bridge is poor for large variances.
    """
    mu, variances = _with_zero_sum(mean.double(), covariance.double())
    scale = variances.mean(-1, keepdim=True) / math.sqrt(mean.shape[-1] / 2)
    return _log_bridge(mu / scale.sqrt(), variances / scale).to(mean.dtype)


def _with_zero_sum(mean: Logits, covariance: Covariance) -> tuple[Logits, Logits]:
    """Mean and variances of Gaussian logits under the condition that their sum is zero."""
    row_sums = covariance.sum(-1)
    total = row_sums.sum(-1, keepdim=True)
    variances = covariance.diagonal(dim1=-2, dim2=-1)
    # A covariance without any common part is not changed, nor one of zero.
    rounding = torch.finfo(covariance.dtype).eps * variances.mean(-1, keepdim=True)
    gain = torch.where(total > rounding, row_sums / total, 0)
    conditioned = (variances - gain * row_sums).clamp_min(0) + rounding
    is_zero = rounding <= torch.finfo(covariance.dtype).tiny
    return mean - gain * mean.sum(-1, keepdim=True), torch.where(is_zero, 1, conditioned)


def _log_bridge(mean: Logits, variances: Logits) -> Logits:
    num_classes = mean.shape[-1]
    constant = torch.full_like(mean, 1 - 2 / num_classes).log()
    exponent = mean + (-mean).logsumexp(-1, keepdim=True) - 2 * math.log(num_classes)
    return torch.logaddexp(constant, exponent) - variances.log()


RequiredMoments = Literal["variances", "differences", "covariance"]
"""The part of the outputs' covariance that a predictive depends on. `"differences"` stands for
the covariances of differences between outputs."""


@dataclass(frozen=True)
class Formula:
    """A formula for the expected softmax of Gaussian logits.

    Attributes:
        logits: From the mean and the required moments to logits of probabilities.
        required_moments: The part of the covariance that the formula uses.
    """

    logits: Callable[[Logits, Float[Tensor, "..."]], Logits]
    required_moments: RequiredMoments


FORMULAS = {
    "pairwise": Formula(pairwise, "differences"),
    "probit": Formula(probit, "variances"),
    "exact": Formula(exact, "differences"),
    "bridge": Formula(bridge, "covariance"),
    "bridge_norm": Formula(bridge_norm, "covariance"),
}
"""The formulas by name. `"probit"` (MacKay, 1992) shrinks each logit by its own variance."""
BRIDGES = ("bridge", "bridge_norm")
"""The formulas that use a Dirichlet distribution. They apply only to mutually exclusive classes."""


@dataclass(frozen=True)
class Link:
    """A way to turn Gaussian logits into probabilities.

    Attributes:
        name: One of `FORMULAS`.
        temperature: T, which the logits are divided by.

    Raises:
        ValueError: If the name is unknown, or the temperature is not positive and finite.
    """

    name: str
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in FORMULAS:
            raise ValueError(f"Unknown link={self.name!r}. Use one of {', '.join(FORMULAS)}.")
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"The temperature of the link is {self.temperature}. Pass a positive number."
            )

    def __str__(self) -> str:
        """The name, and the temperature unless it is 1."""
        if self.temperature == 1:
            return self.name
        return f"{self.name} at temperature {self.temperature:.3g}"

    def logits(
        self, likelihood: Likelihood, mean: Logits, covariance: Float[Tensor, "..."]
    ) -> Logits:
        """Compute the logarithms of the probabilities."""
        mean, covariance = tempered_moments(self, mean, covariance)
        if likelihood.activation == "softmax":
            return FORMULAS[self.name].logits(mean, covariance)
        if self.name != "exact":
            return probit(mean, covariance)
        # A label that applies or not is a choice between its logit and zero.
        is_matrix = covariance.ndim > mean.ndim
        variances = covariance.diagonal(dim1=-2, dim2=-1) if is_matrix else covariance
        both_means = torch.stack([torch.zeros_like(mean), mean], -1)
        both_variances = torch.stack([torch.zeros_like(mean), variances], -1)
        log_probs = exact(both_means, torch.diag_embed(both_variances))
        return log_probs[..., 1] - log_probs[..., 0]


def tempered(link: Link | None, logits: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Divide logits by a link's temperature; without a link, return them unchanged."""
    if link is None or link.temperature == 1:
        return logits
    return logits / link.temperature


def tempered_moments(
    link: Link | None, mean: Float[Tensor, "..."], covariance: Float[Tensor, "..."]
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Divide the mean and the covariance of Gaussian logits by a link's temperature."""
    if link is None or link.temperature == 1:
        return mean, covariance
    return mean / link.temperature, covariance / link.temperature**2


def link_from(link: "str | Link | None", likelihood: Likelihood) -> Link | None:
    """Return a link by its name; links and None are returned as they are."""
    if link is None:
        return None
    checked = link if isinstance(link, Link) else Link(link)
    if likelihood.activation is None:
        raise ValueError(
            f"`link={link!r}` computes probabilities of classes or labels, but "
            f"{type(likelihood).__name__} has no classes. Remove `link=`."
        )
    if checked.name in BRIDGES and likelihood.activation != "softmax":
        raise ValueError(
            f"`link={checked.name!r}` applies only to mutually exclusive classes, but "
            f'the likelihood is {type(likelihood).__name__}. Use "probit" or "exact".'
        )
    return checked


def default_link(likelihood: Likelihood, shape: torch.Size) -> Link | None:
    """Return the link of an untuned posterior, or None if the likelihood has no links.

    Outputs with positions, `[B, ..., C]`, use the probit, because the size of their full covariance
    grows with the square of their number.
    """
    if likelihood.activation is None:
        return None
    if likelihood.activation == "softmax" and len(shape) == 2 and shape[1] <= MOST_CLASSES:
        return Link("pairwise")
    return Link("probit")


def required_moments(likelihood: Likelihood, by: Collection[Link]) -> RequiredMoments:
    """Determine the part of the outputs' covariance that suffices for the predictives by links."""
    if by and likelihood.activation == "softmax":
        required = {FORMULAS[link.name].required_moments for link in by}
        if len(required) > 1:
            return "covariance"
        return required.pop()
    return "variances" if likelihood.variances_suffice else "covariance"


def predictive(
    likelihood: Likelihood, link: Link | None, mean: Logits, covariance: Float[Tensor, "..."]
) -> Distribution:
    """Return p(y) for Gaussian outputs."""
    if link is None:
        return likelihood.predictive(mean, covariance)
    return likelihood.predictive(link.logits(likelihood, mean, covariance), None)


def tempered_predictive(
    likelihood: Likelihood,
    name: str,
    mean: Logits,
    covariance: Float[Tensor, "..."] | None,
    temperatures: Sequence[float],
) -> Distribution:
    """Return p(y) by a formula at several temperatures, with batch shape `[temperatures, B]`.

    Without a covariance every formula is the softmax, or the sigmoid.
    """
    if covariance is None:
        name = "probit"
        covariance = torch.zeros_like(mean)
    if name == "pairwise" and likelihood.activation == "softmax":
        logits = tempered_pairwise(mean, covariance, temperatures)
        return likelihood.predictive(logits, None)
    if name == "probit":
        return likelihood.predictive(tempered_probit(mean, covariance, temperatures), None)
    T = torch.tensor(temperatures, dtype=torch.float64, device=mean.device)
    means = mean / T.to(mean.dtype).view(-1, *[1] * mean.ndim)
    squares = T.square().to(mean.dtype).view(-1, *[1] * covariance.ndim)
    return predictive(likelihood, Link(name), means, covariance / squares)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def normal_points(dimension: int) -> Float[Tensor, "draws dimension"]:
    """Return standard normal Sobol points, which are the same at every call."""
    # The best of a few seeds for two classes; for more they are alike.
    uniforms = SobolEngine(dimension, scramble=True, seed=2).draw(NUM_DRAWS, dtype=torch.float64)
    return torch.special.ndtri(uniforms.clamp(1e-10, 1 - 1e-10))
