"""A network's loss on a data set, and the gradient and curvature of the loss."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from tqdm import tqdm

from laplace_debias.curvature.data.batch_forms import BatchHook
from laplace_debias.curvature.data.batches import Batches
from laplace_debias.curvature.data.repeatable_data import RepeatableBatches
from laplace_debias.curvature.losses import Loss, output_loss
from laplace_debias.curvature.losses.torch_losses import check_depends_on_outputs_only
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.curvature.network.quantised import is_never_copied
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.curvature.network.shared_copy import shared_copy
from laplace_debias.curvature.network.unwrapping import unwrapped
from laplace_debias.curvature.operators import GGN, Hessian
from laplace_debias.curvature.operators.network import Network
from laplace_debias.linalg.checks import check_choice
from laplace_debias.system.gathering import is_sharded
from laplace_debias.system.ranks import collective, process_group

_CURVATURES: dict[str, Callable[..., GGN | Hessian]] = {"ggn": GGN, "hessian": Hessian}


@dataclass(frozen=True, eq=False)
class Objective:
    """A loss with its derivatives at the current parameters, and a copy of these parameters.

    Attributes:
        value: The loss.
        gradient: The gradient of the loss, `[D]`.
        matrix: The curvature of the loss, `[D, D]`.
        position: The parameters, `[D]`.
        decayed: Mask of the entries that weight decay acts on, `[D]`; see `decay_mask`.
    """

    value: Float[Tensor, ""]
    gradient: Float[Tensor, " dim"]
    matrix: GGN | Hessian
    position: Float[Tensor, " dim"]
    decayed: Bool[Tensor, " dim"]


@collective("a quadratic")
def objective(
    model: nn.Module,
    loss: Loss,
    data: Batches,
    curvature: str,
    params: ParameterSelection,
    num_data: int | None,
    reduction: str | None,
    progress: bool,
    batch: BatchHook | None,
) -> Objective:
    """Compute a loss, its gradient and its curvature; see `Quadratic.from_data`."""
    check_choice(curvature, _CURVATURES, "curvature")
    network = Network(model, params, data, batch)
    matrix = _CURVATURES[curvature](
        _copy_of_values(model),
        loss,
        data,
        network.names,
        num_data=num_data,
        reduction=reduction,
        batch=batch,
    )
    value, gradient = _loss_and_gradient(network, loss, data, num_data, reduction, progress)
    return Objective(
        value=value,
        gradient=gradient,
        matrix=matrix,
        # Copy the parameters, because the model may be trained further.
        position=network.join([p.clone() for p in network.parameters], batched=False),
        decayed=decay_mask(network.parameters),
    )


def _loss_and_gradient(
    network: Network,
    loss: Loss,
    data: Batches,
    num_data: int | None,
    reduction: str | None,
    progress: bool,
) -> tuple[Float[Tensor, ""], Float[Tensor, " dim"]]:
    """Compute the loss and its gradient over all batches of all processes, in one pass."""
    ranks = process_group()
    batches = RepeatableBatches(network.stream(data), network.device, num_data, ranks)
    criterion = output_loss(loss, reduction, network.returns_vector(batches.first().inputs))
    parameters = tuple(p.detach().requires_grad_() for p in network.parameters)
    value = torch.zeros((), dtype=network.dtype, device=network.device)
    gradient = torch.zeros(network.num_parameters, dtype=network.dtype, device=network.device)
    count = 0.0
    progress_bar = tqdm(batches, desc="loss", unit="batch", leave=False, disable=not progress)
    for number, read_batch in enumerate(progress_bar):
        targets = read_batch.targets
        with torch.enable_grad():
            outputs = network.outputs(parameters, read_batch.inputs)
            check_outputs(outputs, least=0)
            criterion.check(outputs, targets)
            labels = criterion.labels(targets, outputs.ndim)
            total = criterion.value(outputs, labels)
        if number == 0:
            check_depends_on_outputs_only(criterion, network.user_parameters, outputs, labels)
        gradients = torch.autograd.grad(total, parameters, materialize_grads=True)
        value += total.detach()
        gradient += network.join(gradients, batched=False)
        count += criterion.count(targets)
    ranks.sum([value, gradient])
    count = sum(ranks.exchange(float(count)))
    scale = 1 / count if criterion.reduction == "mean" else 1.0
    return value * scale, gradient * scale


def _copy_of_values(model: nn.Module) -> nn.Module:
    """Copy a model, because its training may continue; quantised values are shared, not copied."""
    plain = unwrapped(model)
    copied = shared_copy(plain)
    for module, copied_module in zip(plain.modules(), copied.modules(), strict=True):
        copied_module.training = module.training
    for parameter, copied_parameter in zip(plain.parameters(), copied.parameters(), strict=True):
        copied_parameter.requires_grad_(parameter.requires_grad)
        if not (is_never_copied(parameter) or is_sharded(parameter)):
            copied_parameter.data = copied_parameter.detach().clone()
    return copied


def decay_mask(parameters: Iterable[Tensor]) -> Bool[Tensor, " dim"]:
    """Return a mask of the flattened entries that weight decay (β of Eq. 1) acts on.

    These are the entries of weights, which have more than one dimension, but not of biases and
    normalisation scales.
    """
    return torch.cat([torch.full((p.numel(),), p.dim() > 1, device=p.device) for p in parameters])
