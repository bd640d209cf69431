"""The model of a fitted posterior, and the check that it has not changed since the fit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.network.adapters import AdapterState, adapter_states
from laplace_debias.curvature.network.change_detector import ChangeDetector
from laplace_debias.curvature.network.fingerprints import fingerprint
from laplace_debias.curvature.network.module_snapshot import ModuleSnapshot
from laplace_debias.curvature.network.precision import NARROW, wide
from laplace_debias.curvature.network.unwrapping import without_outer_wrappers
from laplace_debias.laplace.state.model_spec import ModelSpec
from laplace_debias.laplace.state.parameter_blocks import ParameterBlocks
from laplace_debias.laplace.state.prediction_cache import PredictionCache
from laplace_debias.system.checks import check_no_autocast


@dataclass(frozen=True, eq=False)
class FittedModel:
    """A model with the Bayesian parameters of a fit, which must not change after the fit.

    Attributes:
        spec: The model and its likelihood.
        parameters: The Bayesian parameters and their blocks.
        frozen_fingerprint: A checksum for each tensor of the model that is not Bayesian.
        adapters: The state of each module that has PEFT adapters.
        prediction_cache: Working copies of the model that are kept between predictions.
        change_detector: Detects changes of the model.
    """

    spec: ModelSpec
    parameters: ParameterBlocks
    frozen_fingerprint: dict[str, int]
    adapters: dict[str, AdapterState]
    prediction_cache: PredictionCache = field(repr=False)
    change_detector: ChangeDetector = field(repr=False)

    @classmethod
    def record(
        cls, spec: ModelSpec, parameters: ParameterBlocks, *, is_verified: bool
    ) -> "FittedModel":
        """Record a model as it is now.

        Args:
            spec: The model and its likelihood.
            parameters: The Bayesian parameters and their blocks.
            is_verified: Whether the blocks were verified on data with the modules in their current
                state.
        """
        plain = spec.plain_model
        is_plain = plain is without_outer_wrappers(spec.model)
        modules = ModuleSnapshot.of(plain) if is_verified and is_plain else None
        return cls(
            spec=spec,
            parameters=parameters,
            frozen_fingerprint=fingerprint(plain, parameters.names),
            adapters=adapter_states(plain),
            prediction_cache=PredictionCache(modules),
            change_detector=ChangeDetector(modules),
        )

    def network(self) -> nn.Module:
        """Copy the model's modules but share its parameters; see `ModelSpec.network`."""
        return self.spec.network(self.parameters.names)

    def check_unchanged(self, mean: Float[Tensor, " D"]) -> ModuleSnapshot | None:
        """Require that the model has not changed since the fit.

        The Bayesian parameters are compared entry by entry. The other tensors, which can be far
        larger if only the last layer is Bayesian, are checked as described in `ChangeDetector`.

        Args:
            mean: The Bayesian parameters at the fit.

        Returns:
            A snapshot of the current modules, or None if a snapshot could miss changes. It is the
            same object as long as the modules do not change.

        Raises:
            RuntimeError: If the model has moved or changed, if different adapters are active, or
                under autocast.
        """
        check_no_autocast(mean.device)
        model = without_outer_wrappers(self.spec.model)
        snapshot = self.change_detector.unchanged_modules(model, mean)
        if snapshot is not None:
            return snapshot
        plain = self.spec.plain_model
        names = self.parameters.names
        _check_same_adapters(self.adapters, adapter_states(plain))
        parameters = [_parameter(plain, name) for name in names]
        _check_same_values(parameters, mean)
        changed = self.change_detector.changed_tensor(plain, names, self.frozen_fingerprint)
        if changed is not None:
            cause = ""
            if ".base_layer." in changed:
                cause = " (PEFT's `merge_adapter` and `unmerge_adapter` change it by rounding)"
            raise RuntimeError(
                f"{changed} has changed since the fit{cause}, so the posterior is no longer "
                "valid. Fit again."
            )
        if plain is not model:
            return None
        return self.change_detector.remember(plain, parameters, mean)


def _check_same_adapters(
    at_fit: Mapping[str, AdapterState], now: Mapping[str, AdapterState]
) -> None:
    """Require that the model uses the same PEFT adapters as at the fit."""
    for path, state in at_fit.items():
        if path in now and now[path] != state:
            raise RuntimeError(
                f"{path or 'The model'} has {now[path]}, but had {state} at the fit, so the "
                "posterior is no longer valid. Undo the change, or fit again."
            )


def _check_same_values(parameters: list[nn.Parameter], mean: Float[Tensor, " D"]) -> None:
    """Require that parameters have the same device, dtype and values as at the fit."""
    dtype = reduce(torch.promote_types, {wide(parameter.dtype) for parameter in parameters})
    if dtype != mean.dtype:
        remedy = f"Convert it back with model.to({mean.dtype})"
        if torch.finfo(dtype).bits < torch.finfo(mean.dtype).bits:
            remedy = f"The conversion has rounded the parameters. Load them again in {mean.dtype}"
        raise RuntimeError(
            f"The model is now in {dtype}, but was in {mean.dtype} at the fit. {remedy}, or fit "
            "again."
        )
    for parameter in parameters:
        if parameter.device != mean.device:
            raise RuntimeError(
                f"The model is now on {parameter.device}, but was on {mean.device} at the fit. "
                f"Move it back with model.to('{mean.device}'). To use the posterior on "
                f"{parameter.device}, save it with la.save(path), move the model, and load the "
                "posterior with la = Laplace.load(path, model)."
            )
    sizes = [parameter.numel() for parameter in parameters]
    has_changed = sum(sizes) != len(mean)
    if not has_changed:
        for parameter, values in zip(parameters, mean.split(sizes), strict=True):
            has_changed |= not torch.equal(parameter.detach().flatten().to(dtype), values)
    if has_changed:
        cause = ""
        if any(parameter.dtype in NARROW for parameter in parameters):
            cause = " (a conversion to half precision rounds them)"
        raise RuntimeError(
            f"The model's parameters have changed since the fit{cause}, so the posterior is no "
            "longer valid. Fit again."
        )


def _parameter(model: nn.Module, name: str) -> nn.Parameter:
    """Return the Bayesian parameter with a given name."""
    try:
        return model.get_parameter(name)
    except AttributeError as error:
        raise RuntimeError(
            f"The model no longer has the parameter {name}: it has changed since the fit, for "
            "example by pruning, a parametrisation or a new module around a layer. The posterior "
            "is no longer valid. Undo the change, or fit again."
        ) from error
