"""The running curvature of a network during training, and its saved form."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.directions import Eigenbasis, Eigenpairs
from laplace_debias.curvature.fits.eigenbases import eigenbases
from laplace_debias.curvature.fits.factor_sums import FactorSums
from laplace_debias.curvature.fits.magnitudes import SquaredGradients, assemble
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.operators import BlockDiagonal
from laplace_debias.training.running import RUNNING_MAGNITUDES, BlockParts, RunningSum


class RunningCurvature:
    """Running means of factors and magnitudes, and the directions of these magnitudes.

    Args:
        curvature: `"ekfac"` or `"kfac"`.
        decay: The factor by which earlier batches are discounted for each batch that is added.
        dtype: The dtype of the running sums.

    Attributes:
        factors: The running sums of the factors G and A.
        magnitudes: The running sums of the curvature along the directions.
        bases: The directions along which the next batches are measured; empty before the first
            refresh.
    """

    def __init__(self, curvature: str, decay: float, dtype: torch.dtype) -> None:
        self.factors = RunningSum(decay, dtype)
        self.magnitudes = RUNNING_MAGNITUDES[curvature](decay, dtype)
        self.bases: dict[Block, Eigenbasis] = {}

    @property
    def has_magnitudes(self) -> bool:
        """Whether any batch has been measured along directions of earlier batches."""
        return bool(self.magnitudes.sums.parts)

    def squares_accumulator(self, context: FitContext) -> SquaredGradients | None:
        """Return the accumulator that the next batches need besides their factors, or None."""
        if not self.bases:
            return None
        return self.magnitudes.accumulator(context, self.bases)

    def add(self, factors: BlockParts, squares: Mapping[Block, Tensor], totals: DataTotals) -> None:
        """Add a batch.

        Args:
            factors: The sums of the batch's factors.
            squares: The squares along the directions, if there is an accumulator of squares.
            totals: The totals of the batch's examples.
        """
        if self.bases:
            measured = self.magnitudes.measure(self.bases, factors, squares)
            self.magnitudes.sums.update(measured, totals)
        self.factors.update(factors, totals)

    def refresh_directions(self, context: FitContext) -> None:
        """Decompose the running factors, and project the magnitudes onto the new directions."""
        dtype = context.dtype
        factors: FactorSums = {}
        for block, (G, A) in self.factors.parts.items():
            # In single precision, the decomposition takes less than half the time.
            factors[block] = (G.to(dtype), A.to(dtype))
        bases = eigenbases(context, factors, self.factors.totals)
        for block, basis in self.bases.items():
            # If the batch after the last refresh was rejected, there are no magnitudes yet.
            if block in self.magnitudes.sums.parts:
                self.magnitudes.rotate(block, basis, bases[block], dtype)
        self.bases = bases

    def mean_curvature(self, context: FitContext) -> BlockDiagonal:
        """Build the curvature of the mean loss from the directions and the mean magnitudes."""
        magnitudes = {}
        for block, basis in self.bases.items():
            magnitudes[block] = basis.pooled(self.magnitudes.mean(block), context.dtype)
        return assemble(context, dict(self.bases), magnitudes)

    def state_dict(self) -> dict[str, Any]:
        """Return the running sums and the directions, keyed by the names of the blocks."""
        blocks = {}
        for block in self.factors.parts:
            tensors = self._tensors(block)
            blocks[block.name] = {name: value.clone() for name, value in tensors.items()}
        totals = self.factors.totals
        magnitude_totals = self.magnitudes.sums.totals
        return {
            "num_examples": totals.num_examples,
            "nll": totals.nll,
            "num_outputs": totals.num_outputs,
            "weight": totals.weight,
            "input_weights": dict(totals.input_weights),
            "magnitude_weight": magnitude_totals.weight,
            "magnitude_input_weights": dict(magnitude_totals.input_weights),
            "blocks": blocks,
        }

    def _tensors(self, block: Block) -> dict[str, Tensor]:
        """Collect a block's factors and, once it has been measured, its directions and magnitudes.

        `_restore_block` is the inverse.
        """
        G, A = self.factors.parts[block]
        tensors = {"G": G, "A": A}
        if block in self.magnitudes.sums.parts:
            basis = self.bases[block]
            for side, pairs in (("G", basis.G), ("A", basis.A)):
                tensors[f"eigenvalues_{side}"] = pairs.eigenvalues
                if pairs.U is not None:
                    tensors[f"U_{side}"] = pairs.U
            for index, value in enumerate(self.magnitudes.sums.parts[block]):
                tensors[f"magnitudes.{index}"] = value
        return tensors

    def load_state_dict(self, state: Mapping[str, Any], context: FitContext) -> None:
        """Restore the running sums and the directions from a saved state.

        Raises:
            ValueError: If the state has different blocks, or factors of different shapes.
        """
        blocks = {block.name: block for block in context.blocks}
        _check_all_blocks(state["blocks"], blocks)
        self.factors.parts = {}
        self.magnitudes.sums.parts = {}
        self.bases = {}
        for name, saved in state["blocks"].items():
            tensors = {key: value.to(context.device, copy=True) for key, value in saved.items()}
            self._restore_block(blocks[name], tensors, context.dtype)
        self.factors.totals = DataTotals(
            num_examples=state["num_examples"],
            nll=state["nll"],
            num_outputs=state["num_outputs"],
            weight=state["weight"],
            input_weights=_input_weights(state, ""),
        )
        self.magnitudes.sums.totals = DataTotals(
            weight=state["magnitude_weight"], input_weights=_input_weights(state, "magnitude_")
        )

    def _restore_block(
        self, block: Block, tensors: Mapping[str, Tensor], dtype: torch.dtype
    ) -> None:
        """Restore a block's factors, directions and magnitudes from the result of `_tensors`."""
        self.factors.parts[block] = [tensors["G"], tensors["A"]]
        if "magnitudes.0" not in tensors:
            return
        parts = [f"magnitudes.{index}" for index in range(self.magnitudes.num_parts)]
        self.magnitudes.sums.parts[block] = [tensors[part] for part in parts]
        basis = Eigenbasis(
            Eigenpairs(tensors["eigenvalues_G"], tensors.get("U_G")),
            Eigenpairs(tensors["eigenvalues_A"], tensors.get("U_A")),
        )
        # States of earlier versions contain the directions in the dtype of the sums, so they are
        # converted.
        self.bases[block] = basis.to(dtype)


def _input_weights(state: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return the input weights of the blocks from a state, possibly of an earlier version.

    Earlier versions saved the weights of the examples that did not reach a layer, or no weights.
    """
    name = f"{prefix}input_weights"
    if name in state:
        return dict(state[name])
    weight = state[f"{prefix}weight"]
    return {block: weight - absent for block, absent in state.get(f"{prefix}absent", {}).items()}


def _check_all_blocks(
    saved: Mapping[str, Mapping[str, Tensor]], blocks: Mapping[str, Block]
) -> None:
    """Require that a saved state has either no blocks or exactly these blocks."""
    check_blocks(saved, blocks)
    missing = [name for name in blocks if name not in saved]
    if saved and missing:
        raise ValueError(
            f"This model has the blocks {missing[:4]}, but the state does not. Load the state into "
            "an object with the same model and the same `params=` as when it was saved. If the "
            "first batch of the saved run did not call these layers, leave them out by `params=`."
        )


def check_blocks(saved: Mapping[str, Mapping[str, Tensor]], blocks: Mapping[str, Block]) -> None:
    """Require that a saved state has no other blocks, and factors of the expected shapes."""
    for name, tensors in saved.items():
        if name not in blocks:
            raise ValueError(
                f"The state has a block {name!r}, but this model does not. Load the state "
                "into an object with the same model and the same `params=` as when it "
                "was saved."
            )
        block = blocks[name]
        shape_G, shape_A = block.factor_shapes
        expected = [shape_G, shape_A or (*block.groups, 1, 1)]
        shapes = [tuple(tensors["G"].shape), tuple(tensors["A"].shape)]
        if shapes != expected:
            raise ValueError(
                f"The state's factors of {name!r} have the shapes {shapes}, but the factors of "
                f"this model have {expected}. Use the model with which the state was saved."
            )
