"""Subnetworks: selected entries of parameters as the parameters of a network."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from laplace_debias.curvature.network.selection import (
    ParameterSelection,
    check_parameters,
    select_parameters,
)
from laplace_debias.curvature.network.shared_copy import shared_copy
from laplace_debias.curvature.network.unwrapping import unwrapped
from laplace_debias.system.checks import check_is, whole

EntrySelection = Mapping[str, Bool[Tensor, "..."]] | Tensor | Sequence[int]
"""Masks keyed by parameter name, or indices into the flat vector of all trainable parameters."""


class Subnetwork(nn.Module):
    """A network whose only trainable parameter is the vector of the selected weights.

    `Laplace(Subnetwork(model, entries), curvature="full")` is a posterior over single entries, with
    all other entries fixed. It supports all operations of a posterior. To load a file, use
    `Laplace.load(path, Subnetwork(model, entries))`. The curvature of the entries is one exact
    block, which is computed from the gradients of the full parameters.

    Args:
        model: The trained network. It is not changed: the fixed entries are shared with it, and the
            selected entries are copied.
        entries: A mapping from names of parameters to masks of their shapes, or indices into all
            trainable parameters, flattened in the model's order. `largest_magnitude` and
            `largest_variance` return indices.

    Attributes:
        entries: The selected entries, `[S]`, in the model's order.
        indices: The indices of these entries among all trainable parameters, ascending.

    Raises:
        TypeError: If `entries` is neither masks nor integers.
        ValueError: If no entry is selected, an index is out of range or repeated, a name is unknown
            or frozen, or a mask does not have the shape of its parameter.

    Reference:
        Daxberger, Nalisnick, Allingham, Antorán, Hernández-Lobato. Bayesian deep learning via
        subnetwork inference. ICML, 2021.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias import Laplace
        >>> from laplace_debias.curvature import Subnetwork, largest_magnitude
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
        >>> data = [(torch.randn(64, 4), torch.randint(3, (64,)))]
        >>> subnetwork = Subnetwork(model, largest_magnitude(model, 20))
        >>> la = Laplace(subnetwork, curvature="full").fit(data)
        >>> la.posterior.precision.shape
        (20, 20)
    """

    def __init__(self, model: nn.Module, entries: EntrySelection) -> None:
        super().__init__()
        check_is(model, "model", nn.Module)
        plain = unwrapped(model)
        parameters = _trainable(plain)
        check_parameters(plain, list(parameters))
        indices = _indices(entries, parameters)
        self.network = shared_copy(plain)
        self.entries = nn.Parameter(flattened(parameters).detach()[indices])
        self.register_buffer("indices", indices)
        self._sizes = {name: parameter.numel() for name, parameter in parameters.items()}

    indices: Int[Tensor, " entries"]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network after writing the selected entries into its parameters."""
        state = {}
        start = 0
        for name, size in self._sizes.items():
            is_inside = (self.indices >= start) & (self.indices < start + size)
            # Read the attribute, because within `functional_call` it is a plain tensor, which
            # `get_parameter` rejects.
            fixed = attrgetter(name)(self.network)
            positions = self.indices[is_inside] - start
            values = fixed.flatten().index_put((positions,), self.entries[is_inside])
            state[name] = values.view_as(fixed)
            start += size
        return functional_call(self.network, state, args, kwargs)


def largest_magnitude(
    model: nn.Module, count: int, params: ParameterSelection = "all"
) -> Int[Tensor, " count"]:
    """Return the indices of the entries with the largest absolute values.

    Args:
        model: The network.
        count: The number of entries.
        params: The parameters among which the entries are chosen: `"all"`, `"weights"`, names or a
            predicate.

    Raises:
        ValueError: If `count` is not between 1 and the number of entries, or `params` selects no
            parameter.
    """
    plain = unwrapped(model)
    magnitudes = {name: parameter.detach().abs() for name, parameter in _trainable(plain).items()}
    selected = set(select_parameters(plain, params))
    is_eligible = torch.cat(
        [
            torch.full((magnitude.numel(),), name in selected, device=magnitude.device)
            for name, magnitude in magnitudes.items()
        ]
    )
    whole(count, "count", 1, int(is_eligible.sum()))
    scores = flattened(magnitudes).masked_fill(~is_eligible, -torch.inf)
    return scores.topk(count).indices.sort().values


def largest_variance(
    model: nn.Module, count: int, variances: Float[Tensor, " parameters"]
) -> Int[Tensor, " count"]:
    """Return the indices of the entries with the largest variances.

    Args:
        model: The network.
        count: The number of entries.
        variances: One number for each trainable entry, `[D]`, in the model's order, such as
            `diagonal(la.posterior.covariance).value` of a posterior with `curvature="diag"`, or the
            squared deviations of SWAG.

    Raises:
        ValueError: If `count` is not between 1 and the number of entries, or the number of
            variances differs from the number of entries.
    """
    check_is(variances, "variances", Tensor)
    num_entries = sum(parameter.numel() for parameter in _trainable(unwrapped(model)).values())
    if variances.shape != (num_entries,):
        raise ValueError(
            f"`variances` has shape {tuple(variances.shape)}, but the model has "
            f'{num_entries} trainable entries. Fit with `params="all"`, and pass the '
            "variances of that posterior."
        )
    whole(count, "count", 1, num_entries)
    return variances.topk(count).indices.sort().values


def flattened(parameters: Mapping[str, Tensor]) -> Float[Tensor, " parameters"]:
    """Concatenate the entries of all parameters in the order of the mapping."""
    return torch.cat([parameter.flatten() for parameter in parameters.values()])


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: model.get_parameter(name) for name in select_parameters(model, "all")}


def _indices(entries: EntrySelection, parameters: Mapping[str, Tensor]) -> Int[Tensor, " entries"]:
    """Convert masks, or indices in any order, to ascending indices among all entries."""
    num_entries = sum(parameter.numel() for parameter in parameters.values())
    device = next(iter(parameters.values())).device
    if isinstance(entries, Mapping):
        indices = _complete_mask(entries, parameters).nonzero().flatten()
    else:
        values = torch.as_tensor(entries)
        # The dtype of an empty list is not checked, because torch converts it to floats.
        is_wrong_dtype = values.dtype == torch.bool or values.is_floating_point()
        if values.numel() and is_wrong_dtype:
            raise TypeError(
                f"`entries` has dtype {values.dtype}. Pass indices as integers, or a dict from "
                "names to masks."
            )
        indices = values.flatten().long().sort().values
    if not len(indices):
        raise ValueError("`entries` selects no entry. Select at least one.")
    if indices[0] < 0 or indices[-1] >= num_entries:
        raise ValueError(
            f"`entries` contains indices from {int(indices[0])} to {int(indices[-1])}, but the "
            f"model has {num_entries} trainable entries. Pass indices from 0 to "
            f"{num_entries - 1}."
        )
    if (indices[1:] == indices[:-1]).any():
        raise ValueError("`entries` contains an index twice. Pass each index only once.")
    return indices.to(device)


def _complete_mask(
    masks: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> Bool[Tensor, " parameters"]:
    """Concatenate the masks of all parameters; a parameter without a mask has no selected entry."""
    unknown = sorted(masks.keys() - parameters.keys())
    if unknown:
        raise ValueError(
            f"`entries` contains the names {unknown}, but the model does not have these "
            f"parameters, or they are frozen. Use these names: {list(parameters)}."
        )
    complete = []
    for name, parameter in parameters.items():
        mask = masks.get(name)
        if mask is None:
            mask = torch.zeros(parameter.shape, dtype=torch.bool)
        if mask.dtype != torch.bool:
            raise TypeError(f"The mask of {name!r} is {mask.dtype}. Pass booleans.")
        if mask.shape != parameter.shape:
            raise ValueError(
                f"The mask of {name!r} has shape {tuple(mask.shape)}, but the parameter has "
                f"shape {tuple(parameter.shape)}. Pass a mask of the parameter's shape."
            )
        complete.append(mask.flatten().to(parameter.device))
    return torch.cat(complete)
