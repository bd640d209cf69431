"""The predictive distributions of a fit, computed from moments or samples of the outputs."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    MultivariateNormal,
)

from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.chosen_positions import Positions
from laplace_debias.curvature.network.inputs import Inputs, Record, take, tensors_of
from laplace_debias.laplace import links
from laplace_debias.laplace.functional import last_layer, linearised
from laplace_debias.laplace.functional.context import (
    PredictionContext,
    map_outputs,
    prediction_context,
)
from laplace_debias.laplace.functional.differentiable import differentiable_moments
from laplace_debias.laplace.functional.gaussian_outputs import (
    DenseOutputs,
    GaussianOutputs,
    within_positions,
)
from laplace_debias.laplace.functional.request import check_covariance
from laplace_debias.laplace.functional.sampled_outputs import linearised_outputs, network_outputs
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.pairwise import pairwise_of_differences
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.system.checks import check_generator, whole

# The largest total number of entries in the moments of several temperatures, by device type. On a
# CPU, this many entries stay in the cache.
_MAX_ENTRIES = defaultdict(lambda: 2**22, cpu=2**17)

NETWORK_METHODS = ("map", "temperature")
"""The methods that predict with the trained parameters only, so without parameter uncertainty."""
METHODS = ("glm", "glm-mc", "nn", *NETWORK_METHODS)
DEFAULT_SAMPLES = 100


@dataclass(frozen=True, eq=False)
class PredictionMethod:
    """A prediction method, defined by the arguments of `Laplace.predict` that select it.

    Attributes:
        name: One of `METHODS`.
        samples: Number of draws; None for the closed form or the default number.
        generator: Seeds the draws; None for torch's global generator.
        positions: Positions of the outputs; None for all.
        differentiable: Whether gradients flow back to the inputs.
    """

    name: str = "glm"
    samples: int | None = None
    generator: torch.Generator | None = None
    positions: Positions | None = None
    differentiable: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(
                f"`method` is a {type(self.name).__name__}. Pass the name of a method. A model "
                "with several inputs takes them as one tuple, `predict((x1, x2))`."
            )
        if self.name not in METHODS:
            raise ValueError(f"Unknown method={self.name!r}. Use one of {', '.join(METHODS)}.")
        check_generator(self.generator)
        has_samples = self.samples is not None and whole(self.samples, "samples")
        if has_samples and not self.has_uncertainty:
            raise ValueError(
                f'`samples={self.samples}` is not possible with this method. The methods "glm", '
                '"glm-mc" and "nn" use samples, and "map" and "temperature" use none. Change '
                "`method` or `samples`."
            )
        has_gradients = (self.is_closed_form or self.name == "nn") and self.positions is None
        if self.differentiable and not has_gradients:
            raise ValueError(
                '`differentiable=True` supports only `method="nn"` and the closed form of '
                '`method="glm"`. Use `method="nn"`, or `method="glm"` without `samples=`, and '
                "remove `positions=`."
            )

    @property
    def has_uncertainty(self) -> bool:
        """Whether the parameters are uncertain, rather than those of the trained network."""
        return self.name not in NETWORK_METHODS

    @property
    def is_closed_form(self) -> bool:
        """Whether the predictive has a closed form."""
        return self.name == "glm" and self.samples is None

    @property
    def num_samples(self) -> int:
        """The number of draws."""
        return self.samples or DEFAULT_SAMPLES


@dataclass(frozen=True, eq=False)
class FitWithLink:
    """A fit, with the link that converts its logits to probabilities.

    The link has separate temperatures for the closed form, for draws, and for the temperature
    scaling of the trained network. Likelihoods without a link have no temperature.
    """

    fitted: FittedPosterior
    link: Link | None

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood."""
        return self.fitted.likelihood

    @property
    def temperature(self) -> float:
        """The temperature of the closed form."""
        return 1.0 if self.link is None else self.link.temperature

    @property
    def draw_temperature(self) -> float:
        """The temperature of draws."""
        return 1.0 if self.link is None else self.link.draw_temperature

    @property
    def network_temperature(self) -> float:
        """The temperature of the trained network.

        Raises:
            ValueError: If there is none.
        """
        if self.likelihood.activation is None:
            raise ValueError(
                '`method="temperature"` divides logits by a temperature, but the outputs of '
                f'{type(self.likelihood).__name__} are not logits. Use `method="map"`.'
            )
        if self.link is None:
            raise ValueError(
                '`method="temperature"` needs a temperature, and none has been chosen. Call '
                "la.tune(validation_loader) (command line: laplace-debias tune), or use "
                '`method="map"` for the plain network.'
            )
        return self.link.network_temperature

    def mean_and_variances(
        self, x: Inputs | Record, method: PredictionMethod
    ) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "batch *outputs"]]:
        """Compute mean and variances of the linearised network's outputs."""
        mean, variances = linearised.moments(
            self.fitted, x, kind="variances", positions=method.positions
        )
        return mean, variances[0]

    def gaussian_outputs(self, x: Inputs | Record, method: PredictionMethod) -> GaussianOutputs:
        """Compute the distribution of the linearised network's outputs."""
        if method.positions is None:
            # A matrix per example is cheap for up to 100 classes, so factors are used only beyond
            # that.
            factored = last_layer.factored_outputs(
                self.fitted, x, min_outputs=links.MOST_CLASSES + 1
            )
            if factored is not None:
                return factored
        mean, covariances = linearised.moments(self.fitted, x, positions=method.positions)
        return DenseOutputs(mean, covariances[0])

    def outputs(
        self, x: Inputs | Record, method: PredictionMethod
    ) -> Float[Tensor, "batch *outputs"]:
        """Compute the outputs of the trained network, divided by its temperature if requested."""
        temperature = self.network_temperature if method.name == "temperature" else 1.0
        with self._context(x, method) as context:
            outputs = context.by_position(map_outputs(context.network, context.x), None)
        return _divide_by_temperature(outputs, temperature)

    def draws(
        self, x: Inputs | Record, method: PredictionMethod
    ) -> Float[Tensor, "samples batch *outputs"]:
        """Draw samples of the outputs, and divide logits by the temperature of draws."""
        if method.name == "glm":
            return self.draws_of_outputs(self.gaussian_outputs(x, method), method)
        with self._context(x, method) as context:
            parameters = self.fitted.posterior.sample(method.num_samples, method.generator)
            names = self.fitted.parameters.names
            if method.name == "glm-mc":
                draws = linearised_outputs(context.network, names, context.x, parameters)
            else:
                draws = network_outputs(
                    context.network,
                    names,
                    context.x,
                    parameters,
                    keeps_graph=method.differentiable,
                )
            outputs = context.by_position(draws, None)
        return _divide_by_temperature(outputs, self.draw_temperature)

    def draws_of_outputs(
        self, outputs: GaussianOutputs, method: PredictionMethod
    ) -> Float[Tensor, "samples batch *outputs"]:
        """Draw samples of Gaussian outputs, and divide logits by the temperature of draws."""
        draws = outputs.draws(method.num_samples, method.generator)
        return _divide_by_temperature(draws, self.draw_temperature)

    def predictive_of_outputs(self, outputs: GaussianOutputs) -> Distribution:
        """Compute the predictive distribution in closed form."""
        links_used = [] if self.link is None else [self.link]
        kind = links.required_moments(self.likelihood, links_used)
        second_moments = outputs.second_moments(kind)
        return links.predictive(self.likelihood, self.link, outputs.mean, second_moments)

    def _context(
        self, x: Inputs | Record, method: PredictionMethod
    ) -> AbstractContextManager[PredictionContext]:
        """Prepare a forward pass in which a head is applied only at the requested positions."""
        return prediction_context(
            self.fitted,
            x,
            method.positions,
            restricts_head=lambda path: True,
            keeps_graph=method.differentiable,
        )

    def predictive(self, x: Inputs | Record, method: PredictionMethod) -> Distribution:
        """Compute the predictive distribution."""
        if method.is_closed_form and method.differentiable:
            mean, covariance = differentiable_moments(self.fitted, x)
            return links.predictive(self.likelihood, self.link, mean, covariance)
        if method.is_closed_form:
            return self._closed_form(x, method)
        with torch.inference_mode(False):
            if not method.has_uncertainty:
                return self.likelihood.predictive(self.outputs(x, method), None)
            return self.likelihood.mixture(self.draws(x, method))

    def _closed_form(self, x: Inputs | Record, method: PredictionMethod) -> Distribution:
        """Compute the predictive distribution from the moments of the outputs."""
        mean_and_differences = self._difference_variances(x, method)
        if mean_and_differences is not None:
            assert self.link is not None
            mean, variances = mean_and_differences
            logits = pairwise_of_differences(mean, variances, [self.link.temperature])[0]
            return self.likelihood.predictive(logits, None)
        links_used = [] if self.link is None else [self.link]
        mean, covariances = _moments_for_links(
            self.fitted, x, None, links_used, positions=method.positions
        )
        return links.predictive(self.likelihood, self.link, mean, covariances[0])

    def _difference_variances(
        self, x: Inputs | Record, method: PredictionMethod
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch classes classes"]] | None:
        """Return a last layer's moments for `"pairwise"`, or None for other links or posteriors."""
        is_softmax = self.likelihood.activation == "softmax"
        is_pairwise = self.link is not None and self.link.name == "pairwise"
        if not (is_softmax and is_pairwise and method.positions is None):
            return None
        return last_layer.difference_variances(self.fitted, x)

    def marginals(self, x: Inputs | Record, method: PredictionMethod) -> Distribution:
        """Compute the predictive distribution of each target of a regression on its own."""
        if method.is_closed_form:
            mean, variances = self.mean_and_variances(x, method)
            return self.likelihood.marginals(mean, variances)
        with torch.inference_mode(False):
            if not method.has_uncertainty:
                mean = self.outputs(x, method)
                return self.likelihood.marginals(mean, torch.zeros_like(mean))
            return self.likelihood.marginal_mixture(self.draws(x, method))


def _divide_by_temperature(
    logits: Float[Tensor, "..."], temperature: float
) -> Float[Tensor, "..."]:
    return logits if temperature == 1 else logits / temperature


def equal_mixture(predictives: Sequence[Distribution]) -> Distribution:
    """Mix predictives with equal weights; normal distributions are combined into a normal one.

    Raises:
        ValueError: If the outputs have different shapes.
        NotImplementedError: If a predictive is neither a normal distribution nor a distribution
            over classes or labels.
    """
    first = predictives[0]
    if len(predictives) == 1:
        return first
    values = stack_members([_logits_or_mean(predictive) for predictive in predictives])
    if isinstance(first, MultivariateNormal):
        covariances = torch.stack(
            [predictive.covariance_matrix for predictive in predictives]  # type: ignore[attr-defined]
        )
        mean = values.mean(0)
        return MultivariateNormal(mean, covariances.mean(0) + covariance_between(values))
    if isinstance(first, Categorical):
        return Categorical(logits=mean_logits(values, exclusive=True))
    mixed = Bernoulli(logits=mean_logits(values, exclusive=False))
    return Independent(mixed, 1) if isinstance(first, Independent) else mixed


def mean_logits(
    logits: Float[Tensor, "members *n outputs"], exclusive: bool
) -> Float[Tensor, "*n outputs"]:
    """Compute the logits of the members' mean probabilities."""
    # The computation uses logits, because only they keep the digits of probabilities near one.
    if exclusive:
        return logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))
    return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)


def covariance_between(
    means: Float[Tensor, "members *batch outputs"],
) -> Float[Tensor, "*batch outputs outputs"]:
    """Compute the covariance of the means over the members."""
    residuals = means - means.mean(0)
    return torch.einsum("m...i,m...j->...ij", residuals, residuals) / len(means)


def stack_members(members: Sequence[Tensor]) -> Float[Tensor, "members ..."]:
    """Stack the tensors of a mixture's members, which must all have the same shape."""
    check_same_shape([tuple(member.shape) for member in members])
    return torch.stack(list(members))


def check_same_shape(shapes: Sequence[tuple[int, ...]]) -> None:
    """Require that the outputs of all members of a mixture have the same shape."""
    if len(set(shapes)) > 1:
        raise ValueError(
            f"The members of the mixture have outputs of different shapes, {list(shapes)}. Use "
            "members with outputs of the same shape."
        )


def _logits_or_mean(predictive: Distribution) -> Tensor:
    """Return the logits of a discrete predictive, or the means of a normal predictive."""
    if isinstance(predictive, MultivariateNormal):
        return predictive.mean
    base = predictive.base_dist if isinstance(predictive, Independent) else predictive
    if not isinstance(base, Bernoulli | Categorical):
        raise NotImplementedError(
            "A mixture of predictive distributions of type "
            f"{type(predictive).__name__} is not supported. Supported types are "
            "MultivariateNormal, Categorical, Bernoulli and Independent(Bernoulli). "
            "Average the members' predictions yourself."
        )
    return base.logits


def _moments_for_links(
    fitted: FittedPosterior,
    x: Inputs | Record,
    prior_precisions: Tensor | None,
    links_used: Collection[Link],
    positions: Positions | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the mean, and the part of the covariance at each position that the links need."""
    kind = links.required_moments(fitted.likelihood, links_used)
    mean, covariances = linearised.moments(
        fitted,
        x,
        prior_precisions,
        kind=kind,
        positions=positions,
        may_overflow=prior_precisions is not None,
    )
    if mean.ndim > 2 and kind != "variances":
        covariances = within_positions(covariances, mean.shape)
    return mean, covariances


def predictives_by_links(
    fitted: FittedPosterior,
    x: Inputs | Record,
    grid: Tensor,
    links_used: Sequence[Link],
    network_links: Sequence[Link] = (),
) -> Iterator[tuple[int, Distribution | ValueError]]:
    """Predict in closed form, with every link at every point of a grid, in one pass.

    Yields:
        Pairs of a point's index and a `"glm"` predictive of batch shape `[links, B]`; see
        `tempered_predictives`. Without links, there is one predictive `[1, B]` per point. After the
        P points of the grid, index P means the network without covariance, with `network_links`. If
        a predictive overflows or is singular, the pair contains the error instead.
    """
    likelihood = fitted.likelihood
    mean, covariances = _moments_for_links(fitted, x, grid, links_used)
    for index, covariance in enumerate(covariances):
        try:
            check_covariance(covariance, grid[index : index + 1])
        except ValueError as error:
            yield index, error
            continue
        if not links_used:
            yield index, _closed_predictive(likelihood, mean, covariance)
        for predicted in tempered_predictives(likelihood, mean, covariance, links_used):
            yield index, predicted
    for predicted in tempered_predictives(likelihood, mean, None, network_links):
        yield len(grid), predicted


def tempered_predictives(
    likelihood: Likelihood,
    mean: Float[Tensor, "batch *outputs"],
    covariance: Float[Tensor, "batch *covariance"] | None,
    links_used: Sequence[Link],
) -> Iterator[Distribution | ValueError]:
    """Predict in closed form with every link.

    Args:
        likelihood: The likelihood.
        mean: The mean of the outputs.
        covariance: The covariances of the outputs, or only variances; None for the trained network.
        links_used: The links, ordered by formula.

    Yields:
        For several temperatures of one formula at a time, in the order of the links: a predictive
        of batch shape `[links, B]`, or the error that its computation raised.
    """
    temperatures_by_formula = dict[str, list[float]]()
    for link in links_used:
        temperatures_by_formula.setdefault(link.name, []).append(link.temperature)
    for name, temperatures in temperatures_by_formula.items():
        chunk_size = len(temperatures)
        # All formulas except `pairwise` copy the moments for each temperature, so only a chunk of
        # temperatures is processed at a time.
        if covariance is None or name != "pairwise":
            # Without a covariance, and for the probit link, only vectors are copied.
            copied = mean if covariance is None or name == "probit" else covariance
            chunk_size = max(1, _MAX_ENTRIES[mean.device.type] // copied.numel())
        for start in range(0, len(temperatures), chunk_size):
            chunk = temperatures[start : start + chunk_size]
            try:
                yield links.tempered_predictive(likelihood, name, mean, covariance, chunk)
            except ValueError as error:
                yield error


def _closed_predictive(
    likelihood: Likelihood, mean: Tensor, covariance: Tensor
) -> Distribution | ValueError:
    """Return the predictive without a link, `[1, B]`, or an error if it is singular."""
    try:
        return links.predictive(likelihood, None, mean.unsqueeze(0), covariance.unsqueeze(0))
    except ValueError as error:
        return error


def default_link_of_fit(fitted: FittedPosterior, x: Inputs | Record) -> Link | None:
    """Return the default link of a fit, which depends on the shape of an example's outputs."""
    if fitted.likelihood.activation != "softmax":
        return links.default_link(fitted.likelihood, torch.Size())
    default_links = fitted.fitted_model.prediction_cache.default_links
    # A model for inputs `[B, d]` may also accept `[B, T, d]`. It then returns outputs with
    # positions, for which the default link may differ.
    num_dims = tuple(tensor.ndim for tensor in tensors_of(x))
    if num_dims not in default_links:
        with prediction_context(fitted, x) as context:
            shape = map_outputs(context.network, take(context.x, slice(1))).shape
        default_links[num_dims] = links.default_link(fitted.likelihood, shape)
    return default_links[num_dims]
