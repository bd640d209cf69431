"""Messages for wrong names: misspelt attributes, and the names of other libraries."""

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

EQUIVALENTS = {
    "H": "la.posterior.precision, minus the prior's",
    "backend_kwargs": 'fisher="exact", "mc" or "empirical", and backend=',
    "dict_key_x": "batch=, a function from a batch to (inputs, targets)",
    "dict_key_y": "batch=, a function from a batch to (inputs, targets)",
    "diagonal_output": "la.functional(x, diagonal=True)",
    "enable_backprop": "la.predict(x, differentiable=True)",
    "functional_covariance": "la.functional(x, joint=True)",
    "functional_variance": "la.functional(x), which returns the mean and the covariance",
    "hessian_structure": 'curvature="kfac" for "kron", "full", "diag" or "lowrank"',
    "last_layer_name": "params=[names of its parameters]",
    "link_approx": 'link="probit", "bridge", "pairwise" or "exact", or samples= for "mc"',
    "load_state_dict": "Laplace.load(path, model)",
    "log_det_posterior_precision": "linalg.logdet(la.posterior.precision)",
    "log_det_ratio": "linalg.logdet(la.posterior.precision), minus the prior's",
    "log_likelihood": 'la.evaluate(train_loader, method="map")["nll"], times -la.num_data',
    "log_prob": "la.posterior.log_prob(parameters)",
    "n_data": "la.num_data",
    "n_params": "len(la.mean)",
    "n_samples": "samples=",
    "n_subset": 'curvature="gp" and inducing=',
    "optimize_prior_precision": "la.tune(validation_loader) or la.tune_evidence()",
    "override": "la.update(loader) to add data to a fit",
    "posterior_covariance": "la.posterior.covariance",
    "posterior_precision": "la.posterior.precision",
    "posterior_scale": "la.posterior.scale",
    "posterior_variance": "linalg.diagonal(la.posterior.covariance)",
    "pred_type": 'method="glm" or "nn"',
    "functional_samples": "la.sample_outputs(x, n)",
    "predictive_samples": "la.sample_outputs(x, n), or la.predict(x).sample((n,))",
    "prior_structure": 'la.tune_evidence(per="block") for "layerwise"',
    "progress_bar": "progress=",
    "sigma_noise": "sigma= of Laplace, or la.sigma",
    "state_dict": "la.save(path)",
    "subnetwork_indices": "params=, names or a predicate (name, parameter) -> bool",
    "subset_of_weights": 'params="all" (the default), "last_layer", names or a predicate',
}
"""The arguments, methods and attributes of laplace-torch, and their equivalents here."""
OTHER_NAMES = {
    "class_weight": "likelihood=Categorical(class_weights=...)",
    "class_weights": "likelihood=Categorical(class_weights=...)",
    "cuda": "la.save(path), then model.cuda(), then Laplace.load(path, model)",
    "interval": "la.marginals(x).icdf(levels) for a regression, or Conformal(la)",
    "predict_interval": "la.marginals(x).icdf(levels) for a regression, or Conformal(la)",
    "predict_proba": "la.predict(x).probs",
    "return_std": "la.predict(x).stddev",
    "sample_weight": "batches (x, y, weights)",
    "to": "la.save(path), then model.to(device), then Laplace.load(path, model)",
}
"""Names that users may expect from other classes, such as torch's modules, and equivalents."""
SETTABLE = ("prior_precision", "prior_mean", "temperature", "link", "sigma")
"""The attributes of `Laplace` that can be set without a new fit."""
CURVATURES = {"kron": "kfac"}
"""The values of `hessian_structure=` that have a different name as `curvature=`."""


def explain_laplace_torch_name(name: str) -> str:
    """Return a message that states what to use instead of a name from laplace-torch."""
    return f"{name} is a name of laplace-torch. Use {EQUIVALENTS[name]}."


EXPLANATIONS = {
    **{name: explain_laplace_torch_name(name) for name in EQUIVALENTS},
    **{name: f"There is no {name}. Use {advice}." for name, advice in OTHER_NAMES.items()},
}
"""The messages for wrong names."""


def explains_arguments(
    explanations: Mapping[str, str],
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Return a decorator that adds an explanation to the error for an unknown argument.

    Args:
        explanations: The messages, keyed by argument name. Names that the function accepts are
            ignored.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        own_names = inspect.signature(function).parameters

        @wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            for name in kwargs:
                if name in explanations and name not in own_names:
                    raise TypeError(
                        f"{function.__qualname__}() got an unexpected keyword argument {name!r}: "
                        f"{explanations[name]}"
                    )
            return function(*args, **kwargs)

        return call

    return decorate


explains_wrong_arguments = explains_arguments(EXPLANATIONS)
"""Explain, in the error for an unknown argument, which argument replaces it."""


def check_settable(cls: type, name: str) -> None:
    """Reject a name that is probably a misspelt attribute or a name from laplace-torch.

    All other names, such as attributes of a subclass, are accepted.

    Raises:
        AttributeError: If the class has no such attribute, and the name is a likely mistake.
    """
    if name.startswith("_") or hasattr(cls, name):
        return
    if name in EQUIVALENTS:
        raise AttributeError(explain_laplace_torch_name(name))
    if name in SETTABLE:
        raise AttributeError(
            f"{cls.__name__} has no attribute {name!r}. Set `{name}` of each of its `members`."
        )
    check_spelling(cls, name, SETTABLE)


def check_spelling(cls: type, name: str, settable: Collection[str]) -> None:
    """Reject a name that resembles the name of an attribute that can be set.

    Raises:
        AttributeError: If the name is probably misspelt.
    """
    if name in settable or hasattr(cls, name):
        return
    for meant in difflib.get_close_matches(name, settable, n=1, cutoff=0.75):
        raise AttributeError(f"{cls.__name__} has no attribute {name!r}. Did you mean {meant!r}?")
