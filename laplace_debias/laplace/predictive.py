"""Predictives of a fit, by each method: from moments or samples of the outputs to distributions."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent

from laplace_debias import metrics
from laplace_debias.curvature.losses.likelihoods import Categorical as CategoricalLikelihood
from laplace_debias.curvature.losses.likelihoods import (
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
)
from laplace_debias.curvature.network.chosen_positions import Positions
from laplace_debias.curvature.network.inputs import Inputs, Record, take
from laplace_debias.laplace import links
from laplace_debias.laplace.functional import linearised
from laplace_debias.laplace.functional.sampled_outputs import linearised_outputs, network_outputs
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.posterior import standard_normal
from laplace_debias.laplace.state import FittedPosterior
from laplace_debias.metrics import Uncertainty
from laplace_debias.metrics import uncertainty as of_probabilities
from laplace_debias.operators.eigh import eigh
from laplace_debias.system.checks import check_generator, whole

# Numbers in the covariances of several temperatures together, at most.
_AT_ONCE = 2**22

METHODS = ("glm", "glm-mc", "nn", "map")
DEFAULT_SAMPLES = 100


class Prediction:
    """How to predict; as `Laplace.predict` takes it."""

    def __init__(
        self,
        method: str = "glm",
        samples: int | None = None,
        generator: torch.Generator | None = None,
        positions: Positions | None = None,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"Unknown method={method!r}: use one of {', '.join(METHODS)}.")
        check_generator(generator)
        if samples is not None and whole(samples, "samples") and method == "map":
            raise ValueError(
                f'samples={samples}: give them to "glm", "glm-mc" or "nn", none to "map".'
            )
        self.method, self.samples = method, samples
        self.generator, self.positions = generator, positions
        # Whether the predictive has a closed form.
        self.is_closed = method == "glm" and samples is None

    def moments(
        self, fitted: FittedPosterior, x: Inputs | Record, diagonal: bool
    ) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "batch *covariance"]]:
        """Mean and covariance (or variances) of the linearised network's outputs."""
        mean, covariances = linearised.moments(
            fitted, x, diagonal=diagonal, positions=self.positions
        )
        return mean, covariances[0]

    def outputs(
        self, fitted: FittedPosterior, x: Inputs | Record
    ) -> Float[Tensor, "batch *outputs"]:
        """The outputs that the network itself gives, `[B, ..., C]`."""
        with linearised.asked_of(fitted, x, self.positions, lambda _: True) as asked:
            return asked.shaped(linearised.map_outputs(asked.network, asked.x), None)

    def draws_of(self, mean: Tensor, covariance: Tensor) -> Float[Tensor, "samples batch *outputs"]:
        """Samples of Gaussian outputs, `[S, B, ..., C]`; singular covariances are fine."""
        values, vectors = eigh(covariance, "the functional covariance")
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        flat, num_samples = mean.flatten(1), self.samples or DEFAULT_SAMPLES
        noise = standard_normal((num_samples, *flat.shape), mean, self.generator)
        found = flat + torch.einsum("bij,sbj->sbi", root, noise)
        return found.unflatten(2, mean.shape[1:])

    def draws(
        self, fitted: FittedPosterior, x: Inputs | Record
    ) -> Float[Tensor, "samples batch *outputs"]:
        """Samples of the outputs, `[S, B, ..., C]`."""
        if self.method == "glm":
            return self.draws_of(*self.moments(fitted, x, diagonal=False))
        with linearised.asked_of(fitted, x, self.positions, lambda _: True) as asked:
            parameters = fitted.posterior.sample(self.samples or DEFAULT_SAMPLES, self.generator)
            names = fitted.parameters.names
            outputs = linearised_outputs if self.method == "glm-mc" else network_outputs
            return asked.shaped(outputs(asked.network, names, asked.x, parameters), None)


def predict(
    fitted: FittedPosterior, x: Inputs | Record, how: Prediction, link: Link | None
) -> Distribution:
    """The predictive distribution, in closed form by a link that is known."""
    if how.is_closed:
        names = [] if link is None else [link.name]
        mean, covariances = _moments_for(fitted, x, None, names, how.positions)
        return links.predictive(fitted.likelihood, link, mean, covariances[0])
    with torch.inference_mode(False):
        if how.method == "map":
            return fitted.likelihood.predictive(how.outputs(fitted, x), None)
        return fitted.likelihood.mixture(how.draws(fitted, x))


def marginals(fitted: FittedPosterior, x: Inputs | Record, how: Prediction) -> Distribution:
    """The predictive of each target of a regression; as `Laplace.marginals`, arguments as above."""
    if how.is_closed:
        return fitted.likelihood.marginals(*how.moments(fitted, x, diagonal=True))
    with torch.inference_mode(False):
        if how.method == "map":
            mean = how.outputs(fitted, x)
            return fitted.likelihood.marginals(mean, torch.zeros_like(mean))
        return fitted.likelihood.marginal_mixture(how.draws(fitted, x))


def uncertainty(fitted: FittedPosterior, x: Inputs | Record, how: Prediction) -> Uncertainty:
    """Total, aleatoric and epistemic; as `Laplace.uncertainty`, arguments as above."""
    if how.is_closed and isinstance(fitted.likelihood, Gaussian | HeteroscedasticGaussian):
        mean, variances = how.moments(fitted, x, diagonal=True)
        total = fitted.likelihood.marginals(mean, variances).variance
        # The outputs that are means of targets come first; there may be log-variances behind them.
        epistemic = variances[..., : total.shape[-1]].to(total.dtype)
        return Uncertainty(total, total - epistemic, epistemic)
    with torch.inference_mode(False):
        if how.method != "glm" or type(fitted.likelihood) not in links.WITH_LINKS:
            return of_draws(fitted.likelihood, how.draws(fitted, x))
        mean, covariance = how.moments(fitted, x, diagonal=False)
        found = of_draws(fitted.likelihood, how.draws_of(mean, covariance))
        if mean.ndim > 2:
            covariance = _within_positions(covariance, mean.shape)
        more = scores_of_moments(fitted.likelihood, mean, covariance)
        if type(fitted.likelihood) is CategoricalLikelihood:
            more |= {"energy": metrics.energy(mean), "max_logit": metrics.max_logit(mean)}
        return replace(found, scores={**found.scores, **more})


def scores_of_moments(
    likelihood: Likelihood, mean: Float[Tensor, "*n outputs"], covariance: Float[Tensor, "..."]
) -> dict[str, Float[Tensor, "*n"]]:
    """The scores `variance` and `instability` of Gaussian logits, each `[...]`.

    Of labels that apply or not the variance is the mean over the labels, and the instability that
    of the least stable one.
    """
    if type(likelihood) is CategoricalLikelihood:
        scores = metrics.logit_variance(covariance), metrics.instability(mean, covariance)
    else:
        variances = covariance.diagonal(dim1=-2, dim2=-1)
        # A label that applies or not is a choice between its logit and zero.
        both, of_both = (torch.stack([torch.zeros_like(x), x], -1) for x in (mean, variances))
        of_labels = metrics.instability(both, torch.diag_embed(of_both))
        scores = variances.mean(-1), of_labels.amax(-1)
    return dict(zip(("variance", "instability"), scores, strict=True))


def _moments_for(
    fitted: FittedPosterior,
    x: Inputs | Record,
    grid: Tensor | None,
    names: Collection[str],
    positions: Positions | None = None,
) -> tuple[Tensor, Tensor]:
    """The mean, and as much of the covariances as named links look at, within each position.

    The probit looks at variances alone, another softmax at the differences of its logits.
    """
    diagonal, differences = fitted.likelihood.variances_suffice, False
    if names and type(fitted.likelihood) is CategoricalLikelihood:
        diagonal, differences = set(names) == {"probit"}, "probit" not in names
    mean, covariances = linearised.moments(
        fitted,
        x,
        grid,
        diagonal,
        positions=positions,
        differences=differences,
        may_overflow=grid is not None,
    )
    if mean.ndim > 2 and not diagonal:
        covariances = _within_positions(covariances, mean.shape)
    return mean, covariances


def predictives_by_links(
    fitted: FittedPosterior, x: Inputs | Record, grid: Tensor, by: Sequence[Link]
) -> Iterator[tuple[int, Distribution | ValueError]]:
    """The closed-form `"glm"` predictives at every point of a grid, by every link, in one pass.

    Yields:
        Numbers of the grid's points, each with a predictive of batch shape `[links, B]`, of some
        temperatures of one formula at a time, in the links' order. Of links there is one point
        more, P, without any covariance. Without links there is one predictive a point, `[1, B]`.
        A point whose predictive overflows or is singular comes with that error instead.
    """
    likelihood, temperatures = fitted.likelihood, dict[str, list[float]]()
    for link in by:
        temperatures.setdefault(link.name, []).append(link.temperature)
    mean, covariances = _moments_for(fitted, x, grid, temperatures)
    some = max(1, _AT_ONCE // covariances[0].numel())
    # Divided by several temperatures at once, for formulas at temperature 1.
    parts: list[tuple[Link | None, Tensor, Tensor]] = []
    if not by:
        parts.append((None, mean.unsqueeze(0), mean.new_ones([1] * covariances.ndim)))
    for name, of_name in temperatures.items():
        for T in torch.tensor(of_name, dtype=torch.float64).split(some):
            means = mean / T.to(mean).view(-1, *[1] * mean.ndim)
            squares = T.square().to(mean).view(-1, *[1] * (covariances.ndim - 1))
            parts.append((Link(name), means, squares))
    points = list(covariances)
    if by:
        points.append(torch.zeros_like(covariances[0]))
    for number, covariance in enumerate(points):
        try:
            linearised.check_covariance(covariance, grid[number : number + 1])
        except ValueError as error:
            yield number, error
            continue
        for formula, means, squares in parts:
            predicted: Distribution | ValueError
            try:
                predicted = links.predictive(likelihood, formula, means, covariance / squares)
            except ValueError as error:
                predicted = error
            yield number, predicted


def default_link(fitted: FittedPosterior, x: Inputs | Record) -> Link | None:
    """The link of a fit that none was chosen for, by the outputs of the first example."""
    shape = torch.Size()
    if type(fitted.likelihood) is CategoricalLikelihood:
        with linearised.asked_of(fitted, x) as asked:
            shape = linearised.map_outputs(asked.network, take(asked.x, slice(1))).shape
    return links.default_link(fitted.likelihood, shape)


def _within_positions(
    covariances: Float[Tensor, "*grid batch all all"], shape: torch.Size
) -> Float[Tensor, "..."]:
    """The covariance of each position's outputs, `[..., B, T, C, C]`, from that of all of them."""
    num_outputs = shape[-1]
    by_position = covariances.unflatten(-1, (-1, num_outputs)).unflatten(-3, (-1, num_outputs))
    blocks = by_position.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    return blocks.unflatten(-3, shape[1:-1])


def of_draws(likelihood: Likelihood, draws: Float[Tensor, "samples *batch outputs"]) -> Uncertainty:
    """The entropies, or variances, over samples of the outputs."""
    each = likelihood.predictive(draws, None)
    base = each.base_dist if isinstance(each, Independent) else each
    if not isinstance(base, Categorical | Bernoulli):
        aleatoric = each.variance.mean(0)
        epistemic = torch.var(each.mean, dim=0, unbiased=False)
        return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)
    shape = base.batch_shape[1:]
    probs = base.probs.flatten(1, len(shape))
    total, aleatoric, epistemic = (part.view(shape) for part in of_probabilities(probs))
    more = {}
    if isinstance(each, Independent):
        total, aleatoric, epistemic = total.sum(-1), aleatoric.sum(-1), epistemic.sum(-1)
    else:
        more["max_probability"] = metrics.max_probability(probs.mean(0)).view(shape)
    scores = {"entropy": total, **more, "mutual_information": epistemic}
    return Uncertainty(total, aleatoric, epistemic, scores)
