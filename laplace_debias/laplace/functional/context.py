"""A network and inputs, prepared for a prediction of the outputs at the requested positions."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.calling import call
from laplace_debias.curvature.network.chosen_positions import (
    ChosenPositions,
    Positions,
    choose_positions,
)
from laplace_debias.curvature.network.inputs import Inputs, Record
from laplace_debias.curvature.network.outputs import check_outputs, explain_unbatched
from laplace_debias.curvature.network.sharded import has_units
from laplace_debias.laplace.functional.request import requested_indices
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.laplace.state.prediction_cache import PreparedModel
from laplace_debias.system.checks import whole
from laplace_debias.system.ranks import collective, process_group

OutputChoice = Tensor | Sequence[Sequence[int]] | int
"""Indices of the requested outputs of each example, `[B, k]`, or k for the k largest outputs."""


@dataclass(frozen=True)
class PredictionContext:
    """A network that returns the outputs at the requested positions, and its inputs.

    Attributes:
        network: The network, with outputs `[B, ..., C]`, or `[B, p, C]` at chosen positions.
        x: The inputs of the network.
        positions: The positions; None for all.
        head: The path of the linear layer that is applied only at the requested positions; None if
            all outputs are computed and the positions are selected from them.
        prepared: The working copy that contains the network, if it is kept between predictions.
    """

    network: nn.Module
    x: Inputs
    positions: ChosenPositions | None = None
    head: str | None = None
    prepared: PreparedModel | None = None

    def tap(self, blocks: Sequence[Block]) -> Tap:
        """Return the tap of the working copy if it is kept, or a new tap of the network."""
        if self.prepared is None:
            return Tap(self.network, blocks)
        return self.prepared.tap

    def output_indices(self, outputs: OutputChoice) -> Int[Tensor, "batch k"]:
        """Compute indices of requested outputs among the flattened outputs of each example.

        With several positions, the outputs of the first position come first.

        Raises:
            TypeError: If `outputs` is a single number but not an integer.
            ValueError: If the requested outputs are out of range.
        """
        values = map_outputs(self.network, self.x)
        # The outputs have one row per example, or one row per position of an example.
        if self.positions is None:
            rows = values.flatten(1)
            shape = values.shape[:1]
        else:
            rows = values.flatten(0, 1)
            shape = values.shape[: 1 if self.positions.is_single else 2]
        num_outputs = rows.shape[1]
        # Everything that is neither a sequence nor an array must be a number, which `whole` checks.
        is_sequence = isinstance(outputs, Sequence) and not isinstance(outputs, str)
        is_array = getattr(outputs, "ndim", 0) > 0
        if not (is_sequence or is_array):
            num_chosen = whole(outputs, "outputs")
            if num_chosen > num_outputs:
                raise ValueError(
                    f"`outputs={outputs}` is too large, because the model has {num_outputs} "
                    f"outputs per example. Pass at most {num_outputs}."
                )
            indices = rows.topk(num_chosen, dim=1).indices
        else:
            assert not isinstance(outputs, int)
            choice = _as_indices(outputs, shape, num_outputs)
            indices = choice.to(rows.device, torch.long).flatten(0, -2)
        if self.positions is None:
            return indices
        by_position = indices.unflatten(0, (len(values), -1))
        starts = num_outputs * torch.arange(by_position.shape[1], device=indices.device)
        return (by_position + starts[:, None]).flatten(1)

    def model_indices(
        self,
        outputs: Float[Tensor, "batch *outputs"],
        indices: Int[Tensor, "batch k"] | None,
        examples: slice | Int[Tensor, " batch"],
    ) -> Int[Tensor, "#batch k"]:
        """Compute the indices of requested outputs among all outputs of the model.

        Args:
            outputs: The outputs of the given examples at the requested positions.
            indices: Indices of the requested outputs among `outputs`; None for all.
            examples: The examples whose outputs are given.
        """
        requested = requested_indices(outputs, indices)
        if self.positions is None:
            return requested
        num_classes = outputs.shape[-1]
        positions = self.positions.columns[examples]
        requested = requested.expand(len(positions), -1)
        by_output = positions.gather(1, requested // num_classes)
        return by_output * num_classes + requested % num_classes

    def by_position(
        self, values: Float[Tensor, "..."], num_outputs: int | None
    ) -> Float[Tensor, "..."]:
        """Reshape means or variances to the requested positions, `[..., B, p, k]`.

        For a single position, the shape is `[..., B, k]`.

        Args:
            values: `[..., B, p · k]`, or `[..., B, p, C]` for all outputs.
            num_outputs: The number of requested outputs, p · k; None for all.
        """
        if self.positions is None:
            return values
        if num_outputs is not None:
            values = values.unflatten(-1, (self.positions.columns.shape[1], -1))
        return values.squeeze(-2) if self.positions.is_single else values


@contextmanager
def prediction_context(
    fitted: FittedPosterior,
    x: Inputs | Record,
    positions: Positions | None = None,
    restricts_head: Callable[[str], bool] = lambda path: False,
    keeps_graph: bool = False,
) -> Iterator[PredictionContext]:
    """Prepare the network and its inputs, and explain errors from a missing batch dimension.

    The model must not have changed since the fit.

    Args:
        fitted: The fit.
        x: Inputs as the user passed them.
        positions: The positions; None for all.
        restricts_head: A function of the path of the linear layer that returns the outputs; true if
            this layer may be applied only at the requested positions. `moments` passes
            `acts_through_head`.
        keeps_graph: Whether gradients flow back to the inputs. If so, the network becomes part of
            the graph and is not reused.

    Raises:
        NotImplementedError: If gradients are requested, but the model is sharded.
    """
    if keeps_graph and has_units(fitted.spec.model):
        # A differentiable prediction uses torch.func, which cannot gather sharded parameters.
        raise NotImplementedError(
            "`differentiable=True` does not support models whose parameters fully_shard has split "
            "over processes. Remove `differentiable=`, or save the posterior and load it with the "
            "complete model."
        )
    outside_inference_mode: AbstractContextManager[Any] = nullcontext()
    if torch.is_inference_mode_enabled():
        outside_inference_mode = torch.inference_mode(False)
    on_all_processes: AbstractContextManager[Any] = nullcontext()
    if process_group().size > 1 and has_units(fitted.spec.model):
        on_all_processes = collective("predict")
    with outside_inference_mode, on_all_processes:
        mean = fitted.posterior.mean
        model = fitted.fitted_model
        snapshot = model.check_unchanged(mean)
        x = model.spec.read_batch.inputs(x, mean.device, keeps_graph=keeps_graph)
        cache = model.prediction_cache
        kept_copy: AbstractContextManager[PreparedModel | None]
        if positions is None and not keeps_graph:
            kept_copy = cache.borrow(model.spec, model.parameters, snapshot)
        else:
            kept_copy = nullcontext()
        with kept_copy as prepared:
            network = model.network() if prepared is None else prepared.tap.network
            checked: AbstractContextManager[None] = nullcontext()
            if prepared is None or prepared.is_new:
                checked = cache.first_use(model.spec, model.parameters, snapshot, network, x)
            try:
                with checked:
                    context = PredictionContext(network, x, prepared=prepared)
                    if positions is not None:
                        context = _at_positions(network, x, positions, restricts_head)
                    yield context
            except Exception as error:
                explain_unbatched(error, network, x)
                raise


def _at_positions(
    network: nn.Module, x: Inputs, positions: Positions, restricts_head: Callable[[str], bool]
) -> PredictionContext:
    """Build a network that returns the outputs at the requested positions, and its inputs."""
    chosen = choose_positions(network, x, positions)
    head = chosen.head
    if head is not None and not restricts_head(head):
        head = None
    network_at_positions = chosen.network(network, before_head=head is not None)
    return PredictionContext(network_at_positions, chosen.inputs(x), chosen, head)


def map_outputs(network: nn.Module, x: Inputs) -> Float[Tensor, "batch *outputs"]:
    """Compute the trained network's outputs, `[B, ..., C]`."""
    with torch.no_grad():
        outputs = call(network, x)
    check_outputs(outputs)
    # The outputs are copied, because the model may write its next outputs into the same tensor.
    return outputs.clone()


def _as_indices(
    outputs: Tensor | Sequence[Sequence[int]], shape: torch.Size, num_outputs: int
) -> Int[Tensor, "*shape k"]:
    """Convert a user's choice of outputs to a tensor of indices, and check that they exist."""
    choice = torch.as_tensor(outputs)
    expected = (
        "Pass the number of outputs to compute, or a tensor of shape "
        f"({', '.join(map(str, shape))}, k) with indices from 0 to {num_outputs - 1}."
    )
    is_integer = not (choice.is_floating_point() or choice.dtype is torch.bool)
    if not is_integer or choice.shape[:-1] != shape or choice.numel() == 0:
        raise ValueError(
            f"`outputs` has dtype {choice.dtype} and shape {tuple(choice.shape)}. {expected}"
        )
    if choice.min() < 0 or choice.max() >= num_outputs:
        raise ValueError(
            f"`outputs` contains indices from {int(choice.min())} to {int(choice.max())}. "
            f"{expected}"
        )
    return choice
