"""The layer tap: each layer's inputs and output gradients, for any forward pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.network.attention import expose_projections
from laplace_debias.curvature.network.inputs import Inputs, call, join, num_examples, take
from laplace_debias.curvature.network.layer_types import CONVOLUTIONS, TRANSPOSED


@dataclass(frozen=True)
class Use:
    """One call of a layer: what went in, `[B, ...]`, and what came out, `[B, ...]`."""

    layer: str
    x: Tensor
    z: Tensor


class Tap:
    """Runs a network forward and yields the output gradients of chosen layers.

    Only the part of the graph behind the first tapped layer is recorded, and no gradient with
    respect to a parameter is ever computed.

    Args:
        network: A `shadow` of the model: hooks are left on it.
        layers: Paths of the layers to tap.
    """

    def __init__(self, network: nn.Module, layers: Sequence[str]) -> None:
        self._network = network
        self._layers = list(layers)
        self._uses: list[Use] = []
        self._versions: list[int] = []
        self._handed_on: dict[str, Tensor] = {}
        self._batch = 0
        # Embeddings that look up the same for every example; found in the first forward pass.
        self._common: frozenset[str] | None = None
        expose_projections(network)
        # Whether cotangents are pushed back one at a time.
        self.one_by_one = any(
            isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)) for module in network.modules()
        )
        for path in layers:
            # Before any hook of the user's that may replace the output: what they do to it is part
            # of the forward pass, not of the layer.
            network.get_submodule(path).register_forward_hook(
                self._recorder(path), prepend=True, with_kwargs=True
            )

    def _recorder(self, path: str) -> Any:
        def record(
            _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor
        ) -> Tensor:
            x = inputs[0] if inputs else next(iter(named.values()))
            if self._common and path in self._common:
                x, output = self._for_every_example(x), self._for_every_example(output)
            if not output.requires_grad:
                # The first tapped layer's output is where the recorded graph begins.
                output = output.detach().requires_grad_()
            self._uses.append(Use(path, x.detach(), output))
            self._versions.append(x._version)
            # The forward pass goes on with a copy, which it may overwrite.
            self._handed_on[path] = output.clone()
            return self._handed_on[path]

        return record

    def forward(self, x: Inputs) -> Tensor:
        """Run the network and record the uses of the tapped layers.

        Args:
            x: Inputs, `[B, ...]`.

        Returns:
            The network's outputs, attached to the recorded graph.

        Raises:
            ValueError: If a tapped layer takes no part in the forward pass.
            NotImplementedError: If the forward pass overwrites a tapped layer's input, merges the
                examples with another dimension before one, or calls one with an `output_size`.
        """
        if self._common is None:
            self._common = frozenset()
            self._common = self._find_common(x)
        outputs = self._run(x)
        for use, version in zip(self._uses, self._versions, strict=True):
            if use.x._version != version:
                raise NotImplementedError(
                    f"The input of {use.layer} is overwritten in place by the forward pass (`+=`, "
                    "`relu_`, ...): use the out-of-place form there."
                )
            check_batched(use.layer, use.x, self._batch)
            check_output_size(use.layer, self._network.get_submodule(use.layer), use.x, use.z)
        called = {use.layer for use in self._uses}
        idle = [path for path in self._layers if path not in called]
        if idle:
            raise ValueError(
                f"The forward pass does not call {idle}: leave their parameters out with params=."
            )
        return outputs

    def _run(self, x: Inputs) -> Tensor:
        self._uses.clear()
        self._versions.clear()
        self._handed_on.clear()
        self._batch = num_examples(x)
        with torch.enable_grad():
            return call(self._network, x)

    def _find_common(self, x: Inputs) -> frozenset[str]:
        """Embeddings whose input has no dimension for the examples, such as positions `[T]`.

        One example and the same one twice tell: the leading dimension of what every example has of
        its own is their number both times.

        Raises:
            NotImplementedError: If the forward pass does not let each example have a copy.
        """
        tables = {
            p for p in self._layers if isinstance(self._network.get_submodule(p), nn.Embedding)
        }
        if not tables:
            return frozenset()
        one = take(x, slice(0, 1))
        two = join([one, one])
        common = set()
        for inputs in (one, two):
            outputs = self._run(inputs)
            uses = [use for use in self._uses if use.layer in tables]
            common |= {use.layer for use in uses if len(use.x) != self._batch}
        if common:
            self._common = frozenset(common)
            with_copies = self._run(two)
            if with_copies.shape != outputs.shape or not torch.allclose(with_copies, outputs):
                raise NotImplementedError(
                    f"{sorted(common)} look up the same for all examples, in a way that does not "
                    "let every example have a copy: look up [batch, positions] instead, or leave "
                    "their parameters out with params=."
                )
        return frozenset(common)

    def _for_every_example(self, x: Tensor) -> Tensor:
        """A copy for each example of what all have in common, `[T, ...]` or `[1, T, ...]`."""
        is_single = len(x) == 1 and x.ndim > 1
        common = x if is_single else x.unsqueeze(0)
        return common.expand(self._batch, *common.shape[1:]).clone()

    @property
    def uses(self) -> list[Use]:
        """The tapped layers' uses in the last `forward`, in its order."""
        return list(self._uses)

    def forget(self) -> None:
        """Let go of the last `forward`'s uses."""
        self._uses.clear()
        self._handed_on.clear()

    def output_bytes(self) -> int:
        """Bytes of the tapped layers' outputs for one example of the last `forward`."""
        return max(1, sum(use.z[0].numel() * use.z.element_size() for use in self._uses))

    def last_layer(self, outputs: Tensor) -> Use | None:
        """The use of a tapped layer whose output is the network's, as it came, if there is one."""
        if outputs._version > 0:
            return None  # Overwritten since: `outputs /= temperature`.
        for use in self._uses:
            calls = sum(other.layer == use.layer for other in self._uses)
            if self._handed_on[use.layer] is outputs and calls == 1:
                return use
        return None

    def backward(
        self,
        outputs: Float[Tensor, "batch *outputs"],
        columns: Float[Tensor, "columns batch *outputs"],
        again: bool = False,
        without: str | None = None,
    ) -> Iterator[tuple[str, list[tuple[Tensor, Tensor]]]]:
        """Push output cotangents back to every tapped layer.

        Args:
            outputs: What `forward` returned.
            columns: K cotangents, `[K, B, C]`.
            again: Whether further cotangents of the same outputs will follow; the graph is kept.
            without: Path of a layer to leave out.

        Yields:
            A layer's path, and for each of its uses the input `[B, ...]` and the gradients with
            respect to the output `[K, B, ...]`; from the last layer to the first.

        Raises:
            ValueError: If the outputs do not depend on a tapped layer.
        """
        uses = [use for use in self._uses if use.layer != without]
        gradients: list[list[Tensor]] = [[] for _ in uses]
        if outputs.requires_grad:
            gradients = self._gradients(outputs, uses, columns, again)
        reached = {use.layer for use, g in zip(uses, gradients, strict=True) if g}
        unreached = {use.layer for use in uses} - reached
        if unreached:
            raise ValueError(
                f"The outputs do not depend on {sorted(unreached)} by differentiable operations "
                "(`detach`, `no_grad`, an unused branch): leave their parameters out with params=."
            )
        if not again:
            self._uses.clear()
        for path in reversed(self._layers):
            if path == without:
                continue
            pairs = []
            for index, use in enumerate(uses):
                if use.layer == path and gradients[index]:
                    pairs.append((use.x, _together(gradients[index])))
                    gradients[index] = []
            yield path, pairs

    def _gradients(
        self, outputs: Tensor, uses: Sequence[Use], columns: Tensor, again: bool
    ) -> list[list[Tensor]]:
        """For every use its output gradients, cotangent by cotangent or in one tensor.

        torch differentiates convolutions one cotangent at a time anyway, and copies around that.
        """
        if not uses:
            return []
        if not self.one_by_one:
            batched = torch.autograd.grad(
                outputs,
                [use.z for use in uses],
                grad_outputs=columns,
                is_grads_batched=True,
                allow_unused=True,
                retain_graph=again,
            )
            return [[] if gradient is None else [gradient] for gradient in batched]
        gradients: list[list[Tensor]] = [[] for _ in uses]
        for index, column in enumerate(columns):
            of_column = torch.autograd.grad(
                outputs,
                [use.z for use in uses],
                grad_outputs=column,
                allow_unused=True,
                retain_graph=again or index + 1 < len(columns),
            )
            for of_use, gradient in zip(gradients, of_column, strict=True):
                if gradient is not None:
                    of_use.append(gradient.unsqueeze(0))
        return gradients


def _together(gradients: list[Tensor]) -> Float[Tensor, "columns batch *outputs"]:
    return gradients[0] if len(gradients) == 1 else torch.cat(gradients)


def check_batched(layer: str, x: Tensor, batch: int) -> None:
    """Require a layer's input to have the examples as its leading dimension.

    Raises:
        NotImplementedError: Otherwise: per-example quantities could not be told apart.
    """
    if x.shape[0] != batch:
        raise NotImplementedError(
            f"The input of {layer} has shape {tuple(x.shape)} for {batch} examples: its leading "
            "dimension must be the examples. Keep positions in a dimension of their own, "
            "[batch, positions, features] (attention: batch_first=True), instead of merging them "
            "into the batch, and let position embeddings look up a position for every example; or "
            "leave the layer's parameters out with params=."
        )


def check_output_size(path: str, layer: nn.Module, x: Tensor, z: Tensor) -> None:
    """Require a transposed convolution's output to be of the size that its own padding gives.

    Raises:
        NotImplementedError: If it was called with another `output_size`.
    """
    if not isinstance(layer, TRANSPOSED):
        return
    geometry = zip(
        *(x.shape[2:], layer.stride, layer.padding, layer.dilation, layer.kernel_size),
        layer.output_padding,
        strict=True,
    )
    size = tuple((n - 1) * s - 2 * p + d * (k - 1) + extra + 1 for n, s, p, d, k, extra in geometry)
    if tuple(z.shape[2:]) != size:
        raise NotImplementedError(
            f"{path} is called with output_size={tuple(z.shape[2:])}, where its output_padding "
            f"gives {size}: set the output_padding of the layer instead, or leave its parameters "
            "out with params=."
        )
