"""The base class for predictions of a posterior, or of a mixture of several posteriors."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from laplace_debias.curvature.data.batches import Batches, Stream
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.chosen_positions import Positions
from laplace_debias.curvature.network.inputs import Inputs, Record
from laplace_debias.laplace.links import Link, link_from
from laplace_debias.laplace.prediction.decomposition import uncertainty
from laplace_debias.laplace.prediction.evaluation import (
    check_held_out,
    evaluate_predictions,
)
from laplace_debias.laplace.prediction.predictive import (
    FitWithLink,
    PredictionMethod,
    equal_mixture,
)
from laplace_debias.laplace.state.fitted import FitSetup, FittedPosterior
from laplace_debias.laplace.wrong_names import check_settable, explains_wrong_arguments
from laplace_debias.metrics import Report, Uncertainty
from laplace_debias.system.ranks import collective, process_group


class Predictor(ABC):
    """The prediction and evaluation methods that `Laplace` and `Mixture` share."""

    def __setattr__(self, name: str, value: Any) -> None:
        check_settable(type(self), name)
        super().__setattr__(name, value)

    @property
    @abstractmethod
    def _states(self) -> Sequence[FitSetup | FittedPosterior]:
        """The state of every posterior."""

    @abstractmethod
    def _fits_with_links(
        self, x: Inputs | Record, method: PredictionMethod, link: Link | None
    ) -> list[FitWithLink]:
        """Pair each fit with `link` or, if that is None, with its own link or the default link."""

    def _require_same(self, **marks: Any) -> None:
        """Require that all processes make a collective call with the same arguments.

        Args:
            **marks: Arguments that must be the same, or functions that return further values that
                must be the same.
        """
        ranks = process_group()
        if ranks.size > 1:
            settings = [state.config for state in self._states]
            ranks.require_same(made=lambda: str(self), settings=settings, **marks)

    def _require_same_posterior(self) -> None:
        """Require that all processes have the same posterior, up to rounding.

        The processes compare the training loss of the posterior, which differs if the data differs.
        """
        ranks = process_group()
        if ranks.size == 1:
            return
        losses = [state.nll for state in self._states if isinstance(state, FittedPosterior)]
        by_rank = ranks.exchange(losses)
        for rank, losses_of_rank in enumerate(by_rank):
            if len(losses_of_rank) != len(by_rank[0]) or not all(
                math.isclose(loss, first, rel_tol=1e-5)
                for loss, first in zip(losses_of_rank, by_rank[0], strict=True)
            ):
                raise ValueError(
                    "The posterior differs between the ranks: the loss of its data is "
                    f"{by_rank[0]} on rank 0, but {losses_of_rank} on rank {rank}. Fit it on all "
                    "ranks together, load it from one file, or work on one rank within `alone()`."
                )

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood; for a regression, `tune` updates its noise."""
        return self._states[0].spec.likelihood

    @explains_wrong_arguments
    def predict(
        self,
        x: Inputs | Record,
        method: str = "glm",
        samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        link: str | Link | None = None,
        positions: Positions | None = None,
        differentiable: bool = False,
    ) -> Distribution:
        """Predict the distribution p(y | x) of the targets, averaged over the posterior.

        Args:
            x: Inputs, `[B, ...]`: a tensor, a tuple of tensors, or a mapping or dataclass whose
                entries are passed by name. Targets, such as `labels`, are dropped unless the
                forward pass accepts them.
            method: `"glm"`: the linearised network, whose Gaussian outputs have an exact
                covariance, averaged in closed form (see `link`) or over `samples` draws of the
                outputs. `"glm-mc"`: the linearised network at samples of the parameters (Eq. 18).
                `"nn"`: the network itself at samples of the parameters. `"map"`: the trained
                network, without parameter uncertainty. `"temperature"`: the trained network, with
                its logits divided by `la.link.network_temperature`, which `tune` chooses. The
                methods with samples divide the logits by `la.link.draw_temperature`, and the closed
                form divides them by `la.link.temperature`.
            samples: Number of draws. Default: the closed form for `"glm"`, and 100 draws for
                `"glm-mc"` and `"nn"`.
            generator: Seeds the draws. Default: torch's global generator. The closed form,
                `"map"` and `"temperature"` draw nothing.
            link: The function from Gaussian logits to probabilities in the closed form of `"glm"`.
                `"pairwise"`: the mean-field softmax with the full covariance (Lu et al., 2020).
                `"probit"`: the softmax of the logits, each shrunk by its variance (MacKay, 1992).
                `"exact"`: the expected softmax, from 128 Sobol points. `"bridge"`, `"bridge_norm"`:
                the Laplace bridge to a Dirichlet distribution, without and with a scaling of the
                variances; provided for comparisons. Pass a `Link` to set the temperature, too.
                Default: the link that `tune` chose (`la.link`); before `tune`, it is `"pairwise"`
                for up to 100 classes, and `"probit"` for more classes, for outputs with positions,
                and for binary and multi-label outputs.
            positions: Indices of the positions to predict, for outputs `[B, T, C]`. Default: all
                positions. With one position, the batch shape is `[B]`; with several, `[p]` or
                `[B, p]`, it is `[B, p]`. Negative numbers count from the last position that an
                `attention_mask` does not mark as padding.
            differentiable: Whether gradients flow back to the inputs. Possible only for the closed
                form of `"glm"`, which keeps the Jacobians of all inputs, `[B, C, D]`, in memory,
                and for `"nn"`, which keeps the activations of all samples.

        Returns:
            The distribution, of batch shape `[B]`: `Categorical` for classes, `Bernoulli` for one
            label, `Independent(Bernoulli)` for several labels (`.mean` contains their
            probabilities), or `MultivariateNormal` for a regression, which includes the noise σ².
            Its mean is `[B, C]`, and its `log_prob` takes targets `[B, C]`, also if the model
            returns a single output as `[B]`. For quantiles, use `marginals`.

        Raises:
            ValueError: If the method or link is unknown; if `samples` is below 1, or the method
                draws no samples; if `link` is passed for a method without closed form; if no
                temperature has been set for `"temperature"`; if outputs are not finite, or too many
                to differentiate; if positions are out of range or padding.
            TypeError: If positions are not integers.
            RuntimeError: If nothing has been fitted, a parameter or buffer has changed since the
                fit, or autocast is enabled.
        """
        prediction = PredictionMethod(method, samples, generator, positions, differentiable)
        return self._predict(x, prediction, self._checked_link(link, prediction))

    def _predict(
        self, x: Inputs | Record, method: PredictionMethod, link: Link | None
    ) -> Distribution:
        """Predict with a method and a link that have been checked."""
        fits = self._fits_with_links(x, method, link)
        return equal_mixture([fit.predictive(x, method) for fit in fits])

    def _checked_link(self, link: str | Link | None, method: PredictionMethod) -> Link | None:
        """Check the user's link, if any, and require the closed form for it."""
        checked = link_from(link, self.likelihood)
        if checked is not None and not method.is_closed_form:
            raise ValueError(
                f"`link={link!r}` applies only to the closed form, without `method=` and "
                "`samples=`. Remove these two arguments, or remove `link=`. (The temperature of "
                "la.link applies to every method with uncertainty.)"
            )
        return checked

    def uncertainty(
        self,
        x: Inputs | Record,
        method: str = "glm",
        samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        positions: Positions | None = None,
    ) -> Uncertainty:
        """Decompose the uncertainty of each input into aleatoric and epistemic parts.

        For class probabilities, the total is the entropy of the predictive, the aleatoric part is
        the mean entropy over samples of the parameters, and the epistemic part is the mutual
        information between target and parameters (BALD). All three are in nats, and summed over the
        labels if there are several. They are computed from the same draws, which `predict` with the
        same number of samples also uses. For a regression, the three parts are variances of each
        target, in squared units. With `method="glm"` and without `samples`, these variances have a
        closed form; otherwise, they are computed from draws. For a mixture, the draws of all
        members are pooled, so the epistemic part includes the disagreement between members. Logits
        are divided by the temperatures of `la.link`, as in `predict`.

        Args:
            x: Inputs, `[B, ...]`; see `predict`.
            method: `"glm"`, `"glm-mc"` or `"nn"`; see `predict`.
            samples: Number of draws of each member. Default: 100.
            generator: Seeds the draws. Default: torch's global generator.
            positions: Positions of outputs; see `predict`.

        Returns:
            Total, aleatoric and epistemic uncertainty, each `[B]`, or `[B, C]` for a regression.
            For class probabilities, `.scores` contains further scores by name: `entropy`,
            `max_probability` (not for several labels) and `mutual_information`. With
            `method="glm"`, it also has `variance` (of the logits, without their common part),
            `instability` (the log-probability of a different decision) and, for classes, `energy`
            and `max_logit` (for a mixture, their means over its members). In closed form, `entropy`
            and `max_probability` are computed from `predict(x)`, without draws. The score `entropy`
            therefore differs from the total: only slightly with the pairwise link, but more with
            the probit link if its temperature is also used for draws.

        Raises:
            ValueError: If the method is `"map"` or `"temperature"`, which have no uncertainty about
                the parameters. Also raises the errors of `predict`.

        Reference:
            Houlsby, Huszár, Ghahramani, Lengyel. Bayesian active learning for classification and
            preference learning. 2011.
        """
        prediction = PredictionMethod(method, samples, generator, positions)
        return self._uncertainty(x, prediction, None)

    def _uncertainty(
        self, x: Inputs | Record, method: PredictionMethod, link: Link | None
    ) -> Uncertainty:
        """Compute the uncertainty with a method and a link that have been checked."""
        if not method.has_uncertainty:
            raise ValueError(
                f'`method="{method.name}"` predicts with a single value of the parameters, so it '
                'has no parameter uncertainty. Use "glm", "glm-mc" or "nn".'
            )
        return uncertainty(self._fits_with_links(x, method, link), x, method)

    @collective("evaluate")
    def evaluate(
        self,
        loader: Batches,
        ood: Mapping[str, Batches] | None = None,
        method: str = "glm",
        samples: int | None = None,
        generator: torch.Generator | None = None,
        progress: bool = False,
        *,
        link: str | Link | None = None,
        intervals: bool = True,
        level: float = 0.95,
        score: str | None = None,
    ) -> Report:
        """Evaluate the predictions on labelled data: accuracy, calibration and OOD detection.

        Each metric comes with a confidence interval, which treats examples as independent, but not
        the positions of an example. Ignored targets do not count.

        Args:
            loader: Labelled batches `(x, y)`, or `(x, y, w)` with whole-numbered example weights:
                an example of weight w counts as w examples.
            ood: Out-of-distribution batches by name. Targets are optional and ignored. A pair
                always means inputs and targets, so pass several inputs without targets as
                `((a, b), None)`. For each name, the report contains OOD metrics, such as
                `auroc_<name>` (in-distribution = 0, OOD = 1).
            method: How to predict; see `predict`.
            samples: Number of draws; see `predict`.
            generator: Seeds the draws, and the order and augmentation of the loaders. Default:
                torch's global generator.
            progress: Show progress bars over the loaders.
            link: The function from logits to probabilities; see `predict`.
            intervals: Whether to compute confidence intervals.
            level: Nominal coverage of the confidence intervals. For a regression, this is also the
                level of the predicted intervals whose coverage and width are reported.
            score: Name of the score in `uncertainty(x).scores` that separates OOD data. Default:
                the entropy of the predictive, or its variance for a regression.

        Returns:
            A report: the metrics by name, each a float with the interval `.low` and `.high`. The
            metrics are those of `metrics.evaluate`, of `metrics.evaluate_multilabel` for several
            labels, or of `metrics.evaluate_regression` for a regression. To compare two reports,
            pass them to `metrics.compare`.

        Raises:
            ValueError: If the loader is empty, or all of its targets are ignored; if `ood` is
                passed for a regression whose predictive is not normal; if the level is not between
                0 and 1; if `score` is not available for the likelihood or the method, or is passed
                without `ood`. Also raises the errors of `predict`.
        """
        if ood is not None and not isinstance(ood, Mapping):
            raise TypeError(
                "`ood` must be a mapping from names to loaders, got "
                f"{type(ood).__name__}. Pass a dict, such as {{'other': loader}}."
            )
        options = {"samples": samples, "link": link, "level": level, "score": score}
        self._require_same(ood=list(ood or ()), method=method, **options)
        self._require_same_posterior()
        if score is not None and not ood:
            raise ValueError(
                f"`score={score!r}` applies only to out-of-distribution data. Pass `ood=` too, "
                "or remove `score=`."
            )
        check_held_out(loader, *(ood or {}).values())

        prediction = PredictionMethod(method, samples, generator)
        checked_link = self._checked_link(link, prediction)

        def predict(x: Inputs) -> Distribution:
            return self._predict(x, prediction, checked_link)

        def score_inputs(x: Inputs) -> Tensor:
            """Return the requested score of each input or position."""
            scores = self._uncertainty(x, prediction, checked_link).scores
            if score is None or score not in scores:
                advice = "Remove `score=`."
                if scores:
                    advice = f"Use one of {', '.join(scores)}."
                raise ValueError(
                    f"`score={score!r}` is not available for these predictions. {advice}"
                )
            return scores[score].flatten()

        state = self._states[0]
        bar = "evaluate" if progress else None

        def read(data: Batches, *, needs_targets: bool) -> Stream:
            return state.spec.stream(
                data, state.device, generator, bar, takes_weights=True, needs_targets=needs_targets
            )

        return evaluate_predictions(
            predict,
            self.likelihood,
            read(loader, needs_targets=True),
            ood={name: read(data, needs_targets=False) for name, data in (ood or {}).items()},
            class_dim=state.spec.class_dim,
            intervals=intervals,
            level=level,
            score_inputs=None if score is None else score_inputs,
        )
