"""Training in which the prior precision and the noise maximise the marginal likelihood."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from laplace_debias.curvature.data.batch_forms import BatchHook
from laplace_debias.curvature.data.batches import Batches
from laplace_debias.curvature.data.dataset_size import training_size
from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.losses.base import NegativeLogLikelihood
from laplace_debias.curvature.losses.likelihoods import Gaussian, Likelihood, likelihood_from
from laplace_debias.curvature.network.calling import call
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.curvature.network.unwrapping import unwrapped
from laplace_debias.curvature.structures import curvature_structure
from laplace_debias.laplace import Full, Laplace
from laplace_debias.laplace.fitting.fit import fit
from laplace_debias.laplace.state.curvature_config import CurvatureConfig
from laplace_debias.laplace.state.fitted import FittedPosterior, checked_setup, checked_temperature
from laplace_debias.laplace.state.model_spec import ModelSpec
from laplace_debias.laplace.state.prior import check_prior_precision
from laplace_debias.laplace.tuning.evidence import PER
from laplace_debias.laplace.tuning.result import Row
from laplace_debias.system.checks import check_generator, check_is, real, whole
from laplace_debias.system.ranks import refuse_ranks
from laplace_debias.training.eval_copy import eval_copy
from laplace_debias.training.hyper_parameters import HyperParameters
from laplace_debias.training.optimizer_checks import check_optimizer, check_steps


@dataclass(frozen=True, eq=False)
class MarginalLikelihoodRun:
    """The result of `marginal_likelihood_training`.

    Attributes:
        laplace: The posterior at the epoch with the largest marginal likelihood. Its model has the
            weights of that epoch and is in eval mode.
        epoch: The number of that epoch.
        history: One row per fit: `epoch`, `loss` (the training objective per example, averaged over
            the epoch), `log_marginal_likelihood` (after the steps on the hyper-parameters),
            `prior_precision` (one number, or one per block) and, for a regression, `sigma`.
    """

    laplace: Laplace
    epoch: int
    history: list[Row]


@dataclass(frozen=True)
class _BestFit:
    """The fit with the largest marginal likelihood so far.

    Attributes:
        fitted: The posterior.
        log_marginal_likelihood: Its log marginal likelihood.
        epoch: The epoch of the fit.
        weights: A copy of the model's state at that epoch.
    """

    fitted: FittedPosterior
    log_marginal_likelihood: float
    epoch: int
    weights: Mapping[str, Any]


@torch.enable_grad()
def marginal_likelihood_training(
    model: nn.Module,
    train_loader: Batches,
    likelihood: str | Likelihood = "classification",
    *,
    optimizer: Optimizer,
    epochs: int,
    scheduler: LRScheduler | None = None,
    every: int = 1,
    burn_in: int = 0,
    patience: int | None = None,
    per: str | None = "block",
    steps: int = 10,
    learning_rate: float = 0.1,
    prior_precision: float = 1.0,
    sigma: float | Sequence[float] | Tensor | None = None,
    temperature: float = 1.0,
    curvature: str = "kfac",
    params: ParameterSelection = "all",
    fisher: str = "exact",
    num_data: SupportsIndex | None = None,
    batch: BatchHook | None = None,
    generator: torch.Generator | None = None,
) -> MarginalLikelihoodRun:
    r"""Train a network, and learn its prior precision and noise from the marginal likelihood.

    The optimizer minimises $\sum_n \ell_n/T + \tfrac12\sum_b\delta_b\lVert\theta_b\rVert^2$,
    divided by N, over the weights. After every `every` epochs, a posterior is fitted to all data,
    and Adam takes `steps` steps on the logarithms of the prior precisions δ and of the noise,
    towards a larger Laplace approximation of the marginal likelihood. No validation data are
    needed. The weights and the posterior of the epoch with the largest marginal likelihood are
    kept.

    The temperature is not optimised: a likelihood to the power 1/T is not normalised, so its
    marginal likelihood grows with T without bound.

    Args:
        model: The network, which is trained in place and ends in eval mode.
        train_loader: Batches `(x, y)`, or `(x, y, weights)` with one weight per example. They are
            read once per epoch and once per fit. With weights, the loss of a batch is the weighted
            mean.
        likelihood: The likelihood; see `Laplace`.
        optimizer: An optimizer for the model's parameters, whose `step()` must not need a closure.
            Its weight decay must be 0, because the prior takes its place.
        epochs: The number of epochs.
        scheduler: A learning-rate scheduler, which makes a step after each batch and must not
            depend on a metric.
        every: The number of epochs between two fits.
        burn_in: The number of epochs before the first fit.
        patience: Stop after this many consecutive fits without a larger marginal likelihood.
            Default: run all epochs.
        per: Use one prior precision for each `"block"` or each `"kind"` of layer; see
            `Laplace.tune_evidence`. None means a single prior precision.
        steps: Steps on the hyper-parameters after each fit.
        learning_rate: Learning rate of the hyper-parameters.
        prior_precision: δ at the start.
        sigma: For `"regression"`: the standard deviation of the noise, which is then fixed. By
            default, the noise is optimised, starting at 1.
        temperature: T of the likelihood.
        curvature: The curvature of the posteriors; see `Laplace`.
        params: The Bayesian parameters; all others have no prior.
        fisher: The Fisher matrix of the posteriors.
        num_data: Number of training examples N, which must be passed if the loader leaves out
            examples (`drop_last=True`) or draws a random subset. Default: the number of examples in
            one pass over the loader.
        batch: A function from a batch to (inputs, targets); see `Laplace`.
        generator: Seeds sampled labels and the shuffling of loaders. Default: torch's global
            generator.

    Raises:
        ValueError: If an option is out of range, if the optimizer has a weight decay or none of the
            Bayesian parameters, or if a step of the optimizer or the scheduler needs an argument.
            Also raises the errors of `Laplace.fit`.
        FloatingPointError: If the training loss is no longer finite.

    Reference:
        Immer et al. (2021), "Scalable marginal likelihood estimation for model selection in deep
        learning", Algorithm 1.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from laplace_debias.training import marginal_likelihood_training
        >>> x = torch.linspace(-2, 2, 64)[:, None]
        >>> loader = DataLoader(TensorDataset(x, x.sin() + 0.1 * torch.randn(64, 1)), 32)
        >>> model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
        >>> run = marginal_likelihood_training(
        ...     model,
        ...     loader,
        ...     "regression",
        ...     optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        ...     epochs=20,
        ... )
        >>> run.laplace.marginals(x).variance.shape
        torch.Size([64, 1])
    """
    _check_options(epochs, every, burn_in, patience, steps, learning_rate, per)
    check_generator(generator)
    check_is(optimizer, "optimizer", Optimizer)
    check_steps(optimizer, scheduler)
    delta = _initial_delta(prior_precision)
    refuse_ranks(
        "marginal_likelihood_training",
        "train on one process, or call tune_evidence after training on several",
    )
    initial = likelihood_from(likelihood, sigma)
    tunes_noise = initial.has_sigma and initial.is_assumed
    fits = _Fits(
        model=model,
        likelihood=Gaussian(1.0) if tunes_noise else initial,
        config=CurvatureConfig(
            structure=curvature_structure(curvature),
            fisher=FisherType(fisher),
            params=params,
            backend="auto",
            factor_dtype=torch.float64,
            joint=False,
            sharing="expand",
            memory_bound=None,
        ),
        temperature=checked_temperature(temperature),
        num_data=num_data,
        batch=batch,
        generator=generator,
    )
    # A posterior is fitted at the start, to find the blocks and the number of training examples.
    fitted = fits.fitted(train_loader, delta)
    check_optimizer(optimizer, model, fitted.parameters.names)
    hyper = HyperParameters.at_start(fitted, per, float(delta), tunes_noise, learning_rate)
    history: list[Row] = []
    best: _BestFit | None = None
    num_worse = 0
    for epoch in range(1, epochs + 1):
        penalty = Penalty(fitted, hyper.deltas())
        loss = _train_epoch(model, fits, train_loader, penalty, optimizer, scheduler)
        is_due = epoch > burn_in and (epoch - burn_in) % every == 0
        is_last = epoch == epochs
        if not (is_due or is_last):
            continue
        fitted = hyper.improve(fits.fitted(train_loader, hyper.deltas()), steps)
        fits.likelihood = fitted.likelihood
        value = float(fitted.log_marginal_likelihood())
        history.append(_row(epoch, loss, value, fitted))
        num_worse += 1
        if best is None or value > best.log_marginal_likelihood:
            best = _BestFit(fitted, value, epoch, copy.deepcopy(unwrapped(model).state_dict()))
            num_worse = 0
        if patience is not None and num_worse >= patience:
            break
    assert best is not None
    return MarginalLikelihoodRun(_restore(model, best), best.epoch, history)


def _check_options(
    epochs: int,
    every: int,
    burn_in: int,
    patience: int | None,
    steps: int,
    learning_rate: float,
    per: str | None,
) -> None:
    whole(epochs, "epochs")
    whole(every, "every")
    whole(steps, "steps")
    if whole(burn_in, "burn_in", 0) >= epochs:
        raise ValueError(
            f"With `burn_in={burn_in}`, no fit takes place within {epochs} epochs. "
            "Use a shorter burn-in."
        )
    if patience is not None:
        whole(patience, "patience")
    if per is not None and per not in PER:
        raise ValueError(f"Unknown per={per!r}. Use 'kind', 'block' or None.")
    check_is(learning_rate, "learning_rate", int, float)
    if not 0 < learning_rate < math.inf:
        raise ValueError(
            f"`learning_rate` must be positive and finite, got {learning_rate}. Use "
            "for example 0.1, which changes a hyper-parameter by about 10 % per step."
        )


def _initial_delta(prior_precision: float) -> Float[Tensor, ""]:
    """Check and return the initial prior precision, which must be a single number."""
    delta = real(prior_precision, "prior_precision")
    if delta.ndim:
        raise TypeError(
            f"`prior_precision` is {delta.tolist()}. Pass one number as the initial value. For "
            "several prior precisions, use `per=`."
        )
    check_prior_precision(delta, 1)
    return delta


@dataclass(eq=False)
class _Fits:
    """Everything that is needed to fit a posterior at the current weights.

    Attributes:
        model: The model, in any mode.
        likelihood: The likelihood with its current noise.
        config: The options of the fits.
        temperature: T of the likelihood.
        num_data: N; None to use the number of examples in one pass.
        batch: Reads the user's batches; None for the default.
        generator: Seeds labels and loaders.
    """

    model: nn.Module
    likelihood: Likelihood
    config: CurvatureConfig
    temperature: float
    num_data: SupportsIndex | None
    batch: BatchHook | None
    generator: torch.Generator | None

    def eval_spec(self) -> ModelSpec:
        """Copy the model in eval mode, with the likelihood."""
        return ModelSpec.checked(eval_copy(self.model), self.likelihood, self.batch, None)

    def fitted(self, loader: Batches, prior_precision: Tensor) -> FittedPosterior:
        """Fit the posterior of a copy of the model in eval mode to all data."""
        setup = checked_setup(
            self.eval_spec(),
            self.config,
            prior_precision=prior_precision,
            temperature=self.temperature,
        )
        size = training_size(loader, self.num_data, "full", reads_whole_loader=True)
        return fit(setup, Full(loader), size, generator=self.generator)


class Penalty:
    r"""The negative log-density of the prior, $\tfrac12\sum_b\delta_b\lVert\theta_b\rVert^2$.

    Args:
        fitted: A posterior, from which the blocks and N are taken.
        deltas: δ of every block.
    """

    def __init__(self, fitted: FittedPosterior, deltas: Float[Tensor, " blocks"]) -> None:
        posterior = fitted.posterior
        self._deltas = posterior.by_parameter(deltas).to(posterior.mean)
        self._names = fitted.parameters.names
        self.num_data = posterior.num_data

    def __call__(self, model: nn.Module) -> Float[Tensor, ""]:
        """Compute the penalty, which is differentiable in the model's parameters."""
        entries = [model.get_parameter(name).flatten() for name in self._names]
        theta = torch.cat(entries)
        return 0.5 * (self._deltas.to(theta) * theta.square()).sum()


def _train_epoch(
    model: nn.Module,
    fits: _Fits,
    loader: Batches,
    penalty: Penalty,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
) -> float:
    """Train the weights for one epoch, and return the mean objective per example, in nats."""
    model.train()
    plain = unwrapped(model)
    loss = NegativeLogLikelihood(fits.likelihood)
    total = 0.0
    total_weight = 0.0
    device = next(model.parameters()).device
    stream = fits.eval_spec().stream(loader, device, fits.generator, takes_weights=True)
    for batch in stream:
        if not batch.total_weight:
            continue  # If no example contributes to the loss, its mean is undefined.
        targets = batch.targets
        optimizer.zero_grad()
        outputs = call(model, batch.inputs)
        loss.check(outputs, targets)
        labels = replace(loss.labels(targets, outputs.ndim), example_weights=batch.weights)
        nll = loss.weighted_value(outputs, labels)
        mean_nll = nll / (fits.temperature * batch.total_weight)
        objective = mean_nll + penalty(plain) / penalty.num_data
        if not objective.isfinite():
            raise FloatingPointError(
                f"The training loss is {objective.item()}. Use a smaller learning rate."
            )
        objective.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        total += objective.item() * batch.total_weight
        total_weight += batch.total_weight
    if not total_weight:
        raise ValueError(
            "The loader has no batches in an epoch. An iterator can be read only once: pass a "
            "DataLoader or a list of batches."
        )
    return total / total_weight


def _restore(model: nn.Module, best: _BestFit) -> Laplace:
    """Load the weights of the best epoch into the model, and return its posterior."""
    unwrapped(model).load_state_dict(best.weights)
    model.eval()
    batch = best.fitted.spec.read_batch.hook
    spec = ModelSpec.checked(model, best.fitted.likelihood, batch, None)
    fitted_model = replace(best.fitted.fitted_model, spec=spec)
    return Laplace.from_posterior(replace(best.fitted, fitted_model=fitted_model))


def _row(epoch: int, loss: float, value: float, fitted: FittedPosterior) -> Row:
    row: Row = {"epoch": epoch, "loss": loss, "log_marginal_likelihood": value}
    row["prior_precision"] = fitted.prior.precision.tolist()
    if isinstance(fitted.likelihood, Gaussian):
        row["sigma"] = fitted.likelihood.sigma.tolist()
    return row
