"""Adapters for other libraries, which are imported when their contenders are built.

The libraries are wrapped as little as possible: the library's own call is timed, with the library's
own defaults if they do the same work. Models are fresh copies, because BackPACK leaves hooks on
them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.settings import Settings
from benchmarks.timing import Run

PACKAGES = (
    "backpack-for-pytorch",
    "curvlinops-for-pytorch",
    "laplace-torch",
    "nngeometry",
)


def curvlinops_factors(settings: Settings, fisher: str) -> Callable[[], Run]:
    """Return the `KFACLinearOperator` of curvlinops, with separate weights and biases like ours."""

    def build() -> Run:
        from curvlinops import FisherType, KFACLinearOperator

        model = settings.model()
        kind = FisherType.MC if fisher == "mc" else FisherType.TYPE2

        def run(size: int) -> object:
            operator = KFACLinearOperator(
                model,
                nn.CrossEntropyLoss(),
                list(model.parameters()),
                [settings.data(size)],
                fisher_type=kind,
                mc_samples=1,
                num_data=size,
                check_deterministic=False,
                separate_weight_and_bias=True,
            )
            operator.compute_kronecker_factors()
            return operator

        return run

    return build


def backpack_factors(settings: Settings, fisher: str) -> Callable[[], Run]:
    """Return BackPACK's `KFAC` (Monte-Carlo) or `KFLR` (exact), including the gradient."""

    def build() -> Run:
        from backpack import backpack, extend
        from backpack.extensions import KFAC, KFLR

        model = extend(_without_adaptive_pooling(settings))
        loss = extend(nn.CrossEntropyLoss())

        def run(size: int) -> object:
            x, y = settings.data(size)
            with backpack(KFAC(mc_samples=1) if fisher == "mc" else KFLR()):
                loss(model(x), y).backward()
            name = "kfac" if fisher == "mc" else "kflr"
            factors = [parameter.__dict__.pop(name) for parameter in model.parameters()]
            model.zero_grad()
            return factors

        return run

    return build


def _without_adaptive_pooling(settings: Settings) -> nn.Sequential:
    """Return an equivalent network with a fixed pooling, for which BackPACK has a rule."""
    model = settings.model()
    x, _ = settings.data(1)
    with torch.no_grad():
        for index, layer in enumerate(model):
            if isinstance(layer, nn.AdaptiveAvgPool2d):
                model[index] = nn.AvgPool2d((x.shape[2], x.shape[3]))
            x = model[index](x)
    return model


def nngeometry_factors(settings: Settings, fisher: str) -> Callable[[], Run]:
    """Return the `PMatKFAC` of nngeometry, whose blocks join weight and bias."""

    def build() -> Run:
        from nngeometry.metrics import FIM, FIM_MonteCarlo
        from nngeometry.object import PMatKFAC

        model = settings.model()
        options: dict[str, Any] = {"variant": "classif_logits", "device": settings.device}

        def run(size: int) -> object:
            loader = _loader(settings, size)
            if fisher == "mc":
                return FIM_MonteCarlo(model, loader, PMatKFAC, trials=1, **options)
            return FIM(model, loader, PMatKFAC, **options)

        return run

    return build


def laplace_torch_factors(settings: Settings, fisher: str) -> Callable[[], Run]:
    """Return laplace-torch's own call of its default backend (curvlinops), with the added loss."""

    def build() -> Run:
        from laplace.curvature import CurvlinopsGGN

        interface = CurvlinopsGGN(settings.model(), "classification", stochastic=fisher == "mc")

        def run(size: int) -> object:
            return interface.kron(*settings.data(size), N=size)

        return run

    return build


def laplace_torch_fitted(settings: Settings) -> Any:
    """Fit laplace-torch's `KronLaplace` of all parameters to one batch, Monte-Carlo Fisher."""
    from laplace import Laplace

    torch.manual_seed(0)
    la = Laplace(
        settings.model(),
        "classification",
        subset_of_weights="all",
        hessian_structure="kron",
        backend_kwargs={"stochastic": True},
    )
    la.fit(_loader(settings, settings.batch, seed=1))
    return la


def _loader(settings: Settings, size: int, seed: int = 0) -> DataLoader:
    return DataLoader(TensorDataset(*settings.data(size, seed)), batch_size=size)
