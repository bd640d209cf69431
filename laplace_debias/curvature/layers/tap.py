"""The layer tap: each layer's inputs and output gradients, for any forward pass."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.layers.blocks import Block, Site
from laplace_debias.curvature.layers.calls import Call, CallUses
from laplace_debias.curvature.layers.recorder import CallRecorder, ExampleDims
from laplace_debias.curvature.layers.uses import Uses
from laplace_debias.curvature.network.inputs import Inputs, call, join, num_examples, take
from laplace_debias.curvature.network.layer_types import (
    CONVOLUTIONS,
    TRANSPOSED,
    expose_projections,
    lay_out_gradients,
)
from laplace_debias.system.memory import is_out_of_memory


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
        sites: What to tap: layers, and modules whose calls are run again (see `calls`).
        names: For the sites of calls the parameters that are differentiated there.
    """

    def __init__(
        self,
        network: nn.Module,
        sites: Sequence[Site],
        names: Mapping[Site, Sequence[str]] | None = None,
    ) -> None:
        self._network = network
        self._sites = list(sites)
        self._names = dict(names or {})
        self._layers = [site.paths[0] for site in sites if not site.is_call]
        self._uses: list[Use] = []
        self._calls: dict[str, list[Call] | None] = {}
        self._versions: list[int] = []
        self._handed_on: dict[str, Tensor] = {}
        self._batch, self._has_graph = 0, True
        # What one example and two tell of the layers' inputs; None before they were run.
        self._dims: ExampleDims | None = None
        called = dict.fromkeys(path for s in sites if s.is_call for path in s.paths)
        self._recorder = CallRecorder(network, list(called))
        expose_projections(network)
        lay_out_gradients(network)
        # Whether cotangents are pushed back one at a time.
        self.one_by_one = any(
            isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)) for module in network.modules()
        )
        for path in self._layers:
            # Before any hook of the user's that may replace the output: what they do to it is part
            # of the forward pass, not of the layer.
            network.get_submodule(path).register_forward_hook(
                self._record(path), prepend=True, with_kwargs=True
            )

    @classmethod
    def on(cls, network: nn.Module, blocks: Iterable[Block]) -> "Tap":
        """A tap where some blocks are measured."""
        names: dict[Site, list[str]] = {}
        for block in blocks:
            names.setdefault(block.site, []).extend(block.parameters)
        return cls(network, list(names), names)

    @property
    def network(self) -> nn.Module:
        """The network that is run."""
        return self._network

    def module(self, site: Site) -> nn.Module:
        """The module at a site."""
        return self._network.get_submodule(site.paths[0])

    def _record(self, path: str) -> Any:
        def record(
            _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor
        ) -> Tensor:
            x = inputs[0] if inputs else next(iter(named.values()))
            if self._dims is not None and path in self._dims.common:
                x, output = self._for_every_example(x), self._for_every_example(output)
            if not output.requires_grad:
                # The first tapped layer's output is where the recorded graph begins.
                output = output.detach().requires_grad_()
            self._versions.append(x._version)
            merged = 1 if self._dims is None else self._dims.merged.get(path, 1)
            if merged > 1 and len(x) == merged * self._batch:
                # Windows or frames that are merged into the examples are positions of them.
                apart = (self._batch, merged)
                z = output.unflatten(0, apart)
                self._uses.append(Use(path, x.detach().unflatten(0, apart), z))
                self._handed_on[path] = z.flatten(0, 1).clone()
                return self._handed_on[path]
            self._uses.append(Use(path, x.detach(), output))
            # The forward pass goes on with a copy, which it may overwrite.
            self._handed_on[path] = output.clone()
            return self._handed_on[path]

        return record

    def forward(self, x: Inputs, graph: bool = True) -> Tensor:
        """Run the network and record the uses of the tapped layers.

        Args:
            x: Inputs, `[B, ...]`.
            graph: Whether the graph is recorded, without which nothing can be pushed back.

        Returns:
            The network's outputs, attached to the recorded graph.

        Raises:
            ValueError: If a tapped layer takes no part in the forward pass.
            NotImplementedError: If the forward pass overwrites a tapped layer's input, or merges
                the examples with another dimension before one.
        """
        self._has_graph = graph
        outputs, faults = self.look(x)
        for error in faults.values():
            raise error
        return outputs

    def look(self, x: Inputs) -> tuple[Tensor, dict[Site, Exception]]:
        """As `forward`, which raises the first of the faults that are returned, site by site."""
        has_tables = any(
            isinstance(self._network.get_submodule(path), nn.Embedding) for path in self._layers
        )
        if self._dims is None and (has_tables or any(self._recorder.paths)):
            self._learn(x)
        outputs = self._run(x)
        has_other_dims = any(len(use.x) != self._batch for use in self._uses)
        if has_other_dims or None in self._calls.values():
            # Sequences of another length, or images of another size, have other dimensions.
            self._learn(x)
            outputs = self._run(x)
        return outputs, dict(self._faults())

    def _faults(self) -> Iterator[tuple[Site, Exception]]:
        """The faults at the sites, for the last forward pass."""
        uncopied = frozenset() if self._dims is None else self._dims.uncopied
        if uncopied:
            no_copies = NotImplementedError(
                f"{sorted(uncopied)} look up the same for all examples, in a way that does not "
                "let every example have a copy: look up [batch, positions] instead, or leave "
                "their parameters out with params=."
            )
            for path in uncopied:
                yield Site((path,)), no_copies
        for use, version in zip(self._uses, self._versions, strict=True):
            if use.x._version != version:
                overwritten = NotImplementedError(
                    f"The input of {use.layer} is overwritten in place by the forward pass (`+=`, "
                    "`relu_`, ...): use the out-of-place form there."
                )
                yield Site((use.layer,)), overwritten
            elif len(use.x) != self._batch:
                yield Site((use.layer,)), not_batched(use.layer, use.x, self._batch)
        called = {use.layer for use in self._uses}
        idle = [s for s in self._sites if not s.is_call and s.paths[0] not in called]
        idle += [s for s in self._sites if s.is_call and any(self._calls[p] == [] for p in s.paths)]
        for site in idle:
            yield (
                site,
                ValueError(
                    f"The forward pass does not call {[str(s) for s in idle]}: leave their "
                    "parameters out with params=."
                ),
            )
        for site in self._sites:
            if site.is_call and any(self._calls[path] is None for path in site.paths):
                yield (
                    site,
                    NotImplementedError(
                        f"Calls of {site} have no dimension of their own for the examples: leave "
                        "their parameters out with params=."
                    ),
                )

    def _run(self, x: Inputs) -> Tensor:
        self.forget()
        self._versions.clear()
        self._batch = num_examples(x)
        with torch.set_grad_enabled(self._has_graph):
            outputs = call(self._network, x)
            if "" in self._recorder.paths and not outputs.requires_grad:
                outputs = outputs.detach().requires_grad_()
        self._calls = self._recorder.calls(x, outputs, self._batch)
        return outputs

    def _learn(self, x: Inputs) -> None:
        """Find which inputs of the layers have examples, from one and the same one twice."""
        one = take(x, slice(0, 1))
        two = join([one, one])
        outputs, inputs, calls = [], [], []
        for few in (one, two):
            outputs.append(self._run(few))
            of_layers: dict[str, list[int]] = {}
            for use in self._uses:
                of_layers.setdefault(use.layer, []).append(len(use.x))
            inputs.append(of_layers)
            calls.append(self._recorder.seen)
        self._recorder.learn(calls)
        self._dims = ExampleDims.of(self._network, *inputs)
        if self._dims.common and not self._takes_copies(two, outputs[1]):
            self._dims = ExampleDims(frozenset(), self._dims.merged, uncopied=self._dims.common)

    def _takes_copies(self, x: Inputs, expected: Tensor) -> bool:
        """Whether outputs stay the same with a copy for each example of what all have in common."""
        try:
            outputs = self._run(x)
        # Whatever a forward pass raises where it meets a dimension that it does not expect.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return False
        return outputs.shape == expected.shape and torch.allclose(outputs, expected)

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
        self._calls.clear()
        self._recorder.forget()

    def output_bytes(self) -> int:
        """Bytes of the tapped layers' outputs for one example of the last `forward`."""
        outputs = [use.z for use in self._uses]
        outputs += [z for of in self._calls.values() for c in of or () for z in c.outputs]
        total = sum(z.numel() * z.element_size() for z in outputs)
        return max(1, total // self._batch)

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
        without: Site | None = None,
        strict: bool = True,
    ) -> Iterator[tuple[Site, Uses]]:
        """Push output cotangents back to every tapped layer.

        Args:
            outputs: What `forward` returned.
            columns: K cotangents, `[K, B, C]`.
            again: Whether further cotangents of the same outputs will follow; the graph is kept.
            without: A site to leave out.
            strict: Whether every site must be reached; what is not is left out otherwise.

        Yields:
            A site, and for each of a layer's uses the input `[B, ...]` and the gradients with
            respect to the output `[K, B, ...]`; from the last site to the first.

        Raises:
            ValueError: If the outputs do not depend on a tapped layer.
        """
        uses = [use for use in self._uses if Site((use.layer,)) != without]
        calls = [c for of in self._calls.values() for c in of or ()]
        targets = [use.z for use in uses] + [z for c in calls for z in c.outputs]
        gradients: list[list[Tensor]] = [[] for _ in targets]
        if outputs.requires_grad:
            gradients = self._gradients(outputs, targets, columns, again)
        by_site = self._by_site(uses, calls, gradients)
        unreached = [s for s in self._sites if s != without and by_site.get(s) is None]
        if unreached and strict:
            raise ValueError(
                f"The outputs do not depend on {sorted(map(str, unreached))} by differentiable "
                "operations (`detach`, `no_grad`, an unused branch): leave their parameters out "
                "with params=."
            )
        if not again:
            # The hooks make a circle of references, which would hold all of it for long.
            self.forget()
        del uses, calls, targets, gradients
        for site in reversed(self._sites):
            found = by_site.pop(site, None)
            if found is not None:
                yield site, found()

    def _by_site(
        self, uses: Sequence[Use], calls: Sequence[Call], gradients: list[list[Tensor]]
    ) -> dict[Site, Callable[[], Uses]]:
        """For every site that is reached what makes its uses, once they are wanted."""
        found: dict[Site, Callable[[], Uses]] = {}
        of_layers: dict[str, list[tuple[Tensor, list[Tensor]]]] = {}
        for use, of_use in zip(uses, gradients, strict=False):
            if of_use:
                of_layers.setdefault(use.layer, []).append((use.x, of_use))
        for path, pairs in of_layers.items():
            found[Site((path,))] = partial(_pairs, pairs)
        rest = iter(gradients[len(uses) :])
        of_calls = [(c, [next(rest) for _ in c.outputs]) for c in calls]
        for site in self._sites:
            here = [(c, g) for c, g in of_calls if site.is_call and c.path in site.paths]
            here = [(c, g) for c, g in here if any(g)]
            if here:
                found[site] = partial(self._call_uses, site, here)
        return found

    def _call_uses(
        self, site: Site, calls: Sequence[tuple[Call, Sequence[list[Tensor]]]]
    ) -> CallUses:
        gradients = [[_together(list(g)) if g else None for g in of_call] for _, of_call in calls]
        return CallUses(
            self._recorder.bare,
            [c for c, _ in calls],
            gradients,
            self._names.get(site, ()),
            self._batch,
            self._recorder.loops,
        )

    def _gradients(
        self, outputs: Tensor, targets: Sequence[Tensor], columns: Tensor, again: bool
    ) -> list[list[Tensor]]:
        """For every target its gradients, cotangent by cotangent or in one tensor.

        torch differentiates convolutions one cotangent at a time anyway, and copies around that.
        """
        if not targets:
            return []
        if not self.one_by_one:
            batched = torch.autograd.grad(
                outputs,
                targets,
                grad_outputs=columns,
                is_grads_batched=True,
                allow_unused=True,
                retain_graph=again,
            )
            return [[] if gradient is None else [gradient] for gradient in batched]
        gradients: list[list[Tensor]] = [[] for _ in targets]
        for index, column in enumerate(columns):
            of_column = torch.autograd.grad(
                outputs,
                targets,
                grad_outputs=column,
                allow_unused=True,
                retain_graph=again or index + 1 < len(columns),
            )
            for of_target, gradient in zip(gradients, of_column, strict=True):
                if gradient is not None:
                    of_target.append(gradient.unsqueeze(0))
        return gradients


def _pairs(pairs: list[tuple[Tensor, list[Tensor]]]) -> list[tuple[Tensor, Tensor]]:
    """A layer's uses; what they are made of is let go."""
    found = []
    while pairs:
        x, gradients = pairs.pop(0)
        found.append((x, _together(gradients)))
    return found


def _together(gradients: list[Tensor]) -> Float[Tensor, "columns batch *outputs"]:
    if len(gradients) == 1:
        return gradients[0]
    # An example's columns lie one after the other, as products of Jacobians take them.
    return torch.cat([g.transpose(0, 1) for g in gradients], 1).transpose(0, 1)


def not_batched(layer: str, x: Tensor, batch: int) -> NotImplementedError:
    """An error for a layer whose input does not have the examples as its leading dimension."""
    return NotImplementedError(
        f"The input of {layer} has shape {tuple(x.shape)} for {batch} examples: its leading "
        "dimension must be the examples. Keep positions in a dimension of their own, "
        "[batch, positions, features] (attention: batch_first=True), instead of merging them "
        "into the batch, and let position embeddings look up a position for every example; or "
        "leave the layer's parameters out with params=. If only some examples pass through it "
        "(a mixture of experts), shuffle the data, so that the first batch shows it."
    )
