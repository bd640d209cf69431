"""What a posterior file says besides its tensors."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from laplace_debias.curvature.fits.kinds import CURVATURES
from laplace_debias.curvature.layers.blocks import SHARINGS
from laplace_debias.laplace.files.likelihood_json import likelihood_to_json
from laplace_debias.laplace.files.plain_data import (
    FINITE,
    FLAG,
    MAPPING,
    NOTHING,
    POSITIVE,
    TEXT,
    Kind,
    check_fields,
    either,
    list_of,
    mapping_to,
    one_of,
    record_of,
    whole_number,
)
from laplace_debias.laplace.fitted import Fitted


@dataclass(frozen=True)
class Header:
    """What a file says besides its tensors.

    Attributes:
        likelihood: As `likelihood_to_json` gives it.
        curvature: The curvature's name.
        joint: Whether weight and bias make one block.
        sharing: `expand` or `reduce`, for all layers or by their paths.
        param_names: The Bayesian parameters.
        block_names: The curvature blocks.
        num_data: N.
        nll: Summed negative log-likelihood of the N examples, in nats.
        rank: How many directions a low-rank curvature is asked for, as `Laplace` takes it. Data of
            lower rank give fewer.
        others: The `fingerprint` of what the model holds besides the Bayesian parameters.
        class_dim: Which dimension of the outputs has the classes; the last if None, as in format 3.
        mode: How the posterior was fitted, for `repr`; None if it is not known, as in format 3.
        calls: Parameters that are measured at calls of modules, with the modules' paths; none
            before format 5.
        noise: Of a regression `Fitted.noise`; files without it lack the field.
        temperature: T of the likelihood, in files alone of posteriors that have another than 1.
    """

    likelihood: dict[str, Any]
    curvature: str
    joint: bool
    sharing: str | dict[str, str]
    param_names: list[str]
    block_names: list[str]
    num_data: int
    nll: float
    rank: int | None
    others: dict[str, int]
    class_dim: int | None = None
    mode: str | None = None
    calls: dict[str, list[str]] = field(default_factory=dict)
    noise: dict[str, Any] | None = None
    temperature: float = 1.0

    def as_plain(self) -> dict[str, Any]:
        """The fields of the file: what is optional only where it is not the default."""
        plain = asdict(self)
        defaults = {known.name: known.default for known in fields(self)}
        return {n: v for n, v in plain.items() if n not in OPTIONAL or v != defaults[n]}


_INT64 = whole_number(-(2**63), 2**63 - 1)
FIELDS: dict[str, Kind] = {
    "likelihood": MAPPING,
    "curvature": one_of(CURVATURES),
    "joint": FLAG,
    "sharing": either(one_of(SHARINGS), mapping_to(one_of(SHARINGS))),
    "param_names": list_of(TEXT, distinct=True),
    "block_names": list_of(TEXT, distinct=True),
    "num_data": whole_number(1),
    "nll": FINITE,
    "rank": either(NOTHING, whole_number(1)),
    "others": mapping_to(_INT64),
    "class_dim": either(NOTHING, whole_number(1), whole_number(-(2**53), -1)),
    "mode": either(NOTHING, TEXT),
    "calls": mapping_to(list_of(TEXT, distinct=True)),
}
# Which fields a format does not have yet.
LATER_FIELDS = {3: ("class_dim", "mode", "calls"), 4: ("calls",), 5: ()}
_POWER = Kind("2 or 4", lambda v: type(v) is int and v in (2, 4))
# Fields that a file has where they are not the defaults. A reader that knows none refuses the file.
OPTIONAL = {
    "noise": record_of({"num_targets": POSITIVE, "power": _POWER}),
    "temperature": POSITIVE,
}


def check_header(plain: Any, where: str, without: Sequence[str] = ()) -> None:
    """Require the fields of a header, each of its kind.

    Args:
        plain: A header as plain data.
        where: What errors call it.
        without: Fields that it does not have.

    Raises:
        ValueError: As `check_fields`.
    """
    kinds = {name: kind for name, kind in FIELDS.items() if name not in without}
    if isinstance(plain, dict):
        kinds |= {name: kind for name, kind in OPTIONAL.items() if name in plain}
    check_fields(plain, kinds, where)


def header_of(fitted: Fitted, own_likelihood: bool) -> Header:
    """What a file says besides its tensors.

    Args:
        fitted: The fit.
        own_likelihood: Whether a likelihood of another package is named.

    Raises:
        ValueError: As `likelihood_to_json`.
    """
    settings, sharing = fitted.settings, fitted.settings.sharing
    return Header(
        likelihood=likelihood_to_json(fitted.likelihood, own_likelihood),
        curvature=settings.kind.name,
        joint=bool(settings.joint),
        sharing=sharing if isinstance(sharing, str) else dict(sharing),
        param_names=fitted.parameters.names,
        block_names=fitted.parameters.block_names,
        num_data=fitted.posterior.num_data,
        nll=fitted.nll,
        rank=settings.kind.rank,
        others=fitted.others,
        class_dim=settings.class_dim,
        mode=fitted.mode,
        calls={name: list(paths) for name, paths in fitted.parameters.calls.items()},
        noise=None if fitted.noise is None else asdict(fitted.noise),
        temperature=fitted.posterior.temperature,
    )
