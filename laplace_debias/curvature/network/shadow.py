"""A stand-in for the user's model that can be hooked, extended and differentiated freely.

And fingerprints of a model's tensors, a number for each: has it changed?
"""

import copy
import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from laplace_debias.system.memory import is_out_of_memory

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def shadow(model: nn.Module) -> nn.Module:
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
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    for buffer in model.buffers():
        # Buffers are small, and some forward passes write to them.
        memo[id(buffer)] = buffer.detach().clone()
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
    return twin.eval()


@contextmanager
def kept_as_it_is(modules: Iterable[nn.Module]) -> Iterator[None]:
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


def usable(model: nn.Module) -> nn.Module:
    """The model without wrappers, found to be one that curvature is defined for.

    Its parameters hold numbers, and its outputs are neither random nor those of a whole batch. A
    buffer may hold Inf, as a mask of attention does: if it matters, the outputs are not finite.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{path or 'The model'} is TorchScript (torch.jit.script, torch.jit.trace), whose "
                "layers cannot be looked into: pass the Python module that it was made from, with "
                "the same state_dict."
            )
        # By attributes: to import the classes takes a second.
        if hasattr(module, "unshard") or hasattr(module, "summon_full_params"):
            raise _split(path or "The model")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if hasattr(tensor, "full_tensor"):
            raise _split(name)
        if tensor.is_nested:
            raise NotImplementedError(
                f"{name} is a nested tensor, of which curvature is not computed: hold its parts "
                "as parameters or buffers of their own, in an nn.ParameterList say."
            )
        if tensor.is_meta:
            raise ValueError(
                f"{name} lies on the device 'meta', where it has no values: load the checkpoint "
                "first, for example model.to_empty(device='cpu') and then "
                "model.load_state_dict(...)."
            )
        # Detached: threads that use one parameter under autograd at once can block each other.
        if isinstance(tensor, nn.Parameter) and not tensor.detach().isfinite().all():
            raise ValueError(
                f"{name} holds NaN or Inf: the model has diverged or its checkpoint is damaged."
            )
    plain = unwrapped(model)
    for path, module in plain.named_modules():
        name = f"{path or 'model'} ({type(module).__name__})"
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        # By its module: to import the classes takes long, and torchao is to replace them.
        if ".quantized.dynamic." in type(module).__module__:
            raise ValueError(
                f"{name} is dynamically quantised: it rounds by the largest input of the batch, so "
                "an example's output depends on the others. Use the model as it was before "
                "quantize_dynamic."
            )
        if is_norm and module.running_mean is None:
            raise ValueError(
                f"{name} keeps no running statistics, so an example's output depends on the rest "
                "of its batch, and curvature per example is not defined: train it with "
                "track_running_stats=True."
            )
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        if module.training and (is_norm or is_dropout):
            what = "is active: dropout makes the outputs random"
            if is_norm:
                what = "is in training mode and would mix the examples of a batch"
            raise ValueError(
                f"{name} {what}. Curvature is computed in eval mode: call `model.eval()` first."
            )
    return plain


def _split(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} is split over processes (fully_shard, tensor parallelism), while curvature needs "
        "the whole model on each: build the plain model and load the full state into it, "
        "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True)). If its posterior is too large, take "
        'params="last_layer" or adapters. Processes may share the data.'
    )


def check_no_autocast(device: torch.device) -> None:
    """Refuse to work under autocast, which would round factors and rotations to half precision."""
    if torch.is_autocast_enabled(device.type):
        raise RuntimeError(
            f"torch.autocast({device.type!r}) is on: curvature and predictives are computed in the "
            "model's dtype. Leave the context, or turn it off here with "
            f"torch.autocast({device.type!r}, enabled=False)."
        )


NARROW = (torch.bfloat16, torch.float16)
"""Dtypes in which neither probabilities nor curvature are computed."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which curvature of parameters of a dtype is computed."""
    return torch.float32 if dtype in NARROW else dtype


def widened(network: nn.Module, names: Iterable[str]) -> nn.Module:
    """A `shadow` that computes in single precision if some of its Bayesian parameters are narrower.

    The parameters keep their values, which single precision holds exactly. So curvature, directions
    and predictives are those of the function of these values, without the rounding of every
    activation and gradient to the 8 bits of bfloat16. It takes 4 bytes for each parameter of the
    model, Bayesian or not.
    """
    dtypes = set[torch.dtype]()
    for name in names:
        dtypes.add(network.get_parameter(name).dtype)
    if not dtypes.isdisjoint(NARROW):
        network._apply(_widen)
        network.register_forward_pre_hook(
            lambda _, arguments, named: tree_map_only(Tensor, _widen, (arguments, named)),
            prepend=True,
            with_kwargs=True,
        )
    return network


def coarsest_eps(model: nn.Module) -> float:
    """The relative rounding of the model's coarsest floating-point tensor."""
    coarsest = 0.0
    for x in (*model.parameters(), *model.buffers()):
        if x.is_floating_point():
            coarsest = max(coarsest, torch.finfo(x.dtype).eps)
    return coarsest


def _widen(value: Tensor) -> Tensor:
    return value.to(wide(value.dtype))


def unwrapped(model: nn.Module, seen: dict[int, nn.Module] | None = None) -> nn.Module:
    """The model without what was wrapped around it or around a part of it.

    Its parameters are the user's own tensors, under the names that they have in the plain model. A
    wrapper computes what the model in it computes, but neither hooks nor derivatives of any order
    can be relied on through it. Where parts are wrapped this is a copy of the modules around them,
    which does not see the modes that are set later: ask for it where it is needed, and do not keep
    it. Parts that were `seen` before, by their `id`, are plain already.
    """
    seen = {} if seen is None else seen
    inside: nn.Module | None = model
    while inside is not None:
        model = inside
        # A compiled module by its attribute: to import torch's compiler takes a second.
        inside = model._modules.get("module" if isinstance(model, _PARALLEL) else "_orig_mod")
        if inside is not None and (model._forward_hooks or model._forward_pre_hooks):
            raise ValueError(
                f"The {type(model).__name__} around {type(inside).__name__} has forward hooks, "
                "which would be lost with it: register them on the module inside."
            )
    if id(model) in seen:
        return seen[id(model)]
    plain = model
    for name, child in model._modules.items():
        part = None if child is None else unwrapped(child, seen)
        if part is not child:
            if plain is model:
                plain = copy.copy(model)
                plain.__dict__["_modules"] = model._modules.copy()
            plain._modules[name] = part
    seen[id(model)] = plain
    return plain


def plain_names(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Names as the plain model has them, `0.weight` for `module.0.weight`; unknown ones stay."""
    plain = dict(unwrapped(model).named_parameters())
    own_names = {id(parameter): name for name, parameter in plain.items()}
    parameters = dict(model.named_parameters(remove_duplicate=False)) | plain
    return [own_names.get(id(parameters.get(name)), name) for name in names]


# Integers of as many bytes as an entry; two of eight for a complex one in float64.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def fingerprint(model: nn.Module, without: Collection[str]) -> dict[str, int]:
    """A number for every tensor of the model's state, the same wherever the model lies.

    It is the sum of the entries' bits, taken for integers: exact, so that no device rounds it
    otherwise, and read once. Training, another checkpoint or new statistics of a normalisation
    change it; exchanging entries does not. Buffers that checkpoints do not hold, such as caches
    that a forward pass fills, do not count.
    """
    sums = {}
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and name not in without:
            sums[name] = sum_of_bits(value)
    return sums


def checksum(model: nn.Module) -> str:
    """A text that tells a model's state from another's."""
    return hashlib.sha256(json.dumps(fingerprint(model, ())).encode()).hexdigest()[:16]


def sum_of_bits(tensor: Tensor) -> int:
    """The sum of a tensor's entries, their bits taken for integers."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    kind = _INTEGERS.get(dense.element_size(), torch.int64)
    return int(dense.flatten().contiguous().view(kind).sum(dtype=torch.int64))


# Entries of a tensor that are read: so many, or up to twice as many.
_SAMPLE = 1024


@dataclass
class Watch:
    """Watches what a model holds besides its Bayesian parameters.

    The first time everything is read. A copy, or what comes out of a pickle, begins anew.
    """

    marks: dict[str, tuple[tuple[Any, ...], Tensor]] = field(default_factory=dict, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Watch, ()

    def changed(
        self, model: nn.Module, without: Collection[str], sums: Mapping[str, int]
    ) -> list[str]:
        """Names of what is not as the fingerprint has it, as far as they are found."""
        gone = dict(sums)
        for name, x in model.state_dict().items():
            if not isinstance(x, Tensor) or name in without:
                continue
            if gone.pop(name, None) is None:
                return [name]
            # Where a tensor lies, how often torch has seen it change, and a sample of its entries.
            version = None if x.is_inference() else x._version
            dense = x.detach() if x.layout is torch.strided else x.detach().to_dense()
            place = dense.data_ptr(), version, x.dtype, tuple(x.shape), dense.stride()
            sample = dense.flatten()[:: max(1, x.numel() // _SAMPLE)].contiguous()
            sample = sample.view(_INTEGERS.get(x.element_size(), torch.int64))
            before = self.marks.get(name)
            if before is not None and before[0] == place and before[1].equal(sample):
                continue
            if sum_of_bits(x) != sums[name]:
                return [name]
            self.marks[name] = place, sample.clone()
        return list(gone)
