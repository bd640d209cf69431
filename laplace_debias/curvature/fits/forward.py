"""Input factors from forward passes alone."""

from torch import Tensor

from laplace_debias.curvature.fits.factors import measured_inputs
from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.fits.sums import SideSums
from laplace_debias.curvature.layers.positions import PositionFinder
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.inputs import Inputs, move
from laplace_debias.curvature.network.outputs import check_outputs


class ForwardPasses:
    """Runs the network forward, and sums A of its weight blocks on the way."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._blocks = [block for block in problem.blocks if not block.is_exact]
        self._tap = Tap(problem.network, self._blocks)
        self._positions: PositionFinder | None = None

    def __call__(self, x: Inputs, y: Tensor, inputs: SideSums) -> Tensor:
        """The outputs for a batch, whose inputs of layers are added to `inputs`."""
        problem, tap = self._problem, self._tap
        outputs = tap.forward(move(x, problem.device, None), graph=False)
        check_outputs(outputs)
        uses = tap.uses
        tap.forget()
        if self._positions is None:
            self._positions = PositionFinder(
                problem.network, self._blocks, problem.cotangents, uses, outputs
            )
        masks = self._positions.find(x, y)
        for block in self._blocks:
            of_layer = [use.x for use in uses if use.layer == block.layer]
            layer = tap.network.get_submodule(block.layer)
            is_streamed = block.is_streamed(1)
            for A in measured_inputs(layer, block, of_layer, masks.get(block.layer), is_streamed):
                inputs.add(block, A)
        return outputs
