r"""Maximisation of the marginal likelihood over prior precisions, for all parameters or per group.

Let h = N Λ be the precisions of the data along the directions of a group, D the number of its
parameters, and S their squared distance from the prior mean. The contribution of the group to the
log marginal likelihood is
$$\tfrac D2 \log\delta - \tfrac{\delta S}2 - \tfrac12\sum_i \log(h_i + \delta),$$
whose slope in log δ is half of $\sum_i h_i / (h_i + \delta) - \delta S$: the number of parameters
that the data determines, minus δ S (MacKay's fixed point). The first term decreases with δ, whereas
the second one increases. The slope therefore has a single root, which is the optimum and does not
depend on the other groups.

The noise of a regression can be tuned together with the prior precision. Tuning reads no data.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.laplace.state.posterior import GaussianPosterior
from laplace_debias.laplace.tuning.noise import (
    apply_with_noise,
    nll_change,
    note_on_assumed_sigma,
    tunes_noise,
)
from laplace_debias.laplace.tuning.result import LOG_EVIDENCE, Row, TunedFit, Tuning

PER = ("kind", "block")
BOUNDS = (1e-8, 1e8)
"""The search range of the prior precision δ, unless the parameters are very large or very small."""
# The range never exceeds these limits, which single precision can represent.
_LIMITS = (1e-20, 1e20)
# When the noise is tuned, γ = δ k² is searched from 10^-_RANGE to 10^_RANGE.
_RANGE = 20


def maximise_evidence(fitted: FittedPosterior, sigma: bool | None, per: str | None) -> TunedFit:
    """Maximise the marginal likelihood; see `Laplace.tune_evidence`."""
    if fitted.thinned_at is not None:
        raise ValueError(
            "The posterior is thinned, which changes its marginal likelihood by an amount that "
            "depends on the prior precision. Call `tune_evidence` before `thin`, or load the "
            "posterior that was saved before `thin`."
        )
    if fitted.prior.information is not None:
        raise ValueError(
            "`tune_evidence` does not support posteriors that were fitted with `prior=`. Use "
            "`tune(loader)`."
        )
    if tunes_noise(fitted, sigma):
        # The noise is tuned along with a single prior precision. Several are tuned at this noise.
        tuned = tune_noise(fitted)
        if per is not None:
            tuning = replace(tune_groups(tuned.fitted, per), sigma=tuned.tuning.sigma)
            tuned = TunedFit.apply(tuning, tuned.fitted)
        return tuned
    tuning = tune_one(fitted) if per is None else tune_groups(fitted, per)
    return TunedFit.apply(tuning, fitted).with_notes(note_on_assumed_sigma(fitted, sigma))


def search_range(
    num_parameters: Float[Tensor, "*groups"], squared_distances: Float[Tensor, "*groups"]
) -> tuple[Float[Tensor, "*groups"], Float[Tensor, "*groups"]]:
    r"""Return the search range of δ for D parameters at a squared distance S.

    The optimum is $\delta = \gamma / S$, where γ ≤ D is the number of determined parameters. It
    lies far below `BOUNDS` if the parameters are large, for example because the targets are in the
    millions, and above `BOUNDS` if they are small, so the range is extended in proportion to D / S.
    """
    low, high = BOUNDS
    # Parameters at the prior mean, where S = 0, do not define a scale, so they get the scale 1.
    largest = (num_parameters / squared_distances).nan_to_num(1.0, posinf=1.0)
    return (1e-6 * largest).clamp(_LIMITS[0], low), (10 * largest).clamp(high, _LIMITS[1])


def tune_one(fitted: FittedPosterior) -> Tuning:
    """Maximise the log marginal likelihood over a single prior precision."""
    # SciPy is imported here because the import takes a third of a second.
    from scipy.optimize import minimize_scalar

    # The values are cached, because the searches below visit some prior precisions repeatedly.
    log_evidences: dict[float, float] = {}

    def loss(log_delta: float) -> float:
        delta = 10.0 ** float(log_delta)
        if delta not in log_evidences:
            value = fitted.log_marginal_likelihood(torch.tensor(delta, dtype=torch.float64))
            log_evidences[delta] = value.item()
        return -log_evidences[delta]

    posterior = fitted.posterior
    squared_distance = posterior.squared_distances().double().sum()
    num_parameters = torch.tensor(sum(posterior.curvature.sizes)).to(squared_distance)
    ends = torch.stack(search_range(num_parameters, squared_distance))
    low, high = ends.log10().tolist()
    result = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-3})
    if min(result.x - low, high - result.x) < 1e-2:
        raise ValueError(
            f"The marginal likelihood has no maximum between {ends[0]:g} and {ends[1]:g} "
            f"(the search ended at {10**result.x:.3g}). Tune on validation data instead."
        )
    flat = (
        _end_of_flat_range(loss, result.x, low),
        _end_of_flat_range(loss, result.x, high),
    )
    table: list[Row] = [
        {"prior_precision": delta, LOG_EVIDENCE: log_evidences[delta]}
        for delta in sorted(log_evidences)
    ]
    best = 10.0 ** float(result.x)
    return Tuning(best, LOG_EVIDENCE, log_evidences[best], table, flat=flat)


def _end_of_flat_range(loss: Callable[[float], float], best: float, bound: float) -> float:
    """Find where half a nat is lost, between the best prior precision and a bound.

    Args:
        loss: The negative log marginal likelihood, as a function of the decimal logarithm of the
            prior precision.
        best: Decimal logarithm of the best prior precision.
        bound: Decimal logarithm of the end of the search range, which is returned if less than half
            a nat is lost there.
    """
    from scipy.optimize import brentq

    limit = loss(best) + 0.5
    if loss(bound) <= limit:
        return 10.0**bound
    return 10.0 ** float(brentq(lambda log_delta: loss(log_delta) - limit, best, bound, xtol=1e-6))


def tune_groups(fitted: FittedPosterior, per: str) -> Tuning:
    """Maximise the log marginal likelihood over one prior precision for each group.

    For a group without curvature, the marginal likelihood increases towards δ = 0, so the data does
    not determine its δ. Such a group gets the δ that is best for all groups together. For a group
    whose parameters all equal the prior mean, the optimum is at infinity, so it gets the largest δ
    of the search range.

    Args:
        fitted: The fit.
        per: The groups: `"kind"` of layer, or `"block"`.

    Reference:
        MacKay (1992), "A practical Bayesian framework for backpropagation networks".
    """
    if per not in PER:
        raise ValueError(f"Unknown per={per!r}. Use 'kind', 'block' or None.")
    structure = fitted.config.structure
    if structure.is_dense:
        raise ValueError(
            f"`curvature={structure.name!r}` treats all parameters as one block with a "
            f"single prior precision. Remove `per={per!r}`, or fit with "
            '`curvature="kfac"`, "ekfac" or "diag".'
        )
    posterior = fitted.posterior
    groups = dict[str, list[int]]()
    for index, block in enumerate(fitted.parameters.blocks):
        name = block.name if per == "block" else block.kind
        groups.setdefault(name, []).append(index)
    common_delta = tune_one(fitted).prior_precision
    assert isinstance(common_delta, float)
    squared_distances = posterior.squared_distances()
    block_deltas = torch.zeros(len(fitted.parameters.blocks), dtype=torch.float64)
    rows: list[Row] = []
    without_curvature: list[str] = []
    without_distance: dict[str, float] = {}
    for name, block_indices in groups.items():
        spectrum = _GroupSpectrum.of_group(posterior, block_indices, squared_distances)
        low, high = spectrum.search_range()
        delta = spectrum.best_delta(low, high)
        if delta == low:
            without_curvature.append(name)
            delta = common_delta
        elif delta == high:
            without_distance[name] = high
        block_deltas[block_indices] = delta
        rows.append(
            {
                "name": name,
                "prior_precision": delta,
                "num_parameters": spectrum.num_parameters,
                "num_determined": spectrum.num_determined(delta),
            }
        )
    value = float(fitted.log_marginal_likelihood(block_deltas))
    notes = tuple(_notes_on_groups(without_curvature, without_distance, common_delta))
    return Tuning(block_deltas.tolist(), LOG_EVIDENCE, value, rows, notes=notes)


def _notes_on_groups(
    without_curvature: Sequence[str], without_distance: Mapping[str, float], common_delta: float
) -> Iterator[str]:
    """Explain the prior precisions of groups for which there is no optimum.

    Args:
        without_curvature: The groups without curvature.
        without_distance: For each group whose parameters equal the prior mean, the end of the
            search range.
        common_delta: The best prior precision for all groups together.
    """
    if without_curvature:
        yield (
            f"{', '.join(without_curvature)}: there is almost no curvature, so the data do not "
            "determine the prior precision. (The marginal likelihood keeps increasing as the prior "
            "precision approaches 0.) The prior precision is set to the best value for all "
            f"parameters together, {common_delta:.3g}."
        )
    if without_distance:
        ends = ", ".join(f"{end:g}" for end in sorted(set(without_distance.values())))
        yield (
            f"{', '.join(without_distance)}: the parameters are almost equal to the prior's "
            "mean, so the marginal likelihood keeps increasing with the prior precision. The prior "
            f"precision is set to the end of the search range, {ends}."
        )


@dataclass(frozen=True, eq=False)
class _GroupSpectrum:
    """The spectrum of a group of blocks, and the other numbers that determine its optimum.

    Attributes:
        h: The precisions of the data, N Λ, along the directions.
        counts: The number of directions with each precision.
        num_parameters: D.
        squared_distance: S, the squared distance of the parameters from the prior mean.
    """

    h: Float[Tensor, " directions"]
    counts: Float[Tensor, " directions"]
    num_parameters: int
    squared_distance: Float[Tensor, ""]

    @classmethod
    def of_group(
        cls,
        posterior: GaussianPosterior,
        block_indices: Sequence[int],
        squared_distances: Float[Tensor, " blocks"],
    ) -> "_GroupSpectrum":
        """Combine the spectra of the blocks with these indices."""
        all_blocks = list(posterior.curvature.blocks.values())
        blocks = [all_blocks[index] for index in block_indices]
        eigenvalues = [block.distinct_eigenvalues for block in blocks]
        multiplicities = [
            block.multiplicities.expand_as(values)
            for block, values in zip(blocks, eigenvalues, strict=True)
        ]
        return cls(
            h=posterior.curvature_weight
            * torch.cat([values.double().flatten() for values in eigenvalues]),
            counts=torch.cat([values.flatten() for values in multiplicities]).double(),
            num_parameters=sum(block.shape[0] for block in blocks),
            squared_distance=squared_distances[block_indices].double().sum().cpu(),
        )

    def search_range(self) -> tuple[float, float]:
        """Return the search range of δ for the group."""
        size = torch.tensor(self.num_parameters).double()
        low, high = search_range(size, self.squared_distance)
        return float(low), float(high)

    def num_determined(self, delta: float) -> float:
        """Compute γ = Σ h / (h + δ), the number of parameters that the data determines."""
        return float((self.counts * (self.h / (self.h + delta))).sum())

    def best_delta(self, low: float, high: float) -> float:
        """Find the root δ of γ(δ) − δ S, or the end of the range if the root is outside."""
        squared_distance = float(self.squared_distance)

        def slope(delta: float) -> float:
            return self.num_determined(delta) - delta * squared_distance

        return root_between((low, high), slope, tolerance=1e-10)


def root_between(
    bounds: tuple[float, float], falling: Callable[[float], float], tolerance: float
) -> float:
    """Find the root of a decreasing function of a positive number.

    Args:
        bounds: The search range.
        falling: The function.
        tolerance: The largest error of the logarithm of the root.

    Returns:
        The root; if the root is outside the range, the nearest end of the range.
    """
    # SciPy is imported here because the import takes a third of a second.
    from scipy.optimize import brentq

    low, high = map(math.log, bounds)
    if falling(math.exp(low)) <= 0:
        return bounds[0]
    if falling(math.exp(high)) >= 0:
        return bounds[1]
    return math.exp(brentq(lambda log: falling(math.exp(log)), low, high, xtol=tolerance))


def tune_noise(fitted: FittedPosterior) -> TunedFit:
    r"""Maximise the log marginal likelihood over σ = k σ₀ and one prior precision δ.

    With $P = k^{-2}(N \cdot C + \gamma)$, $\gamma = \delta k^2$, the squared distance S = ‖θ* − μ‖²
    from the prior mean μ, and Q and M as in `Residuals`, the log marginal likelihood is, up to a
    constant,
    $$-\frac{Q + \gamma S}{2k^2} - M\log k + \frac D2\log\gamma
    - \frac12\log\det(N \cdot C + \gamma),$$
    The best k has a closed form, $k^2 = (Q + \gamma S)/M$, so the search is only over γ. If σ has
    one entry per output, the ratios of the entries do not change.

    Reference:
        MacKay (1992), "Bayesian interpolation", for the choice of both hyperparameters by the
        evidence.
    """
    # SciPy is imported here because the import takes a third of a second.
    from scipy.optimize import minimize_scalar

    residuals = fitted.residuals
    assert residuals is not None
    posterior = fitted.posterior
    # At temperature T, the likelihood has the weight of N/T examples, so M is divided by T.
    M = residuals.num_targets / posterior.temperature
    Q = residuals.squared / posterior.temperature
    D = sum(posterior.curvature.sizes)
    S = posterior.num_copies * posterior.displacement.double().square().sum().item()
    table: list[dict[str, float]] = []

    def loss(log_gamma: float) -> float:
        gamma = 10.0 ** float(log_gamma)
        k = math.sqrt((Q + gamma * S) / M)
        nll = (fitted.nll + nll_change(residuals, k)) / posterior.temperature
        log_det = posterior.log_det_precision(
            torch.tensor(gamma, dtype=torch.float64, device=posterior.mean.device)
        ).item()
        value = -nll + 0.5 * (D * math.log(gamma) - gamma * S * k**-2 - log_det)
        table.append({"prior_precision": gamma * k**-2, "sigma_factor": k, LOG_EVIDENCE: value})
        return -value

    # With the noise, there may be several optima, so a grid locates the best one first.
    coarse = [loss(power) for power in range(-_RANGE, _RANGE + 1)]
    start = min(range(len(coarse)), key=coarse.__getitem__) - _RANGE
    if abs(start) == _RANGE:
        raise ValueError(
            "The marginal likelihood has no joint maximum over sigma and the prior "
            "precision. Pass `sigma`, and tune the prior precision on validation "
            "data."
        )
    result = minimize_scalar(
        loss, bounds=(start - 1, start + 1), method="bounded", options={"xatol": 1e-4}
    )
    gamma = 10.0 ** float(result.x)
    k = math.sqrt((Q + gamma * S) / M)
    table.sort(key=lambda row: row["prior_precision"])
    tuning = Tuning(gamma * k**-2, LOG_EVIDENCE, -float(result.fun), table)
    return apply_with_noise(tuning, fitted, k)
