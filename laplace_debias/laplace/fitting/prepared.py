"""A fit that is ready to run: its parameters have been checked on examples."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batches import Stream
from laplace_debias.curvature.data.dataset_size import TrainingSize
from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.layers.backends import make_backend
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.losses.base import NegativeLogLikelihood
from laplace_debias.curvature.losses.cotangents import Cotangents
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.calling import call
from laplace_debias.curvature.network.inputs import Inputs, move, take
from laplace_debias.curvature.network.outputs import explain_fixed_size
from laplace_debias.curvature.network.selection import LAST_LAYER
from laplace_debias.curvature.network.shared_copy import preserve_attributes
from laplace_debias.curvature.network.validation import validate_model
from laplace_debias.laplace.fitting.fit_stream import FitStream
from laplace_debias.laplace.state.curvature_config import CurvatureConfig
from laplace_debias.laplace.state.fitted import FitSetup
from laplace_debias.laplace.state.parameter_blocks import ParameterBlocks
from laplace_debias.system.ranks import process_group
from laplace_debias.system.shown import warn

# The number of examples of the first batch on which the model is checked.
_NUM_CHECKED = 4
# With more columns of `fisher="exact"` than this, a warning recommends `"mc"`.
_MANY_COLUMNS = 1_000


@dataclass(frozen=True, eq=False)
class PreparedFit:
    """A fit before its passes over the data.

    Attributes:
        setup: The model, the options of the fit, and the prior.
        parameters: The Bayesian parameters, checked on an example.
        context: The network, its loss and its blocks, in the form that the passes over the data
            use.
        size: N, the number of training examples.
        mode: The name of the fitting scheme.
        streams: The batches of each source of the scheme, in the order of the sources.
    """

    setup: FitSetup
    parameters: ParameterBlocks
    context: FitContext
    size: TrainingSize
    mode: str
    streams: Sequence[FitStream] = ()

    @property
    def config(self) -> CurvatureConfig:
        """The options of the fit."""
        return self.setup.config


def examine(
    setup: FitSetup,
    streams: Sequence[Stream],
    *,
    reads_all: bool,
    fisher: FisherType,
) -> tuple[ParameterBlocks, FitContext]:
    """Find the Bayesian parameters, check them on the first batch, and prepare the network.

    Args:
        setup: The model and the options of the fit.
        streams: The batches. The first batch is read here, and is still available to the fit.
        reads_all: Whether the fit reads all of the data, so that all batches may be searched for
            parameters that the first batch does not use.
        fisher: The type of the Fisher matrix, with its random seed.
    """
    validate_model(setup.spec.model)
    checked = _parameters_on_examples(setup, streams, reads_all)
    config = setup.config
    blocks = checked.parameters.blocks
    backend = make_backend(config.backend, setup.spec.plain_model, checked.tap, blocks)
    likelihood = NegativeLogLikelihood(setup.spec.likelihood)
    context = FitContext(
        cotangents=Cotangents(likelihood, fisher, setup.spec.class_dim),
        blocks=blocks,
        backend=backend,
        factor_dtype=config.factor_dtype,
        memory_bound=config.memory_bound,
        ranks=process_group(),
        example=checked.example,
        num_outputs=checked.num_outputs,
    )
    return checked.parameters, context


class _CheckedParameters(NamedTuple):
    """Parameters that were checked on the first batch.

    Attributes:
        parameters: The parameters.
        tap: The tap on their layers.
        example: The inputs of one example.
        num_outputs: The number of outputs of one example.
    """

    parameters: ParameterBlocks
    tap: Tap
    example: Inputs
    num_outputs: int


def _parameters_on_examples(
    setup: FitSetup,
    streams: Sequence[Stream],
    reads_all: bool,
) -> _CheckedParameters:
    """Check the parameters on the first batch.

    A process without examples uses the batch of the first process that has examples.
    """
    first = _first_batch(streams[0])
    inputs = move(first.inputs, setup.device, None)
    try:
        return _parameters_on_batch(setup, streams, inputs, first.targets, reads_all)
    except Exception as error:
        # A forward pass of one process could wait for the other processes.
        if process_group().size == 1:
            explain_fixed_size(error, setup.spec.network(()), inputs)
        raise


def _parameters_on_batch(
    setup: FitSetup,
    streams: Sequence[Stream],
    inputs: Inputs,
    targets: Tensor,
    reads_all: bool,
) -> _CheckedParameters:
    """Check the parameters on the inputs and targets of the first batch."""
    spec = setup.spec
    config = setup.config
    targets = targets.to(setup.device)
    selected = _selected_parameters(setup, inputs)
    tap = Tap(spec.network(selected.names))
    examples = take(inputs, slice(0, _NUM_CHECKED))
    outputs = _first_outputs(tap.network, selected.names, spec.likelihood, examples)
    _check_first_outputs(
        tap.network,
        spec.likelihood,
        outputs,
        targets,
        class_dim=spec.class_dim,
        fisher=config.fisher,
    )
    num_outputs = outputs.shape[1:].numel()
    del outputs  # frees the autograd graph
    all_inputs = None
    if reads_all and all(stream.is_reiterable for stream in streams):
        all_inputs = chain.from_iterable(stream.extra_pass() for stream in streams)
    parameters = selected.verified(tap, spec.plain_model, config, inputs, all_inputs=all_inputs)
    return _CheckedParameters(
        parameters=parameters,
        tap=tap,
        example=take(inputs, slice(0, 1)),
        num_outputs=num_outputs,
    )


def _selected_parameters(setup: FitSetup, inputs: Inputs) -> ParameterBlocks:
    """Return the parameters of the fit; `params="last_layer"` is determined from the inputs."""
    config = setup.config
    if setup.parameters is not None and config.params != LAST_LAYER:
        return setup.parameters
    selected = ParameterBlocks.selected(setup.spec.plain_model, config, inputs)
    if setup.names is not None and setup.names != selected.names:
        raise ValueError(
            f'`params="last_layer"` selected {setup.names} before (in an earlier '
            f"fit, or as the parameters of `prior=`), but the outputs come from "
            f"{selected.names}. If the model has changed, build a new Laplace. Otherwise pass "
            "a prior of the last layer's parameters."
        )
    return selected


def _first_batch(stream: Stream) -> Batch:
    """Return the first batch of this process or, if it has none, of another process."""
    ranks = process_group()
    first = stream.first
    has_first = ranks.exchange(first is not None)
    if True not in has_first:
        raise ValueError("The data contains no examples. Pass a loader with at least one batch.")
    if False in has_first:
        first_of_another_rank = ranks.from_rank(first, has_first.index(True))
        first = first_of_another_rank if first is None else first
    assert first is not None
    return first


def _first_outputs(
    network: nn.Module, names: Sequence[str], likelihood: Likelihood, examples: Inputs
) -> Tensor:
    """Compute the outputs of a few examples.

    If the likelihood checks which operation the network applied last, the outputs have the autograd
    graph of the parameters with these names.
    """
    if not likelihood.checks_last_operation:
        with torch.no_grad(), preserve_attributes(network.modules()):
            return call(network, examples)
    parameters = {name: network.get_parameter(name).detach().requires_grad_() for name in names}
    with torch.enable_grad(), preserve_attributes(network.modules()):
        return call(network, examples, parameters)


def _check_first_outputs(
    network: nn.Module,
    likelihood: Likelihood,
    outputs: Tensor,
    y: Tensor,
    class_dim: int | None,
    fisher: FisherType,
) -> None:
    """Check which dimension holds the classes, and warn if the outputs do not look like logits.

    `outputs` are the outputs for a few examples of the first batch; `y` contains the targets of all
    its examples.
    """
    shape = torch.Size((len(y), *outputs.shape[1:]))
    # One batch is enough for the check, since all batches use the same model.
    fits_both = len(shape) > 2 and y.shape == shape[:-1] == shape[:1] + shape[2:]
    if class_dim is None and fits_both and shape[1] > 1:
        raise ValueError(
            f"For outputs of shape {tuple(shape)} and targets of shape {tuple(y.shape)}, the "
            "classes can be in the last dimension or in dimension 1. Pass `class_dim=-1` to "
            "Laplace for outputs [B, ..., C], or `class_dim=1` for [B, C, ...]."
        )
    likelihood.warn_of_outputs(network, outputs)
    if likelihood.activation == "softmax":
        num_columns = outputs.shape[1:].numel()
        if fisher.kind == "exact" and outputs.ndim > 2 and num_columns > _MANY_COLUMNS:
            warn(
                f'`fisher="exact"` needs {num_columns:,} backward passes per example (one '
                "per class and position). For one backward pass per example, use "
                '`fisher="mc"`.'
            )
