"""The records of a run: the contents of its JSON files, as dataclasses.

The names of the fields are the keys in the files, unless `metadata` specifies a different key.
Fields with a default may be missing from a file, for example if an earlier version wrote it. Keys
that do not correspond to a field are ignored.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")
Role = Literal["test", "shift", "ood"]

TargetKind = Literal["class", "labels", "numbers"]

_TARGETS_BY_TASK: dict[str, TargetKind] = {
    "classification": "class",
    "binary": "class",
    "multilabel": "labels",
    "regression": "numbers",
    "heteroscedastic": "numbers",
}
"""The kind of targets of each task, because runs of earlier versions record only the task."""
FORMAT = 1
"""Version of the file format."""
TEST = "test"
"""Name of the test set."""


@dataclass
class SetRecord:
    """A set of examples on which methods are evaluated.

    Attributes:
        name: Name of its files.
        role: `test`, `shift` (corrupted test examples) or `ood`.
        severity: Severity of the shift, 1 … 5; None for other sets.
        num_examples: Number of examples; None before the network has predicted them.
    """

    name: str
    role: Role
    severity: int | None = field(default=None, metadata={"optional": True})
    num_examples: int | None = None


@dataclass
class MethodRecord:
    """A method with its tuned values and its costs.

    Attributes:
        key: Name of its files.
        label: Name on the page.
        describes: Description in one sentence.
        is_laplace: Whether the method uses a Laplace posterior.
        temperature: Fitted temperature of the network's logits.
        num_validation: Number of examples to which the temperature was fitted; None if it is not
            fitted, or in runs of earlier versions.
        prior_precision: Tuned prior precision: one number or several.
        link: Link that the tuning chose.
        prior_precision_at_limit: Whether the metric was still improving at the end of the search
            range.
        posterior: Key under which the posterior and the sweep are stored.
        examples: Number of examples of each set that the method predicts; None for all examples.
        seconds: Time by stage, in seconds.
        seconds_per_example: Time to predict one example, in seconds.
        bytes: Size of the method's posterior files.
    """

    key: str
    label: str
    describes: str = ""
    is_laplace: bool = False
    temperature: float | None = None
    num_validation: int | None = None
    prior_precision: Any = None
    link: str | None = None
    prior_precision_at_limit: bool = False
    posterior: str | None = None
    examples: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    seconds_per_example: float | None = None
    bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class MetricValue:
    """A metric with its 95 % interval; `low` and `high` are None if there is no interval."""

    metric: str
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def lower(self) -> float:
        """The lower end, or minus infinity if it is unknown."""
        return -math.inf if self.low is None else self.low

    @property
    def upper(self) -> float:
        """The upper end, or infinity if it is unknown."""
        return math.inf if self.high is None else self.high

    def sign(self, ideal: float = 0.0) -> int:
        """Return 1 or -1 if the metric is significantly above or below `ideal`, otherwise 0."""
        return int(self.lower > ideal) - int(self.upper < ideal)


@dataclass(frozen=True, kw_only=True)
class MetricRow(MetricValue):
    """A metric of a method on a set; for an OOD set, also the name of the score."""

    method: str
    set_name: str = field(metadata={"key": "set"})
    score: str | None = field(default=None, metadata={"optional": True})
    num_examples: int | None = None


@dataclass(frozen=True, kw_only=True)
class DifferenceRow(MetricRow):
    """The difference of a metric between a method and a reference on the same examples."""

    reference: str
    reference_score: str | None = field(default=None, metadata={"optional": True})


@dataclass(frozen=True)
class Recommendation:
    """The method and the score that are recommended for detecting out-of-distribution inputs."""

    method: str
    score: str


@dataclass
class Measurements:
    """`metrics.json`: the metrics, their differences, and the recommended score."""

    rows: list[MetricRow]
    differences: list[DifferenceRow]
    recommended: Recommendation | None = None


@dataclass
class TrainingRecord:
    """The network's metrics on the first of its training examples.

    Attributes:
        num_examples: Number of examples.
        rows: Metrics on these examples.
        num_classes: Number of classes, or of labels.
        uniform_nll: Negative log-likelihood of a uniform guess, in nats.
    """

    num_examples: int = 0
    rows: list[MetricValue] = field(default_factory=list)
    num_classes: int | None = field(default=None, metadata={"optional": True})
    uniform_nll: float | None = field(default=None, metadata={"optional": True})

    def metrics(self) -> dict[str, MetricValue]:
        """Return the metrics by name."""
        return {row.metric: row for row in self.rows}


@dataclass
class RunRecord:
    """`run.json`: network, data, methods, and the status of the run.

    Attributes:
        format: Version of the files.
        status: `running` or `complete`.
        title: Title of the page.
        created: Time at which the run began, in ISO 8601.
        task: Name of the likelihood.
        targets: Kind of the targets: a class, several labels, or numbers. None in runs of earlier
            versions.
        input_name: Name of an input, in the singular.
        target: Name of the predicted column, if the data is a table.
        classes: Names of the classes.
        num_train: Number of training examples.
        num_parameters: Number of the network's parameters.
        sets: The sets, the test set first.
        methods: The methods, the network first.
        sigma: Standard deviation of a regression's noise, one number per output. Runs of earlier
            versions have a single number.
        training: The network's metrics on its own training examples.
        notes: Notes for the reader, each one a sentence or more.
        conclusion: The verdict, as sentences.
        versions: Versions of Python and of the packages.
        seed: Seed of all random choices.
        device: Device of the network.
        threads: Number of threads that torch used.
        seconds: Time by stage, in seconds.
        identity: Settings that identify the run when it is resumed.
    """

    format: int
    task: str
    sets: list[SetRecord]
    methods: list[MethodRecord]
    targets: TargetKind | None = None
    status: str = "running"
    title: str = ""
    created: str | None = None
    input_name: str = "example"
    target: str | None = None
    classes: list[str] | None = None
    num_train: int | None = None
    num_parameters: int | None = None
    sigma: float | list[float] | None = None
    training: TrainingRecord | None = None
    notes: list[str] = field(default_factory=list)
    conclusion: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    seed: int | None = None
    device: str | None = None
    threads: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)

    @property
    def target_kind(self) -> TargetKind:
        """The kind of the targets; for runs of earlier versions, it is inferred from the task."""
        return self.targets or _TARGETS_BY_TASK[self.task]

    @property
    def has_numbers(self) -> bool:
        """Whether the targets are numbers."""
        return self.target_kind == "numbers"

    @property
    def network(self) -> MethodRecord:
        """The network itself, the first method."""
        return self.methods[0]

    @property
    def test(self) -> SetRecord:
        """The test set."""
        return next(dataset for dataset in self.sets if dataset.role == "test")

    def method(self, key: str) -> MethodRecord:
        """Return the method with the given key."""
        return next(method for method in self.methods if method.key == key)

    def sets_of(self, role: Role) -> list[SetRecord]:
        """Return the sets with the given role, ordered by severity."""
        sets = [dataset for dataset in self.sets if dataset.role == role]
        return sorted(sets, key=lambda dataset: dataset.severity or 0)


@dataclass
class SweepPoint:
    """The metric at one prior precision, with its 95 % interval."""

    prior_precision: Any
    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass
class Sweep:
    """`sweeps/METHOD.json`: the search for a prior precision.

    Attributes:
        metric: Metric that was optimised, or `log_marginal_likelihood`; None if there was no
            search.
        rows: The values that were tried.
        chosen: The chosen prior precision: one number or several.
        flat: Range of prior precisions for which the metric is within one standard error of the
            best value.
        sigma: The noise that was found together with the prior precision.
    """

    metric: str | None = None
    rows: list[SweepPoint] = field(default_factory=list)
    chosen: Any = None
    flat: list[float] | None = None
    sigma: Any = None

    @property
    def is_at_limit(self) -> bool:
        """Whether the search ended at a limit of its range while the metric still improved."""
        points = self.rows
        if len(points) < 2 or points[0].low is None:
            return False
        # Compare the chosen value with its neighbour, if it is the first or the last one.
        if self.chosen == points[-1].prior_precision:
            best, inner = points[-1], points[-2]
        elif self.chosen == points[0].prior_precision:
            best, inner = points[0], points[1]
        else:
            return False
        assert best.value is not None
        assert inner.value is not None
        assert best.high is not None
        return abs(best.value - inner.value) > 0.05 * (best.high - best.value)


@dataclass
class ExampleRecord:
    """A notable test example.

    Attributes:
        index: The index of the example in the test set.
        target: Target of a regression.
        label: The class of the example, or whether each label applies.
        probs: The most probable classes with their probabilities, by method.
        predictions: Mean and standard deviation of a regression, by method.
        inputs: The input itself, as numbers, if it is not an image.
        columns: The values of a table row by column, in the units of the table.
    """

    index: int
    target: Any = field(default=None, metadata={"optional": True})
    label: Any = field(default=None, metadata={"optional": True})
    probs: dict[str, list[Any]] = field(default_factory=dict, metadata={"optional": True})
    predictions: dict[str, dict[str, Any]] = field(
        default_factory=dict, metadata={"optional": True}
    )
    inputs: list[float] | None = field(default=None, metadata={"optional": True})
    columns: dict[str, float] | None = field(default=None, metadata={"optional": True})


@dataclass
class ExampleGroups:
    """`examples.json`: groups of test examples, and the methods that chose them."""

    most_uncertain: list[ExampleRecord] = field(default_factory=list)
    most_confidently_wrong: list[ExampleRecord] = field(default_factory=list)
    chosen_by: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PredictionsSummary:
    """The summary of a complete table of predictions."""

    num_examples: int
    seconds: float


def to_json(value: Any) -> Any:
    """Convert a record to dictionaries and lists; empty optional fields are omitted."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        content = {}
        for column in dataclasses.fields(value):
            entry = getattr(value, column.name)
            if column.metadata.get("optional") and entry in (None, {}):
                continue
            content[column.metadata.get("key", column.name)] = to_json(entry)
        return content
    if isinstance(value, Mapping):
        return {str(key): to_json(content) for key, content in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(content) for content in value]
    return value


def from_json(kind: type[Record], content: Any) -> Record:
    """Build a record of the given type from JSON content.

    Raises:
        TypeError: If the content is not a mapping.
        KeyError: If a field without a default is missing.
    """
    if not isinstance(content, Mapping):
        raise TypeError(f"it has {type(content).__name__} instead of an object")
    kinds = get_type_hints(kind)
    values: dict[str, Any] = {}
    for column in dataclasses.fields(kind):  # type: ignore[arg-type]
        key = column.metadata.get("key", column.name)
        if key in content:
            values[column.name] = _value(kinds[column.name], content[key])
        elif (
            column.default is dataclasses.MISSING and column.default_factory is dataclasses.MISSING
        ):
            raise KeyError(key)
    return kind(**values)


def _value(kind: Any, content: Any) -> Any:
    """Convert the content of a field, including any records within it."""
    if get_origin(kind) in (Union, UnionType):
        if content is None:
            return None
        kinds = [member for member in get_args(kind) if member is not NoneType]
        if len(kinds) > 1:
            # The field is a number or a list of numbers.
            return content
        (kind,) = kinds
    if get_origin(kind) is list:
        (kind_of_entries,) = get_args(kind)
        return [_value(kind_of_entries, entry) for entry in content]
    if dataclasses.is_dataclass(kind):
        return from_json(kind, content)  # type: ignore[arg-type]
    return content
