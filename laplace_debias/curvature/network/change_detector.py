"""Detection of changes in a model since a fit; most of the model is read only once."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from laplace_debias.curvature.network.fingerprints import state_tensors, sum_of_bits
from laplace_debias.curvature.network.frozen_tensors import FrozenTensors
from laplace_debias.curvature.network.module_snapshot import ModuleSnapshot
from laplace_debias.curvature.network.quantised import plain_parts


@dataclass(frozen=True, eq=False)
class _UnchangedModel:
    """A model that was found unchanged.

    Attributes:
        modules: The modules.
        mean: The posterior's mean.
        parameters: The Bayesian parameters, each with the matching part of the mean.
        others: The other tensors.
        frozen: The other tensors as they were when they were read.
    """

    modules: ModuleSnapshot
    mean: Tensor
    parameters: list[tuple[Tensor, Tensor]]
    others: list[Tensor]
    frozen: FrozenTensors

    def is_current(self, model: nn.Module) -> bool:
        """Whether the model is still the same."""
        # The places of all tensors need no further check, because the snapshot compares them.
        if not self.modules.is_current(model) or not self.frozen.are_unchanged(self.others):
            return False
        return all(parameter.equal(values) for parameter, values in self.parameters)


class ChangeDetector:
    """A detector of changes in a model's state since a fit.

    The first comparison reads the whole model. Later comparisons read the Bayesian parameters, and
    a sample of each other tensor. A copied or unpickled detector starts from the beginning.
    """

    def __init__(self) -> None:
        self._frozen: FrozenTensors | None = None
        self._unchanged: _UnchangedModel | None = None

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
        unchanged = self._unchanged
        if unchanged is None or unchanged.mean is not mean or not unchanged.is_current(model):
            return None
        return unchanged.modules

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
        self, model: nn.Module, names: Collection[str], mean: Tensor
    ) -> ModuleSnapshot | None:
        """Remember that a model was found unchanged.

        Args:
            model: The model, whose tensors `changed_tensor` has compared.
            names: The Bayesian parameters, whose values are the posterior's mean.
            mean: The posterior's mean.

        Returns:
            A snapshot of the model's modules, or None if their changes cannot be detected.
        """
        modules = ModuleSnapshot.of(model)
        if modules is None:
            return None
        assert self._frozen is not None
        values = [model.get_parameter(name).detach() for name in names]
        if any(parameter.dtype != mean.dtype for parameter in values):
            # In half precision, the parameters have to be converted before they are compared.
            return modules
        parts = mean.split([parameter.numel() for parameter in values])
        parameters = [
            (parameter, part.view(parameter.shape))
            for parameter, part in zip(values, parts, strict=True)
        ]
        others = [tensor for name, tensor in state_tensors(model) if name not in names]
        self._unchanged = _UnchangedModel(
            modules=modules,
            mean=mean,
            parameters=parameters,
            others=others,
            frozen=self._frozen,
        )
        return modules
