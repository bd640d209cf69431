"""A network's loss on a data set, with its gradient and as a quadratic."""

import difflib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from tqdm import tqdm

from laplace_debias.curvature.losses import LossFunction, output_loss
from laplace_debias.curvature.matrix_free import GGN, Hessian
from laplace_debias.curvature.matrix_free.data import Batches, Data
from laplace_debias.curvature.matrix_free.network import Network, check_outputs
from laplace_debias.curvature.selection import ParameterSelection
from laplace_debias.quadratic import Quadratic
from laplace_debias.weight_decay import decay_mask

_CURVATURES: dict[str, Callable[..., GGN | Hessian]] = {"ggn": GGN, "hessian": Hessian}


def loss_quadratic(
    model: nn.Module,
    loss: LossFunction,
    data: Batches,
    curvature: str = "ggn",
    params: ParameterSelection = "all",
    weight_decay: float = 0.0,
    decay_biases: bool = False,
    num_data: int | None = None,
    reduction: str | None = None,
    progress: bool = False,
) -> Quadratic:
    """See `Quadratic.from_data`."""
    if curvature not in _CURVATURES:
        nearest = difflib.get_close_matches(str(curvature), _CURVATURES, n=1, cutoff=0)[0]
        raise ValueError(
            f"Unknown curvature {curvature!r}: use 'ggn' or 'hessian' (nearest: {nearest!r})."
        )
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be at least 0 and finite, got {weight_decay}.")
    matrix = _CURVATURES[curvature](model, loss, data, params, num_data, reduction=reduction)
    network = Network(model, params, data)
    batches = Data(data, network.device, network.dtypes, num_data)
    value, gradient = _loss_and_gradient(network, loss, batches, reduction, progress)
    # A copy: the parameters may be trained on, and the quadratic stays where it is.
    position = network.join([p.clone() for p in network.parameters], batched=False)
    quadratic = Quadratic(value, gradient, matrix, position)
    if weight_decay == 0:
        return quadratic
    decayed = None if decay_biases else decay_mask(network.parameters)
    return quadratic.regularized(weight_decay, decayed)


def _loss_and_gradient(
    network: Network, loss: LossFunction, data: Data, reduction: str | None, progress: bool
) -> tuple[Tensor, Tensor]:
    """The loss on the data as one batch, and its gradient `[D]`, in one pass."""
    output = output_loss(loss, reduction, len(data))
    parameters = tuple(p.detach().requires_grad_() for p in network.parameters)
    value = torch.zeros((), dtype=network.dtype, device=network.device)
    gradient = torch.zeros(network.num_parameters, dtype=network.dtype, device=network.device)
    count = 0.0
    for batch in tqdm(data, desc="loss", unit="batch", leave=False, disable=not progress):
        with torch.enable_grad():
            outputs = network.outputs(parameters, batch.inputs)
            check_outputs(outputs)
            output.check(outputs.shape, batch.targets)
            labels = output.labels(batch.targets, batch.first)
            total = output.value(outputs, labels)
        gradients = torch.autograd.grad(total, parameters, materialize_grads=True)
        value += total.detach()
        gradient += network.join(gradients, batched=False)
        count += output.count(batch.targets)
    scale = 1 / count if output.reduction == "mean" else 1.0
    return value * scale, gradient * scale
