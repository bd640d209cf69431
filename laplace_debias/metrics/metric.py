"""The definition of a metric: its name, unit, meaning and statistic."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from laplace_debias.metrics.statistics import Statistic

MEAN_INTERVAL = "Student's t with Hall's correction for skewness. It needs many test examples."
SHARE_INTERVAL = "Wilson's interval."
ROOT_INTERVAL = "The root of an interval of the mean square (Student's t with Hall's correction)."
AREA_INTERVAL = "Student's t, for the logit of the metric. It needs many test and OOD examples."
NO_INTERVAL = "None, because no known interval has its nominal coverage."


@dataclass(frozen=True)
class Metric:
    """A metric of a predictive distribution.

    Attributes:
        name: Name in reports.
        label: Name in tables and on axes.
        statistic: A function that computes the metric from probabilities and labels; from scores of
            ID and OOD examples (and, if examples have several scores, the example of each score);
            or from mean, standard deviation, targets and the level of the interval.
        better: `lower` or `higher`, whichever is better; `level` if the metric should equal the
            level of the interval that it measures; `ideal` if it should be a certain number
            (differences are then between the distances from this number, and lower is better); None
            if no value is better than another.
        unit: Unit of the values; "" if they have no unit.
        interval: One sentence on what the confidence interval of the metric means.
        meaning: One sentence on what the metric measures.
        is_main: Whether the main table of a report contains the metric. The table of all metrics
            always does.
        over_labels: If the metric is also reported for several labels per example, whether it is
            the mean or the sum over an example's labels; None if it is not reported.
    """

    name: str
    label: str
    statistic: Callable[..., Statistic]
    better: Literal["lower", "higher", "level", "ideal"] | None = "lower"
    unit: str = ""
    interval: str = MEAN_INTERVAL
    meaning: str = ""
    is_main: bool = False
    over_labels: Literal["mean", "sum"] | None = None
