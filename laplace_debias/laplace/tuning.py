"""The findings of a search for the prior precision."""

from dataclasses import dataclass, field
from typing import Any

from laplace_debias.laplace.links import Link
from laplace_debias.system.shown import html_table

Row = dict[str, Any]

OF_EVIDENCE = "log_marginal_likelihood"
"""The metric that is maximised without data."""


_WIDE = 1e6
"""A range that holds the best value of every trained network, largest over smallest."""


@dataclass(frozen=True, repr=False)
class Tuning:
    """The findings of a search for the prior precision.

    Attributes:
        prior_precision: The best value: one number, or one for each block, in the order of
            `Laplace.block_names`.
        metric: What was optimised: a metric's name, or `"log_marginal_likelihood"`.
        value: The metric there.
        table: One row for each value tried, ascending: `prior_precision`, the metric, and from two
            examples on its `standard_error` over the examples. If `sigma` was tuned with it,
            `sigma_factor`: what the fit's sigma is multiplied by. With one prior precision a kind
            or a block a row for each: its `name`, `prior_precision`, `num_parameters`, and
            `num_determined`, how many of these the data determine.
        sigma: The noise that was tuned with it, one number or one per output; None if it was not.
        flat: The least and the greatest prior precision tried between which the metric differs from
            the best by at most one standard error of that difference, paired over the examples. Of
            the marginal likelihood: within half a nat. None for one example, and for several prior
            precisions.
        notes: What a user should know of the search: that it ended at a limit, say.
        link: What makes probabilities of logits, tuned with it; None of the marginal likelihood and
            of a regression.
        compared: A row for each of the network, temperature scaling, and every link at T = 1 and at
            its best T, at its best prior precision of the grid: its `name`, `prior_precision` (None
            without a posterior), `temperature`, the metric, the `difference` to what was chosen
            and, of 95 %, its paired `half_width`.
    """

    prior_precision: float | list[float]
    metric: str
    value: float
    table: list[Row]
    sigma: float | list[float] | None = None
    flat: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()
    link: Link | None = None
    compared: list[Row] = field(default_factory=list)

    def __float__(self) -> float:
        """The prior precision; a `TypeError` if there are several."""
        return float(self.prior_precision)  # type: ignore[arg-type]

    @property
    def _tried(self) -> list[float]:
        return sorted(row["prior_precision"] for row in self.table)

    @property
    def all_alike(self) -> bool:
        """Whether no value of a wide range scores differently."""
        low, high = self._tried[0], self._tried[-1]
        return self.flat == (low, high) and high >= _WIDE * low

    @property
    def _summary(self) -> str:
        name = self.metric.replace("_", " ")
        sigma = "" if self.sigma is None else f" and sigma {_numbers(self.sigma)}"
        if isinstance(self.prior_precision, list):
            each = ", ".join(f"{row['name']} {row['prior_precision']:.3g}" for row in self.table)
            return f"Prior precisions {each}{sigma}: {name} {self.value:.4g}."
        error = self._standard_error
        plus = "" if error is None else f" ± {error:.2g}"
        by = "" if self.link is None else f", link {self.link}"
        return (
            f"Prior precision {self.prior_precision:.3g}{sigma}{by}: {name} {self.value:.4g}{plus}."
        )

    @property
    def message(self) -> str:
        """The findings in words."""
        said, name = [self._summary], self.metric.replace("_", " ")
        if self.flat is not None:
            within = "half a nat" if self.metric == OF_EVIDENCE else "one standard error"
            low, high = self.flat
            if self.all_alike:
                said.append(
                    f"All values from {low:.3g} to {high:.3g} score the same, within {within}: the "
                    "examples are too few to tell, or the network is untrained or broken. Check "
                    "its accuracy first."
                )
            elif low == high:
                said.append(f"Every other value tried is worse by more than {within}.")
            else:
                said.append(
                    f"Values from {low:.3g} to {high:.3g} score the same: the {name} there is "
                    f"within {within} of the best."
                )
                if high == self._tried[-1]:
                    said.append(
                        "That is up to the largest value tried: the data show hardly any "
                        "difference between the best and the network without parameter uncertainty."
                    )
        if self.compared:
            rows = [
                f"{row['name']} {row['difference']:+.2g} ± {row['half_width']:.2g}"
                for row in self.compared
            ]
            said.append(f"Differences from it on these data: {', '.join(rows)}.")
        return " ".join([*said, *self.notes])

    def __repr__(self) -> str:
        return f"<Tuning: {self._summary}>"

    def _repr_html_(self) -> str:
        header = list(dict.fromkeys(name for row in self.table for name in row))
        return html_table([[row.get(name) for name in header] for row in self.table], header)

    @property
    def _standard_error(self) -> float | None:
        for row in self.table:
            if row["prior_precision"] == self.prior_precision:
                return row.get("standard_error")
        return None


def _numbers(value: float | list[float]) -> str:
    if not isinstance(value, list):
        return f"{value:.3g}"
    return f"[{', '.join(f'{number:.3g}' for number in value)}]"
