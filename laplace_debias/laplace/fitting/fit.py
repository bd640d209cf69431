"""A fit from end to end: prepare, run a scheme's passes over the data, build the posterior."""

from dataclasses import replace
from pathlib import Path

import torch

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batches import Stream
from laplace_debias.curvature.data.dataset_size import TrainingSize
from laplace_debias.curvature.data.shards import check_all_different, first_indices_of_stream
from laplace_debias.curvature.fits.checkpoint import Checkpoint
from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.fits.information import Information
from laplace_debias.curvature.losses.base import NegativeLogLikelihood
from laplace_debias.curvature.network.fingerprints import checksum
from laplace_debias.curvature.network.inputs import digest_of_examples
from laplace_debias.curvature.structures import CurvatureStructure
from laplace_debias.curvature.structures.kfac import KfacCurvature
from laplace_debias.laplace.fitting.fit_stream import FitStream
from laplace_debias.laplace.fitting.prepared import PreparedFit, examine
from laplace_debias.laplace.fitting.resuming import check_resumable, fit_identity
from laplace_debias.laplace.fitting.schemes import Full, Scheme, prior_needs_all_data
from laplace_debias.laplace.state.fitted import FitSetup, FittedPosterior
from laplace_debias.laplace.state.fitted_model import FittedModel
from laplace_debias.laplace.state.parameter_blocks import ParameterBlocks
from laplace_debias.laplace.state.posterior import GaussianPosterior
from laplace_debias.system.checks import check_generator, check_no_autocast
from laplace_debias.system.memory import available_memory, check_memory
from laplace_debias.system.ranks import Ranks, process_group


def fit(
    setup: FitSetup,
    scheme: Scheme,
    size: TrainingSize,
    *,
    information: Information | None = None,
    generator: torch.Generator | None = None,
    resume: Path | None = None,
    progress: bool = False,
) -> FittedPosterior:
    """Fit the curvature to data, and build its posterior.

    The options and the data are checked first. With `resume`, sums are saved during the passes over
    the data, so that an interrupted fit can continue from them.

    Args:
        setup: The model, the options of the fit, and the prior.
        scheme: Determines which data give the directions and which give the magnitudes.
        size: The number of training examples N, as far as it is known before the fit.
        information: The information of earlier data, to which the new data is added at the noise of
            the earlier fit. By default, the noise is determined afresh, and the information of the
            prior, if there is any, is added.
        generator: Seeds sampled labels and the order of loaders.
        resume: The folder of the checkpoint; None for a fit without one.
        progress: Whether to show progress bars.

    Raises:
        ValueError: If the options, the data and the model do not match.
        RuntimeError: Under autocast, or with TF32 products.
    """
    is_new = information is None
    if is_new:
        setup = setup.with_likelihood(setup.spec.likelihood.for_new_fit())
        information = _prior_information(setup)
    check_before_fit(setup, scheme, information, generator=generator, resume=resume)
    with torch.inference_mode(False):
        prepared = prepare_fit(
            setup, scheme, size, may_estimate_noise=is_new, generator=generator, progress=progress
        )
        checkpoint = None
        if resume is not None:
            identity = fit_identity(prepared, generator, scheme.num_folds, information)
            context = prepared.context
            checkpoint = Checkpoint(resume, identity, context.ranks)
            prepared = replace(prepared, context=replace(context, checkpoint=checkpoint))
        if information is None:
            curvature_fit = scheme.fit(prepared)
        else:
            curvature_fit = _add_information(prepared, information)
        fitted = build_posterior(prepared, curvature_fit)
        if checkpoint is not None:
            checkpoint.end()
        return fitted


def _prior_information(setup: FitSetup) -> Information | None:
    """Return the information of the prior, with its weight adapted to the temperature."""
    information = setup.prior.information
    if information is None:
        return None
    return replace(information, weight=information.weight * setup.temperature)


def check_before_fit(
    setup: FitSetup,
    scheme: Scheme,
    information: Information | None,
    *,
    generator: torch.Generator | None,
    resume: Path | None,
) -> None:
    """Check everything that can be checked without reading data."""
    # Information is added by the structure, not by `scheme.fit`, which a subclass may override.
    if information is not None and type(scheme) is not Full:
        raise prior_needs_all_data(scheme.label)
    check_generator(generator)
    if resume is not None:
        if not scheme.is_resumable:
            raise ValueError(
                f'A fit with `mode="{scheme.label}"` cannot be resumed. Remove `resume=`.'
            )
        check_resumable(resume, setup.config.fisher, generator, list(scheme.sources.values()))
    if information is None:
        scheme.check(setup.config.structure)
    elif isinstance(setup.config.structure, KfacCurvature):
        _check_has_factors(information)
    device = setup.device
    check_no_autocast(device)
    # torch 2.8 does not have this attribute, so a default is needed.
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if device.type == "cuda" and precision == "tf32":
        raise RuntimeError(
            "TF32 matrix products are not precise enough for the eigendecompositions. Call "
            "torch.set_float32_matmul_precision('highest') before fitting."
        )


def _check_has_factors(information: Information) -> None:
    """Require that the Kronecker factors can be recovered from the curvature."""
    for name in information.curvature.blocks:
        if name not in information.factor_scales:
            raise ValueError(
                f"The Kronecker factors of {name} cannot be recovered. Either the "
                "posterior was loaded from a file written by an earlier version of the "
                "library, or it was created by OnlineCurvature. Fit to the earlier and "
                "the new data together."
            )


def prepare_fit(
    setup: FitSetup,
    scheme: Scheme,
    size: TrainingSize,
    *,
    may_estimate_noise: bool,
    generator: torch.Generator | None,
    progress: bool,
) -> PreparedFit:
    """Open the data, check the model on the first batch, and require enough memory."""
    ranks = process_group()
    bar = "fit" if progress else None
    # The seed of the labels must be drawn before the loaders draw the order of the data.
    fisher = setup.config.fisher.seeded(generator, ranks)
    streams = [
        setup.spec.training_stream(data, setup.device, generator, bar)
        for data in scheme.sources.values()
    ]
    parameters, context = examine(setup, streams, reads_all=scheme.reads_all, fisher=fisher)
    # A prior that does not match the last layer must fail before the passes over the data.
    setup.prior.for_parameters(parameters)
    likelihood = setup.spec.likelihood
    if may_estimate_noise and likelihood.has_sigma and likelihood.is_assumed:
        likelihood = scheme.estimate_noise(context, streams)
        setup = setup.with_likelihood(likelihood)
        loss = NegativeLogLikelihood(likelihood)
        context = replace(context, cotangents=replace(context.cotangents, loss=loss))
    size = _size_with_weights(size, scheme.label, streams[0], ranks)
    if ranks.size > 1:
        size = _agreed_size(size, ranks)
        _check_processes_agree(setup, parameters, size, streams[0].first, ranks)
    if size.must_match_read:
        context = replace(context, num_examples=size.num_data)
    structure = setup.config.structure
    structure.check(context)
    _require_memory(context, structure)
    draws_by_index = fisher.is_random or structure.draws_examples
    fit_streams = []
    for name, stream in zip(scheme.sources, streams, strict=True):
        first_indices = None
        if ranks.size > 1 and draws_by_index:
            # Random draws are keyed by the index of an example among the examples of all processes.
            first_indices = first_indices_of_stream(ranks, stream)
        fit_streams.append(FitStream(stream, likelihood, name, first_indices))
    return PreparedFit(
        setup, parameters, context, size=size, mode=scheme.label, streams=fit_streams
    )


def _check_processes_agree(
    setup: FitSetup,
    parameters: ParameterBlocks,
    size: TrainingSize,
    first: Batch | None,
    ranks: Ranks,
) -> None:
    """Require that all processes have the same model, and different data unless it is shared."""
    model_checksum = checksum(setup.spec.plain_model)
    ranks.require_same(model=model_checksum, blocks=parameters.block_names)
    if not size.is_shared:
        digest = None
        if first is not None:
            digest = digest_of_examples(first.inputs, first.targets)
        check_all_different(ranks.exchange(digest), "starts with the same batch")


def _require_memory(context: FitContext, structure: CurvatureStructure) -> None:
    """Require enough memory for the posterior before any pass over the data."""
    mean_bytes = context.dtype.itemsize * sum(block.size for block in context.blocks)
    check_memory(
        structure.least_bytes(context) + mean_bytes,
        available_memory(context.device),
        f"Nothing was fitted, because the posterior of curvature={structure.name!r} needs",
        structure.less_memory,
    )


def _size_with_weights(size: TrainingSize, mode: str, stream: Stream, ranks: Ranks) -> TrainingSize:
    """Discard a size that was inferred from a sampler if the examples have weights."""
    if not size.is_inferred:
        return size
    first = stream.first
    has_weights = first is not None and first.weights is not None
    if not any(ranks.exchange(has_weights)):
        return size
    if not size.must_match_read:
        raise ValueError(
            f'`mode="{mode}"` uses only part of the data, so the sum of all example weights is not '
            "known. Pass this sum as `num_data=`."
        )
    return replace(size, num_data=None)


def _agreed_size(size: TrainingSize, ranks: Ranks) -> TrainingSize:
    """Sum the sizes that the processes inferred from their own loaders."""
    if not size.is_inferred:
        return size
    sizes = ranks.exchange(size.num_data)
    return replace(size, num_data=None if None in sizes else sum(sizes))


def _add_information(prepared: PreparedFit, information: Information) -> CurvatureFit:
    """Add the information of the data to the information of earlier data."""
    names = prepared.parameters.block_names
    earlier_names = list(information.curvature.blocks)
    structure = prepared.config.structure
    if names != earlier_names and not structure.has_independent_outputs:
        differing = sorted(set(names) ^ set(earlier_names)) or names
        raise ValueError(
            "The new data has different curvature blocks from the earlier data: "
            f"{differing[:4]} differ. Fit to the earlier and the new data together."
        )
    (data,) = prepared.streams
    return structure.update(prepared.context, information, data, prepared.size.num_data)


def build_posterior(prepared: PreparedFit, curvature_fit: CurvatureFit) -> FittedPosterior:
    """Build the posterior from a curvature, the model's parameters and its prior."""
    setup = prepared.setup
    parameters = prepared.parameters
    data = curvature_fit.totals
    num_data = prepared.size.after_reading(data.weight)
    # Sums over the examples that were read are extrapolated to all N examples.
    scale = num_data / data.weight
    num_targets = None
    # The curvature is proportional to 1/σ², except for the empirical Fisher, and unless it contains
    # the information of earlier data.
    can_scale_noise = setup.config.fisher.kind != "empirical" and setup.prior.information is None
    if setup.spec.likelihood.has_sigma and can_scale_noise:
        num_targets = data.num_outputs * scale
    model = setup.spec.plain_model
    mean = parameters.flattened(model)
    order = parameters.order
    prior = setup.prior.to(mean.device).for_parameters(parameters)
    posterior = GaussianPosterior(
        mean=mean,
        curvature=curvature_fit.curvature,
        num_data=num_data,
        prior=prior,
        order=None if order is None else order.to(mean.device),
        temperature=setup.temperature,
        layout=parameters.layout(model),
        factor_scales=curvature_fit.factor_scales,
    )
    return FittedPosterior(
        fitted_model=FittedModel.record(setup.spec, parameters, is_verified=True),
        config=setup.config,
        selected=setup.parameters,
        posterior=posterior,
        nll=data.nll * scale,
        mode=prepared.mode,
        num_targets=num_targets,
        link=setup.link,
        report=curvature_fit.report,
    )
