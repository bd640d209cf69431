"""Totals of a pass over data: the number of examples that it read, and their loss."""

import operator
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from laplace_debias.curvature.layer_rules import Block
from laplace_debias.system.ranks import Ranks


@dataclass
class DataTotals:
    """Totals over the examples of one or several passes.

    Attributes:
        num_examples: The number of examples.
        nll: The sum of the examples' negative log-likelihoods in nats, times their weights; a
            tensor on the model's device during a pass.
        num_outputs: The number of output entries of all examples, times the examples' weights.
        weight: The sum of the examples' weights, which are 1 if the data have no weights.
        input_weights: The total weight of the examples over which the factor A of a block is a
            mean, by the block's name: the examples that have a position in the layer, with their
            weights in the loss Hessian. The weights may be tensors during a pass. For a block that
            is not listed, it is `weight`.
    """

    num_examples: int = 0
    nll: Any = 0.0
    num_outputs: float = 0
    weight: float = 0
    input_weights: dict[str, Any] = field(default_factory=dict)

    def add_input_weight(self, block: Block, weight: Any) -> None:
        """Add the weight of examples whose activations were added to the factor A of a block."""
        # Do not start the sum at zero: it would then have the dtype of that zero.
        earlier = self.input_weights.get(block.name)
        self.input_weights[block.name] = weight if earlier is None else earlier + weight

    def input_weight(self, block: Block) -> float:
        """Return the weight of the examples over which the factor A of a block is a mean."""
        return self.input_weights.get(block.name, self.weight)

    def input_divisor(self, block: Block) -> float:
        """Return the weight by which the sum of the input factors A of a block is divided.

        If no example has a position in the layer, the sum is zero, and the weight of all examples
        is returned.
        """
        return self.input_weight(block) or self.weight

    def input_share(self, block: Block) -> float:
        """Return `input_weight` as a fraction of the weight of all examples.

        It is 0 if no example has a position in the layer. It may exceed 1 if targets have weights.
        """
        return self.input_weight(block) / self.weight

    def __add__(self, other: "DataTotals") -> "DataTotals":
        """Add the totals of two passes over different data."""
        input_weights: dict[str, Any] = {}
        for name in {**self.input_weights, **other.input_weights}:
            own_weight = self.input_weights.get(name, self.weight)
            input_weights[name] = own_weight + other.input_weights.get(name, other.weight)
        return DataTotals(
            num_examples=self.num_examples + other.num_examples,
            nll=self.nll + other.nll,
            num_outputs=self.num_outputs + other.num_outputs,
            weight=self.weight + other.weight,
            input_weights=input_weights,
        )

    def discounted(self, decay: float) -> "DataTotals":
        """Return the totals with every example's weight multiplied by a number."""
        return DataTotals(
            num_examples=self.num_examples,
            nll=decay * self.nll,
            num_outputs=decay * self.num_outputs,
            weight=decay * self.weight,
            input_weights={name: decay * weight for name, weight in self.input_weights.items()},
        )

    def as_numbers(self) -> "DataTotals":
        """Return the totals without tensors."""
        input_weights = {name: float(weight) for name, weight in self.input_weights.items()}
        return replace(self, nll=float(self.nll), input_weights=input_weights)

    def sum_over(self, ranks: Ranks) -> "DataTotals":
        """Return the totals over all processes.

        Raises:
            ValueError: If there are no examples, or no example has a weight above zero.
        """
        totals = reduce(operator.add, ranks.exchange(self.as_numbers()))
        if totals.num_examples == 0:
            raise ValueError(
                "The data contains no examples. Pass a loader with at least one batch."
            )
        if not totals.weight:
            raise ValueError(
                "The weights of all examples are zero. Pass a positive weight for at least one "
                "example."
            )
        return totals
