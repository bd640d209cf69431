"""Conformal sets and intervals are those of MAPIE for the same predictions."""

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from torch import nn

from laplace_debias import Conformal, Laplace

pytest.importorskip("mapie", reason="compares with MAPIE: pip install mapie")
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import ResidualNormalisedScore
from mapie.conformity_scores.sets import aps
from mapie.regression import SplitConformalRegressor

LEVELS = [0.8, 0.9]


class Probabilities(ClassifierMixin, BaseEstimator):
    """Class probabilities of a posterior, as a fitted estimator."""

    def __init__(self, la):
        self.la = la
        self.classes_ = np.arange(4)

    def fit(self, X, y):
        raise AssertionError("The posterior is fitted already.")

    def predict_proba(self, X):
        return self.la.predict(torch.from_numpy(X)).probs.numpy()

    def predict(self, X):
        return self.predict_proba(X).argmax(1)


class Statistic(RegressorMixin, BaseEstimator):
    """The mean or the standard deviation of a posterior's predictive, as a fitted estimator."""

    def __init__(self, la, name):
        self.la = la
        self.name = name
        self.n_features_in_ = 3

    def fit(self, X, y):
        raise AssertionError("The posterior is fitted already.")

    def predict(self, X):
        predictive = self.la.predict(torch.from_numpy(X))
        return getattr(predictive, self.name).squeeze(1).numpy()


class LargestDraws:
    """A source of uniform numbers that are all 1: sets without randomisation."""

    def uniform(self, size):
        return np.ones(size)


def inputs(size, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, generator=g, dtype=torch.float64), g


def network(num_outputs):
    torch.manual_seed(0)
    layers = nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, num_outputs)
    return nn.Sequential(*layers).double().eval()


def class_data(size, seed):
    x, g = inputs(size, seed)
    return x, torch.randint(4, (size,), generator=g)


def numbers(size, seed):
    x, g = inputs(size, seed)
    noise = torch.randn(size, 1, generator=g, dtype=torch.float64)
    return x, x[:, :1].sin() + (1 + x[:, 1:2].abs()) * noise


def is_positive(x):
    return (x[:, 0] > 0).long()


@pytest.mark.parametrize("level", LEVELS)
def test_class_sets_are_the_adaptive_ones(level, monkeypatch):
    monkeypatch.setattr(aps, "check_random_state", lambda _: LargestDraws())
    la = Laplace(network(4), curvature="full").fit([class_data(60, 1)])
    x, y = class_data(103, 2)
    new, _ = class_data(50, 3)
    theirs = SplitConformalClassifier(
        Probabilities(la), confidence_level=level, conformity_score="aps", prefit=True
    )
    _, sets = theirs.conformalize(x.numpy(), y.numpy()).predict_set(new.numpy())
    ours = Conformal(la).calibrate([(x, y)], level).predict(new)
    assert torch.equal(ours.contains, torch.from_numpy(sets[:, :, 0]))
    assert len(ours.sizes.unique()) > 1


def their_intervals(la, x, y, new, level):
    score = ResidualNormalisedScore(Statistic(la, "stddev"), prefit=True)
    theirs = SplitConformalRegressor(
        Statistic(la, "mean"), confidence_level=level, conformity_score=score, prefit=True
    )
    theirs.conformalize(x.numpy(), y.squeeze(1).numpy())
    _, intervals = theirs.predict_interval(new.numpy())
    return torch.from_numpy(intervals)


def check_intervals(intervals, expected):
    torch.testing.assert_close(intervals.low, expected[:, 0])
    torch.testing.assert_close(intervals.high, expected[:, 1])


@pytest.mark.parametrize("level", LEVELS)
def test_intervals_are_those_that_a_residual_model_scales(level):
    la = Laplace(network(1), "regression", curvature="full", sigma=0.5).fit([numbers(60, 1)])
    x, y = numbers(103, 2)
    new, _ = numbers(50, 3)
    intervals = Conformal(la).calibrate([(x, y)], level).predict(new)
    check_intervals(intervals, their_intervals(la, x, y, new, level))


def test_intervals_by_group_are_those_of_the_groups_calibration_examples():
    la = Laplace(network(1), "regression", curvature="full", sigma=0.5).fit([numbers(60, 1)])
    x, y = numbers(103, 2)
    new, _ = numbers(50, 3)
    conformal = Conformal(la, groups=is_positive).calibrate([(x, y)], 0.9)
    for group in (0, 1):
        is_calibration = is_positive(x) == group
        is_new = is_positive(new) == group
        expected = their_intervals(la, x[is_calibration], y[is_calibration], new[is_new], 0.9)
        check_intervals(conformal.predict(new[is_new]), expected)
