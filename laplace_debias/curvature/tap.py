"""The layer tap: each layer's inputs and output gradients, for any forward pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


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
        self._versions: list[tuple[int, int]] = []
        for path in layers:
            network.get_submodule(path).register_forward_hook(self._recorder(path))

    def _recorder(self, path: str) -> Any:
        def record(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if not output.requires_grad:
                # The first tapped layer's output is where the recorded graph begins.
                output = output.detach().requires_grad_()
            self._uses.append(Use(path, inputs[0].detach(), output))
            self._versions.append((inputs[0]._version, output._version))
            return output

        return record

    def forward(self, x: Tensor) -> Tensor:
        """Run the network and record the uses of the tapped layers.

        Args:
            x: Inputs, `[B, ...]`.

        Returns:
            The network's outputs, attached to the recorded graph.

        Raises:
            ValueError: If a tapped layer takes no part in the forward pass.
            NotImplementedError: If the forward pass overwrites a tapped layer's input or output.
        """
        self._uses.clear()
        self._versions.clear()
        with torch.enable_grad():
            outputs = self._network(x)
        for use, versions in zip(self._uses, self._versions, strict=True):
            if (use.x._version, use.z._version) != versions:
                raise NotImplementedError(
                    f"The input or output of {use.layer} is overwritten in place by the forward "
                    "pass (`+=`, `relu_`, ...): use the out-of-place form there."
                )
        called = {use.layer for use in self._uses}
        idle = [path for path in self._layers if path not in called]
        if idle:
            raise ValueError(
                f"The forward pass does not call {idle}: leave their parameters out with params=."
            )
        return outputs

    def output_bytes(self) -> int:
        """Bytes of the tapped layers' outputs for one example of the last `forward`."""
        return max(1, sum(use.z[0].numel() * use.z.element_size() for use in self._uses))

    def backward(
        self,
        outputs: Float[Tensor, "batch outputs"],
        columns: Float[Tensor, "columns batch outputs"],
    ) -> Iterator[tuple[str, list[tuple[Tensor, Tensor]]]]:
        """Push output cotangents back to every tapped layer.

        Args:
            outputs: What `forward` returned.
            columns: K cotangents, `[K, B, C]`.

        Yields:
            A layer's path, and for each of its uses the input `[B, ...]` and the gradients with
            respect to the output `[K, B, ...]`; from the last layer to the first.
        """
        gradients = torch.autograd.grad(
            outputs,
            [use.z for use in self._uses],
            grad_outputs=columns,
            is_grads_batched=True,
            materialize_grads=True,
        )
        pending = list(gradients)
        del gradients
        uses = list(self._uses)
        self._uses.clear()
        for path in reversed(self._layers):
            pairs = []
            for index, use in enumerate(uses):
                if use.layer == path:
                    pairs.append((use.x, pending[index]))
                    pending[index] = torch.empty(0)
            yield path, pairs
