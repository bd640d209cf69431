"""All eigenvalues of a GGN of few examples: through the products of its Jacobian's rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laplace_debias.curvature.fits.directions import eigh
from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.fits.rows import sweep_parts
from laplace_debias.curvature.layers.backends import HookStream
from laplace_debias.curvature.layers.blocks import Block, parameter_order
from laplace_debias.curvature.losses import Loss
from laplace_debias.curvature.losses.cotangents import Cotangents, FisherType
from laplace_debias.curvature.network.batches import Batches, Pairs
from laplace_debias.curvature.network.inputs import Inputs, take
from laplace_debias.curvature.network.network import Network
from laplace_debias.curvature.network.reader import BatchHook
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.curvature.operators.kfac import LossData, verified_blocks
from laplace_debias.system.memory import check_memory_bound
from laplace_debias.system.ranks import refuse_ranks

MAX_ROWS = 10_000
"""Rows whose products are decomposed at most: 800 MB in double precision, and minutes."""

Pair = tuple[Inputs, Tensor]


@dataclass(frozen=True)
class RowSpectrum:
    """The spectrum of a GGN.

    Attributes:
        values: Its eigenvalues, descending: one for each row that was kept; all others are zero,
            or as small as `left_out` allows.
        vectors: Eigenvectors of the leading ones as columns, `[D, k]`, in the order of the
            model's parameters.
        trace: Its trace, of all rows.
        left_out: The trace of the rows that were left out: no eigenvalue is too small by more.
    """

    values: Float[Tensor, " rows"]
    vectors: Float[Tensor, "parameters k"]
    trace: float
    left_out: float


def ggn_spectrum(
    model: nn.Module,
    loss: Loss,
    data: Batches,
    k: int,
    params: ParameterSelection | None = None,
    *,
    tol: float = 0.0,
    memory_bound: int = 2**32,
    batch: BatchHook | None = None,
) -> RowSpectrum:
    r"""All eigenvalues of a `GGN` and its k leading eigenvectors, without iterations.

    With the rows $r = \sqrt{1/c}\, s^\top J_n$ of all examples and of the columns $s$ of the loss
    Hessian's square root, $G = \sum r^\top r$, and its eigenvalues that are not zero are those of
    the matrix of products of rows, $[R, R]$ with $R = N (C - 1)$ for cross-entropy. That is exact
    where Lanczos iterations only approach, and for some hundred examples costs no more.

    A trained network is sure of most examples, and their rows are next to nothing. With `tol` the
    least of them are left out, as long as all of them have at most that share of the trace. By
    Weyl's inequality no eigenvalue is then too small by more than what was left out, none too
    large.

    Args:
        model: In eval mode where it has dropout or batch normalisation. It is never touched.
        loss: `nn.CrossEntropyLoss`, `nn.MSELoss` or `nn.BCEWithLogitsLoss`, with any arguments.
        data: Batches `(inputs, targets)`, re-iterable; the loss is that of all of them as one.
        k: How many eigenvectors, at most: there are no more than eigenvalues above rounding.
        params: Which parameters, as for `GGN`; each must belong to a layer that K-FAC supports.
        tol: Share of the trace that may be left out.
        memory_bound: Bytes that kept rows may take. With less memory the data is read more
            often; results do not depend on it.
        batch: As for `GGN`.

    Raises:
        ValueError: If there are more rows than `MAX_ROWS`, a number is out of range, the model is
            random, or its outputs are not finite.
        TypeError: If the loss is another, or the data can be read only once.
        NotImplementedError: If a parameter belongs to a layer without support.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias.curvature import ggn_spectrum
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> data = [(torch.randn(20, 2), torch.randint(3, (20,)))]
        >>> spectrum = ggn_spectrum(model, nn.CrossEntropyLoss(), data, k=5)
        >>> spectrum.values.shape, spectrum.vectors.shape
        (torch.Size([40]), torch.Size([51, 5]))
    """
    if k < 1 or not 0 <= tol < 1:
        raise ValueError(f"k is {k} and tol is {tol}; expected at least 1, and a share below 1.")
    check_memory_bound(memory_bound)
    refuse_ranks("ggn_spectrum", "eigsh(GGN(...)) is")
    network = Network(model, "all" if params is None else params, data, batch)
    model = network.model
    of_loss = LossData(data, network, loss, None, None)
    cotangents = Cotangents(of_loss.loss, FisherType("exact"))
    with torch.inference_mode(False):
        blocks = verified_blocks(network.names, model, of_loss, joint=False, sharing="expand")
        rows = _Rows(model, cotangents, blocks, memory_bound)
        squares = rows.squares(of_loss) * of_loss.scale
        trace = float(squares.sum())
        kept = _kept(squares, tol * trace)
        if int(kept.sum()) > MAX_ROWS:
            raise ValueError(
                f"The GGN has {int(kept.sum()):,} rows that matter; expected at most {MAX_ROWS:,}. "
                "Take fewer examples, raise tol, or use eigsh(GGN(...)), which iterates."
            )
        batches = list(of_loss)
        values, U = eigh(rows.products(batches, kept).double() * of_loss.scale)
        assert U is not None
        # Directions without curvature cannot be had from the rows, and say nothing.
        floor = float(values[0]) * len(values) * torch.finfo(rows.dtype).eps
        k = max(1, min(k, int((values > floor).sum())))
        leading = values[:k].clamp_min(torch.finfo(torch.float64).tiny)
        weights = U[:, :k] * (of_loss.scale / leading).sqrt()
        vectors = rows.combined(batches, kept, weights.to(rows.dtype))
    order = parameter_order(model, network.names, blocks)
    if order is not None:
        vectors = torch.empty_like(vectors).index_copy_(0, order.to(vectors.device), vectors)
    return RowSpectrum(values.to(rows.dtype), vectors, trace, trace - float(squares[kept].sum()))


def _kept(squares: Float[Tensor, "examples columns"], allowance: float) -> Bool[Tensor, "n k"]:
    """The rows to keep: all but the least, whose squares sum to no more than the allowance."""
    ordered, index = squares.flatten().sort()
    dropped = int((ordered.cumsum(0) <= allowance).sum())
    kept = torch.ones(squares.numel(), dtype=torch.bool, device=squares.device)
    # One is left in any case.
    kept[index[: min(dropped, squares.numel() - 1)]] = False
    return kept.view(squares.shape)


class _Rows:
    """The rows of some data, part by part; not divided by what the loss divides by."""

    def __init__(
        self,
        model: nn.Module,
        cotangents: Cotangents,
        blocks: Sequence[Block],
        memory_bound: int,
    ) -> None:
        parameter = model.get_parameter(blocks[0].parameters[0])
        self.dtype = parameter.dtype
        self._device = parameter.device
        self._size = sum(block.size for block in blocks)
        self._memory_bound = memory_bound
        self._problem = Problem(model, cotangents, blocks, HookStream, self.dtype, memory_bound)

    def squares(self, batches: Pairs) -> Float[Tensor, "examples columns"]:
        """The square of every row, in double precision."""
        found: list[Tensor] = []

        def add_up(parts: list[Tensor]) -> None:
            found.append(sum((part.double().sum(2) for part in parts), torch.zeros(())))

        sweep_parts(self._problem, batches, lambda J: J.square().sum(2, keepdim=True), add_up)
        if len({len(part[0]) for part in found}) > 1:
            raise ValueError(
                f"memory_bound={self._memory_bound} is too small for the rows of one example, or "
                "examples differ in their number of outputs: raise it, or use eigsh(GGN(...))."
            )
        return torch.cat(found)

    def products(
        self, batches: Sequence[Pair], kept: Bool[Tensor, "n k"]
    ) -> Float[Tensor, "rows rows"]:
        """Products of the kept rows with each other: as many at a time as the memory allows."""
        count = int(kept.sum())
        at_once = max(1, self._memory_bound // (self._size * self.dtype.itemsize))
        products = torch.zeros(count, count, dtype=self.dtype, device=self._device)
        for start in range(0, count, at_once):
            window = slice(start, min(start + at_once, count))
            held = torch.empty(
                window.stop - start, self._size, dtype=self.dtype, device=self._device
            )

            def multiply(
                first: int, rows: Tensor, held: Tensor = held, window: slice = window
            ) -> None:
                past = first + len(rows)
                inside = slice(max(first, window.start), min(past, window.stop))
                if inside.start < inside.stop:
                    chosen = rows[inside.start - first : inside.stop - first]
                    held[inside.start - window.start : inside.stop - window.start] = chosen
                filled = min(past, window.stop)
                if filled > window.start:
                    to = slice(window.start, filled)
                    products[to, first:past] = held[: filled - window.start] @ rows.T

            self._pass_over(batches, kept, start, multiply)
        # Rows were multiplied with those that came before them in their window, or after it.
        return products.triu() + products.triu(1).T

    def combined(
        self, batches: Sequence[Pair], kept: Bool[Tensor, "n k"], weights: Float[Tensor, "rows m"]
    ) -> Float[Tensor, "parameters m"]:
        """Sums of the kept rows, weighed."""
        total = torch.zeros(self._size, weights.shape[1], dtype=self.dtype, device=self._device)
        self._pass_over(
            batches,
            kept,
            0,
            lambda first, rows: total.addmm_(rows.T, weights[first : first + len(rows)]),
        )
        return total

    def _pass_over(
        self,
        batches: Sequence[Pair],
        kept: Bool[Tensor, "n k"],
        start: int,
        consume: Callable[[int, Tensor], object],
    ) -> None:
        """Hand over kept rows in their order, with the number of the first, from `start` at last.

        Examples without a kept row do not go through the network.
        """
        chosen: list[Pair] = []
        masks: list[Tensor] = []
        position = first = 0
        for x, y in batches:
            mask = kept[position : position + len(y)]
            position += len(y)
            matters = mask.any(1).nonzero().squeeze(1)
            if first + int(mask.sum()) <= start:
                first += int(mask.sum())  # all of them come before
            elif len(matters):
                chosen.append((take(x, matters), y[matters.to(y.device)]))
                masks.append(mask[matters])
        mask = torch.cat(masks)
        position = 0

        def hand_over(parts: list[Tensor]) -> None:
            nonlocal position, first
            rows = torch.cat(parts, dim=2)
            some = rows[mask[position : position + len(rows)]]
            position += len(rows)
            consume(first, some)
            first += len(some)

        sweep_parts(self._problem, chosen, lambda J: J, hand_over)
