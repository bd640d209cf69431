"""Low-rank adaptation of the linear layers of any network."""

import copy
import difflib
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from jaxtyping import Float
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)
Target = str | Sequence[str] | Callable[[str, nn.Linear], bool]


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trainable product of rank r, `base(x) + (α/r) · B A x`.

    Attributes:
        base: The frozen layer, with weight [d_out, d_in].
        lora_a: A, a linear layer without bias, weight [r, d_in], from He's uniform initialisation.
        lora_b: B, likewise, weight [d_out, r], zero at the start.
        scale: α/r.

    Reference:
        Hu et al. (2022), LoRA: Low-Rank Adaptation of Large Language Models.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        where = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False, **where)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False, **where)
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.lora_a.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """The base layer's output plus the adaptation's."""
        return self.base(x) + self.scale * self.lora_b(self.lora_a(x))


def with_lora(
    model: Model, rank: int, target: Target | None = None, *, alpha: float | None = None
) -> Model:
    """A copy of a model that is frozen but for low-rank additions to its linear layers.

    The copy computes what the model does until it is trained. Its parameters keep their names but
    for those of an adapted layer `path`: `path.base.weight`, `path.base.bias` (frozen),
    `path.lora_a.weight` and `path.lora_b.weight` (trainable). A layer that the model uses at
    several paths is adapted once, for all of them.

    Args:
        model: Any model with `nn.Linear` layers; it is left as it is.
        rank: Rank r of the additions.
        target: Which layers: names (`"qkv"` or `"attention.qkv"`: the last parts of a path), a
            predicate `(path, layer) -> bool`, or all `nn.Linear` by default. Subclasses of
            `nn.Linear`, such as the output projection of `nn.MultiheadAttention` whose weight is
            used without calling the layer, are never adapted.
        alpha: α; the rank by default, so that the additions are not scaled.

    Returns:
        The adapted copy, on the model's device, in its dtype and mode.

    Raises:
        ValueError: If the rank or α is not positive, a name or the predicate fits no layer, or the
            model has no linear layer.

    Reference:
        Hu et al. (2022), LoRA: Low-Rank Adaptation of Large Language Models.
    """
    alpha = float(rank) if alpha is None else alpha
    if rank < 1 or not 0 < alpha < math.inf:
        raise ValueError(f"rank {rank}, alpha {alpha}; expected positive numbers")
    layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) is nn.Linear
    }
    chosen = _chosen(layers, target)
    if not chosen:
        raise ValueError(
            f"no layer of {type(model).__name__} fits the target; expected some of its nn.Linear "
            f"layers: {list(layers)}"
        )
    if "" in chosen:
        raise ValueError("the model itself is the nn.Linear layer; wrap it in nn.Sequential")
    adapted = copy.deepcopy(model).requires_grad_(False)
    made: dict[nn.Module, LoRALinear] = {}
    for name in chosen:
        parent_name, _, child = name.rpartition(".")
        base = adapted.get_submodule(name)
        # A shared parent has had its layer replaced at another of its paths.
        if isinstance(base, LoRALinear):
            continue
        assert isinstance(base, nn.Linear)
        if base not in made:
            made[base] = LoRALinear(base, rank, alpha).train(base.training)
        setattr(adapted.get_submodule(parent_name), child, made[base])
    return adapted


def _chosen(layers: dict[str, nn.Linear], target: Target | None) -> list[str]:
    """Paths of the layers that a target means."""
    if target is None:
        return list(layers)
    if callable(target):
        return [name for name, layer in layers.items() if target(name, layer)]
    wanted = [target] if isinstance(target, str) else list(target)
    for name in wanted:
        if not any(_fits(path, name) for path in layers):
            leaves = {path.rpartition(".")[2] for path in layers} | set(layers)
            close = difflib.get_close_matches(name, sorted(leaves), n=1, cutoff=0.0)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"no nn.Linear layer is called {name!r}{hint} Expected one of {list(layers)} "
                "or the last parts of one"
            )
    return [path for path in layers if any(_fits(path, name) for name in wanted)]


def _fits(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")
