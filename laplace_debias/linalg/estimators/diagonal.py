"""The diagonal of an operator: Hutchinson and XDiag."""

import torch
from torch import Tensor

from laplace_debias.linalg.checks import (
    check_at_least,
    check_choice,
    check_finite,
    check_generator,
    check_square,
)
from laplace_debias.linalg.estimators.quadratic_forms import RunningMoments
from laplace_debias.linalg.estimators.sketch import LeftOutPairs, RangeSketch
from laplace_debias.linalg.probes import draw
from laplace_debias.linalg.products import Products
from laplace_debias.linalg.results import Estimate
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.exact import exact_diagonal

_LEAST = {
    "hutchinson": (1, "one for a probe"),
    "xdiag": (4, "two for each of two probes"),
}


def diagonal(
    A: LinearOperator,
    method: str = "hutchinson",
    num_matvecs: int = 100,
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Estimate:
    r"""The diagonal of a square operator, from products alone; unbiased.

    - `"hutchinson"`: the mean of $\omega \odot A\omega$ over probes of ±1.
    - `"xdiag"`: exact on the range of a sketch, Hutchinson on the rest, every probe in turn left
      out of the sketch. Half of its products are with the adjoint. Best on decaying spectra. Its
      standard errors allow for the dependence of the probes' estimates.

    Intervals of 95 % (`Estimate.interval`) cover an entry in 93 to 97 % of runs from 12 products
    on.

    A structured operator's diagonal is exact (no products), and so is that of one of at most
    `num_matvecs` columns (as many products as columns).

    Args:
        A: Operator of shape `[n, n]`.
        method: `"hutchinson"` or `"xdiag"`.
        num_matvecs: Products to use; XDiag needs 4 and uses an even number.
        generator: Source of randomness, on the operator's device.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: The operator is not square or a product not finite, a name is unknown, a number
            too small, or the generator on another device.

    Reference:
        Bekas, Kokiopoulou, Saad. An estimator for the diagonal of a matrix. Applied Numerical
        Mathematics, 2007. Epperly, Tropp, Webber. XTrace. SIMAX, 2024, section 2.4.
    """
    n = check_square(A, "diagonal")
    check_choice(method, _LEAST, "method")
    check_at_least(num_matvecs, _LEAST[method][0], "num_matvecs", _LEAST[method][1])
    check_generator(generator, A)
    check_finite(A)
    closed_form = exact_diagonal(A)
    if closed_form is not None:
        return Estimate.exact(closed_form)
    total = min(n, num_matvecs)
    with Products(A, progress=progress, total=total, label="diagonal") as products:
        if total == n:
            parts = [columns[places].diagonal() for places, columns in products.columns()]
            return Estimate.exact(torch.cat(parts), products.count)
        estimate = _hutchinson if method == "hutchinson" else _xdiag
        return estimate(products, total, generator)


def _hutchinson(products: Products, total: int, generator: torch.Generator | None) -> Estimate:
    # Mean and squared deviations, not the samples: they are `[n, m]`.
    moments = RunningMoments()
    for size in products.chunks(total):
        probes = draw(products.operator, size, "rademacher", generator)
        moments.add(probes * products(probes))
    standard_error = torch.full_like(moments.mean, torch.inf)
    if total > 1:
        standard_error = (moments.deviations / (total - 1) / total).sqrt()
    return Estimate(moments.mean, standard_error, total, degrees_of_freedom=total - 1.0)


def _xdiag(products: Products, total: int, generator: torch.Generator | None) -> Estimate:
    probes = draw(products.operator, total // 2, "rademacher", generator)
    sketch = RangeSketch(probes, products(probes))
    images = products.adjoint(sketch.Q)
    mean, standard_error, degrees = _leave_one_out_changes(sketch, images)
    value = (sketch.Q * images).sum(dim=1) + mean
    return Estimate(value, standard_error, products.count, degrees_of_freedom=degrees)


def _leave_one_out_changes(sketch: RangeSketch, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""The share of the estimates in $\mathrm{diag}(Q Q^\top A)$, the error and its degrees, `[n]`.

    $d_i = \mathrm{diag}(Q_{(i)}Q_{(i)}^\top A) + \omega_i \odot (I - Q_{(i)}Q_{(i)}^\top) A
    \omega_i$, in which $(I - Q_{(i)}Q_{(i)}^\top) A\omega_i = Q s_i\, s_i^\top r_i$; so the
    probe adds $Q s_i \odot (\omega_i\, s_i^\top r_i - A^\top Q s_i)$. Leaving out probe j too adds
    the same with $u_{ij}$ in place of $s_i$.
    """
    S, count = sketch.left_out(), sketch.Q.shape[1]
    basis, images = sketch.Q @ S, images @ S
    own = (S * sketch.R).sum(dim=0)
    samples = basis * (sketch.probes * own - images)
    pairs = LeftOutPairs(S)
    on_range = pairs.project(sketch.R)
    products = torch.zeros_like(samples)
    for i in range(count - 1):
        one, others = slice(i, i + 1), slice(i + 1, count)
        known = pairs.known[i, others]
        cosine, sine = pairs.cosine[i, others], pairs.sine[i, others]
        direction = (basis[:, others] - cosine * basis[:, one]) / sine
        image = (images[:, others] - cosine * images[:, one]) / sine
        change = direction * (image - sketch.probes[:, one] * on_range[i, others])
        direction = (basis[:, one] - cosine * basis[:, others]) / sine
        image = (images[:, one] - cosine * images[:, others]) / sine
        change = change * direction * (image - sketch.probes[:, others] * on_range[others, i])
        change = change * known
        products[:, i] += change.sum(dim=1)
        products[:, others] += change
    return pairs.mean_of(samples, products)
