"""Totals of a pass over data: the number of examples that it read, and their loss."""

import operator
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from laplace_debias.curvature.layer_rules import Block
from laplace_debias.system.ranks import Ranks

# A relative difference of two weights below this number is a rounding error.
_ROUNDING = 1e-12


@dataclass
class DataTotals:
    """Totals over the examples of one or several passes.

    Attributes:
        num_examples: The number of examples.
        nll: The sum of the examples' negative log-likelihoods in nats, times their weights; a
            tensor on the model's device during a pass.
        num_outputs: The number of numbers that the network returned, times the examples' weights.
        weight: The sum of the examples' weights, which are 1 if the data have no weights.
        absent: The total weight of the examples that have no position in the layer of a block, by
            the block's name, if there are any. The weights may be tensors during a pass. Passes
            that do not look for positions leave this empty.
    """

    num_examples: int = 0
    nll: Any = 0.0
    num_outputs: float = 0
    weight: float = 0
    absent: dict[str, Any] = field(default_factory=dict)

    def add_absent(self, block: Block, weight: Any) -> None:
        """Add the weight of examples that have no position in the layer of a block."""
        # The sum does not start at a zero, whose dtype it would have.
        earlier = self.absent.get(block.name)
        self.absent[block.name] = weight if earlier is None else earlier + weight

    def present_weight(self, block: Block) -> float:
        """Return the weight of the examples that have a position in the layer of a block."""
        present = self.weight - self.absent.get(block.name, 0.0)
        return present if present > _ROUNDING * self.weight else 0.0

    def input_divisor(self, block: Block) -> float:
        """Return the weight by which the sum of the input factors A of a block is divided.

        This is the weight of the examples that have a position in the layer. If there are no such
        examples, the sum is zero, and the weight of all examples is returned.
        """
        return self.present_weight(block) or self.weight

    def input_share(self, block: Block) -> float:
        """Return the share of the examples over which the factor A of a block is a mean.

        The share is 0 if no example has a position in the layer.
        """
        return self.present_weight(block) / self.weight

    def __add__(self, other: "DataTotals") -> "DataTotals":
        """Add the totals of two passes over different data."""
        absent = dict(self.absent)
        for name, weight in other.absent.items():
            absent[name] = absent[name] + weight if name in absent else weight
        return DataTotals(
            self.num_examples + other.num_examples,
            self.nll + other.nll,
            self.num_outputs + other.num_outputs,
            self.weight + other.weight,
            absent,
        )

    def discounted(self, decay: float) -> "DataTotals":
        """Return the totals with every example's weight multiplied by a number."""
        return DataTotals(
            self.num_examples,
            decay * self.nll,
            decay * self.num_outputs,
            decay * self.weight,
            {name: decay * weight for name, weight in self.absent.items()},
        )

    def as_numbers(self) -> "DataTotals":
        """Return the totals without tensors."""
        absent = {name: float(weight) for name, weight in self.absent.items()}
        return replace(self, nll=float(self.nll), absent=absent)

    def over(self, ranks: Ranks) -> "DataTotals":
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
