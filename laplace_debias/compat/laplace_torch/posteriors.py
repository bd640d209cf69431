"""A `Laplace` with the arguments, methods and shapes of laplace-torch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.compat.laplace_torch.absent import (
    ABSENT_ATTRIBUTES,
    SETTABLE,
    explains_absent_arguments,
)
from laplace_debias.compat.laplace_torch.arguments import (
    CURVATURES_BY_NAME,
    LIKELIHOODS_BY_NAME,
    LINKS,
    SUBSETS,
    batch_hook,
    check_applies,
    checked_name,
    fisher_of_backend,
    names_in_layer,
    scalar_or_vector,
)
from laplace_debias.compat.laplace_torch.parameterwise import (
    STRUCTURES,
    ParameterwisePrior,
    by_parameter,
    parameterwise_log_marginal_likelihood,
)
from laplace_debias.compat.laplace_torch.predictions import (
    linearised_draws,
    output_moments,
)
from laplace_debias.compat.laplace_torch.prior_search import (
    PRIOR_STRUCTURES,
    check_prior_structure,
    maximise_marginal_likelihood,
    search_grid,
)
from laplace_debias.compat.laplace_torch.saved_states import (
    FILE,
    PRECISIONS,
    check_state,
    file_of_posterior,
    posterior_of_file,
)
from laplace_debias.curvature.data.batches import Batches
from laplace_debias.curvature.network.bradley_terry import BradleyTerry
from laplace_debias.curvature.network.inputs import Inputs, OneArgument
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.curvature.network.subnetwork import Subnetwork
from laplace_debias.laplace.laplace import Laplace as Posterior
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.laplace.state.prior import prior_precision_from
from laplace_debias.laplace.wrong_names import check_spelling
from laplace_debias.linalg import diagonal, logdet
from laplace_debias.operators import LinearOperator
from laplace_debias.system.checks import real
from laplace_debias.system.shown import warn
from laplace_debias.training.hyper_parameters import log_marginal_likelihood


class Laplace:
    """A Laplace approximation with the names and defaults of laplace-torch.

    Args:
        model: The trained network, which is not changed: samples of the parameters are evaluated on
            a copy.
        likelihood: `"classification"`, `"regression"` or `"reward_modeling"`. For
            `"reward_modeling"`, the network has a single output, and the data consists of pairs of
            inputs `[B, 2, ...]` and the index of the preferred one.
        subset_of_weights: `"last_layer"`, `"all"` or `"subnetwork"`.
        hessian_structure: `"kron"`, `"full"`, `"diag"`, `"lowrank"` or `"gp"`.
        sigma_noise: Standard deviation of the noise of a regression.
        prior_precision: One number; for `"kron"` and `"diag"`, also one per block, and for
            `"full"`, one per weight or bias (one per layer in laplace-torch). For `"diag"` and
            `"full"`, also one per parameter.
        prior_mean: One number, or one per parameter.
        temperature: T.
        enable_backprop: Whether gradients of predictions flow back to the inputs.
        subnetwork_indices: For `"subnetwork"`: indices of the Bayesian entries of the flattened
            parameters.
        last_layer_name: Name of the last layer. Default: it is found automatically.
        n_subset: For `"gp"`: the number of training examples that span the posterior. Default: all.
        independent_outputs: For `"gp"`: whether each output has its own Gaussian process.
        backend: A backend of laplace-torch, or its name. Names that end with `GGN` select the exact
            Fisher matrix, and names that end with `EF` the empirical one.
        backend_kwargs: `{"stochastic": True}` for a Fisher matrix with sampled labels.
        dict_key_x: The name of an entry of each mapping in the data, as a check. If this argument
            or `dict_key_y` is passed, the model takes a whole mapping as one argument, as in
            laplace-torch. Default: the entries of a mapping are passed by their names.
        dict_key_y: The name of the targets in each mapping. Default: `"labels"`.

    Raises:
        NotImplementedError: If this package has no equivalent of the combination of arguments.
        ValueError: If a name is unknown.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from laplace_debias.compat.laplace_torch import Laplace
        >>> x, y = torch.randn(64, 4), torch.randint(3, (64,))
        >>> loader = DataLoader(TensorDataset(x, y), batch_size=16)
        >>> la = Laplace(nn.Linear(4, 3), "classification", subset_of_weights="all")
        >>> la.fit(loader)
        >>> la.optimize_prior_precision(method="gridsearch", val_loader=loader)
        >>> la(x, pred_type="glm", link_approx="probit").shape
        torch.Size([64, 3])
    """

    @explains_absent_arguments
    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        subset_of_weights: str = "last_layer",
        hessian_structure: str = "kron",
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        *,
        subnetwork_indices: Tensor | None = None,
        last_layer_name: str | None = None,
        n_subset: int | None = None,
        independent_outputs: bool = False,
        backend: type | str | None = None,
        backend_kwargs: Mapping[str, Any] | None = None,
        dict_key_x: str | None = None,
        dict_key_y: str | None = None,
    ) -> None:
        likelihood = checked_name("likelihood", likelihood, LIKELIHOODS_BY_NAME)
        subset_of_weights = checked_name("subset_of_weights", subset_of_weights, SUBSETS)
        hessian_structure = checked_name("hessian_structure", hessian_structure, CURVATURES_BY_NAME)
        if (subset_of_weights == "subnetwork") != (subnetwork_indices is not None):
            raise ValueError(
                '`subset_of_weights="subnetwork"` and `subnetwork_indices` belong together. Pass '
                "both, or neither."
            )
        if n_subset is not None:
            check_applies("n_subset", "hessian_structure", "gp", hessian_structure)
        network = BradleyTerry(model) if likelihood == "reward_modeling" else model
        params: ParameterSelection = "last_layer" if subset_of_weights == "last_layer" else "all"
        if last_layer_name is not None:
            check_applies("last_layer_name", "subset_of_weights", "last_layer", subset_of_weights)
            params = names_in_layer(model.get_submodule(last_layer_name), network)
        if subnetwork_indices is not None:
            network = Subnetwork(network, subnetwork_indices)
        sigma = None
        if likelihood == "regression":
            sigma = scalar_or_vector(sigma_noise)
        elif float(torch.as_tensor(sigma_noise)) != 1.0:
            check_applies("sigma_noise", "likelihood", "regression", likelihood)
        if independent_outputs:
            check_applies("independent_outputs", "hessian_structure", "gp", hessian_structure)
        self.model = model
        self.likelihood = likelihood
        self.enable_backprop = enable_backprop
        self._structure = hessian_structure
        self._subset = subset_of_weights
        self._last_layer_name = last_layer_name
        self._takes_mappings = dict_key_x is not None or dict_key_y is not None
        self._batch_hook = batch_hook(likelihood, dict_key_x, dict_key_y)
        self._fit = Posterior(
            network,
            LIKELIHOODS_BY_NAME[likelihood],
            sigma=sigma,
            curvature=CURVATURES_BY_NAME[hessian_structure],
            params=params,
            prior_mean=scalar_or_vector(prior_mean),
            temperature=temperature,
            fisher=fisher_of_backend(backend, backend_kwargs or {}),
            inducing=n_subset,
            independent_outputs=independent_outputs,
            batch=self._batch_hook,
        )
        # If set, this prior replaces the prior precision of the fit. Until the first fit has found
        # the last layer, several precisions may be meant per parameter or per block.
        self._prior: ParameterwisePrior | None = None
        self.prior_precision = prior_precision

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ABSENT_ATTRIBUTES:
                raise AttributeError(
                    f"{type(self).__name__} has no attribute {name!r}. {ABSENT_ATTRIBUTES[name]}"
                )
            if not name.startswith("_") and hasattr(Posterior, name) and not hasattr(Laplace, name):
                raise AttributeError(
                    f"{type(self).__name__} has no attribute {name!r}, because laplace-torch does "
                    f"not have it. Use la.posterior.{name}."
                )
            return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        check_spelling(type(self), name, SETTABLE)
        super().__setattr__(name, value)

    @property
    def posterior(self) -> Posterior:
        """The underlying `laplace_debias.Laplace`, with the current prior.

        You can replace it by another posterior of the same network, likelihood and structure, whose
        prior is then used.
        """
        state = self._fit.state
        if self._prior is None or not isinstance(state, FittedPosterior):
            return self._fit
        return self._prior.posterior(state)

    @posterior.setter
    def posterior(self, posterior: Posterior) -> None:
        self._fit = posterior
        self._prior = None

    def fit(
        self,
        train_loader: Batches,
        override: bool = True,
        progress_bar: bool = False,
        *,
        num_data: SupportsIndex | None = None,
    ) -> None:
        """Fit the posterior to all the data in a loader.

        Args:
            train_loader: Batches `(x, y)`.
            override: Whether to forget earlier data. If false, the new data are added to them; see
                `laplace_debias.Laplace.update`.
            progress_bar: Whether to show a progress bar.
            num_data: Number of training examples, if the loader does not yield each of them once.

        Raises:
            RuntimeError: If `override` is false and nothing has been fitted.
        """
        if override:
            self._fit.fit(train_loader, num_data=num_data, progress=progress_bar)
        else:
            self._fit.update(train_loader, num_data, progress=progress_bar)
        if self._prior is not None:
            # The parameters of a last layer are known only now, so the precisions are checked here.
            self.prior_precision = self._prior.precisions

    @explains_absent_arguments
    def __call__(
        self,
        x: Inputs,
        pred_type: str = "glm",
        joint: bool = False,
        link_approx: str = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Predict probabilities, or the mean and the covariance of a regression without noise.

        Rewards are predicted for single inputs, like the outputs of a regression.

        Args:
            x: Inputs, `[B, ...]`.
            pred_type: `"glm"` for the linearised network, or `"nn"` for networks with sampled
                weights. With `hessian_structure="gp"`, `"gp"` means the same as `"glm"`.
            joint: Whether to return the covariance between all outputs of all inputs.
            link_approx: `"probit"`, `"bridge"`, `"bridge_norm"` or `"mc"`.
            n_samples: Number of draws for `"mc"` and `"nn"`.
            diagonal_output: Whether to leave out covariances between outputs.
            generator: Seeds the draws.

        Returns:
            For classification, the probabilities `[B, C]`. For regression, the mean `[B, C]` and,
            with `"glm"`, the covariance `[B, C, C]`. With `diagonal_output`, these are the mean and
            the variances `[B, C]`; with `joint`, the mean `[B·C]` and the covariance `[B·C, B·C]`;
            with `"nn"`, the mean and the variances over the draws, `[B, C]`.
        """
        x = self._as_argument(x)
        pred_type = self._checked_pred_type(pred_type)
        link_approx = checked_name("link_approx", link_approx, LINKS)
        if self.likelihood != "classification":
            if pred_type == "nn":
                draws = self.functional_samples(x, "nn", n_samples, generator=generator)
                return draws.mean(0), draws.var(0)
            return output_moments(
                self.posterior,
                x,
                joint=joint,
                diagonal_output=diagonal_output,
                differentiable=self.enable_backprop,
            )
        if pred_type == "nn" and link_approx != "mc":
            raise ValueError(
                f'`link_approx={link_approx!r}` is not supported for `pred_type="nn"`. Use '
                '`link_approx="mc"`.'
            )
        if pred_type == "nn" or link_approx == "mc":
            draws = self.predictive_samples(x, pred_type, n_samples, diagonal_output, generator)
            return draws.mean(0)
        predictive = self.posterior.predict(
            x, link=Link(link_approx), differentiable=self.enable_backprop
        )
        return predictive.probs  # type: ignore[attr-defined]

    def functional_samples(
        self,
        x: Inputs,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "samples batch *outputs"]:
        """Draw outputs of the linearised network or of networks with sampled weights.

        Raises:
            torch.linalg.LinAlgError: With `enable_backprop` and `"glm"`, if the covariance of the
                outputs is singular for an input.
        """
        x = self._as_argument(x)
        pred_type = self._checked_pred_type(pred_type)
        differentiable = self.enable_backprop and torch.is_grad_enabled()
        if pred_type == "nn":
            return self.posterior.sample_outputs(
                x, n_samples, "nn", generator, differentiable=differentiable
            )
        return linearised_draws(
            self.posterior,
            x,
            n_samples,
            diagonal_output=diagonal_output,
            differentiable=differentiable,
            generator=generator,
        )

    def predictive_samples(
        self,
        x: Inputs,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "samples batch *outputs"]:
        """Draw class probabilities, or the outputs of a regression."""
        draws = self.functional_samples(x, pred_type, n_samples, diagonal_output, generator)
        return draws.softmax(-1) if self.likelihood == "classification" else draws

    def sample(
        self, n_samples: int = 100, generator: torch.Generator | None = None
    ) -> Float[Tensor, "samples parameters"]:
        """Draw samples of the parameters, `[S, D]`."""
        return self.posterior.sample(n_samples, generator)

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        """Compute the log-density of parameters; if `normalized` is false, omit its constant."""
        log_prob = self.posterior.posterior.log_prob(value)
        if normalized:
            return log_prob
        return log_prob - self.posterior.posterior.log_prob(self.mean)

    def log_marginal_likelihood(
        self, prior_precision: Tensor | float | None = None, sigma_noise: Tensor | None = None
    ) -> Float[Tensor, ""]:
        """Set the prior precision and noise, if passed, and compute the log marginal likelihood.

        The result is differentiable in the prior precision and the noise.
        """
        fitted = self._fit.fitted
        log_factor = torch.zeros((), dtype=torch.float64, device=fitted.posterior.mean.device)
        if sigma_noise is not None:
            earlier_sigma = self.sigma_noise.to(log_factor).reshape(())
            self.sigma_noise = sigma_noise
            sigma = torch.as_tensor(sigma_noise).to(log_factor).reshape(())
            log_factor = (sigma / earlier_sigma).log()
        precision: float | Tensor = self.prior_precision
        if prior_precision is not None:
            precision = scalar_or_vector(prior_precision)
            self.prior_precision = precision
        precisions = torch.as_tensor(precision).to(log_factor)
        if self._prior is not None:
            self._prior.check_size(fitted.parameters)
            return parameterwise_log_marginal_likelihood(fitted, precisions, log_factor)
        deltas = precisions.expand(len(fitted.parameters.block_names))
        return log_marginal_likelihood(fitted, deltas, log_factor)

    def functional_variance(
        self, Js: Float[Tensor, "batch outputs parameters"]
    ) -> Float[Tensor, "batch outputs outputs"]:
        """Compute J Σ Jᵀ for each input, with the posterior covariance Σ."""
        return torch.einsum("bkd,bcd->bkc", self._times_covariance(Js), Js)

    def functional_covariance(
        self, Js: Float[Tensor, "batch outputs parameters"]
    ) -> Float[Tensor, "entries entries"]:
        """Compute J Σ Jᵀ between all outputs of all inputs, `[B·C, B·C]`."""
        return self._times_covariance(Js).flatten(0, 1) @ Js.flatten(0, 1).T

    def _times_covariance(self, Js: Tensor) -> Tensor:
        rows = Js.flatten(0, 1)
        return (self.posterior.posterior.covariance @ rows.T).T.reshape(Js.shape)

    def _as_argument(self, x: Inputs) -> Inputs:
        """Mark a mapping as one argument of the model if the model takes mappings."""
        is_argument = self._takes_mappings and isinstance(x, Mapping)
        return OneArgument(x) if is_argument else x

    def _checked_pred_type(self, pred_type: str) -> str:
        pred_types = ("glm", "gp") if self._structure == "gp" else ("glm", "nn")
        return checked_name("pred_type", pred_type, pred_types)

    @explains_absent_arguments
    def optimize_prior_precision(
        self,
        pred_type: str = "glm",
        method: str = "marglik",
        *,
        prior_structure: str = "scalar",
        val_loader: Batches | None = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: str = "probit",
        progress_bar: bool = False,
    ) -> None:
        """Choose the prior precision by marginal likelihood or by grid search on held-out data.

        The marginal likelihood is maximised by a bounded search. On held-out data, the metric is
        the NLL of the predictive, which includes the noise of a regression.

        Raises:
            NotImplementedError: If `pred_type="nn"` or `link_approx="mc"` is combined with a grid
                search, `prior_structure="diag"` with a structure other than `"diag"`, or
                `"layerwise"` with a structure that has no layer blocks.
            ValueError: If a name is unknown, or a grid search is requested without `val_loader`.
        """
        method = checked_name("method", method, ("marglik", "gridsearch"))
        prior_structure = checked_name("prior_structure", prior_structure, PRIOR_STRUCTURES)
        link_approx = checked_name("link_approx", link_approx, LINKS)
        pred_type = self._checked_pred_type(pred_type)
        check_prior_structure(prior_structure, self._structure, method)
        precisions: Tensor | None = None
        if method == "marglik":
            if val_loader is not None:
                warn(
                    '`method="marglik"` does not use `val_loader`. Pass `method="gridsearch"` to '
                    "choose the prior precision on these data, or remove `val_loader=`."
                )
            precisions = maximise_marginal_likelihood(self._fit, prior_structure)
        else:
            grid = torch.logspace(
                log_prior_prec_min, log_prior_prec_max, grid_size, dtype=torch.float64
            )
            search_grid(
                self._fit,
                val_loader,
                grid,
                prior_structure=prior_structure,
                pred_type=pred_type,
                link_approx=link_approx,
                progress_bar=progress_bar,
            )
        self._prior = None
        if precisions is not None:
            self.prior_precision = precisions

    @property
    def mean(self) -> Float[Tensor, " parameters"]:
        """The trained parameters."""
        return self.posterior.mean

    @property
    def n_params(self) -> int:
        """The number of Bayesian parameters."""
        return len(self.posterior.mean)

    @property
    def n_data(self) -> int:
        """The number of training examples."""
        return self.posterior.num_data

    @property
    def prior_precision(self) -> Float[Tensor, " precisions"]:
        """The prior precision: a single value `[1]`, or one per block, weight or parameter."""
        if self._prior is not None:
            return self._prior.precisions
        return self._fit.prior_precision.reshape(-1)

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        precision = scalar_or_vector(value)
        state = self._fit.state
        parameters = state.parameters
        num_entries = real(precision, "prior_precision").numel()
        if parameters is None:
            # The number of entries is then checked by the fit, on its first batch.
            is_by_block = self._structure not in STRUCTURES
        else:
            is_by_block = num_entries == len(parameters.block_names)
        if num_entries <= 1 or is_by_block:
            self._fit.prior_precision = precision
            self._prior = None
            return
        prior = ParameterwisePrior(prior_precision_from(precision, state.device), self._structure)
        if parameters is not None:
            prior.check_size(parameters)
        if isinstance(state, FittedPosterior):
            prior.posterior(state)  # Raises if the curvature does not allow the precisions.
        self._prior = prior

    @property
    def prior_precision_diag(self) -> Float[Tensor, " parameters"]:
        """The prior precision of each parameter."""
        state = self._fit.state
        if self._prior is not None and state.parameters is not None:
            return by_parameter(self._prior.precisions, state.parameters, state.spec)
        posterior = self._fit.posterior
        return posterior.by_parameter(posterior.deltas())

    @property
    def prior_mean(self) -> Float[Tensor, ""] | Float[Tensor, " parameters"]:
        """The prior mean, one number or one per parameter."""
        return self.posterior.prior_mean

    @prior_mean.setter
    def prior_mean(self, value: float | Tensor) -> None:
        self._fit.prior_mean = scalar_or_vector(value)

    @property
    def scatter(self) -> Float[Tensor, ""]:
        """The squared distance from the prior mean, weighted by the prior precision.

        With `independent_outputs`, it is summed over the outputs, each of which has its own copy of
        the parameters.
        """
        posterior = self._fit.posterior
        displacement = posterior.displacement.repeat(posterior.num_copies)
        return (self.prior_precision_diag * displacement.square()).sum()

    def square_norm(self, value: Float[Tensor, " parameters"]) -> Float[Tensor, ""]:
        """Return the squared distance from the mean, weighted by the posterior precision.

        Args:
            value: Parameters, `[D]`.
        """
        difference = value - self._fit.posterior.mean
        return difference @ (self.posterior.posterior.precision @ difference)

    @property
    def log_det_prior_precision(self) -> Float[Tensor, ""]:
        """The log-determinant of the prior precision."""
        return self.prior_precision_diag.log().sum()

    @property
    def log_det_posterior_precision(self) -> Float[Tensor, ""]:
        """The log-determinant of the posterior precision."""
        return logdet(self.posterior.posterior.precision).value

    @property
    def log_det_ratio(self) -> Float[Tensor, ""]:
        """The log-determinant of the posterior precision minus `log_det_prior_precision`."""
        return self.log_det_posterior_precision - self.log_det_prior_precision

    @property
    def log_likelihood(self) -> Float[Tensor, ""]:
        """The log-likelihood of the training data in nats, divided by the temperature."""
        fitted = self._fit.fitted
        return torch.tensor(-fitted.nll / fitted.temperature, dtype=torch.float64)

    @property
    def sigma_noise(self) -> Tensor:
        """The standard deviation of the noise of a regression; 1 for other likelihoods.

        Setting it after a fit rescales the curvature.

        Raises:
            ValueError: If the likelihood is not `"regression"`, if the noise levels of several
                outputs do not change by the same factor, or if the fit used the empirical Fisher
                matrix, which is not proportional to the inverse noise variance.
        """
        if self.likelihood == "regression":
            return self.posterior.sigma
        return torch.ones(())

    @sigma_noise.setter
    def sigma_noise(self, value: float | Tensor) -> None:
        self._fit.sigma = scalar_or_vector(value)

    @property
    def temperature(self) -> float:
        """The temperature T."""
        return self.posterior.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._fit.temperature = value

    @property
    def posterior_precision(self) -> Tensor | LinearOperator:
        """The posterior precision: a matrix for "full", a vector for "diag", or an operator."""
        return self._in_shape(self.posterior.posterior.precision)

    @property
    def posterior_covariance(self) -> Tensor | LinearOperator:
        """The posterior covariance: a matrix for "full", otherwise an operator."""
        covariance = self.posterior.posterior.covariance
        return covariance.to_dense() if self._structure == "full" else covariance

    @property
    def posterior_variance(self) -> Float[Tensor, " parameters"]:
        """The variance of each parameter."""
        return diagonal(self.posterior.posterior.covariance).value

    @property
    def posterior_scale(self) -> Tensor | LinearOperator:
        """The symmetric root of the covariance, in the same form as `posterior_precision`."""
        return self._in_shape(self.posterior.posterior.scale)

    def _in_shape(self, operator: LinearOperator) -> Tensor | LinearOperator:
        if self._structure == "full":
            return operator.to_dense()
        return diagonal(operator).value if self._structure == "diag" else operator

    def state_dict(self) -> dict[str, Any]:
        """Return the options and the posterior file (as a tensor of bytes), for `torch.save`.

        If several processes have fitted the posterior, any of them can call this method.
        """
        state = {**self._options, FILE: file_of_posterior(self._fit)}
        if self._prior is not None:
            state[PRECISIONS] = self._prior.precisions
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the `state_dict` of an object that has the same options as this one.

        Raises:
            ValueError: If the state was not returned by `state_dict`, or was saved for a different
                model, likelihood, structure or subset of the parameters.
        """
        check_state(state_dict, self._options)
        self.posterior = posterior_of_file(state_dict[FILE], self._fit.model, self._batch_hook)
        if PRECISIONS in state_dict:
            self.prior_precision = state_dict[PRECISIONS]

    @property
    def _options(self) -> dict[str, str | None]:
        """The options that a saved state and the object that loads it must have in common."""
        return {
            "likelihood": self.likelihood,
            "hessian_structure": self._structure,
            "subset_of_weights": self._subset,
            "last_layer_name": self._last_layer_name,
        }

    def __repr__(self) -> str:
        return repr(self.posterior)
