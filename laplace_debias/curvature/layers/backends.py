"""Which backend serves a model."""

from collections.abc import Sequence

from torch import nn

from laplace_debias.curvature.layers.backpack import BackpackStream, why_not_backpack
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.stream import Backend, HookStream


def choose_backend(model: nn.Module, name: str, blocks: Sequence[Block] = ()) -> Backend:
    """The backend of a name.

    Args:
        model: The model.
        name: `"backpack"`, `"hooks"`, or `"auto"`: BackPACK where it can, hooks elsewhere.
        blocks: The blocks that are wanted, if they are known.

    Raises:
        ValueError: For an unknown name.
        NotImplementedError: For `"backpack"` with a model that it would get wrong.
    """
    if name == "hooks":
        return HookStream
    if name not in ("auto", "backpack"):
        raise ValueError(f"Unknown backend={name!r}: use 'auto', 'backpack' or 'hooks'.")
    obstacle = why_not_backpack(model)
    outside = [block.name for block in blocks if block.calls]
    if obstacle is None and outside:
        obstacle = f"{outside} belong to no layer that it knows"
    if obstacle is None:
        return BackpackStream
    if name == "auto":
        return HookStream
    raise NotImplementedError(
        f"BackPACK cannot handle this model: {obstacle}. Use backend='hooks' or 'auto'."
    )
