"""A mixture of posteriors: several trained networks, each with its own Laplace approximation."""

import math
from collections.abc import Sequence

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

from laplace_debias.curvature.network.inputs import Inputs, Record
from laplace_debias.laplace import predictive
from laplace_debias.laplace.laplace import Laplace
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.predictive import Prediction
from laplace_debias.laplace.predictor import Predictor
from laplace_debias.laplace.state import FittedPosterior, Unfitted
from laplace_debias.metrics import Uncertainty


class Mixture(Predictor):
    r"""Several posteriors in one predictive, $p(y\mid x) = \frac1M \sum_m p_m(y\mid x)$.

    Each member is fitted, tuned and saved on its own: checkpoints of other seeds or epochs, or
    other architectures for the same task. What several networks disagree on none of them knows of.
    Of a regression the predictive is the normal with the mixture's mean and covariance.

    Args:
        members: Fitted `Laplace` objects of one likelihood.

    Raises:
        ValueError: If there is none, or their likelihoods differ.
        TypeError: If a member is no `Laplace`.
        RuntimeError: If one is not fitted.

    Reference:
        Eschenhagen, Daxberger, Hennig, Kristiadi (2021), "Mixtures of Laplace approximations for
        improved post-hoc uncertainty in deep learning".

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias import Laplace, Mixture
        >>> data = [(torch.randn(64, 20), torch.randint(3, (64,)))]
        >>> networks = [nn.Sequential(nn.Linear(20, 9), nn.Tanh(), nn.Linear(9, 3)) for _ in "ab"]
        >>> mixture = Mixture([Laplace(network.eval()).fit(data) for network in networks])
        >>> mixture.predict(torch.randn(5, 20)).probs.shape
        torch.Size([5, 3])
    """

    def __init__(self, members: Sequence[Laplace]) -> None:
        self.members = list(members)
        if not self.members:
            raise ValueError("A mixture needs at least one member, a fitted Laplace.")
        for number, member in enumerate(self.members, start=1):
            if not isinstance(member, Laplace):
                raise TypeError(f"Member {number} is {type(member).__name__}, not Laplace.")
            if not isinstance(member._state, FittedPosterior):
                raise RuntimeError(f"Member {number} is not fitted: call its fit first.")
            own, first = (type(one.likelihood) for one in (member, self.members[0]))
            if own is not first:
                raise ValueError(
                    f"Member {number} has the likelihood {own.__name__}, the first one "
                    f"{first.__name__}: all must have the same."
                )

    def __repr__(self) -> str:
        return "\n".join([f"Mixture of {len(self.members)}:", *map(repr, self.members)])

    @property
    def _states(self) -> Sequence[Unfitted | FittedPosterior]:
        return [member._state for member in self.members]

    def _predict(self, x: Inputs | Record, how: Prediction, link: Link | None) -> Distribution:
        found = [member._predict(x, how, link) for member in self.members]
        shapes = [(*one.batch_shape, *_logits_or_mean(one).shape) for one in found]
        if len(set(shapes)) > 1:
            raise ValueError(
                f"The members' predictives have the shapes {shapes}: all need the same outputs."
            )
        first, values = found[0], torch.stack([_logits_or_mean(one) for one in found])
        if isinstance(first, MultivariateNormal):
            covariances = [one.covariance_matrix for one in found]  # type: ignore[attr-defined]
            apart = values - values.mean(0)
            between = torch.einsum("s...i,s...j->...ij", apart, apart) / len(apart)
            return MultivariateNormal(values.mean(0), torch.stack(covariances).mean(0) + between)
        if isinstance(first, Categorical):
            return Categorical(logits=mean_logits(values, exclusive=True))
        mixed = Bernoulli(logits=mean_logits(values, exclusive=False))
        return Independent(mixed, 1) if isinstance(first, Independent) else mixed

    def _uncertainty(self, x: Inputs | Record, how: Prediction) -> Uncertainty:
        alone = Prediction("map", positions=how.positions)
        trained = [member._predict(x, alone, None) for member in self.members]
        if not isinstance(trained[0], MultivariateNormal):
            with torch.inference_mode(False):
                draws = [how.draws(member._unchanged_fit, x) for member in self.members]
                return predictive.of_draws(self.likelihood, torch.cat(draws))
        of_members = zip(*(member._uncertainty(x, how) for member in self.members), strict=True)
        total, aleatoric, epistemic = (torch.stack(part).mean(0) for part in of_members)
        between = torch.stack([one.mean for one in trained]).var(0, unbiased=False)
        return Uncertainty(total + between, aleatoric, epistemic + between)


def mean_logits(
    logits: Float[Tensor, "members *n outputs"], exclusive: bool
) -> Float[Tensor, "*n outputs"]:
    """Logits of the mean of members' probabilities; of exclusive classes its logarithms."""
    # Of probabilities near one the logits alone have digits left.
    if exclusive:
        return logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))
    return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)


def _logits_or_mean(predictive: Distribution) -> Tensor:
    if isinstance(predictive, MultivariateNormal):
        return predictive.mean
    base = predictive.base_dist if isinstance(predictive, Independent) else predictive
    return base.logits  # type: ignore[union-attr]
