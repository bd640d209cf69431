"""A copy of the user's model that can be hooked, extended and differentiated freely."""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from laplace_debias.curvature.network.quantised import (
    is_plain,
    keep_differentiable,
    quantised_state,
    shared_parameter,
)
from laplace_debias.system.memory import is_out_of_memory


def shared_copy(model: nn.Module) -> nn.Module:
    """Copy a model's module tree while sharing the storage of its parameters.

    Whatever is done to the copy (hooks, attributes, `requires_grad`, gradients, modes) never
    reaches the original, also when an exception cuts the work short; and since the storage is
    shared, the copy costs little memory and is never out of date.

    The copy is in eval mode, and its parameters require no gradient. Gradients of embeddings are
    dense, and not divided by how often a token is in the batch.
    """
    memo: dict[int, object] = {}
    for module in model.modules():
        for kept in vars(module).values():
            if type(kept) in (OrderedDict, dict, set) and not kept:
                # A dozen for every module, of hooks that it does not have: they would take longest.
                memo[id(kept)] = type(kept)()
            for value in kept.values() if type(kept) is dict else (kept,):
                if isinstance(value, Tensor) and not value.is_leaf:
                    # Computed of others, as the weight of a weight norm.
                    memo[id(value)] = value.detach()
    for parameter in model.parameters():
        memo[id(parameter)] = shared_parameter(parameter)
    for buffer in model.buffers():
        # Buffers are small, and some forward passes write to them.
        memo[id(buffer)] = buffer.detach().clone() if is_plain(buffer) else buffer
    for module in model.modules():
        for tensor in quantised_state(module):
            memo[id(tensor)] = tensor
        if hasattr(module, "_hf_hook"):
            # It holds the values of offloaded parameters, which would be copied.
            memo[id(module._hf_hook)] = module._hf_hook
    try:
        twin = copy.deepcopy(model, memo)
    # Whatever a module's attributes raise when they are copied.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise TypeError(
            f"{type(model).__name__} cannot be copied ({error}). Curvature is computed on a copy "
            "so that your model stays untouched: keep non-leaf tensors, locks and open files out "
            "of the module's attributes, or implement `__deepcopy__`."
        ) from error
    for module, copied in zip(model.modules(), twin.modules(), strict=False):
        if isinstance(copied, (nn.Embedding, nn.EmbeddingBag)):
            copied.sparse = copied.scale_grad_by_freq = False
        for name, kept in vars(module).items():
            if type(kept) is dict and not name.startswith("_"):
                for key, value in kept.items():
                    if isinstance(value, Tensor) and not value.is_leaf:
                        # What a module keeps from one pass to the next is computed anew.
                        vars(copied)[name].pop(key, None)
    keep_differentiable(twin)
    return twin.eval()


@contextmanager
def preserve_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undo what a forward pass leaves in modules' attributes, such as what it caches.

    The next one would take it for its own, with the numbers of other examples.
    """
    before = []
    for inner in modules:
        kept = vars(inner).copy()
        for name, value in kept.items():
            if type(value) in (dict, list):
                kept[name] = value.copy()
        before.append((inner, kept))
    try:
        yield
    finally:
        for inner, kept in before:
            inner.__dict__ = kept
