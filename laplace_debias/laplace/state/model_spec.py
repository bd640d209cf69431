"""The specification of a model: its likelihood, and how its batches are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from laplace_debias.curvature.data.batch_forms import BatchHook
from laplace_debias.curvature.data.batch_reader import BatchReader
from laplace_debias.curvature.data.batches import Batches, Stream
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.outputs import classes_last
from laplace_debias.curvature.network.quantised import check_can_be_bayesian
from laplace_debias.curvature.network.shared_copy import shared_copy
from laplace_debias.curvature.network.unwrapping import unwrapped
from laplace_debias.curvature.network.validation import validate_model
from laplace_debias.curvature.network.widening import widened
from laplace_debias.system.checks import check_is, whole


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """The user's model, the likelihood of its outputs, and how batches are read.

    Attributes:
        model: The model as the user passed it, with its wrappers.
        likelihood: p(y | f).
        read_batch: Converts the items that a loader yields to inputs and targets.
        class_dim: The dimension of the outputs that holds the classes; None for the last one.
    """

    model: nn.Module
    likelihood: Likelihood
    read_batch: BatchReader
    class_dim: int | None = None

    @classmethod
    def checked(
        cls,
        model: nn.Module,
        likelihood: Likelihood,
        batch: BatchHook | None,
        class_dim: int | None,
    ) -> "ModelSpec":
        """Check the arguments of `Laplace` before any work is done."""
        check_is(batch, "batch", Callable, type(None))
        if class_dim is not None and whole(class_dim, "class_dim", -(2**53)) == 0:
            raise ValueError(
                "`class_dim=0` is the dimension of the examples. Use class_dim=1 for outputs [B, "
                "C, ...], or class_dim=-1 for outputs [B, ..., C]."
            )
        validate_model(model)
        return cls(model, likelihood, BatchReader(model, batch), class_dim)

    @property
    def plain_model(self) -> nn.Module:
        """The model without wrappers, whose parameters are the user's own tensors."""
        return unwrapped(self.model)

    def first_parameter(self, names: Sequence[str] | None) -> nn.Parameter:
        """Return the first of the named parameters.

        If there are no names, return the first trainable parameter that is not offloaded.

        Raises:
            NotImplementedError: If there are no names, and all trainable parameters are offloaded.
        """
        if names is not None:
            return self.plain_model.get_parameter(names[0])
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        on_device = [parameter for parameter in trainable.values() if not parameter.is_meta]
        if not on_device:
            name, parameter = next(iter(trainable.items()))
            check_can_be_bayesian(name, parameter)  # raises an error, because it is offloaded
        return on_device[0]

    def network(self, names: Sequence[str]) -> nn.Module:
        """Copy the model's modules but share its parameters; the copy's outputs are `[B, ..., C]`.

        The copy computes in single precision if any of the named parameters is in half precision.
        """
        network = widened(shared_copy(self.plain_model), names)
        if self.class_dim is None or self.class_dim == -1:
            return network
        return classes_last(network, self.class_dim)

    def stream(
        self,
        data: Batches,
        device: torch.device,
        generator: torch.Generator | None = None,
        progress: str | None = None,
        *,
        takes_weights: bool = False,
        needs_targets: bool = True,
    ) -> Stream:
        """Read data as batches on a device; see `BatchReader` and `Stream` for the arguments."""
        read = replace(self.read_batch, needs_targets=needs_targets, takes_weights=takes_weights)
        return Stream(data, read, generator, device=device, target_device=device, progress=progress)

    def training_stream(
        self,
        data: Batches,
        device: torch.device,
        generator: torch.Generator | None = None,
        progress: str | None = None,
    ) -> Stream:
        """Read the data of a fit as batches, which may contain example weights.

        Targets are moved to the device if the fit depends on their values. Inputs are not moved
        here but by the fit, because it looks for padding on the CPU.
        """
        return Stream(
            data,
            replace(self.read_batch, takes_weights=True),
            generator,
            target_device=None if self.likelihood.checks_shapes_only else device,
            progress=progress,
        )
