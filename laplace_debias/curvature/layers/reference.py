"""Reference gradients of single examples, computed by automatic differentiation.

Blocks are compared with these gradients. The first two examples of the data may not use all parts
of a model, because in a mixture of experts each example takes its own path. Therefore, further
examples are searched until every parameter affects the outputs of some example, or until the data
end.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.network.calling import call
from laplace_debias.curvature.network.inputs import (
    Inputs,
    example_shapes,
    gather_batches,
    join,
    move,
    num_examples,
    take,
)
from laplace_debias.curvature.network.precision import coarsest_eps
from laplace_debias.curvature.network.shared_copy import preserve_attributes, requiring_grad
from laplace_debias.system.memory import is_out_of_memory
from laplace_debias.system.ranks import process_group

FIRST_EXAMPLES = 16
"""Number of examples of the first batch that are run if two examples do not use all of a model."""
# The number of examples that are run at a time after the first examples.
_AT_ONCE = 128


@dataclass(frozen=True)
class Reference:
    """Gradients of a few examples along one random cotangent, from automatic differentiation.

    Attributes:
        x: The examples.
        outputs: The outputs of the examples, `[B, ...]`.
        cotangent: The cotangent, of the outputs' shape.
        gradients: The gradients `[B, size]` of each parameter that is compared.
        unused: Parameters on which the outputs do not depend through differentiable operations.
        without_gradient: Parameters whose gradient is zero for all examples.
        is_partial: Whether the gradient of some parameter is zero for some example.
        rounding: The rounding error of the norm of a gradient.
        eps: The relative rounding error of one number.
    """

    x: Inputs
    outputs: Tensor
    cotangent: Tensor
    gradients: Mapping[str, Float[Tensor, "batch size"]]
    unused: list[str]
    without_gradient: list[str]
    is_partial: bool
    rounding: float
    eps: float

    @classmethod
    def compute(
        cls,
        network: nn.Module,
        names: Sequence[str],
        x: Inputs,
        compared: Collection[str] | None = None,
    ) -> "Reference":
        """Differentiate the outputs for a few examples with respect to the named parameters.

        `compared` are the parameters whose gradients are kept. None keeps all gradients.
        """
        parameters = [network.get_parameter(name) for name in names]
        by_example = []
        with requiring_grad(parameters):
            outputs = _outputs(network, x)
            cotangent = _random_cotangent(outputs)
            for example in range(len(cotangent)):
                by_example.append(_gradients(outputs, parameters, _only(cotangent, example)))
        kept_gradients: dict[str, Tensor] = {}
        norms_by_parameter = []
        unused = []
        for name, parameter, *gradients in zip(names, parameters, *by_example, strict=True):
            rows = _rows(parameter, gradients)
            norms_by_parameter.append(rows.norm(dim=1))
            if compared is None or name in compared:
                kept_gradients[name] = rows
            if all(gradient is None for gradient in gradients):
                unused.append(name)
        norms = torch.stack(norms_by_parameter)  # [parameters, examples]
        without_gradient = []
        for name, is_zero in zip(names, (norms == 0).all(1).tolist(), strict=True):
            if is_zero:
                without_gradient.append(name)
        # Gradients at the size of rounding errors count as zero, such as the gradient of the keys'
        # bias, which cancels in the softmax.
        eps = coarsest_eps(network)
        rounding = eps**0.5 * float(norms.nan_to_num(0.0, 0.0).max())
        return cls(
            x=x,
            outputs=outputs.detach(),
            cotangent=cotangent,
            gradients=kept_gradients,
            unused=unused,
            without_gradient=without_gradient,
            is_partial=bool((norms == 0).any()),
            rounding=rounding,
            eps=eps,
        )


def _rows(parameter: Tensor, gradients: Sequence[Tensor | None]) -> Float[Tensor, "batch size"]:
    """Flatten a parameter's gradients for each example; None is a gradient of zero."""
    rows = []
    for gradient in gradients:
        if gradient is None:
            rows.append(torch.zeros_like(parameter))
        else:
            rows.append(gradient.to_dense())
    return torch.stack(rows).reshape(len(rows), -1)


class _Search:
    """A search for examples whose outputs depend on parameters that earlier examples do not use.

    Attributes:
        unused: Parameters on which no outputs have depended so far.
        batches: Batches that were assembled, each from two examples of the data followed by the
            examples that were found.
    """

    def __init__(self, network: nn.Module, first: Reference) -> None:
        self._network = network
        self._first = first.x
        self._missing = list(first.without_gradient)
        self._rounding = first.rounding
        self.unused = list(first.unused)
        self.batches: list[Inputs] = []

    def read(self, x: Inputs) -> None:
        """Search the examples of a batch for gradients of parameters without a gradient so far."""
        missing = [self._network.get_parameter(name) for name in self._missing]
        with requiring_grad(missing):
            outputs = _outputs(self._network, x)
            if not outputs.requires_grad:
                return
            cotangent = _random_cotangent(outputs)
            gradients = dict(
                zip(self._missing, _gradients(outputs, missing, cotangent), strict=True)
            )
            self.unused = [name for name in self.unused if gradients[name] is None]
            sought = [name for name, g in gradients.items() if self._is_gradient(g)]
            indices = self._find_examples(outputs, cotangent, sought)
        if indices:
            examples = [take(x, slice(index, index + 1)) for index in indices]
            # The examples that reach the parameters are joined with examples that may take a
            # different path.
            companions = self._first
            if example_shapes(x) != example_shapes(companions):
                companions = take(x, slice(0, 2))
            self.batches.append(join([companions, *examples]))

    def _find_examples(self, outputs: Tensor, cotangent: Tensor, sought: list[str]) -> list[int]:
        """Find the indices of examples that together have gradients of all sought parameters."""
        indices: list[int] = []
        for example in range(len(outputs)):
            if not sought:
                break
            parameters = [self._network.get_parameter(name) for name in sought]
            gradients = _gradients(outputs, parameters, _only(cotangent, example))
            by_name = zip(sought, gradients, strict=True)
            covered = {name for name, g in by_name if self._is_gradient(g)}
            if covered:
                indices.append(example)
                sought = [name for name in sought if name not in covered]
                self._missing = [name for name in self._missing if name not in covered]
        return indices

    def _is_gradient(self, gradient: Tensor | None) -> bool:
        return gradient is not None and bool(gradient.to_dense().norm() > self._rounding)


def find_references(
    network: nn.Module,
    names: Sequence[str],
    first: Reference,
    x: Inputs,
    more_batches: Iterable[Inputs],
) -> tuple[list[Reference], list[str]]:
    """Find examples that have gradients for parameters without one so far.

    With several processes, each process uses the examples of all processes.

    Args:
        network: The network.
        names: The parameters' names.
        first: The reference of the first two examples.
        x: The first batch.
        more_batches: Inputs of all batches, which are read as long as some parameter is unused.

    Returns:
        References of further examples, and the parameters on which no outputs depend.
    """
    ranks = process_group()
    search = _Search(network, first)
    if first.is_partial:
        search.read(take(x, slice(0, FIRST_EXAMPLES)))
        for inputs in _chunks(chain([x], more_batches)):
            if not search.unused:
                break
            search.read(move(inputs, first.outputs.device, None))
    batches = search.batches
    unused = search.unused
    if ranks.size > 1 and any(ranks.exchange(first.is_partial)):
        batches = gather_batches(ranks, [first.x, *batches], first.outputs.device)
        unused_by_rank = ranks.exchange(unused)
        unused = [name for name in unused if all(name in names for names in unused_by_rank)]
    references: list[Reference] = []
    missing = set(first.without_gradient)
    for inputs in batches:
        reference = Reference.compute(network, names, inputs, missing)
        missing.intersection_update(reference.without_gradient)
        references.append(reference)
    return references, unused


def _chunks(batches: Iterable[Inputs]) -> Iterator[Inputs]:
    for inputs in batches:
        for start in range(0, num_examples(inputs), _AT_ONCE):
            yield take(inputs, slice(start, start + _AT_ONCE))


def _outputs(network: nn.Module, x: Inputs) -> Tensor:
    with torch.enable_grad(), preserve_attributes(network.modules()):
        return call(network, x)


def _random_cotangent(outputs: Tensor) -> Tensor:
    generator = torch.Generator(outputs.device).manual_seed(0)
    return torch.randn(
        outputs.shape, generator=generator, dtype=outputs.dtype, device=outputs.device
    )


def _only(cotangent: Tensor, example: int) -> Tensor:
    """Return a cotangent that is zero at all examples except the given example."""
    # The batch keeps all examples, because some gradients of torch are wrong for a single example.
    single = torch.zeros_like(cotangent)
    single[example] = cotangent[example]
    return single


def _gradients(
    outputs: Tensor, parameters: Sequence[Tensor], cotangent: Tensor
) -> Sequence[Tensor | None]:
    """Compute the gradients of parameters, with None for parameters without influence."""
    if not outputs.requires_grad:
        return [None] * len(parameters)
    try:
        return torch.autograd.grad(
            outputs, parameters, cotangent, retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise NotImplementedError(
            f"torch cannot differentiate the model's outputs ({error}). Use out-of-place "
            "operations in its forward pass. If the model has recurrent layers on a GPU, call "
            "`fit` and all other methods inside `with torch.backends.cudnn.flags(enabled=False):`."
        ) from error
