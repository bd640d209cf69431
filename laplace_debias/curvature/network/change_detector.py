"""Detection of changes in a model since a fit; most of the model is read only once."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from laplace_debias.curvature.network.fingerprints import state_tensors, sum_of_bits
from laplace_debias.curvature.network.frozen_tensors import FrozenTensors
from laplace_debias.curvature.network.module_snapshot import ModuleSnapshot
from laplace_debias.curvature.network.quantised import plain_parts


class ChangeDetector:
    """A detector of changes in a model's state since a fit.

    The first comparison reads the whole model. Later comparisons read the Bayesian parameters, and
    a sample of each other tensor. A copied or unpickled detector starts from the beginning.

    Args:
        modules: A snapshot of the modules at the fit, if there is one.
    """

    def __init__(self, modules: ModuleSnapshot | None = None) -> None:
        self._modules = modules
        self._frozen: FrozenTensors | None = None
        self._mean: Tensor | None = None
        self._parameters: list[tuple[Tensor, Tensor]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return ChangeDetector, ()

    def unchanged_modules(self, model: nn.Module, mean: Tensor) -> ModuleSnapshot | None:
        """Return the modules' snapshot if nothing has changed since `remember` was called.

        Args:
            model: The model.
            mean: The posterior's mean.

        Returns:
            The snapshot, or None if the model has changed or nothing is remembered.
        """
        modules = self._modules
        frozen = self._frozen
        if self._mean is not mean or frozen is None or modules is None:
            return None
        # The snapshot compares the places of all tensors, so only their entries may have changed.
        if not modules.is_current(model) or not frozen.are_unchanged():
            return None
        if not all(parameter.equal(mean_values) for parameter, mean_values in self._parameters):
            return None
        return modules

    def changed_tensor(
        self, model: nn.Module, names: Collection[str], sums: Mapping[str, int]
    ) -> str | None:
        """Return the name of a tensor that has changed, is new or is missing, or None.

        Args:
            model: The model.
            names: The Bayesian parameters, which are not compared.
            sums: The fingerprint of the other tensors.
        """
        tensors = {name: tensor for name, tensor in state_tensors(model) if name not in names}
        parts = [part for tensor in tensors.values() for part in plain_parts(tensor)]
        has_same_names = tensors.keys() == sums.keys()
        if self._frozen is not None and has_same_names and self._frozen.are_current(parts):
            return None
        # The versions are taken before the entries are read, so that the next comparison notices a
        # change in the meantime.
        frozen = FrozenTensors(parts)
        for name, tensor in tensors.items():
            if name not in sums or sum_of_bits(tensor) != sums[name]:
                return name
        for name in sums:
            if name not in tensors:
                return name
        self._frozen = frozen
        return None

    def remember(
        self, model: nn.Module, parameters: Sequence[Tensor], mean: Tensor
    ) -> ModuleSnapshot | None:
        """Remember that a model was found unchanged.

        Args:
            model: The model, whose tensors `changed_tensor` has compared.
            parameters: The Bayesian parameters, whose values are the posterior's mean.
            mean: The posterior's mean.

        Returns:
            A snapshot of the model's modules, or None if their changes cannot be detected. It is
            the same object as long as the modules do not change.
        """
        self._mean = None
        # In half precision, the parameters have to be converted before they are compared.
        if all(parameter.dtype == mean.dtype for parameter in parameters):
            parameter_means = mean.split([parameter.numel() for parameter in parameters])
            self._parameters = [
                (parameter.detach(), mean_values.view(parameter.shape))
                for parameter, mean_values in zip(parameters, parameter_means, strict=True)
            ]
            self._mean = mean
        if self._modules is None or not self._modules.is_current(model):
            self._modules = ModuleSnapshot.of(model)
        return self._modules
