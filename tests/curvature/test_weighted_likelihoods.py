"""Likelihoods, weights, smoothing and soft targets, against formulas written out."""

import hand_likelihoods as hand
import pytest
import torch
import torch.nn.functional as F
from hand_likelihoods import P3, W3
from spectra import generator

from laplace_debias import Bernoulli, Categorical, HeteroscedasticGaussian, MultiLabel
from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.losses.base import NegativeLogLikelihood
from laplace_debias.curvature.losses.cotangents import Cotangents

N = 9
CASES = hand.STANDARD | hand.CASES


def case(name, *shape):
    likelihood, num_outputs, targets, ell = CASES[name]
    shape = shape or (N,)
    f = torch.randn(*shape, num_outputs, generator=generator(), dtype=torch.float64)
    return likelihood, 2 * f, targets(*shape, generator=generator(1)), ell


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_value_gradient_and_curvature_are_those_of_the_formula(name):
    likelihood, f, y, ell = case(name)
    loss = NegativeLogLikelihood(likelihood)
    loss.check(f, y)
    labels = loss.labels(y, 2)
    values = torch.stack([ell(*row) for row in zip(f, y, strict=True)])
    close(likelihood.nll(f, y), values)
    close(loss.value(f, labels), values.sum())
    close(
        loss.gradient(f, labels),
        torch.stack([hand.gradient(ell, *r) for r in zip(f, y, strict=True)]),
    )
    expected = torch.stack([hand.hessian(ell, *row) for row in zip(f, y, strict=True)])
    root = loss.root(f, labels)
    close(torch.einsum("kbi,kbj->bij", root, root), expected)
    v = torch.randn(f.shape, generator=generator(2), dtype=torch.float64)
    close(loss.hessian(f, labels)(v), torch.einsum("bij,bj->bi", expected, v))
    close(loss.hessian_traces(f, labels), expected.diagonal(dim1=1, dim2=2).sum(1))


@pytest.mark.parametrize("name", CASES)
def test_drawn_gradients_are_unbiased(name):
    likelihood, f, y, ell = case(name)
    n = next(n for n in range(N) if hand.hessian(ell, f[n], y[n]).any())
    many = f[n : n + 1].expand(60_000, -1) / 3
    labels = y[n : n + 1].expand(60_000, *y.shape[1:])
    cotangents = Cotangents(NegativeLogLikelihood(likelihood), FisherType("mc", 2, seed=3))
    columns = cotangents(many, labels, 0).columns
    squares = torch.einsum("kbi,kbj->bij", columns, columns)
    error = squares.mean(0) - hand.hessian(ell, many[0], y[n])
    assert squares.abs().max() > 0
    assert (error.abs() <= 4.5 * squares.std(0) / len(many) ** 0.5 + 1e-12).all()


def test_losses_are_those_of_torch():
    """The losses equal torch's, except that torch's mean divides by the sum of the weights."""
    f = 2 * torch.randn(N, 3).double()
    y = torch.randint(3, (N,))
    w, pi = torch.tensor(W3).double(), torch.tensor(P3).double()
    ours = Categorical(class_weights=W3, label_smoothing=0.1).nll(f, y).mean()
    theirs = F.cross_entropy(f, y, w, label_smoothing=0.1) * w[y].sum() / N
    torch.testing.assert_close(ours, theirs)
    y = torch.randint(2, (N, 3)).double()
    ours = MultiLabel(label_weights=W3, positive_weights=P3).nll(f, y).mean()
    torch.testing.assert_close(ours, 3 * F.binary_cross_entropy_with_logits(f, y, w, pos_weight=pi))
    ours = Bernoulli(positive_weight=P3[0]).nll(f[:, :1], y[:, 0]).mean()
    theirs = F.binary_cross_entropy_with_logits(f[:, 0], y[:, 0], pos_weight=pi[0])
    torch.testing.assert_close(ours, theirs)
    target = torch.randn(N, 1).double()
    ours = HeteroscedasticGaussian().nll(f[:, :2], target).mean()
    theirs = F.gaussian_nll_loss(f[:, :1], target, f[:, 1:2].exp(), full=True)
    torch.testing.assert_close(ours, theirs)


def test_one_hot_targets_are_class_indices():
    f = torch.randn(N, 3).double()
    y = torch.randint(3, (N,))
    hard, soft = (
        NegativeLogLikelihood(Categorical(class_weights=W3, label_smoothing=0.1)) for _ in range(2)
    )
    q = F.one_hot(y, 3).double()
    close(soft.value(f, soft.labels(q, 2)), hard.value(f, hard.labels(y, 2)))
    close(soft.root(f, soft.labels(q, 2)), hard.root(f, hard.labels(y, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_soft_targets_of_narrow_types_are_rounded_probabilities(dtype):
    q = (3 * torch.randn(500, 4)).softmax(-1)
    likelihood = Categorical()
    f = torch.randn(500, 4).double()
    likelihood.check(f, q.to(dtype))
    actual = likelihood.nll(f, q.to(dtype))
    expected = -(q * f.log_softmax(-1)).sum(-1)
    error = (actual - expected).abs() / expected.abs()
    assert error.max() <= 2 * torch.finfo(dtype).eps
    with pytest.raises(TypeError, match="sum to 1"):
        likelihood.check(f, (1.02 * q).to(dtype))


ONES3 = torch.ones(4, 3).double()


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "error", "message"),
    [
        (Categorical(class_weights=[1, 2]), 3, torch.zeros(4).long(), ValueError, "3 outputs"),
        (Categorical(class_weights=[1, 2]), 3, ONES3 / 3, ValueError, "2 entries"),
        (Categorical(), 3, ONES3, TypeError, "sum to 1"),
        (Categorical(), 3, torch.tensor([[2.0, -1.0, 0.0]] * 4), TypeError, "at least 0"),
        (Categorical(), 3, ONES3 * torch.nan, TypeError, "sum to 1"),
        (MultiLabel(label_weights=[1, 2]), 3, ONES3, ValueError, "label_weights has 2"),
        (MultiLabel(positive_weights=[1, 2]), 3, ONES3, ValueError, "positive_weights has 2"),
        (HeteroscedasticGaussian(), 3, ONES3, ValueError, "mean and a log-variance"),
        (HeteroscedasticGaussian(), 2, ONES3, ValueError, "half of the outputs"),
        (HeteroscedasticGaussian(), 6, ONES3.long(), TypeError, "floating"),
        (HeteroscedasticGaussian(), 6, ONES3 * torch.nan, ValueError, "NaN"),
    ],
)
def test_what_does_not_fit_is_refused(likelihood, outputs, targets, error, message):
    loss = NegativeLogLikelihood(likelihood)
    # Code that reads the labels before the check must not fail with a different error.
    Cotangents(loss, FisherType()).counted(targets, 2)
    with pytest.raises(error, match=message):
        loss.check(torch.zeros(4, outputs).double(), targets)


def test_log_variances_out_of_range_are_refused():
    with pytest.raises(ValueError, match="logarithms of variances"):
        HeteroscedasticGaussian().check(torch.tensor([[0.0, 200.0]]), torch.zeros(1, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Categorical(class_weights=[1.0, -1.0]), "`class_weights` must be finite"),
        (lambda: Categorical(class_weights=[0.0, 0.0]), "at least one greater than 0"),
        (lambda: Categorical(class_weights=torch.ones(2, 2)), "class_weights"),
        (lambda: Categorical(label_smoothing=1.5), "`label_smoothing` must be between"),
        (lambda: Categorical(label_smoothing=float("nan")), "`label_smoothing` must be between"),
        (lambda: Bernoulli(positive_weight=0.0), "positive_weight"),
        (lambda: MultiLabel(label_weights=[float("inf")]), "`label_weights` must be finite"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
