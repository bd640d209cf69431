"""Export of a predictive as a program that runs without this package.

The network and the posterior become one module, whose results are compared with `predict` before
the file is written.
"""

import inspect
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Distribution

from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.losses.likelihoods.base import variances_of
from laplace_debias.curvature.network.calling import call, returned_outputs
from laplace_debias.curvature.network.inputs import (
    Inputs,
    OneArgument,
    Record,
    join,
    take,
    tensors_of,
)
from laplace_debias.laplace.functional.linear_head import LinearHead
from laplace_debias.laplace.links import Link, link_from, required_moments
from laplace_debias.laplace.prediction.predictive import (
    FitWithLink,
    PredictionMethod,
    default_link_of_fit,
)
from laplace_debias.laplace.saving.onnx_program import (
    Answers,
    check_onnx,
    check_onnx_inputs,
    onnx_answers,
    onnx_model,
    refusing,
)
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.operators import EigenKronecker
from laplace_debias.operators.structures.directions import Directions
from laplace_debias.system.files import check_target, written_atomically
from laplace_debias.system.shown import first_names
from laplace_debias.system.threads import FORWARD_MODE


def export(
    fitted: FittedPosterior, path: Path, example: Inputs | Record, link: str | Link | None
) -> None:
    """Write the closed-form predictive as a program; see `Laplace.export`.

    Args:
        fitted: The fit of a linear last layer.
        path: The file; its suffix, `.pt2` or `.onnx`, selects the format.
        example: Inputs of one example or more.
        link: The link; None for the link of the fit or, if it has none, the default link.
    """
    chosen_link = link_from(link, fitted.likelihood) or fitted.link
    _check_can_export(fitted.likelihood, path)
    is_onnx = path.suffix == ".onnx"
    if is_onnx:
        check_onnx()
    check_target(path)
    with torch.inference_mode(False):
        inputs = fitted.spec.read_batch.inputs(example, fitted.posterior.mean.device)
        _check_only_tensors(inputs)
        if is_onnx:
            check_onnx_inputs(tensors_of(inputs))
        chosen_link = chosen_link or default_link_of_fit(fitted, inputs)
        if chosen_link is not None and chosen_link.name == "exact":
            raise NotImplementedError(
                '`link="exact"` needs a matrix decomposition of the covariances, and '
                'this operation cannot be exported. Use `link="pairwise"`.'
            )
        program = _trace(_Predictive(fitted, inputs, chosen_link), inputs)
        expected = FitWithLink(fitted, chosen_link).predictive(inputs, PredictionMethod())
        names, args, kwargs = _arguments(inputs)
        with torch.no_grad():
            answers = program.module()(*args, **kwargs)
        _check_answers(answers, expected, "torch.export")
        with FORWARD_MODE:
            if is_onnx:
                content = onnx_model(program, list(answers))
                inputs_by_name = kwargs or dict(zip(names, args, strict=True))
                _check_answers(onnx_answers(content, inputs_by_name), expected, "The ONNX model")
            else:
                buffer = io.BytesIO()
                torch.export.save(program, buffer)
                content = buffer.getvalue()
    with written_atomically(path, make_folders=False) as temporary:
        temporary.write_bytes(content)


def _check_can_export(likelihood: Likelihood, path: Path) -> None:
    """Require a likelihood that can be exported, and a file name of a known format."""
    if not likelihood.is_exportable:
        raise NotImplementedError(
            f"The predictive distribution of a {type(likelihood).__name__} "
            "cannot be exported. Give the likelihood a method exported(mean, "
            "covariance) that returns a mapping from names to tensors."
        )
    if path.suffix not in (".pt2", ".onnx"):
        raise ValueError(
            f"{path} has the suffix {path.suffix!r}. Use a name that ends with .pt2 or .onnx."
        )


def _check_only_tensors(inputs: Inputs) -> None:
    """Require that the inputs are a tensor, or contain only tensors."""
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    if not isinstance(inputs, Tensor) and not all(isinstance(x, Tensor) for x in values):
        raise NotImplementedError(
            "An exported program takes only tensors, but the example contains something else "
            "(None, a flag). Wrap the model in a module that sets this argument, and fit the "
            "wrapper."
        )


class _Predictive(nn.Module):
    """A module for the closed-form predictive of a linear last layer; see `LinearHead`."""

    def __init__(self, fitted: FittedPosterior, example: Inputs, link: Link | None) -> None:
        super().__init__()
        self.network = fitted.fitted_model.network()
        self.likelihood = fitted.likelihood
        self._layer = _last_linear_layer(fitted, example)
        self._link = link
        self._heads: list[LinearHead] = []
        posterior = fitted.posterior
        blocks = zip(fitted.parameters.blocks, posterior.deltas(), strict=True)
        for index, (block, delta) in enumerate(blocks):
            curvature = posterior.curvature.blocks.get(block.name)
            if not isinstance(curvature, EigenKronecker):
                raise NotImplementedError(
                    'Only posteriors with curvature "kfac", "ekfac" or "diag" can be exported. '
                    "Fit with one of them."
                )
            head = LinearHead.from_posterior(block, posterior)
            self._heads.append(head)
            self._store(f"variances_{index}", head.variances(delta))
            self._store(f"U_G_{index}", head.U_G)
            self._store(f"U_A_{index}", curvature.U_A)

        def forward(*args: Tensor, **kwargs: Tensor) -> Answers:
            if isinstance(example, OneArgument):
                return self.predict(OneArgument(kwargs))
            return self.predict(kwargs or args)

        # For `**kwargs`, torch (2.15) writes programs that it cannot call, so each input gets a
        # name.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in _arguments(example)[0]]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward

    def predict(self, inputs: Inputs) -> Answers:
        """Compute the program's results for the model's inputs."""
        mean, phi = self._outputs_and_layer_inputs(inputs)
        links = [] if self._link is None else [self._link]
        diagonal = required_moments(self.likelihood, links) == "variances"
        covariance = self._covariance(phi, diagonal)
        if self._link is None:
            return self.likelihood.exported(mean, covariance)
        variance = variances_of(mean, covariance)
        logits = self._link.logits(self.likelihood, mean, covariance)
        probs = self.likelihood.probabilities(logits)
        return {"logits": mean, "variance": variance, "probs": probs}

    def _outputs_and_layer_inputs(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Run the network, and return its outputs and the inputs of its last layer."""
        # A plain hook is used, because a tap would compare numbers of examples, which are only
        # symbols during tracing.
        layer_inputs: list[Tensor] = []

        def record(_: nn.Module, args: Any, kwargs: Any, __: Any) -> None:
            layer_inputs.append(args[0] if args else next(iter(kwargs.values())))

        layer = self.network.get_submodule(self._layer)
        handle = layer.register_forward_hook(record, with_kwargs=True)
        try:
            outputs = call(self.network, inputs)
        finally:
            handle.remove()
        return outputs, layer_inputs[0]

    def _store(self, name: str, value: Tensor | None) -> None:
        """Register a copy of a tensor as a buffer."""
        if value is not None:
            # Without the copy, the file would contain the whole tensor that underlies a view.
            copy = value.clone(memory_format=torch.contiguous_format)
            self.register_buffer(name, copy)

    def _covariance(self, phi: Tensor, diagonal: bool) -> Float[Tensor, "..."]:
        """Compute the covariance of the layer's outputs, `[B, ..., C, C]`, or its diagonal."""
        stored = dict(self.named_buffers(recurse=False))
        covariances = []
        for index, block_head in enumerate(self._heads):
            size = block_head.input_directions.size
            input_directions = Directions.from_columns_or_axes(stored.get(f"U_A_{index}"), size)
            U_G = stored.get(f"U_G_{index}")
            head = replace(block_head, U_G=U_G, input_directions=input_directions)
            eigen_variances = head.eigen_variances(phi, stored[f"variances_{index}"])
            covariances.append(head.covariance(eigen_variances, diagonal=diagonal))
        return sum(covariances[1:], covariances[0])


# ------------------------------------------------------------------- tracing, and the check


def _trace(module: _Predictive, example: Inputs) -> torch.export.ExportedProgram:
    """Trace the program for any number of examples.

    Raises:
        NotImplementedError: If torch cannot trace the model.
    """
    # Two examples are used, because torch would treat a batch size of 1 as a constant.
    names, args, kwargs = _arguments(join([example, example]))
    shapes = {name: {0: torch.export.Dim("batch")} for name in names}
    failure = (
        "torch.export cannot trace the model's forward pass with a variable number of examples"
    )
    remedy = (
        "Remove operations that depend on the values of tensors (`if`, `.item()`, loops) or on a "
        "fixed number of examples."
    )
    # torch can trace in only one thread at a time, so the lock is held.
    with refusing(failure, remedy), FORWARD_MODE, torch.no_grad():
        return torch.export.export(module.eval(), args, kwargs, dynamic_shapes=shapes, strict=False)


def _check_answers(answers: Answers, predicted: Distribution, source: str) -> None:
    """Require that the answers of a program for the example agree with `predict`, up to rounding.

    Raises:
        RuntimeError: If they differ. The message names the source of the program.
    """
    if "probs" in answers:
        expected = {"probs": getattr(predicted, "probs", predicted.mean)}
    else:
        attributes = {"covariance": "covariance_matrix"}
        expected = {name: getattr(predicted, attributes.get(name, name)) for name in answers}
    for name, value in expected.items():
        tolerance = torch.finfo(value.dtype).eps ** 0.5 * max(1.0, float(value.abs().max()))
        difference = float((answers[name].to(value.device) - value).abs().max())
        if not difference <= tolerance:
            raise RuntimeError(
                "For the example input, the exported program and `predict` differ in "
                f"{name} by {difference:.3g}, so {source} did not record the whole "
                "computation. No file was written. Check whether the forward pass "
                "changes the model's state."
            )


def _arguments(inputs: Inputs) -> tuple[list[str], tuple[Tensor, ...], dict[str, Tensor]]:
    """Convert inputs to the arguments of a program.

    Returns:
        The names of all arguments, the positional arguments, and the keyword arguments.
    """
    if isinstance(inputs, Mapping):
        return list(inputs), (), dict(inputs)
    if isinstance(inputs, Tensor):
        return ["input"], (inputs,), {}
    names = ["input"] if len(inputs) == 1 else [f"input_{n}" for n in range(len(inputs))]
    return names, tuple(inputs), {}


def _last_linear_layer(fitted: FittedPosterior, example: Inputs) -> str:
    """Return the path of the only Bayesian layer, which must return the outputs of the network.

    Raises:
        NotImplementedError: If several layers are Bayesian, or if the only one is not linear or is
            not the last layer.
    """
    blocks: Sequence[Block] = fitted.parameters.blocks
    layers = list(dict.fromkeys(block.layer for block in blocks))
    remedy = 'Use a model that ends with an nn.Linear, and fit with `params="last_layer"`.'
    if len(layers) > 1:
        raise NotImplementedError(
            f"Only a posterior over the last layer can be exported, but {len(layers)} layers are "
            f"Bayesian here: {first_names([layer or 'the model itself' for layer in layers])}. "
            f"{remedy}"
        )
    network = fitted.fitted_model.network()
    tap = Tap(network, blocks)
    forward_pass = tap.forward(example)
    outputs = forward_pass.outputs
    if returned_outputs(network, take(example, slice(0, 1))).ndim == 1:
        raise NotImplementedError(
            "The model returns its single output as [B], which cannot be exported. Return it as "
            "[B, 1], without a squeeze after the last layer."
        )
    last = forward_pass.last_layer()
    layer = network.get_submodule(layers[0])
    is_linear = all(block.rule.is_linear for block in blocks)
    if last is None or not is_linear or last.x.shape[:-1] != outputs.shape[:-1]:
        kind = type(layer).__name__
        reason = f"{layers[0]} is a {kind}, or other operations follow it."
        if not layers[0]:
            reason = f"The Bayesian parameters belong to no such layer, but to the {kind} itself."
        raise NotImplementedError(
            f"A model can only be exported if its last operation is an nn.Linear. {reason} {remedy}"
        )
    return layers[0]
