"""Seconds that others have published, and what large fits would take at their rates."""

from collections.abc import Sequence

from benchmarks.large_networks import resnet
from benchmarks.scale_costs import ekfac_costs, largest_load, passes, table
from laplace_debias.curvature.layers.blocks import Block

IMAGES = 1_281_167
"""Of ImageNet."""
# Kronfluence's published seconds: ResNet-50 on ImageNet, A100s.
# The number of GPUs, and the three steps.
_KRONFLUENCE = (
    ("one A100", 1, 454, 10.6, 1057),
    ("four A100", 4, 138, 7.8, 299),
    ("one A100, half precision", 1, 157, 5.7, 232),
)
# Its `FactorArguments` read at most so many examples unless told otherwise, and its example for
# ImageNet does not: https://github.com/pomonam/kronfluence/tree/main/examples/imagenet
_KRONFLUENCE_IMAGES = 100_000
# Shares of eigendecompositions in an EKFAC of one batch, by curvlinops.
_CURVLINOPS = (0.75, 0.84)
# Eigendecompositions in double precision over those in single precision: docs/benchmarks.md.
_FLOAT32_FASTER = 2.37 / 1.25


def kronfluence() -> str:
    """Seconds that Kronfluence publishes, and what its rates would make of all of ImageNet."""
    of_factors, of_table = passes(resnet())
    rows: list[tuple[str, ...]] = [
        (
            *("", "covariance, s", "TFLOP/s", "eigendecomposition, s"),
            *("lambda, s", "TFLOP/s", "lambda / covariance"),
        )
    ]
    for name, gpus, *seconds in _KRONFLUENCE:
        rates = [
            flops * _KRONFLUENCE_IMAGES / gpus / of / 1e12
            for flops, of in ((of_factors, seconds[0]), (of_table, seconds[2]))
        ]
        rows.append(
            (
                *(f"Kronfluence, {name}", f"{seconds[0]:,}", f"{rates[0]:.1f}"),
                *(f"{seconds[1]:,}", f"{seconds[2]:,}", f"{rates[1]:.1f}"),
                f"{seconds[2] / seconds[0]:.2f}",
            )
        )
    rows.append(("FLOPs by our formulas", "", "", "", "", "", f"{of_table / of_factors:.2f}"))
    factors_rate, table_rate = _rates()
    each = [-(-IMAGES // ranks) for ranks in (1, 8)]
    projected: list[tuple[str, ...]] = [("projected, A100 in single precision", "1 GPU", "8 GPUs")]
    for name, flops, rate in (
        ("pass for the factors, s", of_factors, factors_rate),
        ("pass for the magnitudes, s", of_table, table_rate),
    ):
        projected.append((name, *(f"{n * flops / rate:,.0f}" for n in each)))
    costs = ekfac_costs(resnet())
    loads = [largest_load(costs, ranks) / _eigh_rate() for ranks in (1, 8)]
    projected.append(("eigendecompositions, s", *(f"{s:.1f}" for s in loads)))
    return (
        "Kronfluence publishes seconds for the same network, of its defaults: at most "
        f"{_KRONFLUENCE_IMAGES:,} images for each pass. Its covariance pass is our pass for the "
        "factors, its lambda pass ours for the magnitudes. TFLOP/s are our formulas' operations "
        "for as many images over its seconds, of each GPU.\n\n"
        f"{table(rows)}\n\n"
        f"We have not run ImageNet. At these rates of one A100, all {IMAGES:,} images would take:"
        f"\n\n{table(projected)}\n"
    )


def _rates() -> tuple[float, float]:
    """Operations a second of Kronfluence's two passes, on one A100 in single precision."""
    _, gpus, covariance, _, of_lambda = _KRONFLUENCE[0]
    of_factors, of_table = passes(resnet())
    images = _KRONFLUENCE_IMAGES / gpus
    return images * of_factors / covariance, images * of_table / of_lambda


def _eigh_rate() -> float:
    """Operations a second of its eigendecompositions, in double precision."""
    return largest_load(ekfac_costs(resnet()), 1) / _KRONFLUENCE[0][3]


def projected(positions: dict[Block, int], examples: int, sizes: Sequence[int]) -> str:
    """Seconds of another network at the same rates."""
    of_factors, of_table = passes(positions)
    factors_rate, table_rate = _rates()
    rows: list[tuple[str, ...]] = [
        ("projected, A100 in single precision", *(f"{ranks} GPUs" for ranks in sizes))
    ]
    each = [-(-examples // ranks) for ranks in sizes]
    rows.append(("pass for the factors, h", *(_hours(n * of_factors / factors_rate) for n in each)))
    rows.append(("pass for the magnitudes, h", *(_hours(n * of_table / table_rate) for n in each)))
    costs = ekfac_costs(positions)
    loads = [largest_load(costs, ranks) / _eigh_rate() for ranks in sizes]
    rows.append(("eigendecompositions, s", *(f"{s:,.0f}" for s in loads)))
    return (
        "At the rates of Kronfluence's passes above. Larger matrices go faster than ResNet-50's, "
        f"so this is rather too much than too little.\n\n{table(rows)}\n"
    )


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f}"


def decompositions() -> str:
    """What eigendecompositions cost on a GPU, and what single precision would save."""
    _, _, covariance, decomposing, of_lambda = _KRONFLUENCE[0]
    share = decomposing / (covariance + decomposing + of_lambda)
    once = (100 * (1 - 1 / _FLOAT32_FASTER) * part for part in _CURVLINOPS)
    low, high = (f"{number:.0f}" for number in once)
    return f"""## Eigendecompositions

They cost the same for one batch and for a whole data set.

- curvlinops' own figures, on a GPU: 75 to 84 % of an EKFAC of one batch.
- Kronfluence, ResNet-50, one A100, double precision: {decomposing} s, {100 * share:.1f} % of its
  three steps for {_KRONFLUENCE_IMAGES:,} images.
- Ours on two CPU cores, All-CNN-C ([benchmarks](benchmarks.md)): single precision takes 1.25 s,
  double 2.37 s: {_FLOAT32_FASTER:.1f} times as long.

A fit sums and decomposes factors in double precision. `factor_dtype=torch.float32` does both in
single precision; each decomposition is checked then, as in double precision, and one that fails is
made again in double precision. Sums in double precision that are decomposed in single precision
first are not implemented. Projected from the ratio on the CPU, that would save {low} to {high} % of
an EKFAC of one batch on such a GPU, and less than {100 * share:.1f} % of one of
{_KRONFLUENCE_IMAGES:,} images. On GPUs with few units for double precision the ratio is larger; we
have not measured one. The price: eigenvalues below 1e-7 of the largest are rounding, and so are
directions whose eigenvalues differ by less. Magnitudes of EKFAC and of a debiased fit are measured
along the directions, and do not suffer from the first.
"""
