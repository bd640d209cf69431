"""A posterior as a Gaussian process, and as BoTorch's model where that is installed."""

import oracle
import pytest
import torch
from torch import nn

from laplace_debias import Laplace
from laplace_debias.integrations.botorch import joint_moments


def fitted(num_outputs=2, sigma=0.3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, num_outputs)).double().eval()
    x = torch.randn(20, 3).double()
    y = torch.randn(20, num_outputs).double()
    return Laplace(model, "regression", "full", sigma=sigma).fit_batches([(x, y)])


def dense(la, points):
    """J P⁻¹ Jᵀ; its rows are ordered by points, and then by outputs."""
    J = oracle.flat_jacobian(la.model, points, la.param_names).flatten(0, 1)
    return J @ torch.linalg.inv(la.posterior.precision.to_dense()) @ J.T


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3), (2, 5, 1, 3), (1, 3)])
def test_the_moments_are_those_of_the_dense_process(shape):
    la = fitted(sigma=[0.3, 0.7])
    X = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mean, covariance = joint_moments(la, X)
    assert mean.shape == (*shape[:-1], 2)
    torch.testing.assert_close(mean, la.model(X).detach())
    expected = torch.stack([dense(la, points) for points in X.reshape(-1, *shape[-2:])])
    torch.testing.assert_close(covariance, expected.reshape(covariance.shape))
    _, noisy = joint_moments(la, X, observation_noise=True)
    added = (noisy - covariance).reshape(-1, *covariance.shape[-2:])
    noise = torch.tensor([0.09, 0.49] * shape[-2], dtype=torch.float64).diag()
    torch.testing.assert_close(added, noise.expand_as(added))


def test_what_has_no_such_moments_is_refused():
    with pytest.raises(ValueError, match=r"shape \[\.\.\., q, d\]"):
        joint_moments(fitted(), torch.zeros(3).double())
    model = nn.Sequential(nn.Linear(3, 1)).double().eval()
    la = Laplace(model, "binary").fit_batches([(torch.randn(4, 3).double(), torch.ones(4))])
    with pytest.raises(ValueError, match="needs a Gaussian likelihood"):
        joint_moments(la, torch.randn(2, 3).double(), observation_noise=True)


@pytest.fixture
def botorch_model():
    pytest.importorskip("botorch")
    from laplace_debias.integrations.botorch import LaplaceModel

    return LaplaceModel


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_botorch_has_the_same_moments(botorch_model, num_outputs):
    la = fitted(num_outputs)
    X = torch.randn(2, 4, 3).double()
    model = botorch_model(la, num_outputs)
    posterior = model.posterior(X, observation_noise=True)
    mean, covariance = joint_moments(la, X, observation_noise=True)
    torch.testing.assert_close(posterior.mean, mean)
    torch.testing.assert_close(posterior.distribution.covariance_matrix, covariance)
    samples = posterior.rsample(torch.Size([40_000]))
    rows = samples[:, 0].flatten(1)
    scale = covariance[0].diagonal().max()
    assert (torch.cov(rows.T) - covariance[0]).abs().max() < 0.05 * scale
    last_output = model.posterior(X, output_indices=[num_outputs - 1])
    torch.testing.assert_close(last_output.mean, la.model(X).detach()[..., -1:])
    _, covariance = joint_moments(la, X)
    rows = slice(num_outputs - 1, None, num_outputs)
    expected = covariance[:, rows, rows]
    torch.testing.assert_close(last_output.distribution.covariance_matrix, expected)


def test_botorch_chooses_candidates(botorch_model):
    from botorch.acquisition import UpperConfidenceBound, qUpperConfidenceBound
    from botorch.optim import optimize_acqf, optimize_acqf_discrete

    la = fitted(1)
    model = botorch_model(la)
    choices = torch.randn(30, 3).double()
    mean, covariance = joint_moments(la, choices)
    bound = mean[:, 0] + 2 * covariance.diagonal().sqrt()
    candidate, value = optimize_acqf_discrete(UpperConfidenceBound(model, beta=4.0), 1, choices)
    torch.testing.assert_close(candidate[0], choices[bound.argmax()])
    torch.testing.assert_close(value, bound.max())
    batch, _ = optimize_acqf_discrete(qUpperConfidenceBound(model, beta=4.0), 3, choices)
    assert batch.shape == (3, 3)
    bounds = torch.tensor([[-1.0] * 3, [1.0] * 3]).double()
    options = {"with_grad": False, "maxiter": 3}
    acquisition = UpperConfidenceBound(model, beta=4.0)
    _, best_value = optimize_acqf(
        acquisition, bounds, 1, num_restarts=1, raw_samples=8, options=options
    )
    assert best_value.isfinite()


@pytest.mark.parametrize("q", [1, 2])
def test_gradients_in_the_points_are_finite_differences(q):
    la = fitted()
    X = torch.randn(1, q, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda X: joint_moments(la, X), X.requires_grad_())
    with torch.no_grad():
        for actual, expected in zip(
            joint_moments(la, X), joint_moments(la, X.detach()), strict=True
        ):
            torch.testing.assert_close(actual, expected)


def test_botorch_climbs_by_gradients(botorch_model):
    from botorch.acquisition import UpperConfidenceBound, qUpperConfidenceBound
    from botorch.optim import optimize_acqf

    model = botorch_model(fitted(1))
    bounds = torch.tensor([[-1.0] * 3, [1.0] * 3]).double()
    acquisition = UpperConfidenceBound(model, beta=4.0)
    torch.manual_seed(1)
    options = {"maxiter": 20}
    best, value = optimize_acqf(
        acquisition, bounds, 1, num_restarts=2, raw_samples=8, options=options
    )
    grid = torch.rand(500, 1, 3, generator=torch.Generator().manual_seed(2)).double() * 2 - 1
    assert value >= acquisition(grid).max() - 1e-6
    torch.testing.assert_close(acquisition(best), value[None])
    pair, _ = optimize_acqf(
        qUpperConfidenceBound(model, beta=4.0), bounds, 2, num_restarts=1, raw_samples=4,
        options={"maxiter": 3},
    )  # fmt: skip
    assert pair.shape == (2, 3)


def test_fantasies_are_the_update_of_the_dense_gaussian(botorch_model):
    from botorch.sampling import SobolQMCNormalSampler

    la = fitted(2, sigma=[0.3, 0.7])
    model = botorch_model(la, 2)
    g = torch.Generator().manual_seed(4)
    observed = torch.randn(3, 3, generator=g, dtype=torch.float64)
    points = torch.randn(4, 3, generator=g, dtype=torch.float64)
    fantasies = model.fantasize(observed, SobolQMCNormalSampler(torch.Size([5]), seed=1))
    assert fantasies.batch_shape == (5,)
    J, J_observed = (
        oracle.flat_jacobian(la.model, x, la.param_names).flatten(0, 1) for x in (points, observed)
    )
    weights = torch.tensor([0.3, 0.7] * 3).double() ** -2
    P = la.posterior.precision.to_dense() + J_observed.T @ (weights[:, None] * J_observed)
    residuals = (fantasies._Y - la.model(observed)).flatten(1)
    steps = torch.linalg.solve(P, J_observed.T @ (weights * residuals).T).T
    posterior = fantasies.posterior(points)
    mean = la.model(points) + (steps @ J.T).unflatten(1, (4, 2))
    torch.testing.assert_close(posterior.mean, mean)
    expected = J @ torch.linalg.solve(P, J.T)
    actual = posterior.distribution.covariance_matrix
    torch.testing.assert_close(actual, expected.expand(5, 8, 8))
    twice = model.condition_on_observations(observed[:1], fantasies._Y[:, :1])
    twice = twice.condition_on_observations(observed[1:], fantasies._Y[:, 1:])
    torch.testing.assert_close(twice.posterior(points).mean, mean)
    # With the full curvature, whose targets do not matter, an update has the same covariance.
    la.update([(observed, torch.zeros(3, 2).double())])
    torch.testing.assert_close(joint_moments(la, points)[1], expected)


def test_botorch_computes_the_knowledge_gradient(botorch_model):
    from botorch.acquisition import qKnowledgeGradient

    model = botorch_model(fitted(1))
    acquisition = qKnowledgeGradient(model, num_fantasies=3)
    X = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(5)).double().requires_grad_()
    values = acquisition(X)
    (gradient,) = torch.autograd.grad(values.sum(), X)
    assert gradient.isfinite().all()
    assert (gradient != 0).any()


def test_botorch_looks_several_steps_ahead(botorch_model):
    from botorch.acquisition.multi_step_lookahead import qMultiStepLookahead
    from botorch.sampling import SobolQMCNormalSampler

    model = botorch_model(fitted(1))
    sampler = SobolQMCNormalSampler(torch.Size([3]), seed=0)
    acquisition = qMultiStepLookahead(model, batch_sizes=[1], samplers=[sampler])
    X = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(5)).double().requires_grad_()
    values = acquisition(X)
    (gradient,) = torch.autograd.grad(values.sum(), X)
    assert (gradient != 0).all()
    # The first point is observed; each of the others is the next choice after one observation.
    Y = sampler(model.posterior(X[:, :1], observation_noise=True))
    for x, y, value in zip(X, Y.unbind(1), values, strict=True):
        means = [
            model.condition_on_observations(x[:1], observed).posterior(point[None]).mean
            for point, observed in zip(x[1:], y, strict=True)
        ]
        torch.testing.assert_close(value, torch.stack(means).mean())


def test_botorch_conditions_a_list_of_models(botorch_model):
    from botorch.models import ModelList
    from botorch.sampling import SobolQMCNormalSampler
    from botorch.sampling.list_sampler import ListSampler

    models = [botorch_model(fitted(1, sigma)) for sigma in (0.3, 0.5)]
    X = torch.rand(2, 3, generator=torch.Generator().manual_seed(5)).double()
    samplers = [SobolQMCNormalSampler(torch.Size([3]), seed=seed) for seed in (0, 1)]
    fantasies = ModelList(*models).fantasize(X, ListSampler(*samplers))
    for model, sampler, fantasy in zip(models, samplers, fantasies.models, strict=True):
        expected = model.fantasize(X, sampler).posterior(X).mean
        torch.testing.assert_close(fantasy.posterior(X).mean, expected)
    with pytest.raises(NotImplementedError, match="Remove `observation_noise=`"):
        models[0].fantasize(X, samplers[0], torch.ones(1, 1))


def test_observations_of_another_shape_are_refused(botorch_model):
    model = botorch_model(fitted(1))
    X = torch.randn(2, 3).double()
    with pytest.raises(ValueError, match=r"of shape \[\.\.\., 2, 1\]"):
        model.condition_on_observations(X, torch.zeros(3, 1).double())
    with pytest.raises(NotImplementedError, match="Remove `noise="):
        model.condition_on_observations(X, torch.zeros(2, 1).double(), torch.ones(2, 1))


def test_botorch_model_refuses_what_is_no_regression(botorch_model):
    model = nn.Sequential(nn.Linear(3, 1)).double().eval()
    with pytest.raises(TypeError, match="a Gaussian likelihood, got Bernoulli"):
        botorch_model(Laplace(model, "binary"))
    with pytest.raises(RuntimeError, match="not fitted"):
        botorch_model(Laplace(model, "regression"))
    X = torch.randn(2, 3).double()
    with pytest.raises(ValueError, match="num_outputs=1"):
        botorch_model(fitted(2)).posterior(X)
    with pytest.raises(NotImplementedError, match="`observation_noise` must be True or False"):
        botorch_model(fitted(1)).posterior(X, observation_noise=torch.ones(2))


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_the_covariance_of_many_or_equal_points_is_singular(botorch_model, num_outputs):
    """There are 26 or 31 parameters: more points than these depend on each other."""
    la = fitted(num_outputs)
    model = botorch_model(la, num_outputs)
    points = torch.randn(40, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for X in (points, torch.cat([points[:3], points[:3]])):
        posterior = model.posterior(X)
        samples = posterior.rsample(torch.Size([20_000])).flatten(1)
        _, covariance = joint_moments(la, X)
        scale = covariance.diagonal().max()
        assert (torch.cov(samples.T) - covariance).abs().max() < 0.06 * scale
