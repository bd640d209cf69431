"""Messages for names of laplace-torch that the drop-in module does not provide."""

from laplace_debias.laplace.wrong_names import explains_arguments

_POSTERIOR = "Use Laplace(model, ...)."
_LAST_LAYER = 'Use Laplace(model, ..., subset_of_weights="last_layer").'
_SUBNETWORK = 'Use Laplace(model, ..., subset_of_weights="subnetwork", subnetwork_indices=...).'
_FUNCTION_SPACE = 'Use Laplace(model, ..., hessian_structure="gp", n_subset=...).'
_MAGNITUDE = "Pass subnetwork_indices=largest_magnitude(model, n), from laplace_debias.curvature."
_VARIANCE = (
    "Pass subnetwork_indices=largest_variance(model, n, variances), from laplace_debias.curvature."
)
_NAMES = "Use laplace_debias.Laplace(model, params=names), with the names of the parameters."
_BACKEND = "Pass the backend's name as a string, such as backend={!r}."
_STRING = "Pass a string instead of a member of this enumeration, such as {!r}."
_REMOVE = "There is no such option. Leave it out."
_SEARCH = "A bounded search, which needs no initial value and no steps, replaces it. Leave it out."

ABSENT_CLASSES = {
    "BaseLaplace": _POSTERIOR,
    "ParametricLaplace": _POSTERIOR,
    "LLLaplace": _LAST_LAYER,
    "SubnetLaplace": _SUBNETWORK,
    "FullSubnetLaplace": _SUBNETWORK,
    "DiagSubnetLaplace": _SUBNETWORK,
    "BaseFunctionalLaplace": _FUNCTION_SPACE,
    "FunctionalLaplace": _FUNCTION_SPACE,
    "FunctionalLLLaplace": _FUNCTION_SPACE,
    "ELLA": _FUNCTION_SPACE,
    "VaLLA": _FUNCTION_SPACE,
    "LargestMagnitudeSubnetMask": _MAGNITUDE,
    "LargestVarianceDiagLaplaceSubnetMask": _VARIANCE,
    "LargestVarianceSWAGSubnetMask": _VARIANCE,
    "ParamNameSubnetMask": _NAMES,
    "ModuleNameSubnetMask": _NAMES,
    "LastLayerSubnetMask": _LAST_LAYER,
    "AsdlGGN": _BACKEND.format("AsdlGGN"),
    "AsdlEF": _BACKEND.format("AsdlEF"),
    "BackPackGGN": _BACKEND.format("BackPackGGN"),
    "BackPackEF": _BACKEND.format("BackPackEF"),
    "CurvlinopsGGN": _BACKEND.format("CurvlinopsGGN"),
    "CurvlinopsEF": _BACKEND.format("CurvlinopsEF"),
    "FunctionalApproximation": _STRING.format("gp"),
    "HessianStructure": _STRING.format("kron"),
    "Likelihood": _STRING.format("classification"),
    "LinkApprox": _STRING.format("probit"),
    "PredType": _STRING.format("glm"),
    "PriorStructure": _STRING.format("scalar"),
    "SubsetOfWeights": _STRING.format("last_layer"),
    "TuningMethod": _STRING.format("marglik"),
}
"""The classes of laplace-torch that are missing here, and what to use instead."""

ABSENT_ATTRIBUTES = {
    "H": "Use la.posterior.posterior.curvature, the operator of the mean loss.",
    "H_facs": "Use la.posterior.posterior.curvature, the operator of the mean loss.",
    "functional_variance_fast": "Use la(x, diagonal_output=True) for a regression, or "
    "la.posterior.functional(x, diagonal=True).",
    "backend": "There are no exchangeable backends. Use la.posterior.",
    "loss": "Use -la.log_likelihood.",
    "n_outputs": "Use la(x).shape[-1].",
    "n_params_subnet": "Use la.n_params.",
}
"""The attributes of laplace-torch's classes that are missing here, and what to use instead."""

SETTABLE = ("prior_precision", "prior_mean", "sigma_noise", "temperature", "enable_backprop")
"""The attributes that can be set."""

ABSENT_ARGUMENTS = {
    "asdl_fisher_kwargs": _REMOVE,
    "damping": _REMOVE,
    "feature_reduction": _REMOVE,
    "fitting": _REMOVE,
    "init_prior_prec": _SEARCH,
    "log_prior_prec_base": "The base of the grid is 10. Leave it out.",
    "loss": "The grid search minimises the NLL. Leave it out.",
    "lr": _SEARCH,
    "n_samples": "The grid search needs no samples. Leave it out.",
    "n_steps": _SEARCH,
    "progress_bar": "There is no progress bar. Leave it out.",
    "seed": "The choice of examples depends only on the order of the data. Leave it out.",
    "verbose": "The result is la.prior_precision. Leave it out.",
}
"""The arguments of laplace-torch's functions that are missing here, and what to do instead."""

explains_absent_arguments = explains_arguments(ABSENT_ARGUMENTS)
"""Explain what to do instead in the error for a missing argument of laplace-torch."""
