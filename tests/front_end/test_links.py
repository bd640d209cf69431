"""The Laplace bridge beside the probit link."""

import math

import oracle
import pytest
import torch

from laplace_debias import Laplace
from laplace_debias.laplace.links import log_bridge


def bridge_of(mean, covariance):
    """α of one example, entry by entry, as Hobbhahn et al. (2022) write it."""
    C = len(mean)
    total = sum(covariance[k][j] for k in range(C) for j in range(C))
    row = [sum(covariance[k][j] for j in range(C)) for k in range(C)]
    mu = [mean[k] - row[k] * sum(mean) / total for k in range(C)]
    sigma = [covariance[k][k] - row[k] * row[k] / total for k in range(C)]
    spread = sum(math.exp(-m) for m in mu)
    return [(1 - 2 / C + math.exp(mu[k]) / C**2 * spread) / sigma[k] for k in range(C)]


def fitted(likelihood="classification", **options):
    model, x, y, _, _ = oracle.SMALL_MODELS["mlp_tanh"]()
    if likelihood == "regression":
        y = torch.zeros(len(x), 4).double()
    return Laplace(model, likelihood, prior_precision=0.7, **options).fit_batches([(x, y)]), x, y


@pytest.mark.parametrize("curvature", ["kfac", "full"])
def test_the_bridge_is_the_formula_of_the_dense_covariance(curvature):
    la, x, _ = fitted(curvature=curvature)
    blocks = [block.to_dense() for block in la.posterior.curvature.blocks.values()]
    J = oracle.flat_jacobian(la.model, x, la.param_names)
    covariance = oracle.functional_covariance(
        J, oracle.posterior_covariance(blocks, la.num_data, 0.7)
    )
    mean = la.model(x).detach()
    alphas = torch.tensor(
        [bridge_of(m.tolist(), c.tolist()) for m, c in zip(mean, covariance, strict=True)],
        dtype=torch.float64,
    )
    expected = alphas / alphas.sum(1, keepdim=True)
    actual = la.predict(x, link="bridge").probs
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert (actual - la.predict(x).probs).abs().max() > 1e-3


def test_the_bridge_of_a_dirichlet_is_that_dirichlet():
    """The Gaussian that a Dirichlet makes of its logits, Eq. 6 and 7 of the paper, and back.

    Its covariance has no variance along the ones, so that nothing is left to condition on.
    """
    alpha = torch.tensor([[0.3, 2.0, 5.0, 11.0], [40.0, 30.0, 20.0, 10.0]]).double()
    C = alpha.shape[1]
    mean = alpha.log() - alpha.log().mean(1, keepdim=True)
    inverse = 1 / alpha
    covariance = (
        torch.diag_embed(inverse)
        - (inverse[:, :, None] + inverse[:, None, :] - inverse.mean(1)[:, None, None]) / C
    )
    torch.testing.assert_close(log_bridge(mean, covariance).exp(), alpha, rtol=1e-9, atol=0)
    # A softmax does not see the same number added to every logit.
    torch.testing.assert_close(log_bridge(mean + 3.0, covariance).exp(), alpha, rtol=1e-9, atol=0)


def test_two_classes_have_the_softmax_of_the_conditioned_logits():
    mean = torch.tensor([[1.3, -0.4]], dtype=torch.float64)
    covariance = torch.tensor([[[2.0, 0.3], [0.3, 0.7]]], dtype=torch.float64)
    shares = torch.tensor([2.3, 1.0], dtype=torch.float64) / 3.3
    expected = (mean - shares * 0.9).softmax(1)
    torch.testing.assert_close(log_bridge(mean, covariance).softmax(1), expected)


def test_equal_logits_of_equal_variances_are_uniform_and_variance_is_a_lack_of_counts():
    mean, covariance = torch.full((1, 5), 7.0), torch.eye(5).expand(1, 5, 5)
    few, many = log_bridge(mean, 4 * covariance).exp(), log_bridge(mean, covariance).exp()
    torch.testing.assert_close(few / few.sum(), torch.full((1, 5), 0.2))
    torch.testing.assert_close(many, 4 * few)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("logit", [90.0, 1e4])
def test_nothing_overflows(dtype, scale, logit):
    """exp(90) is beyond single precision, exp(10000) beyond double."""
    mean = torch.tensor([[logit, 0.0, -logit, 1.0]], dtype=dtype)
    root = torch.randn(4, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
    probs = log_bridge(mean, scale * (root @ root.T)[None]).softmax(1)
    assert probs.isfinite().all()
    torch.testing.assert_close(probs.sum(), torch.ones((), dtype=dtype))
    if scale in (0.0, 1e-30):
        torch.testing.assert_close(probs[0, 0], torch.ones((), dtype=dtype))


def test_positions_have_a_bridge_each():
    g = torch.Generator().manual_seed(0)
    mean = torch.randn(2, 3, 4, generator=g, dtype=torch.float64)
    root = torch.randn(2, 3, 4, 4, generator=g, dtype=torch.float64)
    covariance = root @ root.mT
    together = log_bridge(mean, covariance)
    for index in ((0, 0), (1, 2)):
        expected = bridge_of(mean[index].tolist(), covariance[index].tolist())
        expected = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(together[index].exp(), expected)


def test_tune_and_evaluate_use_the_link():
    la, x, y = fitted()
    grid = [1e-2, 1.0, 100.0]
    tuned = la.tune([(x, y)], grid=grid, link="bridge")
    for row in tuned.table:
        la.prior_precision = row["prior_precision"]
        expected = -la.predict(x, link="bridge").log_prob(y).mean()
        assert row["nll"] == pytest.approx(float(expected))
        assert la.evaluate([(x, y)], link="bridge")["nll"] == pytest.approx(float(expected))
    assert tuned.table != la.tune([(x, y)], grid=grid).table
    by_grid = la.predict_grid(x, grid, link="bridge")
    la.prior_precision = 100.0
    torch.testing.assert_close(by_grid[2].probs, la.predict(x, link="bridge").probs)


def test_a_link_that_has_no_use_is_refused():
    la, x, y = fitted()
    with pytest.raises(ValueError, match="Unknown link='laplace'"):
        la.predict(x, link="laplace")
    for options in ({"method": "nn"}, {"samples": 5}, {"method": "map"}):
        with pytest.raises(ValueError, match="belongs to the closed form"):
            la.predict(x, link="bridge", **options)
    with pytest.raises(ValueError, match="a link nor a metric"):
        la.tune(method="marglik", link="bridge")
    regression, x, y = fitted("regression")
    for call in (
        lambda: regression.predict(x, link="bridge"),
        lambda: regression.predict_grid(x, [1.0], link="bridge"),
        lambda: regression.tune([(x, y)], link="bridge"),
        lambda: regression.evaluate([(x, y)], link="bridge"),
    ):
        with pytest.raises(ValueError, match="not of a Gaussian"):
            call()
