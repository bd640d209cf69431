"""Totals of a pass over data: how many examples it read, and their loss."""

from dataclasses import dataclass
from typing import Any

from laplace_debias.system.ranks import Ranks


@dataclass
class DataTotals:
    """Totals over the examples of one or several passes.

    Attributes:
        num_examples: Examples.
        nll: Their negative log-likelihood in nats, times their weights; a tensor on the model's
            device while a pass goes on.
        num_outputs: Numbers that the network returned, times the examples' weights.
        weight: Weights of the examples; each has the weight 1 if the data has no weights.
    """

    num_examples: int = 0
    nll: Any = 0.0
    num_outputs: float = 0
    weight: float = 0

    def __add__(self, other: "DataTotals") -> "DataTotals":
        """The totals of two passes over different data."""
        return DataTotals(
            self.num_examples + other.num_examples,
            self.nll + other.nll,
            self.num_outputs + other.num_outputs,
            self.weight + other.weight,
        )

    def over(self, ranks: Ranks) -> "DataTotals":
        """Return the totals over all processes.

        Raises:
            ValueError: If there is no example, or none with a weight above zero.
        """
        values = [self.num_examples, float(self.nll), self.num_outputs, self.weight]
        num_examples, nll, num_outputs, weight = zip(*ranks.exchange(values), strict=True)
        totals = DataTotals(sum(num_examples), sum(nll), sum(num_outputs), sum(weight))
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
