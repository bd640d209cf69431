"""A network's loss on a data set, with its gradient and curvature."""

from collections.abc import Callable, Iterable

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from tqdm import tqdm

from laplace_debias.curvature.losses import Loss, output_loss
from laplace_debias.curvature.network.batches import Batches, BatchHook
from laplace_debias.curvature.network.network import Network
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.curvature.network.repeatable_data import Data
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.curvature.operators import GGN, Hessian
from laplace_debias.linalg.checks import check_choice
from laplace_debias.system.ranks import current, together

_CURVATURES: dict[str, Callable[..., GGN | Hessian]] = {"ggn": GGN, "hessian": Hessian}


@together("a quadratic")
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
) -> tuple[Tensor, Tensor, GGN | Hessian, Tensor, Tensor]:
    """The loss, its gradient and its curvature; arguments as `Quadratic.from_data` takes them.

    Then a copy of the parameters, which may be trained on, and the entries that β acts on.
    """
    check_choice(curvature, _CURVATURES, "curvature")
    matrix = _CURVATURES[curvature](
        model, loss, data, params, num_data, reduction=reduction, batch=batch
    )
    network, ranks = Network(model, params, data, batch), current()
    batches = Data(network.stream(data), network.device, num_data, ranks)
    output = output_loss(loss, reduction, network.returns_vector(batches.batch(0).inputs))
    parameters = tuple(p.detach().requires_grad_() for p in network.parameters)
    value = torch.zeros((), dtype=network.dtype, device=network.device)
    gradient = torch.zeros(network.num_parameters, dtype=network.dtype, device=network.device)
    count = 0.0
    for part in tqdm(batches, desc="loss", unit="batch", leave=False, disable=not progress):
        inputs, targets = part.inputs, part.targets
        with torch.enable_grad():
            outputs = network.outputs(parameters, inputs)
            check_outputs(outputs, least=0)
            output.check(outputs, targets)
            total = output.value(outputs, output.labels(targets, outputs.ndim))
        gradients = torch.autograd.grad(total, parameters, materialize_grads=True)
        value += total.detach()
        gradient += network.join(gradients, batched=False)
        count += output.count(targets)
    ranks.sum([value, gradient])
    count = sum(ranks.exchange(float(count)))
    scale = 1 / count if output.reduction == "mean" else 1.0
    position = network.join([p.clone() for p in network.parameters], batched=False)
    decayed = decay_mask(network.parameters)
    return value * scale, gradient * scale, matrix, position, decayed


def decay_mask(parameters: Iterable[Tensor]) -> Bool[Tensor, " dim"]:
    """For every entry of the parameters, flattened one behind the other, whether β of Eq. 1 acts.

    It acts on weights, which have more than one dimension. Biases have not, nor have the scales of
    normalisations, which are no weights of a sum.
    """
    return torch.cat([torch.full((p.numel(),), p.dim() > 1, device=p.device) for p in parameters])
