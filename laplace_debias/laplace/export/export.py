"""Which predictive is exported, and what it is held against."""

from pathlib import Path

import torch
from torch import Tensor

from laplace_debias.curvature.network.inputs import Inputs, Record
from laplace_debias.laplace import grids, predictive
from laplace_debias.laplace.export import writing
from laplace_debias.laplace.export.answers import check_likelihood, of_distribution
from laplace_debias.laplace.export.programs import LinearisedPredictive, SampledPredictive
from laplace_debias.laplace.fitted import Fitted
from laplace_debias.laplace.links import check_link

METHODS = ("glm", "nn")
DEFAULT_SAMPLES = 100


def export(
    fitted: Fitted,
    path: Path,
    example: Inputs | Record,
    method: str,
    samples: int | None,
    generator: torch.Generator | None,
    link: str,
) -> None:
    """As `Laplace.export`."""
    if method not in METHODS:
        raise ValueError(f"method={method!r} cannot be exported: use one of {', '.join(METHODS)}.")
    if method == "glm" and (samples is not None or generator is not None):
        raise ValueError(
            'samples and generator belong to method="nn": "glm" is exported in closed form.'
        )
    if samples is not None and samples < 1:
        raise ValueError(f"The number of samples must be at least 1, got {samples}.")
    if method == "nn" and link != "probit":
        raise ValueError(f'link={link!r} belongs to method="glm": leave it out.')
    check_link(link, fitted.likelihood)
    check_likelihood(fitted.likelihood)
    writing.check_path(path)
    with torch.inference_mode(False):
        inputs = fitted.moved(example)
        if method == "glm":
            deltas = fitted.posterior.prior_precision.unsqueeze(0)
            program = writing.traced(LinearisedPredictive(fitted, inputs, link), inputs)
            expected = grids.predictives([fitted], inputs, [deltas], link)[0][0]
        else:
            draws = fitted.posterior.sample(samples or DEFAULT_SAMPLES, generator)
            program = _sampled(fitted, inputs, draws, at_once=path.suffix != ".onnx")
            names = fitted.parameters.names
            outputs = predictive.sampled_outputs(fitted.network, names, inputs, draws)
            expected = fitted.likelihood.mixture(outputs)
        writing.write(path, program, inputs, of_distribution(expected))


def _sampled(
    fitted: Fitted, example: Inputs, draws: Tensor, at_once: bool
) -> torch.export.ExportedProgram:
    """The program; what torch.onnx writes cannot have all samples at once, and fails inside."""
    if at_once:
        try:
            return writing.traced(SampledPredictive(fitted, example, draws, True), example)
        except NotImplementedError:
            # Of some operations, convolutions and embeddings among them, torch cannot trace several
            # samples at once for any number of examples.
            pass
    return writing.traced(SampledPredictive(fitted, example, draws, False), example)
