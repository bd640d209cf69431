"""The posteriors that Figure 6 compares: from few examples in three ways, and from all of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from laplace_debias.curvature.layers.blocks import is_supported
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.experiments.shared.methods import CROSSFIT, DEBIASED, FULL, MINI
from laplace_debias.laplace import Laplace
from laplace_debias.problems import Images

Name = tuple[str, int]
"""A method and its draw."""

FisherKind = Literal["exact", "mc", "empirical"]
"""How the curvature's columns are found; see `Laplace`."""


@dataclass(frozen=True, kw_only=True)
class PosteriorPlan:
    """How the posteriors of a comparison are fitted.

    Attributes:
        curvature: Their structure.
        params: Which parameters are Bayesian; `weights` are those of layers that have curvature,
            not other weights of the network (class tokens, position embeddings).
        fisher: How the curvature of few examples is found.
        full_fisher: How the full-batch curvature is found.
        folds: Folds of the cross-fitted posterior; 0 for none.
    """

    curvature: Literal["kfac", "ekfac"]
    params: Literal["all", "weights", "last_layer"]
    fisher: FisherKind
    full_fisher: FisherKind
    folds: int = 0

    def fit(
        self,
        model: nn.Module,
        train: Images,
        draws: Sequence[Tensor],
        full: Iterable[tuple[Tensor, Tensor]],
        generator: torch.Generator,
        progress: bool = False,
    ) -> dict[Name, Laplace]:
        """All posteriors by method and draw: Eq. 4 on each draw, Eq. 9 for the debiased ones.

        Args:
            model: The trained network, in evaluation mode.
            train: What it was trained on; posteriors are scaled to its size.
            draws: Indices of the examples of each draw, an even number of them. Mini-batch and
                cross-fitted see all of them, debiased takes directions from the first half and
                magnitudes from the second.
            full: Batches of the full-batch fit.
            generator: Source of Monte-Carlo labels.
            progress: Whether to show a progress bar.
        """
        found: dict[Name, Laplace] = {}

        def fit(*batches: Iterable[tuple[Tensor, Tensor]], folds: int | None = None) -> Laplace:
            return self._laplace(model, self.fisher).fit_batches(
                *batches, num_data=len(train), folds=folds, generator=generator
            )

        for draw, indices in enumerate(tqdm(draws, desc="fit", disable=not progress)):
            x, y = train.batch(indices)
            half = len(indices) // 2
            found[MINI, draw] = fit([(x, y)])
            found[DEBIASED, draw] = fit([(x[:half], y[:half])], [(x[half:], y[half:])])
            if self.folds:
                found[CROSSFIT, draw] = fit([(x, y)], folds=self.folds)
        found[FULL, 0] = self._laplace(model, self.full_fisher).fit_batches(
            tqdm(full, desc="fit full-batch", unit="batch", disable=not progress),
            num_data=len(train),
            generator=generator,
        )
        return found

    def _laplace(self, model: nn.Module, fisher: FisherKind) -> Laplace:
        params = chosen_parameters(model, self.params)
        return Laplace(model, curvature=self.curvature, params=params, fisher=fisher)


def chosen_parameters(model: nn.Module, params: str) -> ParameterSelection:
    """The settings' choice; for `weights` the names of those that belong to a supported layer."""
    if params != "weights":
        return params
    return [
        f"{path}.{name}" if path else name
        for path, layer in model.named_modules()
        if is_supported(layer)
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.requires_grad and not name.endswith("bias")
    ]
