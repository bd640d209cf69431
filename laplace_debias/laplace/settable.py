"""Attributes that a user may set: a misspelt one would have no effect."""

import difflib

from laplace_debias.laplace.laplace_torch_names import EQUIVALENTS, explain_laplace_torch_name

SETTABLE = ("prior_precision", "prior_mean", "temperature", "link", "sigma")
"""The attributes of `Laplace` that can be set without a new fit."""


def check_settable(cls: type, name: str) -> None:
    """Refuse a name that is almost that of an attribute, or that of laplace-torch.

    Other names are accepted, such as those of a subclass.

    Raises:
        AttributeError: If the class has no such attribute, and the name looks as if it should.
    """
    if name.startswith("_") or hasattr(cls, name):
        return
    if name in EQUIVALENTS:
        raise AttributeError(explain_laplace_torch_name(name))
    for meant in difflib.get_close_matches(name, SETTABLE, n=1, cutoff=0.75):
        if hasattr(cls, meant):
            advice = f"Did you mean {meant!r}?"
        else:
            advice = f"Set `{meant}` of each of its `members`."
        raise AttributeError(f"{cls.__name__} has no attribute {name!r}. {advice}")
