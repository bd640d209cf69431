"""Mini-batch quadratics along one batch's directions: what the experiments on the bias measure.

Along the columns of V a quadratic is a polynomial (`Cut`). Its slopes Vᵀg and curvatures VᵀHV
determine it at θ₀ and anywhere in the span of V. By Eq. 5 the full set's quadratic is the mean of
the quadratics of a partition into equal batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from laplace_debias.curvature import Jacobian
from laplace_debias.curvature.network.weight_decay import decay_mask
from laplace_debias.experiments.shared.checks import check_at_least
from laplace_debias.experiments.shared.settings import QuadraticSettings
from laplace_debias.experiments.shared.setup import Batch, Trained
from laplace_debias.experiments.shared.store import Store
from laplace_debias.linalg import cg, eigsh
from laplace_debias.quadratic import Cut, Quadratic

Kind = Literal["eigenvectors", "cg"]


@dataclass(frozen=True, kw_only=True)
class BiasSettings(QuadraticSettings):
    """Settings of the experiments on the bias of mini-batches.

    Attributes:
        full_examples: How many training images, chosen at random, are the full set.
        draws: On how many mini-batches directions are computed, the first ones of the full set.
        num_directions: How many directions each.
        tol: Greatest residual of an eigenpair, relative to the largest eigenvalue.
    """

    full_examples: int = 2048
    num_directions: int = 10
    tol: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "full_examples", "num_directions")
        if not 0 < self.tol < 1:
            raise ValueError(f"tol is {self.tol}; expected a number between 0 and 1")

    def num_batches(self, batch_size: int) -> int:
        """Number of batches of the full set.

        Raises:
            ValueError: If they would not be equal, or too few to draw from.
        """
        if batch_size < 1 or self.full_examples % batch_size:
            raise ValueError(
                f"full_examples is {self.full_examples}, batches have {batch_size} examples; "
                "expected a divisor: only the mean over equal batches is the full set's (Eq. 5)"
            )
        number = self.full_examples // batch_size
        if number <= self.draws:
            raise ValueError(
                f"full_examples is {self.full_examples}, which is {number} batches of "
                f"{batch_size}; expected more than draws = {self.draws}, to measure on others"
            )
        return number


@dataclass(frozen=True, eq=False)
class Directions:
    """Directions of one mini-batch's quadratic.

    Attributes:
        vectors: Unit vectors as columns, `[D, k]`.
        coefficients: Where their slopes are measured: for vector t at θ₀ + V·coefficients[:, t].
            `[k, k]`; zero for eigenvectors, CG's step sizes so far for its search directions.
    """

    vectors: Float[Tensor, "dim k"]
    coefficients: Float[Tensor, "k k"]

    def slopes(self, cut: Cut) -> Float[Tensor, " k"]:
        """s(θ_t; d_t) on the quadratic of a cut along these directions (Eq. 10)."""
        return cut.slopes + (cut.curvatures * self.coefficients).sum(0)


def quadratic_on(trained: Trained, batch: Batch, curvature: str, decay: float) -> Quadratic:
    """The regularised quadratic of one mini-batch (Eq. 2)."""
    return Quadratic.from_data(
        trained.model, trained.problem.loss, [batch], curvature, weight_decay=decay
    )


def find_directions(
    quadratic: Quadratic, kind: Kind, number: int, tol: float, seed: int, progress: bool = False
) -> Directions:
    """The top eigenvectors of a quadratic's matrix, or the first search directions of CG on it.

    All point down the quadratic's slope. CG's are conjugate, and its iterates those of Eq. 3.

    Args:
        quadratic: The quadratic.
        kind: `"eigenvectors"` or `"cg"`.
        number: How many; CG may end sooner, where the curvature is not positive.
        tol: Of the eigenvectors, as for `eigsh`.
        seed: Seed of the eigensolver's start.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If CG finds no direction.
    """
    if kind == "eigenvectors":
        generator = torch.Generator(quadratic.matrix.device).manual_seed(seed)
        pairs = eigsh(quadratic.matrix, number, tol=tol, generator=generator, progress=progress)
        # An eigenvector has no sign of its own, and solvers return either.
        is_uphill = pairs.vectors.T @ quadratic.gradient > 0
        downhill = torch.where(is_uphill, -pairs.vectors, pairs.vectors)
        return Directions(downhill, downhill.new_zeros(number, number))
    solution = cg(
        quadratic.matrix,
        -quadratic.gradient,
        tol=1e-12,
        max_iter=number,
        keep="directions",
        progress=progress,
    )
    vectors = solution.directions
    assert vectors is not None
    count = vectors.shape[1]
    if count == 0:
        raise ValueError(f"CG took no step: {solution.message}")
    # Step i is part of every later position.
    coefficients = solution.step_sizes[:, None].expand(count, count).triu(1).contiguous()
    return Directions(vectors, coefficients)


def cut_along(
    trained: Trained, batch: Batch, curvature: str, decay: float, V: Float[Tensor, "dim k"]
) -> Cut:
    r"""The regularised quadratic of one mini-batch in the span of V.

    For the GGN of the cross-entropy $V^\top G V = \tfrac1N \sum_n (J_n V)^\top (\mathrm{diag}(p_n)
    - p_n p_n^\top) J_n V$ takes products with the Jacobian alone, less than half the cost of
    products with G.
    """
    quadratic = quadratic_on(trained, batch, curvature, decay=0.0)
    if curvature == "ggn":
        value, slopes = quadratic.value, V.T @ quadratic.gradient
        curvatures = _ggn_along(trained, batch, V)
    else:
        cut = quadratic.cut(V)
        value, slopes, curvatures = cut.value, cut.slopes, cut.curvatures
    mask = decay_mask(trained.model.parameters())
    theta = quadratic.position * mask
    return Cut(
        value + decay / 2 * theta @ theta,
        slopes + decay * (V.T @ theta),
        curvatures + decay * (V.T @ (mask[:, None] * V)),
    )


def _ggn_along(trained: Trained, batch: Batch, V: Tensor) -> Float[Tensor, "k k"]:
    x, _ = batch
    with torch.no_grad():
        probs = trained.model(x).softmax(1)
    tangents = (Jacobian(trained.model, [batch]) @ V).unflatten(0, probs.shape)
    means = torch.einsum("nc,nck->nk", probs, tangents)
    roots = (probs.sqrt()[..., None] * tangents).flatten(0, 1)
    return (roots.T @ roots - means.T @ means) / len(x)


def stored_directions(
    store: Store,
    name: str,
    trained: Trained,
    batch_size: int,
    kind: Kind,
    settings: BiasSettings,
    draws: int | None = None,
    number: int | None = None,
) -> tuple[list[Batch], list[Directions]]:
    """The full set's batches, and directions of the first ones' quadratics, computed once per run.

    Args:
        store: The run's store.
        name: Name of the parts under which they are stored, to which the draw is added.
        trained: The network.
        batch_size: Examples of a mini-batch.
        kind: Which directions.
        settings: Curvature, weight decay, tolerance and so on.
        draws: On how many batches; the settings' number if None.
        number: How many directions; the settings' number if None.
    """
    count = settings.num_batches(batch_size)
    batches = trained.batches(trained.data.train, batch_size, count, settings.seed)
    decay = settings.decay(trained.weight_decay)

    def compute(batch: Batch) -> dict[str, Tensor]:
        found = find_directions(
            quadratic_on(trained, batch, settings.curvature, decay),
            kind,
            settings.num_directions if number is None else number,
            settings.tol,
            settings.seed,
            settings.progress,
        )
        return {"vectors": found.vectors, "coefficients": found.coefficients}

    directions = []
    for draw, batch in enumerate(batches[: settings.draws if draws is None else draws]):
        found = store.tensors(f"{name}-{draw}", partial(compute, batch))
        directions.append(Directions(**{k: v.to(trained.device) for k, v in found.items()}))
    return batches, directions


def stored_cuts(
    store: Store,
    name: str,
    trained: Trained,
    batches: Sequence[Batch],
    directions: Sequence[Directions],
    settings: BiasSettings,
) -> list[list[Cut]]:
    """Every batch's quadratic along every set of directions, each batch measured once per run.

    Args:
        store: The run's store.
        name: Name of the parts, to which the batch's number is added.
        trained: The network.
        batches: Mini-batches.
        directions: Sets of directions.
        settings: Curvature and weight decay.

    Returns:
        For each set of directions the cut on each batch, on the CPU in float64.
    """
    sizes = [found.vectors.shape[1] for found in directions]
    together = torch.cat([found.vectors for found in directions], dim=1)
    decay = settings.decay(trained.weight_decay)
    cuts: list[list[Cut]] = [[] for _ in directions]
    bar = tqdm(batches, desc=f"measuring {name}", unit="batch", disable=not settings.progress)
    for index, batch in enumerate(bar):

        def compute(batch: Batch = batch) -> dict[str, Tensor]:
            cut = cut_along(trained, batch, settings.curvature, decay, together)
            return {"value": cut.value, "slopes": cut.slopes, "curvatures": cut.curvatures}

        found = {k: v.double() for k, v in store.tensors(f"{name}-{index}", compute).items()}
        start = 0
        for of_set, size in zip(cuts, sizes, strict=True):
            part = slice(start, start + size)
            of_set.append(
                Cut(found["value"], found["slopes"][part], found["curvatures"][part, part])
            )
            start += size
    return cuts


def mean_cut(cuts: Sequence[Cut]) -> Cut:
    """The full set's quadratic from those of a partition into equal batches (Eq. 5)."""
    return Cut(
        torch.stack([cut.value for cut in cuts]).mean(0),
        torch.stack([cut.slopes for cut in cuts]).mean(0),
        torch.stack([cut.curvatures for cut in cuts]).mean(0),
    )
