"""The subject of an approximation: a model, its Bayesian parameters, and the choices made."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.dense import DENSE_BLOCK
from laplace_debias.curvature.kinds import CurvatureKind, FisherType
from laplace_debias.curvature.layers.backends import choose_backend
from laplace_debias.curvature.layers.blocks import Block, Sharing, curvature_blocks, parameter_order
from laplace_debias.curvature.layers.resolve import resolve
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.losses.base import NegativeLogLikelihood
from laplace_debias.curvature.losses.cotangents import Cotangents
from laplace_debias.curvature.losses.likelihoods import (
    OF_SHAPES,
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    MultiLabel,
)
from laplace_debias.curvature.network.batches import Batches, BatchHook, BatchReader, Stream
from laplace_debias.curvature.network.inputs import Inputs, call, move, take
from laplace_debias.curvature.network.outputs import (
    classes_last,
    warn_of_probabilities,
    warn_of_sigmoid,
)
from laplace_debias.curvature.network.selection import (
    LAST_LAYER,
    SUPPORTED,
    ParameterSelection,
    check_parameters,
    leaving_out,
    select_parameters,
)
from laplace_debias.curvature.network.shadow import (
    kept_as_it_is,
    plain_names,
    shadow,
    unwrapped,
    usable,
    wide,
    widened,
)
from laplace_debias.laplace.links import Link, link_from
from laplace_debias.system.checks import check_is, real, whole
from laplace_debias.system.ranks import current
from laplace_debias.system.shown import warn

# One number, or one per block.
PriorPrecision = float | Tensor
# One number, or one per Bayesian parameter [D].
PriorMean = float | Tensor


@dataclass(frozen=True)
class FitSettings:
    """The choices of a fit; as `Laplace` takes them."""

    kind: CurvatureKind
    fisher: FisherType
    factor_dtype: torch.dtype
    joint: bool
    sharing: Sharing
    memory_bound: int | None
    class_dim: int | None = None

    def __post_init__(self) -> None:
        if self.factor_dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"factor_dtype must be torch.float32 or torch.float64, got {self.factor_dtype}."
            )
        check_is(self.joint, "joint", bool)
        check_is(self.sharing, "sharing", str, Mapping)
        if self.memory_bound is not None:
            whole(self.memory_bound, "memory_bound")
        if self.class_dim is not None and whole(self.class_dim, "class_dim", -(2**53)) == 0:
            raise ValueError(
                "class_dim=0 is the dimension of the examples: use class_dim=1 for outputs "
                "[B, C, ...], class_dim=-1 for outputs [B, ..., C]."
            )


@dataclass(frozen=True, eq=False)
class BayesianParameters:
    """The Bayesian parameters, and how their curvature is measured.

    Where parameters are not measured at their layers, `calls` tells it, as `curvature_blocks` takes
    it; `order` tells where the blocks' entries lie among the flattened parameters, of which there
    are `size`.
    """

    names: list[str]
    blocks: list[Block]
    calls: Mapping[str, Sequence[str]]
    order: Int[Tensor, " parameters"] | None
    block_names: list[str]
    size: int

    @classmethod
    def of(
        cls,
        model: nn.Module,
        selection: ParameterSelection,
        settings: FitSettings,
        example: Inputs | None,
        calls: Mapping[str, Sequence[str]] | None = None,
    ) -> "BayesianParameters":
        """The parameters that a user selects; the last layer may take an example to be found."""
        names = select_parameters(model, selection, example)
        check_parameters(model, names)
        calls = {} if calls is None else calls
        rank = settings.kind.directions_per_factor
        blocks, block_names, of_known, size = [], [], set[str](), 0
        for block in curvature_blocks(model, names, settings.joint, settings.sharing, calls):
            if selection != SUPPORTED or not block.calls:
                blocks.append(replace(block, rank=rank))
                block_names.append(block.name)
                of_known.update(block.parameters)
                size += block.size
        if selection == SUPPORTED:
            names = [name for name in names if name in of_known]
            if not names:
                raise ValueError(f"params={SUPPORTED!r} selects no parameter: no layer is known.")
        block_names = [DENSE_BLOCK] if settings.kind.is_dense else block_names
        return cls(names, blocks, calls, parameter_order(model, names, blocks), block_names, size)

    def verified(
        self,
        tap: Tap,
        model: nn.Module,
        selection: ParameterSelection,
        settings: FitSettings,
        x: Inputs,
    ) -> "BayesianParameters":
        """The same parameters with blocks that an example or two were held against.

        Of a general selection, such as `"all"`, parameters that the outputs do not depend on are
        left out, with a warning.
        """
        found = resolve(tap, self.names, x, settings.joint, settings.sharing)
        names, calls = self.names, found.calls
        if selection == SUPPORTED and calls:
            names, calls = [name for name in names if name not in calls], {}
        if found.unused:
            names = [name for name in names if name not in found.unused]
            says = (
                f"The outputs do not depend on {list(found.unused)} by differentiable operations "
                "(an unused branch, `detach`, `no_grad`)"
            )
            if not isinstance(selection, str) or selection == LAST_LAYER or not names:
                raise ValueError(f"{says}: leave them out with {leaving_out(found.unused)}.")
            warn(
                f"{says}, so they are left out of the posterior. To say so yourself, pass "
                f"{leaving_out(found.unused)}, or freeze them with requires_grad_(False)."
            )
        if not names:
            raise ValueError(
                f"params={selection!r} leaves no parameter: none has a block of its layer here."
            )
        if names == self.names and dict(calls) == dict(self.calls):
            return self
        return BayesianParameters.of(model, names, settings, x, calls)

    def flat(self, model: nn.Module) -> Float[Tensor, " parameters"]:
        """The present values, in the model's order, `[D]`, no narrower than single precision."""
        values = []
        for name in self.names:
            value = model.get_parameter(name).detach().flatten()
            values.append(value.to(wide(value.dtype)))
        return torch.cat(values)


@dataclass(frozen=True, eq=False)
class Subject:
    """The subject of an approximation: its model, how its data is read, and its prior.

    If the model's structure tells the Bayesian parameters they are `selected`, and a fit holds them
    against an example; `parameters` are those of the last fit, or before it those selected.
    """

    model: nn.Module
    likelihood: Likelihood
    settings: FitSettings
    selection: ParameterSelection
    backend: str
    read_batch: BatchReader
    selected: BayesianParameters | None
    parameters: BayesianParameters | None
    prior_precision: Float[Tensor, ""] | Float[Tensor, " blocks"]
    temperature: float = 1.0
    given_mean: PriorMean = 0.0
    link: Link | None = None
    prior_mean: Float[Tensor, ""] | Float[Tensor, " parameters"] | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        likelihood: Likelihood,
        settings: FitSettings,
        selection: ParameterSelection,
        backend: str,
        batch: BatchHook | None,
        calls: Mapping[str, Sequence[str]] | None = None,
        **prior: Any,
    ) -> "Subject":
        """The subject of what `Laplace` takes; the prior's fields are those of `changed`.

        Of a fit that is known so are its `calls`, as `curvature_blocks` takes them.
        """
        check_is(batch, "batch", Callable, type(None))
        plain = usable(model)
        if isinstance(selection, (list, tuple)):
            selection = plain_names(model, selection)
        selected = None
        if selection != LAST_LAYER or not any(p.requires_grad for p in plain.parameters()):
            selected = BayesianParameters.of(plain, selection, settings, None, calls)
        if settings.class_dim not in (None, -1):
            if backend == "backpack":
                raise NotImplementedError(
                    "BackPACK does not see how class_dim= moves the outputs' dimensions: use "
                    "backend='hooks' or 'auto', or put the classes last in the model."
                )
            backend = "hooks" if backend == "auto" else backend
        if backend not in ("auto", "hooks"):  # Which serve every model.
            choose_backend(plain, backend)
        parts = (
            model,
            likelihood,
            settings,
            selection,
            backend,
            BatchReader(model, batch),
            selected,
            selected,
        )
        return cls(*parts, torch.ones((), dtype=torch.float64)).changed(**prior)

    def changed(self, **fields: Any) -> "Subject":
        """The same with another prior, temperature, link or likelihood, or of other parameters."""
        given = fields.pop("prior_precision", self.prior_precision)
        link = fields.pop("link", self.link)
        temperature = real(fields.pop("temperature", self.temperature), "temperature")
        if temperature.ndim:
            raise TypeError(f"temperature must be one number, got {temperature.tolist()}.")
        if not 0 < float(temperature) < math.inf:
            raise ValueError(
                f"temperature must be positive and finite, got {float(temperature)}: 1 for the "
                "posterior itself, less for one that is more certain."
            )
        other = replace(self, **fields)
        known = other.parameters
        device = other.first_parameter.device
        precision = real(given, "prior_precision", device).detach().clone()
        # As long as there are no blocks, the fit that finds them checks their number.
        num_blocks = precision.numel() if known is None else len(known.block_names)
        check_prior_precision(precision, num_blocks)
        size = None if known is None else known.size
        return replace(
            other,
            prior_precision=precision,
            temperature=float(temperature),
            link=None if link is None else link_from(link, other.likelihood),
            prior_mean=prior_mean_of(other.given_mean, size, device),
        )

    @property
    def known(self) -> BayesianParameters:
        """The Bayesian parameters."""
        if self.parameters is None:
            raise RuntimeError(
                f'params="last_layer" of a {type(self.model).__name__} is found by running an '
                "example, which the first fit does: call `fit(train_loader)` first, or name the "
                "parameters, params=[...]."
            )
        return self.parameters

    @property
    def first_parameter(self) -> nn.Parameter:
        """The first Bayesian parameter; the first trainable one as long as they are not known."""
        if self.parameters is None:
            return next(p for p in self.model.parameters() if p.requires_grad)
        return unwrapped(self.model).get_parameter(self.parameters.names[0])

    @property
    def network(self) -> nn.Module:
        """A `shadow` of the model without wrappers, with outputs `[B, ..., C]`; each time anew.

        Where Bayesian parameters are in half precision, it computes in single precision.
        """
        network = widened(shadow(unwrapped(self.model)), self.known.names)
        class_dim = self.settings.class_dim
        if class_dim is None or class_dim == -1:
            return network
        return classes_last(network, class_dim)

    def problem(self, stream: Stream, fisher: FisherType) -> tuple["Subject", FitContext]:
        """The problem that is fitted, as a stream's first batch tells, and its subject."""
        settings = self.settings
        usable(self.model)
        found, tap = self._look_at(stream)
        blocks = found.known.blocks
        made = choose_backend(unwrapped(self.model), self.backend, blocks)(tap, blocks)
        problem = FitContext(
            Cotangents(NegativeLogLikelihood(self.likelihood), fisher, settings.class_dim),
            blocks,
            made,
            settings.factor_dtype,
            settings.memory_bound,
            current(),
        )
        return found, problem

    def _look_at(self, stream: Stream) -> tuple["Subject", Tap]:
        """The subject with the parameters that the first batch tells, and a tap where they are.

        A process without examples looks at those of the first one that has some.
        """
        ranks, first = current(), stream.first
        has_one = ranks.exchange(bool(first))
        if True not in has_one:
            raise ValueError("The data holds no example: pass a loader with at least one batch.")
        if False in has_one:
            donated = ranks.from_rank(first, has_one.index(True))
            first = first or donated
        plain, found, settings = unwrapped(self.model), self.selected, self.settings
        (x, y, *_), device = first[0], self.first_parameter.device
        x, y = move(x, device, None), y.to(device)
        if found is None or self.selection == LAST_LAYER:
            found = BayesianParameters.of(plain, self.selection, settings, x)
            known = self.parameters
            if known is not None and known.names != found.names:
                raise ValueError(
                    f'params="last_layer" was {known.names}, but now the outputs come '
                    f"from {found.names}: the model has changed, build a new Laplace."
                )
        tap = Tap(replace(self, parameters=found).network)
        look_at(tap.network, self.likelihood, x, y, settings)
        found = found.verified(tap, plain, self.selection, settings, x)
        return self.changed(parameters=found), tap

    def stream(
        self,
        data: Batches,
        generator: torch.Generator | None = None,
        progress: str | None = None,
    ) -> Stream:
        """Data as pairs on the model's device; arguments as `Stream` takes them."""
        device = self.first_parameter.device
        return Stream(data, self.read_batch, generator, device, device, progress)

    def of_fit(
        self,
        data: Batches,
        generator: torch.Generator | None = None,
        what: str = "data",
        progress: str | None = None,
    ) -> Stream:
        """Data of a fit as pairs, of which at least one target must count.

        A fit moves inputs itself: questions about numbers that lie on the CPU are asked there.
        """
        is_of_shapes = type(self.likelihood) in OF_SHAPES
        of_targets = None if is_of_shapes else self.first_parameter.device
        ignored = getattr(self.likelihood, "ignore_index", None)
        what = what if ignored is None else f"{what} (ignore_index={ignored})"
        return Stream(
            *(data, self.read_batch, generator, None, of_targets, progress),
            *(self.likelihood.counts_any, what, True),
        )


def check_prior_precision(prior_precision: Tensor, num_blocks: int) -> list[float]:
    """One positive finite number, or one per block, as a list."""
    if prior_precision.shape not in ((), (num_blocks,)):
        raise ValueError(
            f"The prior precision must be one number or one for each of the {num_blocks} blocks, "
            f"got shape {tuple(prior_precision.shape)}."
        )
    values: list[float] = prior_precision.detach().double().reshape(-1).tolist()
    for value in values:
        if not 0 < value < math.inf:
            raise ValueError(
                f"The prior precision must be positive and finite, got {prior_precision.tolist()}: "
                "a flat prior is approached by a small one, such as 1e-6."
            )
    return values


def prior_mean_of(value: Any, size: int | None, device: torch.device) -> Tensor | None:
    """The prior's mean, float64, one number or one per parameter; None if it is zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        raise TypeError(
            "prior_mean must be a number or a tensor [D] in the order of param_names, got "
            f"{type(value).__name__}: of a state_dict join its entries, "
            "torch.cat([state[name].flatten() for name in la.param_names])."
        )
    if size is None:
        return None
    mean = real(value, "prior_mean", device).detach().clone()
    if mean.shape not in ((), (size,)):
        raise ValueError(
            f"prior_mean must be one number, or one for each of the {size} Bayesian parameters in "
            f"the order of param_names, got shape {tuple(mean.shape)}."
        )
    if not mean.isfinite().all():
        raise ValueError("prior_mean holds NaN or Inf: check where it comes from.")
    return mean if mean.any() else None


_FEW = 4
_MANY_COLUMNS = 1_000  # of `fisher="exact"`, where a user is told of `"mc"`


def look_at(
    network: nn.Module, likelihood: Likelihood, x: Inputs, y: Tensor, settings: FitSettings
) -> None:
    """Run a few examples: where are the classes, and are the outputs logits?"""
    with torch.no_grad(), kept_as_it_is(network.modules()):
        outputs = call(network, take(x, slice(0, _FEW)))
    shape = torch.Size((len(y), *outputs.shape[1:]))
    # One batch tells for all where the classes are: the others have the same model.
    fits_both = len(shape) > 2 and y.shape == shape[:-1] == shape[:1] + shape[2:]
    if settings.class_dim is None and fits_both and shape[1] > 1:
        raise ValueError(
            f"Outputs of shape {tuple(shape)} with targets of shape {tuple(y.shape)} may "
            "have the classes in the last dimension or in dimension 1. Say which: "
            "Laplace(..., class_dim=-1) for [B, ..., C], class_dim=1 for [B, C, ...]."
        )
    if isinstance(likelihood, Gaussian) and likelihood.is_assumed:
        warn(
            "The noise of the regression is not known, sigma=1.0 is assumed. Pass sigma= (--sigma) "
            "in the targets' units, or tune it after the fit, as la.tune(validation_loader) does, "
            "or la.tune_evidence(sigma=True)."
        )
    if isinstance(likelihood, Categorical):
        warn_of_probabilities(outputs)
        columns, is_exact = outputs.shape[1:].numel(), settings.fisher.kind == "exact"
        if is_exact and outputs.ndim > 2 and columns > _MANY_COLUMNS:
            warn(
                f'fisher="exact" takes {columns:,} backward passes of an example, one for each '
                'class at each position. Laplace(..., fisher="mc") takes one.'
            )
    if isinstance(likelihood, Bernoulli | MultiLabel):
        warn_of_sigmoid(network, outputs)
