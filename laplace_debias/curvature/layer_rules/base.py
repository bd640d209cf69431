"""A curvature block, and the rule by which it is measured at its layer."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from laplace_debias.operators.structures.directions import Directions
from laplace_debias.system.memory import ROOM

# If no layer's rule applies to a parameter, its exact block is dense if it has at most this many
# entries, and diagonal otherwise.
_DENSE_UP_TO = 1024
WIDE = 8192
"""The number of a layer's outputs (or inputs) above which their Kronecker factor is diagonal.

A dense factor for a vocabulary of 50,000 would take 10 GB in single precision.
"""

# Activations are unfolded in slices of at most this many numbers.
_SLICE = 2**22


class Site(NamedTuple):
    """The site of a measurement: a layer, a parameter, or calls that are run again.

    For a parameter that operations add or multiply by, the path is the parameter's name. For calls,
    `paths` are the paths of the modules whose calls read one parameter; these calls are run again
    and differentiated, example by example.
    """

    paths: tuple[str, ...]
    is_call: bool = False

    def __str__(self) -> str:
        return " and ".join(path or "the model" for path in self.paths)


@dataclass(frozen=True, eq=False)
class Block:
    """One curvature block: a layer's weight matrix, bias or scale.

    The name identifies the block within a model: blocks with the same name are equal.

    A convolution's groups of channels share no parameter and no output, so the curvature of its
    weight is itself block-diagonal, with one matrix of the same shape for each group. These
    matrices form a single `Block`, and are computed together.

    Attributes:
        name: The parameter's name, followed by a number in brackets for the query, key or value of
            a packed projection; both names, joined by `+`, if the block has a weight and its bias.
        parameters: The names of the block's parameters in the model: one name, or the names of a
            weight and its bias.
        layer: The path of the layer that yields the block's inputs and output gradients.
        rule: The rule of the layer's type.
        shape: The shape of one group's matrix, `(d_out, d_in)`; d_in is 1 for the block of a
            vector.
        kind: The kind of parameters, by which prior precisions can be grouped: the kind of the
            rule's weights, or `"bias"`.
        group: The index of the query, key or value in a packed projection.
        sharing: `"expand"` or `"reduce"`, for a weight.
        num_groups: The number of groups of a convolution's weight.
        calls: For a parameter that no layer's rule measures, the paths of the modules whose calls
            read it; empty if it is measured where the forward pass multiplies by it or adds it,
            entry by entry.
        rank: The number of directions of each factor that are kept. None keeps all directions.
        is_vector: Whether the parameter is treated as a vector, such as a bias. G is then its exact
            curvature, and A is 1.
        is_one_hot: Whether activations are unit vectors, given by indices, as for an embedding. A
            is then diagonal.
    """

    name: str
    parameters: tuple[str, ...]
    layer: str
    rule: "LayerRule"
    shape: tuple[int, int]
    kind: str
    group: int = 0
    sharing: str = "expand"
    num_groups: int = 1
    calls: tuple[str, ...] = ()
    rank: int | None = None
    is_vector: bool = False
    is_one_hot: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Block) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    @cached_property
    def size(self) -> int:
        """The number of parameters in the block."""
        d_out, d_in = self.shape
        return self.num_groups * d_out * d_in

    @cached_property
    def site(self) -> Site:
        """The site where the block is measured."""
        if self.calls:
            return Site(self.calls, is_call=True)
        return Site((self.name if self.rule.is_generic else self.layer,))

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The leading dimension of each tensor with an entry per group; `()` for one group."""
        return () if self.num_groups == 1 else (self.num_groups,)

    @cached_property
    def is_joint(self) -> bool:
        """Whether the bias is the weight matrix's last column."""
        return len(self.parameters) == 2

    @cached_property
    def most_rows(self) -> int | None:
        """The largest number of rows of a streamed factor; more are compressed to half as many."""
        return None if self.rank is None else 4 * self.rank

    @cached_property
    def is_streamed(self) -> tuple[bool, bool]:
        """Whether G, and whether A, is so much wider than `rank` that no matrix is formed."""
        if self.most_rows is None or self.groups or self.rule.is_generic:
            return False, False
        d_out, d_in = self.shape
        wide = 2 * self.most_rows
        return d_out >= wide, d_in >= wide and not self.is_one_hot

    @cached_property
    def has_diagonal_G(self) -> bool:  # noqa: N802 (the name of the factor)
        """Whether only the diagonal of G is kept, because G is wide or a large exact block."""
        if self.rule.is_generic:
            return self.size > _DENSE_UP_TO
        return self.shape[0] > WIDE and not self.groups and not self.is_streamed[0]

    @cached_property
    def has_diagonal_A(self) -> bool:  # noqa: N802 (the name of the factor)
        """Whether A is a vector, because it is diagonal or because only its diagonal is kept."""
        if self.is_one_hot:
            return True
        return self.shape[1] > WIDE and not self.groups and not self.is_streamed[1]

    @cached_property
    def factor_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of G and A; the shape of A is `()` for the block of a vector."""
        d_out, d_in = self.shape
        G = (d_out,) if self.has_diagonal_G else (*self.groups, d_out, d_out)
        A: tuple[int, ...] = (*self.groups, d_in, d_in)
        if self.is_vector:
            A = ()
        elif self.has_diagonal_A:
            A = (d_in,)
        return G, A


ModuleTypes = tuple[type[nn.Module] | str, ...]
# The arguments x and g of the methods of a rule: inputs of a layer, and gradients at its outputs,
# with one column per cotangent.
LayerInputs = Shaped[Tensor, "batch *input"]
OutputGradients = Float[Tensor, "columns batch *output"]


class LayerRule:
    r"""The rule by which the curvature of one layer type is measured.

    The defaults are for a layer with a weight matrix W, and optionally a bias b. The output at each
    position t is $W a_t + b$, and the gradient of the weight along one cotangent is
    $\sum_t g_t a_t^\top$. A subclass defines `module_types` and `kind`, and overrides the methods
    that differ. The shapes of their arguments x and g are `LayerInputs` and `OutputGradients`.

    The argument x is the first argument of the layer's call. If the rows $a_t$ depend on several
    arguments, `prepare` adds a layer to which the module passes the rows, and `blocks` names this
    layer; see `attention.py`.

    Attributes:
        module_types: The layer types, as classes or, to avoid an import, as names that include the
            module. The rule also applies to subclasses without a rule of their own.
        kind: The kind of the weights, such as `"linear"`.
        weight_name: The name of the weight in the layer.
        bias_name: The name of the bias in the layer.
        is_generic: Whether parameters are measured at operations or calls, rather than at a layer.
        is_linear: Whether the outputs are linear in the layer's input, with features in the last
            dimension.
        is_one_hot: Whether activations are unit vectors, because inputs are indices that are looked
            up. All examples may share a single input.
        is_entrywise: Whether the layer multiplies by its parameters, or adds them, entry by entry.
            If the rule does not hold for a parameter, such operations are looked for.
        is_recurrent: Whether the layer loops over time steps.
        only_rescales: Whether the layer only rescales its input, and so does not count as the last
            layer.
        can_be_joint: Whether weight and bias can form one block.
        channels_first: Whether outputs are `[B, channels, ...]`; if not, `[B, ..., features]`.
        made_layers: Names of the layers that `prepare` adds.
    """

    module_types: ClassVar[ModuleTypes] = ()
    kind: ClassVar[str] = "other"
    weight_name: ClassVar[str] = "weight"
    bias_name: ClassVar[str] = "bias"
    is_generic: ClassVar[bool] = False
    is_linear: ClassVar[bool] = False
    is_one_hot: ClassVar[bool] = False
    is_entrywise: ClassVar[bool] = False
    is_recurrent: ClassVar[bool] = False
    only_rescales: ClassVar[bool] = False
    can_be_joint: ClassVar[bool] = True
    channels_first: ClassVar[bool] = False
    made_layers: ClassVar[tuple[str, ...]] = ()

    # Blocks and the order of their entries.

    def owns(self, layer: nn.Module, key: str) -> bool:
        """Return whether the rule applies to the parameter with the given name in the layer."""
        return key in (self.weight_name, self.bias_name)

    def blocks(
        self, layer: nn.Module, path: str, key: str, sharing: str, joint: bool
    ) -> list[Block]:
        """Make the blocks of a parameter.

        Args:
            layer: The layer.
            path: The layer's path in the model.
            key: The parameter's name in the layer.
            sharing: How positions share the weight, `"expand"` or `"reduce"`.
            joint: Whether the bias becomes the weight matrix's last column.
        """
        parameter = layer.get_parameter(key)
        name = _join(path, key)
        if parameter.ndim == 1:
            return [self.vector_block(name, path, parameter.numel(), "bias")]
        # The tensor has no values, because only its shape matters.
        matrices = self.matrices(layer, torch.empty(parameter.shape, device="meta"))
        *groups, d_out, d_in = matrices.shape
        parameters: tuple[str, ...] = (name,)
        if joint:
            parameters = name, _join(path, self.bias_name)
            d_in += 1
        block = Block(
            name="+".join(parameters),
            parameters=parameters,
            layer=path,
            rule=self,
            shape=(d_out, d_in),
            kind=self.kind,
            sharing=sharing,
            num_groups=math.prod(groups),
            is_one_hot=self.is_one_hot,
        )
        return [block]

    def vector_block(
        self, name: str, path: str, size: int, kind: str, calls: tuple[str, ...] = ()
    ) -> Block:
        """Make the exact block of a parameter that is treated as a vector."""
        return Block(
            name=name,
            parameters=(name,),
            layer=path,
            rule=self,
            shape=(size, 1),
            kind=kind,
            calls=calls,
            is_vector=True,
        )

    def matrices(
        self, layer: nn.Module, weight: Shaped[Tensor, "*weight"]
    ) -> Shaped[Tensor, "*groups d_out d_in"]:
        """Reshape the weight, or a tensor of the same shape, to the block's matrices.

        The matrices are `[d_out, d_in]` or, for several groups, `[groups, d_out, d_in]`.
        """
        return weight.flatten(1)

    def entries(
        self, layer: nn.Module, block: Block, values: Sequence[Tensor]
    ) -> Shaped[Tensor, "*groups d_out d_in"]:
        """Arrange the values of a block's parameters as the block's entries.

        Args:
            layer: The layer that has the parameters.
            block: The block.
            values: For each of the block's parameters, a tensor of the same shape.
        """
        if block.is_vector and not block.groups:
            return values[0].flatten().unsqueeze(-1)
        matrices = self.matrices(layer, values[0])
        if block.is_joint:
            last = values[1].unflatten(0, (*block.groups, -1)).unsqueeze(-1)
            matrices = torch.cat([matrices, last], dim=-1)
        return matrices.reshape(*block.groups, *block.shape)

    # Activations and output gradients.

    def unfold(self, layer: nn.Module, x: LayerInputs) -> Float[Tensor, "batch positions features"]:
        """Reshape inputs to the rows that the weight multiplies, group by group.

        T is the product of all dimensions between the first and the last.
        """
        return x.reshape(x.shape[0], -1, x.shape[-1])

    def num_positions(self, layer: nn.Module, x: LayerInputs) -> int:
        """Count the rows of `unfold` for one example, T."""
        return x.shape[1:-1].numel()

    def unfolded_size(self, layer: nn.Module, block: Block, x: LayerInputs) -> int:
        """Return an upper bound on the number of entries in one example's rows of `unfold`."""
        return x[0].numel()

    def activations(
        self, layer: nn.Module, block: Block, x: LayerInputs
    ) -> Float[Tensor, "batch positions *groups d_in"]:
        """Compute the rows that the weight multiplies, followed by a 1 in a joint block."""
        rows = self.unfold(layer, x).unflatten(2, (*block.groups, -1))
        return F.pad(rows, (0, 1), value=1.0) if block.is_joint else rows

    def activation_rows(
        self, layer: nn.Module, block: Block, x: LayerInputs
    ) -> Float[Tensor, "n *groups d_in"]:
        """Compute the activations of all examples and positions as rows of any memory layout."""
        return self.activations(layer, block, x).flatten(0, 1)

    def activation_indices(
        self, layer: nn.Module, x: LayerInputs
    ) -> Int[Tensor, "batch positions"]:
        """Return the indices of the ones in one-hot activations."""
        return x.reshape(x.shape[0], -1)

    def padding(self, layer: nn.Module, x: LayerInputs) -> Bool[Tensor, "batch positions"] | None:
        """Return a mask of the positions whose inputs are padding, or None if there are none."""
        return None

    def output_gradients(
        self, layer: nn.Module, block: Block, x: LayerInputs, g: OutputGradients
    ) -> Float[Tensor, "columns batch *groups d_out positions"]:
        """Reshape the gradients at the layer's output to columns.

        A depthwise kernel has one output channel per group; a bias has the channels of all groups.
        """
        if not self.channels_first:
            return g.reshape(*g.shape[:2], -1, block.shape[0]).mT
        columns = g.flatten(3) if g.ndim > 3 else g.unsqueeze(-1)
        return columns.unflatten(2, (*block.groups, -1))

    def nonzero_positions(
        self, g: Float[Tensor, "batch *output"]
    ) -> Bool[Tensor, "batch positions"]:
        """Find the positions where one cotangent's gradients at the output do not vanish."""
        if g.ndim == 2:
            # The outputs have one position per example.
            return (g != 0).any(1, keepdim=True)
        channel_dim = 1 if self.channels_first else -1
        return (g != 0).any(channel_dim).flatten(1)

    def jacobian_rows(
        self, layer: nn.Module, block: Block, x: LayerInputs, g: OutputGradients
    ) -> Float[Tensor, "columns batch *groups d_out"]:
        """Compute the Jacobian rows of an exact block for one call; for a bias, `Σ_t g_t`."""
        return self.output_gradients(layer, block, x, g).sum(-1)

    def slices(
        self, layer: nn.Module, block: Block, x: LayerInputs, extra: int = 0
    ) -> Iterator[slice]:
        """Yield ranges of examples whose unfolded activations stay below a fixed size.

        The caller computes `extra` numbers for each example, in addition to the activations.
        """
        numbers = self.unfolded_size(layer, block, x) + extra
        step = max(1, _SLICE * ROOM[x.device.type] // max(1, numbers))
        for start in range(0, x.shape[0], step):
            yield slice(start, min(start + step, x.shape[0]))

    # Methods that compute the same numbers faster.

    def summed_products(
        self, layer: nn.Module, block: Block, x: LayerInputs, g: OutputGradients
    ) -> Float[Tensor, "batch rows d_in"] | None:
        """Compute `Σ_t g_t a_tᵀ` of each example, with the columns stacked.

        The result is None if products of `output_gradients` and `activations` are as fast.
        """
        return None

    def weight_gradients(
        self, layer: nn.Module, block: Block, x: LayerInputs, g: OutputGradients
    ) -> Float[Tensor, "columns *groups d_out d_in"]:
        """Compute `Σ_n Σ_t g_t a_tᵀ` of each column."""
        total = g.new_zeros(len(g), *block.groups, *block.shape)
        for examples in self.slices(layer, block, x):
            sliced_x = x[examples]
            a = self.activations(layer, block, sliced_x).flatten(0, 1)  # [b·T, *groups, d_in]
            columns = self.output_gradients(layer, block, sliced_x, g[:, examples])
            rows = columns.movedim(1, -2).flatten(-2)  # [K, *groups, d_out, b·T]
            total += rows @ a.movedim(0, -2)
        return total

    def activations_along(
        self, layer: nn.Module, block: Block, x: LayerInputs, directions: Directions
    ) -> Float[Tensor, "batch positions *groups coordinates"]:
        """Compute the coordinates of activations along directions."""
        return directions.coordinates(self.activations(layer, block, x))

    def second_moments(
        self, layer: nn.Module, block: Block, inputs: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """Compute `Σ_n Σ_t a aᵀ` of each call without its rows; return None if rows are faster."""
        return None

    # The forward pass.

    def prepare(self, layer: nn.Module) -> None:
        """Make a layer of a working copy ready for hooks at its calls.

        A layer that is added here is used only while it has a hook. Otherwise the outputs must be
        computed from the original parameters, because the blocks are compared with gradients with
        respect to these.
        """

    def use_dense_gradients(self, layer: nn.Module) -> None:
        """Make the gradients of a working copy's parameters plain sums over the calls."""

    def inner_layer(self, layer: nn.Module) -> nn.Module | None:
        """Return the inner layer that receives the outputs that the rule describes, or None."""
        return None

    def has_sequence(self, layer: nn.Module) -> bool:
        """Return whether the positions of the outputs form a sequence, each with its own input."""
        return True

    def has_plain_forward(self, layer: nn.Module) -> bool:
        """Return whether the layer has the forward pass of its layer type, not its own override."""
        types = [kind for kind in self.module_types if isinstance(kind, type)]
        return any(type(layer).forward is kind.forward for kind in types)

    def differentiates_one_by_one(self, layer: nn.Module) -> bool:
        """Return whether computing large output gradients is faster for one cotangent at a time."""
        return False

    def backpack_derivatives(self, layer: nn.Module) -> str | None:
        """Return the class with which BackPACK pushes cotangents through the layer, or None.

        The class is named as `module.Class` below `backpack.core.derivatives`.
        """
        return None

    def problem(self, layer: nn.Module) -> str | None:
        """Return why an example's outputs depend on other examples, and what to do; else None."""
        return None


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
