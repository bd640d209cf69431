"""Predictives of a fit, by each method: from moments or samples of the outputs to distributions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

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
from laplace_debias.laplace import links, sampling
from laplace_debias.laplace.fitted import Fitted
from laplace_debias.laplace.functional import linearised
from laplace_debias.laplace.links import Link, link_from
from laplace_debias.metrics import Uncertainty
from laplace_debias.metrics import uncertainty as of_probabilities
from laplace_debias.system.checks import check_generator, whole

# Numbers in the covariances of several temperatures together, at most.
_AT_ONCE = 2**22

METHODS = ("glm", "glm-mc", "nn", "map")
DEFAULT_SAMPLES = 100


@dataclass(frozen=True, eq=False)
class Prediction:
    """How to predict; as `Laplace.predict` takes it."""

    method: str = "glm"
    samples: int | None = None
    generator: torch.Generator | None = None
    positions: Positions | None = None

    def __post_init__(self) -> None:
        method, samples = self.method, self.samples
        if method not in METHODS:
            raise ValueError(f"Unknown method={method!r}: use one of {', '.join(METHODS)}.")
        check_generator(self.generator)
        if samples is not None and whole(samples, "samples") and method == "map":
            raise ValueError(
                f'samples={samples}: give them to "glm", "glm-mc" or "nn", none to "map".'
            )

    @property
    def is_closed(self) -> bool:
        """Whether the predictive has a closed form."""
        return self.method == "glm" and self.samples is None

    def link(self, link: str | Link | None, likelihood: Likelihood) -> Link | None:
        """The link that is asked for, one that there is for the likelihood and the method."""
        found = link_from(link, likelihood)
        if found is not None and not self.is_closed:
            raise ValueError(
                f'link={link!r} belongs to the closed form of method="glm" without samples: leave '
                "link out, or method and samples."
            )
        return found

    def moments(
        self, fitted: Fitted, x: Inputs | Record, diagonal: bool
    ) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "batch *covariance"]]:
        """Mean and covariance (or variances) of the linearised network's outputs."""
        mean, covariances = linearised.moments(
            fitted, x, diagonal=diagonal, positions=self.positions
        )
        return mean, covariances[0]

    def outputs(self, fitted: Fitted, x: Inputs | Record) -> Float[Tensor, "batch *outputs"]:
        """The outputs that the network itself gives, `[B, ..., C]`."""
        with linearised.asked_of(fitted, x, self.positions, lambda _: True) as asked:
            return asked.shaped(linearised.map_outputs(asked.network, asked.x), None)

    @property
    def num_samples(self) -> int:
        """How many draws."""
        return DEFAULT_SAMPLES if self.samples is None else self.samples

    def draws_of(self, mean: Tensor, covariance: Tensor) -> Float[Tensor, "samples batch *outputs"]:
        """Samples of Gaussian outputs by their moments, `[S, B, ..., C]`."""
        found = sampling.sample_outputs(
            mean.flatten(1), covariance, self.num_samples, self.generator
        )
        return found.unflatten(2, mean.shape[1:])

    def draws(self, fitted: Fitted, x: Inputs | Record) -> Float[Tensor, "samples batch *outputs"]:
        """Samples of the outputs, `[S, B, ..., C]`."""
        if self.method == "glm":
            return self.draws_of(*self.moments(fitted, x, diagonal=False))
        with linearised.asked_of(fitted, x, self.positions, lambda _: True) as asked:
            parameters = fitted.posterior.sample(self.num_samples, self.generator)
            of_network = asked.network, fitted.subject.known.names, asked.x
            linear = self.method == "glm-mc"
            found = sampling.outputs_of_samples(*of_network, parameters, linear)
            return asked.shaped(found, None)


def predict(fitted: Fitted, x: Inputs | Record, how: Prediction, link: Link | None) -> Distribution:
    """The predictive distribution; as `Laplace.predict`."""
    if how.is_closed:
        return closed(fitted, x, link, how.positions)
    with torch.inference_mode(False):
        if how.method == "map":
            return fitted.likelihood.predictive(how.outputs(fitted, x), None)
        return fitted.likelihood.mixture(how.draws(fitted, x))


def marginals(fitted: Fitted, x: Inputs | Record, how: Prediction) -> Distribution:
    """The predictive of each target of a regression; as `Laplace.marginals`, arguments as above."""
    if how.is_closed:
        return fitted.likelihood.marginals(*how.moments(fitted, x, diagonal=True))
    with torch.inference_mode(False):
        if how.method == "map":
            mean = how.outputs(fitted, x)
            return fitted.likelihood.marginals(mean, torch.zeros_like(mean))
        return fitted.likelihood.marginal_mixture(how.draws(fitted, x))


def uncertainty(fitted: Fitted, x: Inputs | Record, how: Prediction) -> Uncertainty:
    """Total, aleatoric and epistemic; as `Laplace.uncertainty`, arguments as above."""
    if how.is_closed and isinstance(fitted.likelihood, Gaussian | HeteroscedasticGaussian):
        return _of_moments(fitted.likelihood, *how.moments(fitted, x, diagonal=True))
    with torch.inference_mode(False):
        if how.method != "glm" or not links.has_links(fitted.likelihood):
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


def closed(
    fitted: Fitted, x: Inputs | Record, link: Link | None, positions: Positions | None = None
) -> Distribution:
    """The closed-form `"glm"` predictive."""
    link = link or fitted.subject.link or default_link(fitted, x)
    mean, covariances = _moments_for(fitted, x, None, [link], positions)
    return links.predictive(fitted.likelihood, link, mean, covariances[0])


def _moments_for(
    fitted: Fitted,
    x: Inputs | Record,
    grid: Tensor | None,
    by: Sequence[Link | None],
    positions: Positions | None = None,
) -> tuple[Tensor, Tensor]:
    """The mean, and as much of the covariances as the links look at, within each position."""
    diagonal = all(links.variances_suffice(fitted.likelihood, link) for link in by)
    # A softmax looks at the differences of its logits alone, unless it is by the probit.
    is_softmax = type(fitted.likelihood) is CategoricalLikelihood
    differences = is_softmax and all(link and link.name != "probit" for link in by)
    mean, covariances = linearised.moments(fitted, x, grid, diagonal, None, positions, differences)
    if mean.ndim > 2 and not diagonal:
        covariances = _within_positions(covariances, mean.shape)
    return mean, covariances


def predictives_by_links(
    fitted: Fitted, x: Inputs | Record, grid: Tensor, by: Sequence[links.Link | None]
) -> Iterator[tuple[int, Distribution]]:
    """The closed-form `"glm"` predictives at every point of a grid, by every link, in one pass.

    Returns:
        Numbers of the grid's points, each with a predictive of batch shape `[links, B]`, of some
        temperatures of one formula at a time, in the links' order. Of links there is one point
        more, P, without any covariance.
    """
    likelihood = fitted.likelihood
    mean, covariances = _moments_for(fitted, x, grid, by)
    of_points = list(covariances)
    if None in by:
        return (
            (number, likelihood.predictive(mean.unsqueeze(0), covariance.unsqueeze(0)))
            for number, covariance in enumerate(of_points)
        )
    some, groups = max(1, _AT_ONCE // of_points[0].numel()), list[tuple[str, list[float]]]()
    for name, of_name in groupby([link for link in by if link], lambda link: link.name):
        temperatures = [link.temperature for link in of_name]
        groups += [(name, temperatures[i : i + some]) for i in range(0, len(temperatures), some)]
    return (
        (number, links.distribution(likelihood, logits))
        for number, covariance in enumerate([*of_points, torch.zeros_like(of_points[0])])
        for name, temperatures in groups
        for logits in [links.logits_at(name, temperatures, likelihood, mean, covariance)]
    )


def default_link(fitted: Fitted, x: Inputs | Record) -> links.Link | None:
    """The link of a fit that none was chosen for, by the outputs of the first example it sees."""
    if type(fitted.likelihood) is not CategoricalLikelihood:
        return links.default_link(fitted.likelihood, torch.Size())
    if not fitted.default_links:
        with linearised.asked_of(fitted, x) as asked:
            outputs = linearised.map_outputs(asked.network, take(asked.x, slice(1)))
        fitted.default_links.append(links.default_link(fitted.likelihood, outputs.shape))
    return fitted.default_links[0]


def _within_positions(
    covariances: Float[Tensor, "*grid batch all all"], shape: torch.Size
) -> Float[Tensor, "..."]:
    """The covariance of each position's outputs, `[..., B, T, C, C]`, from that of all of them."""
    num_outputs = shape[-1]
    by_position = covariances.unflatten(-1, (-1, num_outputs)).unflatten(-3, (-1, num_outputs))
    blocks = by_position.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    return blocks.unflatten(-3, shape[1:-1])


def _of_moments(
    likelihood: Likelihood,
    mean: Float[Tensor, "*batch outputs"],
    variances: Float[Tensor, "*batch outputs"],
) -> Uncertainty:
    """The variances of each target of a regression with Gaussian outputs, exact."""
    total = likelihood.marginals(mean, variances).variance
    # The outputs that are means of targets come first; there may be log-variances behind them.
    epistemic = variances[..., : total.shape[-1]].to(total.dtype)
    return Uncertainty(total, total - epistemic, epistemic)


def of_draws(likelihood: Likelihood, draws: Float[Tensor, "samples *batch outputs"]) -> Uncertainty:
    """The entropies, or variances, over samples of the outputs."""
    each = likelihood.predictive(draws, None)
    if isinstance(each, Categorical | Bernoulli):
        shape = each.batch_shape[1:]
        probs = each.probs.flatten(1, len(shape))
        parts = [part.view(shape) for part in of_probabilities(probs)]
        most = metrics.max_probability(probs.mean(0)).view(shape)
        return _with_scores(*parts, max_probability=most)
    if isinstance(each, Independent) and isinstance(each.base_dist, Bernoulli):
        shape = each.base_dist.batch_shape[1:]
        found = of_probabilities(each.mean.flatten(1))
        parts = [part.view(shape).sum(-1) for part in found]
        return _with_scores(*parts)
    aleatoric = each.variance.mean(0)
    epistemic = torch.var(each.mean, dim=0, unbiased=False)
    return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)


def _with_scores(
    total: Tensor, aleatoric: Tensor, epistemic: Tensor, **more: Tensor
) -> Uncertainty:
    scores = {"entropy": total, **more, "mutual_information": epistemic}
    return Uncertainty(total, aleatoric, epistemic, scores)
