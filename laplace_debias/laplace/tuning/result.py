"""The result of a search for the prior precision, and the fit to which it is applied."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from laplace_debias.laplace.links import Link
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.system.shown import aligned, html_table

Row = dict[str, Any]

LOG_EVIDENCE = "log_marginal_likelihood"
"""The name of the metric that is maximised if tuning uses no validation data."""
_WIDE = 1e6
"""The ratio between the ends of a range that is wide enough to contain the best prior precision of
any trained network.
"""


@dataclass(frozen=True)
class Alternative:
    """A setting that a search compares with its choice, or the choice itself.

    Attributes:
        name: The name of the setting, such as `"temperature scaling"`.
        prior_precision: The prior precision; None for a setting without a posterior.
        link: The link.
        value: The metric.
        difference: The metric of this setting minus the metric of the choice; positive if it is
            worse.
        half_width: Half the width of the paired 95 % interval of the difference. The interval
            ignores that the choice is the best of many settings on the same examples, so it
            contains the difference on new examples less often than in 95 % of cases.
    """

    name: str
    prior_precision: float | None
    link: Link
    value: float
    difference: float
    half_width: float


def _shown_half_width(half_width: float) -> str:
    """Format half the width of an interval, which is unknown (NaN) for a single example."""
    return "–" if math.isnan(half_width) else f"{half_width:.2g}"


class Comparison(list[Row]):
    """The rows of `Tuning.compared`, printed as a table.

    Attributes:
        metric: The name of the metric.
        choice: The index of the row of the chosen setting, which the table marks with an asterisk;
            None if no row has exactly the chosen prior precision and link.
    """

    def __init__(
        self, metric: str, alternatives: Sequence[Alternative], choice: int | None
    ) -> None:
        self.metric = metric
        self.choice = choice
        super().__init__(
            {
                "name": alternative.name,
                "prior_precision": alternative.prior_precision,
                "temperature": alternative.link.temperature,
                metric: alternative.value,
                "difference": alternative.difference,
                "half_width": alternative.half_width,
            }
            for alternative in alternatives
        )

    def __repr__(self) -> str:
        if not self:
            return "[]"
        lines = [["", "prior precision", "temperature", self.metric, "difference", "± (95 %)"]]
        for index, row in enumerate(self):
            delta = row["prior_precision"]
            lines.append(
                [
                    f"{row['name']} *" if index == self.choice else row["name"],
                    "none" if delta is None else f"{delta:.3g}",
                    f"{row['temperature']:.3g}",
                    f"{row[self.metric]:.4g}",
                    f"{row['difference']:+.2g}",
                    _shown_half_width(row["half_width"]),
                ]
            )
        return aligned(lines)


@dataclass(frozen=True, repr=False)
class Tuning:
    """The result of a search for the prior precision.

    Attributes:
        prior_precision: The chosen value: one number, or one for each block, in the order of
            `Laplace.block_names`.
        metric: The name of the optimised metric, or `"log_marginal_likelihood"`.
        value: The metric at the chosen value. A metric on held-out examples is worse on new
            examples, on average, because the setting was chosen on the held-out examples.
        table: One row for each value tried, ascending: `prior_precision`, the metric, and its
            `standard_error` over the examples if there are several. If `sigma` was also tuned,
            `sigma_factor` is the number by which the sigma of the fit is multiplied. With one prior
            precision per kind of layer or per block, there is instead one row per kind or block:
            its `name`, `prior_precision`, `num_parameters`, and `num_determined`, the number of
            parameters that the data determines.
        sigma: The noise that was tuned along with the prior precision, one number or one per
            output; None if it was not tuned.
        flat: The ends of the range of prior precisions that score about as well as the chosen one,
            which means that the metric is worse by at most one standard error of the difference,
            paired over the examples, or the log marginal likelihood is lower by at most half a nat.
            None if there is only one example, or if there are several prior precisions.
        notes: Remarks on the search, for example that it ended at the limit of its range.
        link: The link from logits to probabilities that was tuned along with the prior precision;
            None for the marginal likelihood and for a regression.
        alternatives: The network, temperature scaling, and every link at T = 1 and at its best T,
            at its best prior precision of the grid. If none of them is the choice, the choice is
            the last one. Empty if no links were compared.
    """

    prior_precision: float | list[float]
    metric: str
    value: float
    table: list[Row]
    sigma: float | list[float] | None = None
    flat: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()
    link: Link | None = None
    alternatives: tuple[Alternative, ...] = ()

    def __float__(self) -> float:
        """Return the prior precision, or raise a `TypeError` if there are several."""
        return float(self.prior_precision)  # type: ignore[arg-type]

    @property
    def compared(self) -> Comparison:
        """The alternatives as rows that are printed as a table.

        Each row contains the `name`, `prior_precision` (None without a posterior) and `temperature`
        of an alternative, its metric, the `difference` from the choice, and the `half_width` of the
        paired 95 % interval of the difference. The printed table marks the choice with an asterisk.
        """
        is_choice = [self._is_choice(alternative) for alternative in self.alternatives]
        choice = is_choice.index(True) if True in is_choice else None
        return Comparison(self.metric, self.alternatives, choice)

    @property
    def all_alike(self) -> bool:
        """Whether the flat range is wide and contains all prior precisions that were tried."""
        tried = sorted(row["prior_precision"] for row in self.table)
        return self.flat == (tried[0], tried[-1]) and tried[-1] >= _WIDE * tried[0]

    @property
    def _summary(self) -> str:
        """Return a sentence with the chosen values and the metric."""
        metric = f"{self.metric.replace('_', ' ')} {self.value:.4g}"
        sigma = ""
        if self.sigma is not None:
            numbers = ", ".join(f"{number:.3g}" for number in torch.tensor(self.sigma).flatten())
            if isinstance(self.sigma, list):
                numbers = f"[{numbers}]"
            sigma = f" and sigma {numbers}"
        if isinstance(self.prior_precision, list):
            values = ", ".join(f"{row['name']} {row['prior_precision']:.3g}" for row in self.table)
            return f"Prior precisions {values}{sigma}: {metric}."
        for row in self.table:
            if row["prior_precision"] == self.prior_precision and "standard_error" in row:
                metric += f" (standard error {row['standard_error']:.2g})"
        link = "" if self.link is None else f", link {self.link}"
        return f"Prior precision {self.prior_precision:.3g}{sigma}{link}: {metric}."

    @property
    def _flatness(self) -> str:
        """A sentence on the sharpness of the optimum, or "" if that is unknown."""
        if self.flat is None:
            return ""
        margin = "one standard error of the paired difference"
        if self.metric == LOG_EVIDENCE:
            margin = "half a nat"
        low, high = self.flat
        if low == high:
            return f"All other prior precisions tried are worse by more than {margin}."
        values = f"from {low:.3g} to {high:.3g} score about as well (worse by at most {margin})"
        if self.all_alike:
            check = "Check its predictions first."
            if self.sigma is not None:
                check = (
                    "Check its errors first, and that its outputs have the units of the targets."
                )
            return (
                f"All prior precisions {values}, so the choice hardly matters. There are three "
                "possible reasons: the training data determine the parameters of the posterior so "
                "well that the prior has little effect, the validation examples are too few, or "
                f"the network is untrained or damaged. {check}"
            )
        sentence = f"Prior precisions {values}."
        if high == max(row["prior_precision"] for row in self.table):
            sentence += (
                " This includes the largest value tried, so these data do not distinguish the "
                "chosen posterior from a much narrower one."
            )
        return sentence

    def _is_choice(self, alternative: Alternative) -> bool:
        """Whether an alternative is the choice; only the closed form's temperature is compared."""
        link = self.link
        assert link is not None
        return (
            alternative.prior_precision == self.prior_precision
            and alternative.link.name == link.name
            and alternative.link.temperature == link.temperature
        )

    @property
    def message(self) -> str:
        """The result as a sentence."""
        sentences = [self._summary]
        if self._flatness:
            sentences.append(self._flatness)
        if self.alternatives:
            differences = [
                f"{alternative.name}: {alternative.difference:+.2g} ± "
                f"{_shown_half_width(alternative.half_width)}"
                for alternative in self.alternatives
                if not self._is_choice(alternative)
            ]
            sentences.append(
                "Scores of the alternatives minus the score of this choice, with 95 % intervals: "
                f"{'; '.join(differences)}."
            )
        return " ".join([*sentences, *self.notes])

    def __str__(self) -> str:
        """The result in several lines, including the table `compared`."""
        lines = [self._summary]
        if self._flatness:
            lines.append(self._flatness)
        if self.alternatives:
            lines.append("Candidates compared with the choice (*); a positive difference is worse:")
            lines.append(str(self.compared))
        return "\n".join([*lines, *self.notes])

    def __repr__(self) -> str:
        return f"<Tuning: {self._summary}>"

    def _repr_html_(self) -> str:
        header = list(dict.fromkeys(name for row in self.table for name in row))
        return html_table([[row.get(name) for name in header] for row in self.table], header)


@dataclass(frozen=True, eq=False)
class TunedFit:
    """A fit with the values that a search chose.

    Attributes:
        tuning: The chosen values, and how they were chosen.
        fitted: The fit with the chosen prior precision and, if they were tuned, the chosen link and
            noise.
    """

    tuning: Tuning
    fitted: FittedPosterior

    @classmethod
    def apply(cls, tuning: Tuning, fitted: FittedPosterior) -> "TunedFit":
        """Set the chosen prior precision of a fit, and the link if one was chosen."""
        prior = fitted.prior.with_precision(tuning.prior_precision)
        link = tuning.link or fitted.link
        return cls(tuning, fitted.with_prior(prior).with_link(link))

    def with_notes(self, *notes: str | None) -> "TunedFit":
        """Return the result with further notes; entries that are None are skipped."""
        added = [note for note in notes if note is not None]
        return replace(self, tuning=replace(self.tuning, notes=(*self.tuning.notes, *added)))
