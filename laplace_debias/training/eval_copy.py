"""A copy of a network that is being trained, for which the curvature can be computed."""

from torch import nn

from laplace_debias.curvature.network.precision import NARROW
from laplace_debias.curvature.network.shared_copy import shared_copy
from laplace_debias.curvature.network.unwrapping import unwrapped


def eval_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model in eval mode that shares its parameters but has its own buffers.

    Raises:
        TypeError: If the model is not a module.
        NotImplementedError: If trainable parameters are in half precision.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` is a {type(model).__name__}. Pass a torch.nn.Module.")
    plain = unwrapped(model)
    copied = shared_copy(plain)
    trainable = {name for name, p in plain.named_parameters() if p.requires_grad}
    for name, parameter in copied.named_parameters():
        if name in trainable and parameter.dtype in NARROW:
            raise NotImplementedError(
                f"{name} has dtype {parameter.dtype}. The curvature needs the "
                "parameters in float32, but training updates them in a narrower dtype. Keep the "
                "parameters in float32 during training, and run the forward pass inside "
                "torch.autocast."
            )
        parameter.requires_grad_(name in trainable)
    return copied
