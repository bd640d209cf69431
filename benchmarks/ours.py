"""The contenders of this package, and the gradient with which they are compared."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.settings import Settings
from benchmarks.timing import Run
from laplace_debias import Laplace
from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.factor_sums import factor_sums
from laplace_debias.curvature.layers.backends import make_backend
from laplace_debias.curvature.layers.blocks import curvature_blocks
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.losses.base import NegativeLogLikelihood
from laplace_debias.curvature.losses.cotangents import Cotangents
from laplace_debias.curvature.losses.likelihoods import Categorical
from laplace_debias.curvature.network.selection import select_parameters
from laplace_debias.curvature.network.shared_copy import shared_copy

# Fits for predictions and samples are scaled to the number of training images of CIFAR-10.
NUM_DATA = 45_000


def gradient(settings: Settings) -> Callable[[], Run]:
    """Return a function for the gradient of a batch's mean loss, including the forward pass."""

    def build() -> Run:
        model = settings.model()
        parameters = list(model.parameters())

        def run(size: int) -> object:
            x, y = settings.data(size)
            return torch.autograd.grad(F.cross_entropy(model(x), y), parameters)

        return run

    return build


def factors(
    settings: Settings, fisher: str, backend: str, dtype: torch.dtype = torch.float32
) -> Callable[[], Run]:
    """Return a function for the Kronecker factors of all parameters, not eigendecomposed."""

    def build() -> Run:
        context = fit_context(settings.model(), fisher, backend, dtype)

        def run(size: int) -> object:
            return factor_sums(context, [Batch(*settings.data(size))])

        return run

    return build


def fit_context(
    model: nn.Module,
    fisher: str,
    backend: str = "auto",
    dtype: torch.dtype = torch.float32,
    params: str | Sequence[str] = "all",
) -> FitContext:
    """Prepare what `Laplace.fit` prepares for a classifier.

    Args:
        model: The network, in eval mode.
        fisher: The Fisher matrix.
        backend: `"auto"`, `"hooks"` or `"backpack"`.
        dtype: The dtype in which factors are summed and decomposed.
        params: The parameters of the posterior, or their names.
    """
    blocks = curvature_blocks(model, select_parameters(model, params))
    cotangents = Cotangents(NegativeLogLikelihood(Categorical()), FisherType(fisher))
    passes = make_backend(backend, model, Tap(shared_copy(model)), blocks)
    return FitContext(cotangents, blocks, passes, dtype, memory_bound=None)


def fitted(settings: Settings, **options: Any) -> Laplace:
    """Fit a posterior for predictions and samples, on one batch with the Monte-Carlo Fisher."""
    la = Laplace(settings.model(), fisher="mc", factor_dtype=torch.float32, **options)
    generator = torch.Generator().manual_seed(0)
    return la.fit_batches(
        [settings.data(settings.batch, seed=1)], num_data=NUM_DATA, generator=generator
    )
