"""Which methods can be compared, and how they are chosen."""

import pytest
from torch import nn

from laplace_debias.assessment import Method, PosteriorChoice, default_methods
from laplace_debias.assessment.methods import (
    NETWORK,
    TEMPERATURE,
    check_methods,
    chosen_methods,
)
from laplace_debias.curvature.losses.likelihoods import likelihood_from
from laplace_debias.sources import Loaded


def keys(methods):
    return [method.key for method in methods]


def loaded(task, has_validation):
    return Loaded(
        model=nn.Identity(),
        likelihood=likelihood_from(task),
        train=[],
        num_train=1,
        validation=[] if has_validation else None,
        test=[],
    )


def test_the_default_has_a_temperature_where_one_can_be_fitted():
    assert keys(default_methods(loaded("classification", True))) == [
        "network",
        "temperature",
        "last-layer",
    ]
    plain = ["network", "last-layer"]
    assert keys(default_methods(loaded("classification", False))) == plain
    assert keys(default_methods(loaded("regression", True))) == plain


@pytest.mark.parametrize(
    ("methods", "task", "has_validation", "message"),
    [
        ([NETWORK, TEMPERATURE], "regression", True, "Remove temperature"),
        (
            [NETWORK, TEMPERATURE],
            "binary",
            False,
            "no validation examples for fitting the temperature of",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(methods, task, has_validation, message):
    with pytest.raises(ValueError, match=message):
        check_methods(methods, loaded(task, has_validation))


def test_a_key_must_name_files():
    with pytest.raises(ValueError, match="used in file names"):
        Method(key="../x", label="", describes="")


def test_a_posterior_of_one_example_is_refused():
    with pytest.raises(ValueError, match="Pass at least 2"):
        PosteriorChoice(fit_examples=1)


def test_posteriors_that_are_asked_for_come_last():
    posteriors = {
        "ekfac": PosteriorChoice(curvature="ekfac", params="all"),
        "head": PosteriorChoice(),
    }
    methods = chosen_methods(None, posteriors, 100, loaded("classification", True))
    assert keys(methods) == ["network", "temperature", "last-layer", "ekfac", "head"]
    # Predicting with only the last layer is cheap, so it is not limited.
    assert [method.examples for method in methods[3:]] == [100, None]


def test_methods_can_be_named_and_keep_their_order():
    methods = chosen_methods(("laplace", "temperature"), {}, 7, loaded("classification", True))
    assert keys(methods) == ["network", "temperature", "laplace"]
    assert methods[-1].examples == 7
    with pytest.raises(ValueError, match=r"no method magic. Use network, temperature"):
        chosen_methods(("magic",), {}, None, loaded("classification", True))
    with pytest.raises(ValueError, match="built-in method"):
        chosen_methods(None, {"laplace": PosteriorChoice()}, None, loaded("classification", True))
