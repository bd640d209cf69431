"""What a posterior file says besides its tensors."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from laplace_debias.curvature.fits.kinds import CURVATURES
from laplace_debias.curvature.layers.blocks import SHARINGS
from laplace_debias.curvature.losses.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    MultiLabel,
)
from laplace_debias.curvature.losses.likelihoods.names import LIKELIHOODS
from laplace_debias.laplace.files.plain_data import (
    FINITE,
    FLAG,
    MAPPING,
    NOTHING,
    POSITIVE,
    TEXT,
    check_fields,
    either,
    list_of,
    mapping_to,
    one_of,
    shown,
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
    temperature: float = 1.0


_INT64 = whole_number(-(2**63), 2**63 - 1)
FIELDS = {
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
}
# Fields that a file has where they are not the defaults. A reader that knows none refuses the file.
OPTIONAL = {"temperature": (POSITIVE, 1.0)}
SINCE_FORMAT_4 = ("class_dim", "mode")
_LIKELIHOODS = {
    "classification": {"ignore_index": _INT64},
    "binary": {},
    "multilabel": {"ignore_index": _INT64},
    "regression": {"sigma": either(POSITIVE, list_of(POSITIVE))},
}


def header_of(fitted: Fitted) -> Header:
    """What a file says besides its tensors.

    Raises:
        ValueError: As `likelihood_to_json`.
    """
    settings, sharing = fitted.settings, fitted.settings.sharing
    return Header(
        likelihood=likelihood_to_json(fitted.likelihood),
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
        temperature=fitted.posterior.temperature,
    )


def plain_header(header: Header) -> dict[str, Any]:
    """A header as the file has it: what is optional only where it differs from the default."""
    plain = asdict(header)
    for name, (_, default) in OPTIONAL.items():
        if plain[name] == default:
            del plain[name]
    return plain


def check_header(plain: Any, without: Collection[str] = ()) -> None:
    """Require plain data to be a header's.

    Args:
        plain: The data.
        without: Fields that the file's format does not have.

    Raises:
        ValueError: As `check_fields`.
    """
    kinds = {name: kind for name, kind in FIELDS.items() if name not in without}
    given = plain if isinstance(plain, dict) else {}
    kinds |= {name: kind for name, (kind, _) in OPTIONAL.items() if name in given}
    check_fields(plain, kinds, "it")


def likelihood_to_json(likelihood: Likelihood) -> dict[str, Any]:
    """A likelihood of this package as plain data.

    Raises:
        ValueError: For an instance of any other class.
    """
    if type(likelihood) is Categorical:
        return {"name": "classification", "ignore_index": likelihood.ignore_index}
    if type(likelihood) is Bernoulli:
        return {"name": "binary"}
    if type(likelihood) is MultiLabel:
        return {"name": "multilabel", "ignore_index": likelihood.ignore_index}
    if type(likelihood) is Gaussian:
        return {"name": "regression", "sigma": likelihood.sigma.tolist()}
    raise ValueError(
        f"A {type(likelihood).__name__} cannot be written to a file: only 'classification', "
        "'binary', 'multilabel' and 'regression' can."
    )


def likelihood_from_json(data: Mapping[str, Any]) -> Likelihood:
    """The inverse of `likelihood_to_json`.

    Raises:
        ValueError: For an unknown likelihood.
    """
    name = data.get("name")
    if not isinstance(name, str) or name not in _LIKELIHOODS:
        raise ValueError(f"The file's likelihood {shown(data)} is unknown: it is damaged.")
    options = {key: value for key, value in data.items() if key != "name"}
    check_fields(options, _LIKELIHOODS[name], "The file's likelihood")
    return LIKELIHOODS[name](**options)
