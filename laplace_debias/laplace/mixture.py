"""A mixture of posteriors: several trained networks, each with its own Laplace approximation."""

import math
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    MultivariateNormal,
)

from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.inputs import Inputs, Record
from laplace_debias.laplace import predictive
from laplace_debias.laplace.data_size import check_held_out
from laplace_debias.laplace.evaluation import evaluate_predictions
from laplace_debias.laplace.laplace import Laplace
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.predictive import Prediction
from laplace_debias.metrics import Report, Uncertainty
from laplace_debias.system.atomic import check_target, written_atomically
from laplace_debias.system.ranks import refuse_ranks

_MEMBER = "member-{}.safetensors"


class Mixture:
    r"""Several posteriors in one predictive, $p(y\mid x) = \frac1M \sum_m p_m(y\mid x)$.

    Each member is fitted and tuned on its own: checkpoints of other seeds or epochs, or other
    architectures for the same task. What several networks disagree on none of them knows of.

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
            try:
                member.posterior  # noqa: B018 (asks whether there is one)
            except RuntimeError as error:
                raise RuntimeError(f"Member {number} is not fitted: call its fit first.") from error
            if type(member.likelihood) is not type(self.likelihood):
                raise ValueError(
                    f"Member {number} has the likelihood {type(member.likelihood).__name__}, the "
                    f"first one {type(self.likelihood).__name__}: all must have the same."
                )

    @property
    def likelihood(self) -> Likelihood:
        """The first member's likelihood."""
        return self.members[0].likelihood

    def predict(self, x: Inputs | Record, *how: Any, **options: Any) -> Distribution:
        """The mean of the members' predictives, batch shape `[B]`.

        Of a regression the normal with the mixture's mean and covariance.

        Args:
            x: As `Laplace.predict` takes it.
            *how: Its other arguments, for every member: the method, samples of each, ...
            **options: Likewise, by name.

        Raises:
            ValueError: If the members' outputs differ in shape; as `Laplace.predict`.
            TypeError: As `Laplace.predict`.
            RuntimeError: As `Laplace.predict`.
        """
        found = [member.predict(x, *how, **options) for member in self.members]
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

    def uncertainty(self, x: Inputs | Record, *how: Any, **options: Any) -> Uncertainty:
        """Total, aleatoric and epistemic uncertainty, as `Laplace.uncertainty` defines them.

        The epistemic part is that of members and of their parameters together: of class
        probabilities it comes from as many draws of each member, of a regression it is the mean of
        the members' plus the variance of their means.

        Args:
            x: As `Laplace.uncertainty` takes it; so are the others, for every member.
            *how: The method, samples of each member (100 if None), and a generator.
            **options: Likewise, by name.

        Raises:
            ValueError: As `Laplace.uncertainty`.
            TypeError: As `Laplace.uncertainty`.
            RuntimeError: As `Laplace.uncertainty`.
        """
        prediction = Prediction(*how, **options)
        prediction.check_uncertain()
        if not isinstance(self.members[0].predict(x, "map"), MultivariateNormal):
            with torch.inference_mode(False):
                draws = [prediction.draws(member._unchanged_state, x) for member in self.members]
                return predictive.of_draws(self.likelihood, torch.cat(draws))
        of_members = [m.uncertainty(x, *how, **options) for m in self.members]
        total, aleatoric, epistemic = (
            torch.stack(part).mean(0) for part in zip(*of_members, strict=True)
        )
        means = torch.stack([m.predict(x, "map").mean for m in self.members])
        between = means.var(0, unbiased=False)
        return Uncertainty(total + between, aleatoric, epistemic + between)

    def evaluate(
        self,
        loader: Batches,
        ood: Mapping[str, Batches] | None = None,
        method: str = "glm",
        samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        link: str | Link | None = None,
    ) -> Report:
        """Metrics with intervals, as `Laplace.evaluate`, whose arguments these are."""
        check_held_out(loader, *(ood or {}).values())
        first = self.members[0]

        def predict(x: Inputs) -> Distribution:
            return self.predict(x, method, samples, generator, link=link)

        return evaluate_predictions(
            predict,
            self.likelihood,
            first._subject.stream(loader, generator),
            {name: first._subject.stream(data, generator) for name, data in (ood or {}).items()},
            first._settings.class_dim,
        )

    def save(self, path: str | Path) -> None:
        """Write all members as one file, atomically: a zip archive of what `Laplace.save` writes.

        Raises:
            NotImplementedError: If several processes share the work.
            ValueError: As `Laplace.save`.
            OSError: Likewise.
        """
        refuse_ranks("Mixture.save", "the members' own `save` is")
        path = Path(path)
        check_target(path)
        with (
            tempfile.TemporaryDirectory() as folder,
            written_atomically(path) as temporary,
            zipfile.ZipFile(temporary, "w") as archive,
        ):
            for number, member in enumerate(self.members, start=1):
                own = Path(folder) / _MEMBER.format(number)
                member.save(own)
                # A date would make each file another one.
                archive.writestr(zipfile.ZipInfo(own.name), own.read_bytes())

    @classmethod
    def load(cls, path: str | Path, models: Sequence[nn.Module]) -> "Mixture":
        """Read a mixture that `save` wrote, for the same trained models in the same order.

        Args:
            path: The file.
            models: The members' models.

        Raises:
            ValueError: If the file is damaged or no mixture, has another number of members, or a
                member does not fit its model.
            FileNotFoundError: If there is no such file.
        """
        try:
            with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
                names = archive.namelist()
                if names != [_MEMBER.format(number) for number in range(1, len(names) + 1)]:
                    raise ValueError(f"{path} is no mixture: it holds {', '.join(names[:3])}.")
                if len(names) != len(models):
                    raise ValueError(
                        f"{path} has {len(names)} members, got {len(models)} models: give one for "
                        "each, in the order of the mixture."
                    )
                members = []
                for name, model in zip(names, models, strict=True):
                    members.append(Laplace.load(archive.extract(name, folder), model))
                return cls(members)
        except zipfile.BadZipFile as error:
            raise ValueError(
                f"{path} is damaged or no mixture ({error}): Laplace.load reads a single posterior."
            ) from error


def mean_logits(
    logits: Float[Tensor, "members *n outputs"], exclusive: bool
) -> Float[Tensor, "*n outputs"]:
    """Logits of the mean of several members' probabilities; of classes their logarithms.

    Args:
        logits: Those of each member.
        exclusive: Whether the outputs are classes, of which one applies.
    """
    # Of probabilities near one the logits alone have digits left.
    if exclusive:
        return logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))
    return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)


def _logits_or_mean(predictive: Distribution) -> Tensor:
    if isinstance(predictive, MultivariateNormal):
        return predictive.mean
    base = predictive.base_dist if isinstance(predictive, Independent) else predictive
    return base.logits  # type: ignore[union-attr]
