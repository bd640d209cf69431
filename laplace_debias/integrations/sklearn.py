"""Estimators for scikit-learn; install them with `pip install laplace-debias[sklearn]`."""

import copy
import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Bernoulli

from laplace_debias.curvature.losses.likelihoods import HeteroscedasticGaussian
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.laplace import Laplace
from laplace_debias.laplace.state.prior import PriorPrecision
from laplace_debias.operators.eigh import eigh
from laplace_debias.system.checks import imports_of_extra, whole
from laplace_debias.system.shown import counted, warn
from laplace_debias.system.threads import GLOBAL_GENERATOR

with imports_of_extra("sklearn", "sklearn"):
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
    from sklearn.utils import Tags, check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

__all__ = ["LaplaceClassifier", "LaplaceRegressor"]

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class _LaplaceEstimator(BaseEstimator):
    """A network and the Laplace approximation of its posterior, fitted to arrays."""

    laplace_: Laplace
    _criteria: tuple[type[nn.Module], ...]

    def __init__(
        self,
        network: Any,
        *,
        optimizer: Optimizer | None = None,
        epochs: int = 100,
        batch_size: int = 128,
        curvature: str = "kfac",
        params: ParameterSelection = "all",
        prior_precision: PriorPrecision | str = 1.0,
        random_state: Any = None,
    ) -> None:
        self.network = network
        self.optimizer = optimizer
        self.epochs = epochs
        self.batch_size = batch_size
        self.curvature = curvature
        self.params = params
        self.prior_precision = prior_precision
        self.random_state = random_state

    def _check_arguments(self) -> None:
        """Raise an error for arguments that are invalid for any data."""
        whole(self.epochs, "epochs")
        whole(self.batch_size, "batch_size")
        if isinstance(self.prior_precision, str) and self.prior_precision != "evidence":
            raise ValueError(
                f"Unknown prior_precision={self.prior_precision!r}. Pass a positive number or "
                '"evidence".'
            )
        if self.optimizer is not None and not callable(self.optimizer):
            raise TypeError(
                "optimizer must be a function from parameters to a torch optimizer, got "
                f"{type(self.optimizer).__name__}. Pass a class of torch.optim, or "
                "functools.partial(torch.optim.Adam, lr=1e-2)."
            )
        if _is_skorch_net(self.network):
            self._check_skorch_net()
        elif not callable(self.network):
            raise TypeError(
                "network must be a torch module, a function that returns one, or a "
                f"skorch net, got {type(self.network).__name__}. Pass a trained module. "
                "Or pass optimizer= together with a function that takes (num_features, "
                "num_outputs) and returns a module."
            )
        elif not isinstance(self.network, nn.Module) and self.optimizer is None:
            raise ValueError(
                "`network` is a function that creates an untrained network. Pass `optimizer=` to "
                "train it, such as functools.partial(torch.optim.Adam, lr=1e-2)."
            )

    def _check_skorch_net(self) -> None:
        """Require that a skorch net is trained with the loss that matches the likelihood."""
        if self.optimizer is not None:
            raise ValueError(
                "A skorch net already has an optimizer. Remove `optimizer=`, or pass a module."
            )
        criterion = _criterion_type(self.network)
        if not issubclass(criterion, self._criteria):
            names = " or ".join(f"nn.{allowed.__name__}" for allowed in self._criteria)
            raise ValueError(
                f"The skorch net has the criterion {criterion.__name__}. Use {names} as "
                "the criterion, and a module that returns the inputs of this criterion."
            )
        loss = self.network.initialized_instance(
            self.network.criterion, self.network.get_params_for("criterion")
        )
        has_weights = any(
            getattr(loss, name, None) is not None for name in ("weight", "pos_weight")
        )
        if has_weights or getattr(loss, "label_smoothing", 0) > 0:
            raise ValueError(
                "The criterion of the skorch net has weights or label smoothing, which the "
                "posterior would not have. Train the net, and fit `Laplace(net.module_, "
                "likelihood)` with the likelihood that corresponds to the criterion, such as "
                "Categorical(class_weights=...)."
            )

    def _trained_network(
        self, X: np.ndarray, y: np.ndarray, num_outputs: int, weights: np.ndarray | None
    ) -> tuple[nn.Module, str]:
        """Return a trained copy of the network in eval mode, and its likelihood.

        Args:
            X: Inputs, `[n, ...]`.
            y: Class indices `[n]`, or targets of a regression `[n, C]`.
            num_outputs: The number of classes, or of outputs of a regression.
            weights: Weights of the examples, `[n]`; None if each example counts once.
        """
        seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
        devices = range(torch.cuda.device_count())
        # The lock is held, because estimators in other threads of joblib draw from the same
        # generator.
        with GLOBAL_GENERATOR, torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            network = self.network
            if _is_skorch_net(network):
                network = copy.deepcopy(_trained_skorch_net(network, X, y, weights).module_)
            elif isinstance(network, nn.Module):
                network = copy.deepcopy(network)
            else:
                network = network(X.shape[1], num_outputs)
            network.eval()
            with torch.no_grad():
                row_shape = tuple(network(_tensor(X[:2], network)).shape[1:])
            likelihood = self._likelihood(row_shape, num_outputs)
            if self.optimizer is not None:
                self._train(network, self.optimizer, likelihood, X, y, weights)
        return network.eval(), likelihood

    def _train(
        self,
        network: nn.Module,
        make_optimizer: Optimizer,
        likelihood: str,
        X: np.ndarray,
        y: np.ndarray,
        weights: np.ndarray | None,
    ) -> None:
        """Minimise the weighted mean loss over shuffled batches of nearly equal size."""
        inputs = _tensor(X, network)
        targets = _targets(y, likelihood, network)
        if weights is None:
            weights = np.ones(len(X))
        # With relative weights, the average of the batch losses is the weighted mean over all
        # examples.
        relative_weights = _tensor(weights / weights.mean(), network)
        optimizer = make_optimizer(network.parameters())
        num_batches = math.ceil(len(inputs) / self.batch_size)
        network.train()
        for _ in range(self.epochs):
            for rows in torch.randperm(len(inputs)).tensor_split(num_batches):
                optimizer.zero_grad()
                losses = _example_losses(likelihood, network(inputs[rows]), targets[rows])
                (relative_weights[rows] * losses).mean().backward()
                optimizer.step()

    @abstractmethod
    def _likelihood(self, row_shape: tuple[int, ...], num_outputs: int) -> str:
        """Return the name of the likelihood for a network with this output shape per row."""

    def _fit_laplace(
        self,
        network: nn.Module,
        likelihood: str,
        X: np.ndarray,
        y: np.ndarray,
        weights: np.ndarray | None,
        sigma: Any = None,
    ) -> None:
        """Fit the posterior, and choose its prior precision."""
        prior_precision = self.prior_precision
        uses_evidence = False
        if isinstance(prior_precision, str):
            uses_evidence = True
            prior_precision = 1.0
        la = Laplace(
            network,
            likelihood,
            self.curvature,
            self.params,
            prior_precision=prior_precision,
            sigma=sigma,
        )
        inputs = _tensor(X, network)
        columns = [inputs, _targets(y, likelihood, network)]
        num_data = len(X)
        if weights is not None:
            columns.append(torch.tensor(weights, device=inputs.device))
            num_data = max(1, round(weights.sum()))
        batches = zip(*[column.split(self.batch_size) for column in columns], strict=True)
        la.fit(list(batches), num_data=num_data)
        if uses_evidence:
            tunes_sigma = likelihood == "regression" and getattr(self, "sigma", None) is None
            la.tune_evidence(sigma=tunes_sigma)
        self.laplace_ = la

    def _inputs(self, X: Any) -> Tensor:
        """Validate the inputs of a prediction, and convert them for the network.

        Raises:
            NotFittedError: If nothing has been fitted.
        """
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, allow_nd=True)
        _check_numbers(X)
        return _tensor(X, self.laplace_.model)


class LaplaceClassifier(ClassifierMixin, _LaplaceEstimator):
    """A scikit-learn classifier whose probabilities come from a Laplace approximation.

    The network must return logits `[n, C]`, in the order of the sorted labels, or a single logit
    for the second of two labels. Inputs are cast to the dtype of its parameters. The network that
    you pass is not changed, because `fit` copies it.

    Args:
        network: A trained module, or a skorch net, which `fit` trains unless it has a history. With
            `optimizer`, a module that `fit` trains from its current weights, or a function of
            `(num_features, num_outputs)` that returns a new module. scikit-learn's `clone` keeps
            the weights of a module and discards the training of a skorch net.
        optimizer: A function from parameters to a torch optimizer, such as
            `functools.partial(torch.optim.Adam, lr=1e-2)`. Default: the network is already trained.
        epochs: Passes over the data to train the network with `optimizer`.
        batch_size: Rows per batch, to train the network and to fit the posterior.
        curvature: The structure of the posterior; see `Laplace`.
        params: Which parameters are Bayesian; see `Laplace`.
        prior_precision: δ, or `"evidence"` for the largest marginal likelihood.
        random_state: Seeds a new module's weights and the order of batches.

    Attributes:
        laplace_: The fitted `Laplace`; its `model` is the network.
        classes_: The sorted labels.

    Raises:
        TypeError: If `network` or `optimizer` has an unsupported type. Raised by `fit`.
        ValueError: If arguments contradict each other, there is only one class, or the network's
            outputs do not match the classes. Raised by `fit`, which also raises the errors of
            `Laplace.fit`.

    Example:
        >>> from functools import partial
        >>> import torch
        >>> from sklearn.datasets import load_iris
        >>> from torch import nn
        >>> from laplace_debias.integrations.sklearn import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> adam = partial(torch.optim.Adam, lr=1e-2)
        >>> classifier = LaplaceClassifier(nn.Linear, optimizer=adam, random_state=0).fit(X, y)
        >>> classifier.predict_proba(X[:5]).shape
        (5, 3)
    """

    classes_: np.ndarray
    _criteria = (nn.CrossEntropyLoss, nn.BCEWithLogitsLoss)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "LaplaceClassifier":
        """Train the network unless it is already trained, and then fit the posterior.

        Args:
            X: Inputs, `[n, d]`, or `[n, ...]` for a network that takes them.
            y: Labels, `[n]`.
            sample_weight: Weights of the examples, `[n]`, for training the network and for fitting
                the posterior. An example of weight w counts as w examples, and the number of
                examples is the sum of the weights, rounded to a whole number.
        """
        self._check_arguments()
        X, y = validate_data(self, X, y, allow_nd=True)
        _check_numbers(X)
        check_classification_targets(y)
        classes, indices = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(
                "A classifier needs labels of at least two classes, but y has only one class, "
                f"{classes[0]}. Pass examples of other classes too."
            )
        X, indices, weights = _weighted_examples(X, indices, sample_weight)
        network, likelihood = self._trained_network(X, indices, len(classes), weights)
        self._fit_laplace(network, likelihood, X, indices, weights)
        self.classes_ = classes
        return self

    def _likelihood(self, row_shape: tuple[int, ...], num_outputs: int) -> str:
        if num_outputs == 2 and row_shape in ((), (1,)):
            return "binary"
        if row_shape != (num_outputs,):
            raise ValueError(
                f"The network's outputs for a row have shape {row_shape}, but y has "
                f"{num_outputs} classes. Pass a network with {num_outputs} logits in the order "
                "of the sorted labels, and examples of every class."
            )
        return "classification"

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the class probabilities, `[n, C]`, averaged over the posterior."""
        inputs = self._inputs(X)
        predictive: Any = self.laplace_.predict(inputs)
        probs = predictive.probs.double()
        if isinstance(predictive, Bernoulli):
            probs = torch.stack([1 - probs, probs], 1)
        # The probabilities are normalised in float64, because scikit-learn's metrics warn about
        # rounding errors of the network's dtype.
        return (probs / probs.sum(1, keepdim=True)).cpu().numpy()

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return the logarithms of the class probabilities, `[n, C]`."""
        inputs = self._inputs(X)
        predictive: Any = self.laplace_.predict(inputs)
        logits = predictive.logits.double()
        if isinstance(predictive, Bernoulli):
            logits = torch.stack([torch.zeros_like(logits), logits], 1)
        return logits.log_softmax(1).cpu().numpy()

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable label of each row, `[n]`."""
        most_probable = self.predict_proba(X).argmax(1)
        return self.classes_[most_probable]


class LaplaceRegressor(RegressorMixin, _LaplaceEstimator):
    """A scikit-learn regressor whose standard deviations come from a Laplace approximation.

    The network must return one output per target, `[n, C]`, or `[n]` for a single target, except
    that an untrained skorch net must always return `[n, C]`. With `likelihood="heteroscedastic"`,
    the noise differs between inputs and is predicted by the network, which must return C means
    followed by C log-variances, `[n, 2C]`. The network is copied and trained in the same way as in
    `LaplaceClassifier`.

    Args:
        network: A trained module or, for `"regression"`, a skorch net. With `optimizer`, a module
            to train, or a function of `(num_features, num_outputs)` that returns a new module.
        likelihood: `"regression"` (the same noise for each input) or `"heteroscedastic"`.
        optimizer: A function from parameters to a torch optimizer. Default: the network is already
            trained. The loss is the mean squared error, or the NLL for `"heteroscedastic"`.
        epochs: Passes over the data to train the network with `optimizer`.
        batch_size: Rows per batch, to train the network and to fit the posterior.
        curvature: The structure of the posterior; see `Laplace`.
        params: Which parameters are Bayesian; see `Laplace`.
        prior_precision: δ, or `"evidence"` for the largest marginal likelihood.
        sigma: For `"regression"`: standard deviation of the noise, one number or one per target. By
            default, it is estimated from the training residuals and, with
            `prior_precision="evidence"`, then tuned by the marginal likelihood.
        random_state: Seeds a new module's weights and the order of batches.

    Attributes:
        laplace_: The fitted `Laplace`; its `model` is the network. For `"regression"`, its `sigma`
            is the noise.

    Raises:
        TypeError: If `network` or `optimizer` has an unsupported type. Raised by `fit`.
        ValueError: If arguments contradict each other, the outputs do not match the targets, or
            residuals are zero and `sigma` is None. Raised by `fit`, which also raises the errors of
            `Laplace.fit`.

    Example:
        >>> from functools import partial
        >>> import torch
        >>> from sklearn.datasets import load_diabetes
        >>> from sklearn.preprocessing import scale
        >>> from torch import nn
        >>> from laplace_debias.integrations.sklearn import LaplaceRegressor
        >>> X, y = map(scale, load_diabetes(return_X_y=True))
        >>> adam = partial(torch.optim.Adam, lr=1e-2)
        >>> regressor = LaplaceRegressor(nn.Linear, optimizer=adam, random_state=0).fit(X, y)
        >>> mean, std = regressor.predict(X[:5], return_std=True)
        >>> mean.shape, std.shape
        ((5,), (5,))
    """

    _criteria = (nn.MSELoss,)
    _y_is_vector: bool

    def __init__(
        self,
        network: Any,
        *,
        likelihood: str = "regression",
        optimizer: Optimizer | None = None,
        epochs: int = 100,
        batch_size: int = 128,
        curvature: str = "kfac",
        params: ParameterSelection = "all",
        prior_precision: PriorPrecision | str = 1.0,
        sigma: float | Sequence[float] | None = None,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            network,
            optimizer=optimizer,
            epochs=epochs,
            batch_size=batch_size,
            curvature=curvature,
            params=params,
            prior_precision=prior_precision,
            random_state=random_state,
        )
        self.likelihood = likelihood
        self.sigma = sigma

    def __sklearn_tags__(self) -> Tags:
        """Return the tags of a regressor that supports several targets."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _check_arguments(self) -> None:
        """Raise an error for arguments that are invalid for any data."""
        if self.likelihood not in ("regression", "heteroscedastic"):
            raise ValueError(
                f"Unknown likelihood={self.likelihood!r}. Use 'regression' or 'heteroscedastic'."
            )
        if self.likelihood == "heteroscedastic":
            if self.sigma is not None:
                raise ValueError(
                    'With `likelihood="heteroscedastic"`, the network predicts the noise. Remove '
                    "`sigma=`."
                )
            if _is_skorch_net(self.network):
                raise ValueError(
                    "A skorch net is trained with one of torch's losses, none of which takes means "
                    "and log-variances. Pass a module together with `optimizer=`, or the trained "
                    "module of the net, `net.module_`."
                )
        super()._check_arguments()

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "LaplaceRegressor":
        """Train the network unless it is already trained, and then fit the posterior.

        Args:
            X: Inputs, `[n, d]`, or `[n, ...]` for a network that takes them.
            y: Targets, `[n]` or `[n, C]`.
            sample_weight: Weights of the examples, `[n]`; see `LaplaceClassifier.fit`. Unless
                `sigma` was passed, the noise is estimated from the weighted residuals.
        """
        self._check_arguments()
        X, y = validate_data(self, X, y, allow_nd=True, multi_output=True, y_numeric=True)
        _check_numbers(X)
        X, targets, weights = _weighted_examples(X, y.reshape(len(y), -1), sample_weight)
        num_outputs = targets.shape[1]
        if self.likelihood == "heteroscedastic":
            num_outputs = 2 * targets.shape[1]
        network, likelihood = self._trained_network(X, targets, num_outputs, weights)
        sigma: Any = self.sigma
        if sigma is None and likelihood == "regression":
            sigma = _residual_deviations(network, X, targets, self.batch_size, weights)
            _warn_of_poor_means(sigma, targets, weights)
        self._fit_laplace(network, likelihood, X, targets, weights, sigma)
        self._y_is_vector = y.ndim == 1
        return self

    def _likelihood(self, row_shape: tuple[int, ...], num_outputs: int) -> str:
        is_scalar = num_outputs == 1 and row_shape == ()
        if is_scalar or row_shape == (num_outputs,):
            return self.likelihood
        num_targets = num_outputs
        needed = counted(num_outputs, "output")
        if self.likelihood == "heteroscedastic":
            num_targets = num_outputs // 2
            needed = f"{num_targets} means and {num_targets} log-variances"
        raise ValueError(
            f"The network's outputs for a row have shape {row_shape}, but y has "
            f"{counted(num_targets, 'target')}. Pass a network with {needed}."
        )

    def predict(
        self, X: Any, return_std: bool = False
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Return the mean of the targets, `[n]` or `[n, C]` like the `y` passed to `fit`.

        Args:
            X: Inputs.
            return_std: Whether to also return the standard deviations, in the same shape and
                including the noise.
        """
        inputs = self._inputs(X)
        predictive = self.laplace_.predict(inputs)
        mean = self._as_targets(predictive.mean)
        if not return_std:
            return mean
        return mean, self._as_targets(predictive.variance.sqrt())

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draw joint samples of the targets of all rows.

        Args:
            X: Inputs. The covariance of all targets at all rows, `[n·C, n·C]`, must fit into
                memory.
            n_samples: Number of samples.
            random_state: Seeds the draws.

        Returns:
            Samples in the last dimension, `[n, n_samples]` or `[n, C, n_samples]`.
        """
        whole(n_samples, "n_samples")
        inputs = self._inputs(X)
        mean, covariance = self.laplace_.functional(inputs, joint=True)
        size = mean.numel()
        joint = covariance.double().cpu().reshape(size, size)
        # A Cholesky decomposition might fail: the covariance of many rows is singular up to
        # rounding errors of the network, which may exceed a small noise.
        variances, directions = eigh((joint + joint.mT) / 2, "the functional covariance")
        root = directions * variances.clamp_min(0).sqrt()
        random = check_random_state(random_state)
        outputs = mean.double().cpu().reshape(size, 1).numpy()
        outputs = outputs + root.numpy() @ random.standard_normal((size, n_samples))
        outputs = outputs.reshape(len(inputs), -1, n_samples)
        if self.laplace_.likelihood.name == "heteroscedastic":
            means, log_variances = np.split(outputs, 2, axis=1)
            noise = np.exp(log_variances / 2)
        else:
            means = outputs
            sigma = self.laplace_.sigma.double().cpu().expand(outputs.shape[1])
            noise = sigma[:, None].numpy()
        samples = means + noise * random.standard_normal(means.shape)
        return samples[:, 0] if self._y_is_vector else samples

    def _as_targets(self, values: Tensor) -> np.ndarray:
        """Return one value per target, in the shape of the `y` passed to `fit`."""
        array = values.double().cpu().numpy().reshape(len(values), -1)
        return array[:, 0] if self._y_is_vector else array


def _example_losses(likelihood: str, outputs: Tensor, targets: Tensor) -> Float[Tensor, " batch"]:
    """Compute the training loss of each example."""
    if likelihood == "classification":
        return F.cross_entropy(outputs, targets, reduction="none")
    if likelihood == "heteroscedastic":
        return HeteroscedasticGaussian().nll(outputs, targets)
    targets = targets.reshape(outputs.shape)
    if likelihood == "binary":
        losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    else:
        losses = F.mse_loss(outputs, targets, reduction="none")
    return losses.reshape(len(outputs), -1).mean(1)


def _is_skorch_net(network: Any) -> bool:
    """Whether an object is a skorch net; skorch itself is not imported for the check."""
    skorch = sys.modules.get("skorch")
    return skorch is not None and isinstance(network, skorch.NeuralNet)


def _criterion_type(net: Any) -> type:
    """Return the class of a skorch net's loss, which may be stored as a class or an instance."""
    return net.criterion if isinstance(net.criterion, type) else type(net.criterion)


def _trained_skorch_net(net: Any, X: np.ndarray, y: np.ndarray, weights: np.ndarray | None) -> Any:
    """Return the net if it has been trained, otherwise a trained clone."""
    if net.initialized_ and net.history:
        return net
    if weights is not None:
        raise ValueError(
            "A skorch net is trained without weights, so `sample_weight` would have no effect on "
            "the training. Train the net before, or pass its module together with `optimizer=`."
        )
    dtype = np.int64 if issubclass(_criterion_type(net), nn.CrossEntropyLoss) else np.float32
    # After `initialize`, `partial_fit` trains like `fit`.
    net = clone(net).initialize()
    if issubclass(_criterion_type(net), nn.MSELoss):
        _check_shape_of_outputs(net.module_, X, y)
    return net.partial_fit(X.astype(np.float32), y.astype(dtype))


def _check_shape_of_outputs(module: nn.Module, X: np.ndarray, y: np.ndarray) -> None:
    """Require the shape of the targets, because the mean squared error broadcasts other shapes."""
    with torch.no_grad():
        outputs = module.eval()(_tensor(X[:2], module))
    if outputs.shape[1:] != y.shape[1:]:
        raise ValueError(
            f"The module of the skorch net returns outputs of shape {tuple(outputs.shape[1:])} for "
            f"a row, but the net is trained on targets of shape {y.shape[1:]}. Return outputs "
            f"[n, {y.shape[1]}] from the module, or pass the module together with `optimizer=`."
        )


def _weighted_examples(
    X: np.ndarray, y: np.ndarray, sample_weight: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the inputs, targets and weights of all examples with positive weight."""
    if sample_weight is None:
        return X, y, None
    weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    counts = weights > 0
    return X[counts], y[counts], weights[counts]


def _check_numbers(X: np.ndarray) -> None:
    """Require numbers, because the validation of scikit-learn also accepts dates and strings."""
    if X.dtype.kind not in "biuf":
        raise ValueError(
            f"X contains values of type {X.dtype}, but the network takes numbers. Encode "
            "categories and dates as numbers, for example with OneHotEncoder in a "
            "ColumnTransformer."
        )


def _tensor(values: np.ndarray, network: nn.Module) -> Tensor:
    """Convert an array to a tensor with the device and dtype of the network's parameters."""
    parameter = _first_parameter(network)
    return torch.tensor(values, dtype=parameter.dtype, device=parameter.device)


def _first_parameter(network: nn.Module) -> Tensor:
    return next(p for p in network.parameters() if p.is_floating_point())


def _targets(y: np.ndarray, likelihood: str, network: nn.Module) -> Tensor:
    """Convert class indices to integers, and other targets to the network's dtype."""
    if likelihood == "classification":
        # Half precision would round large indices.
        return torch.tensor(y, dtype=torch.long, device=_first_parameter(network).device)
    return _tensor(y, network)


def _warn_of_poor_means(
    residual_deviations: list[float], y: np.ndarray, weights: np.ndarray | None
) -> None:
    """Warn if the network fits a target worse than the mean of the training targets does."""
    deviations = np.sqrt(np.average((y - np.average(y, 0, weights)) ** 2, 0, weights))
    for residual, deviation in zip(residual_deviations, deviations.tolist(), strict=True):
        if residual > deviation > 0:
            warn(
                "The network predicts the training targets worse than their mean does: the root "
                f"mean square error is {residual:.3g}, and the standard deviation of the targets "
                f"is {deviation:.3g}. Standardise the targets "
                "(`TransformedTargetRegressor(..., transformer=StandardScaler())`) and the inputs, "
                "or train for more epochs."
            )


def _residual_deviations(
    network: nn.Module,
    X: np.ndarray,
    y: np.ndarray,
    batch_size: int,
    weights: np.ndarray | None,
) -> list[float]:
    """Return the weighted root mean square of the training residuals for each target."""
    with torch.no_grad():
        outputs = torch.cat([network(x) for x in _tensor(X, network).split(batch_size)])
    residuals = outputs.double().cpu().numpy().reshape(y.shape) - y
    deviations = np.sqrt(np.average(residuals**2, 0, weights))
    if not deviations.all():
        raise ValueError(
            "The noise cannot be estimated, because all residuals of the network on the training "
            "data are zero. Pass `sigma=`."
        )
    return deviations.tolist()
