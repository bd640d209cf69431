"""A mixture of the posteriors of several trained networks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.inputs import Inputs, Record
from laplace_debias.laplace.laplace import Laplace
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.prediction.predictive import FitWithLink, PredictionMethod
from laplace_debias.laplace.prediction.predictor import Predictor
from laplace_debias.laplace.state.fitted import FitSetup, FittedPosterior


class Mixture(Predictor):
    r"""A mixture of posteriors, $p(y\mid x) = \frac1M \sum_m p_m(y\mid x)$.

    Each member is fitted, tuned and saved separately. Members can be checkpoints from different
    seeds or epochs, or different architectures for the same task. Each member predicts with its own
    link and temperature, and the disagreement between members adds uncertainty that no single
    member can express. For a regression, the predictive is the normal distribution with the mean
    and the covariance of the mixture.

    Args:
        members: Fitted `Laplace` objects. Their likelihoods must be of the same class and have the
            same options (`ignore_index`, weights, smoothing; the `options` of your own class),
            except that each member of a regression has its own sigma.

    Raises:
        ValueError: If there are no members, or if the members' likelihoods or the options of the
            likelihoods differ.
        TypeError: If a member is not a `Laplace`.
        RuntimeError: If a member is not fitted.

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
            raise ValueError("The mixture has no members. Pass at least one fitted Laplace.")
        for number, member in enumerate(self.members, start=1):
            if not isinstance(member, Laplace):
                raise TypeError(
                    f"Member {number} is a {type(member).__name__}. Pass fitted instances of "
                    "Laplace."
                )
            if not isinstance(member.state, FittedPosterior):
                raise RuntimeError(f"Member {number} is not fitted. Call its `fit` first.")
            _check_same_likelihood(number, member.likelihood, self.members[0].likelihood)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_") and hasattr(Laplace, name):
                raise AttributeError(
                    f"A Mixture has no {name!r}. Use the {name!r} of each of its `members`."
                )
            return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        return "\n".join([f"Mixture of {len(self.members)}:", *map(repr, self.members)])

    @property
    def _states(self) -> Sequence[FitSetup | FittedPosterior]:
        return [member.state for member in self.members]

    def _fits_with_links(
        self, x: Inputs | Record, method: PredictionMethod, link: Link | None
    ) -> list[FitWithLink]:
        fits = []
        for member in self.members:
            fits += member._fits_with_links(x, method, link)
        return fits


def _check_same_likelihood(number: int, likelihood: Likelihood, first: Likelihood) -> None:
    """Require a member's likelihood to have the class and the options of the first member's."""
    name = type(likelihood).__name__
    if type(likelihood) is not type(first):
        raise ValueError(
            f"Member {number} has the likelihood {name}, but the first member has "
            f"{type(first).__name__}. Use members with the same likelihood."
        )
    options = _options(likelihood)
    first_options = _options(first)
    for key in first_options | options:
        # Options with their default value may be missing here, so they are read from the attributes
        # of the likelihood.
        value = options.get(key, getattr(likelihood, key, None))
        first_value = first_options.get(key, getattr(first, key, None))
        if value != first_value:
            raise ValueError(
                f"The likelihood {name} of member {number} has {key}={value!r}, but the "
                f"likelihood of the first member has {key}={first_value!r}. Use members whose "
                "likelihoods have the same options."
            )


def _options(likelihood: Likelihood) -> dict[str, Any]:
    """Return the options that members must share: all except the noise of a regression."""
    return {} if likelihood.has_sigma else likelihood.options()
