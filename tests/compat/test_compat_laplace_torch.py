"""laplace-torch's names and shapes on posteriors of this library, compared with laplace-torch."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias.compat.laplace_torch import Laplace
from laplace_debias.linalg import diagonal

STRUCTURES = ["diag", "full", "kron"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()


def loader(likelihood, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(30, 4, generator=g, dtype=torch.float64)
    y = torch.randint(3, (30,), generator=g)
    if likelihood == "regression":
        y = torch.randn(30, 3, generator=g, dtype=torch.float64)
    return DataLoader(TensorDataset(x, y), batch_size=30), x


def fitted_by_both(likelihood, **options):
    """The posteriors of this library and of laplace-torch, their data, and its inputs."""
    laplace = pytest.importorskip("laplace", reason="compares with laplace-torch")
    if likelihood == "regression":
        options["sigma_noise"] = 0.7
    data, x = loader(likelihood)
    ours = Laplace(network(), likelihood, prior_precision=0.9, **options)
    theirs = laplace.Laplace(network(), likelihood, prior_precision=0.9, **options)
    ours.fit(data)
    theirs.fit(data)
    return ours, theirs, data, x


def close(actual, expected):
    # laplace-torch computes some of it in single precision.
    torch.testing.assert_close(actual, expected.to(actual), rtol=1e-4, atol=1e-5)


def test_the_example_of_its_readme_runs():
    train_loader, x = loader("classification")
    val_loader, _ = loader("classification", 2)
    la = Laplace(network(), "classification", subset_of_weights="all", hessian_structure="diag")
    la.fit(train_loader)
    la.optimize_prior_precision(
        method="gridsearch", pred_type="glm", link_approx="probit", val_loader=val_loader
    )
    pred = la(x, pred_type="glm", link_approx="probit")
    assert pred.shape == (30, 3)
    torch.testing.assert_close(pred.sum(-1), torch.ones(30).double())


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_classification_has_the_same_numbers(structure, subset):
    ours, theirs, _, x = fitted_by_both(
        "classification", subset_of_weights=subset, hessian_structure=structure
    )
    for link in ("probit", "bridge", "bridge_norm"):
        close(ours(x, link_approx=link), theirs(x, link_approx=link))
    assert ours.n_params == theirs.n_params
    assert ours.n_data == theirs.n_data
    close(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood())
    precision = torch.tensor([2.0], dtype=torch.float64)
    close(ours.log_marginal_likelihood(precision), theirs.log_marginal_likelihood(precision))
    close(ours.prior_precision, theirs.prior_precision)
    close(ours(x), theirs(x))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_regression_has_the_same_numbers_and_shapes(structure):
    ours, theirs, _, x = fitted_by_both(
        "regression", subset_of_weights="all", hessian_structure=structure
    )
    for options in ({}, {"joint": True}, {"diagonal_output": True}):
        for actual, expected in zip(ours(x, **options), theirs(x, **options), strict=True):
            assert actual.shape == expected.shape
            close(actual, expected)
    close(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood())
    close(ours.sigma_noise.reshape(1), theirs.sigma_noise.reshape(1))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_further_data_are_added_with_the_same_numbers(structure):
    ours, theirs, _, x = fitted_by_both(
        "classification", subset_of_weights="all", hessian_structure=structure
    )
    further_data, _ = loader("classification", 5)
    ours.fit(further_data, override=False)
    theirs.fit(further_data, override=False)
    close(ours(x), theirs(x))
    close(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood())
    assert ours.n_data == theirs.n_data == 60


def test_matrices_have_its_shapes():
    ours, theirs, *_ = fitted_by_both(
        "classification", subset_of_weights="all", hessian_structure="full"
    )
    close(ours.posterior_precision, theirs.posterior_precision)
    close(ours.posterior_covariance, theirs.posterior_covariance)
    close(ours.posterior_scale @ ours.posterior_scale, theirs.posterior_covariance)
    value = ours.mean + 0.1
    close(ours.log_prob(value), theirs.log_prob(value))
    close(ours.log_prob(value, normalized=False), theirs.log_prob(value, normalized=False))
    ours, theirs, *_ = fitted_by_both(
        "classification", subset_of_weights="all", hessian_structure="diag"
    )
    close(ours.posterior_precision, theirs.posterior_precision)
    close(ours.posterior_variance, theirs.posterior_variance)
    close(ours.posterior_scale, theirs.posterior_scale)


def test_subnetworks_and_backends_have_the_same_numbers():
    indices = torch.tensor([0, 5, 20, 33])
    ours, theirs, _, x = fitted_by_both(
        "classification",
        subset_of_weights="subnetwork",
        hessian_structure="full",
        subnetwork_indices=indices,
    )
    close(ours.posterior_precision, theirs.posterior_precision)
    close(ours(x), theirs(x))
    from laplace.curvature import CurvlinopsEF

    ours, theirs, *_ = fitted_by_both(
        "classification",
        subset_of_weights="all",
        hessian_structure="full",
        backend=CurvlinopsEF,
    )
    close(ours.posterior_precision, theirs.posterior_precision)


def test_draws_have_its_shapes_and_the_moments_of_the_posterior():
    data, x = loader("regression")
    la = Laplace(network(), "regression", "all", "full", sigma_noise=0.7)
    la.fit(data)
    g = torch.Generator().manual_seed(0)
    mean, covariance = la(x)
    for is_diagonal in (False, True):
        draws = la.functional_samples(x, "glm", 4000, is_diagonal, generator=g)
        assert draws.shape == (4000, 30, 3)
        expected = covariance.diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(draws.var(0), expected, rtol=0.2, atol=0)
        between = (draws - mean)[:, :, 0].mul((draws - mean)[:, :, 1]).mean(0)
        expected = torch.zeros(30).double() if is_diagonal else covariance[:, 0, 1]
        scale = (covariance[:, 0, 0] * covariance[:, 1, 1]).sqrt()
        assert ((between - expected).abs() < 0.1 * scale).all()
    by_network = la(x, pred_type="nn", n_samples=50, generator=g)
    assert [moment.shape for moment in by_network] == [(30, 3), (30, 3)]
    assert la.sample(7, g).shape == (7, la.n_params)
    data, x = loader("classification")
    la = Laplace(network(), "classification")
    la.fit(data)
    for pred_type in ("glm", "nn"):
        probs = la.predictive_samples(x, pred_type, 11, generator=g)
        torch.testing.assert_close(probs.sum(-1), torch.ones(11, 30).double())
        assert la(x, pred_type, link_approx="mc", n_samples=11, generator=g).shape == (30, 3)


def test_the_prior_precision_is_optimised():
    data, _ = loader("classification")
    la = Laplace(network(), "classification", "all", "kron")
    la.fit(data)
    initial = la.log_marginal_likelihood()
    la.optimize_prior_precision()
    assert la.log_marginal_likelihood() > initial
    scalar = la.log_marginal_likelihood()
    la.optimize_prior_precision(method="marglik", prior_structure="layerwise")
    assert la.log_marginal_likelihood() >= scalar
    assert len(la.prior_precision) == 4
    la.optimize_prior_precision(
        method="gridsearch",
        val_loader=data,
        log_prior_prec_min=0,
        log_prior_prec_max=1,
        grid_size=3,
    )
    assert la.posterior.link.temperature == 1
    assert 1 <= float(la.prior_precision) <= 10
    assert diagonal(la.posterior_precision).value.min() >= float(la.prior_precision)


def test_held_out_data_that_the_marginal_likelihood_does_not_use_are_named():
    data, _ = loader("classification")
    la = Laplace(network(), "classification", "all", "kron")
    la.fit(data)
    with pytest.warns(UserWarning, match='does not use `val_loader`. Pass `method="gridsearch"`'):
        la.optimize_prior_precision(val_loader=data)


@pytest.mark.usefixtures("unchecked")  # passes wrong types
def test_what_has_no_equivalent_is_refused():
    data, x = loader("classification")
    la = Laplace(network(), "classification")
    la.fit(data)
    calls = [
        (lambda: Laplace(network(), "counts"), ValueError, "Use one of 'classification'"),
        (lambda: Laplace(network(), "classification", "some"), ValueError, "subset_of_weights="),
        (lambda: Laplace(network(), "regression", "all", "some"), ValueError, "hessian_structure="),
        (
            lambda: Laplace(network(), "regression", "all", n_subset=3),
            ValueError,
            r"^`n_subset` applies only to hessian_structure=\"gp\", got 'kron'\. Remove",
        ),
        (lambda: setattr(la, "sigma_noise", 2.0), ValueError, "is the noise of a regression"),
        (lambda: Laplace(network(), "classification", "subnetwork"), ValueError, "Pass both"),
        (
            lambda: Laplace(network(), "regression", independent_outputs=True),
            ValueError,
            r"^`independent_outputs` applies only to hessian_structure=\"gp\", got 'kron'\. Remove",
        ),
        (
            lambda: Laplace(network(), "regression", "all", last_layer_name="2"),
            ValueError,
            r"^`last_layer_name` applies only to subset_of_weights=.*, got 'all'\. Remove",
        ),
        (
            lambda: Laplace(network(), "classification", sigma_noise=2.0),
            ValueError,
            r"^`sigma_noise` applies only to likelihood=.*, got 'classification'\. Remove",
        ),
        (
            lambda: Laplace(network(), "classification", backend="CurvlinopsHessian"),
            NotImplementedError,
            "ends with GGN or EF",
        ),
        (
            lambda: Laplace(network(), "classification").fit(data, override=False),
            RuntimeError,
            "not fitted yet",
        ),
        (lambda: la(x, pred_type="nn"), ValueError, 'Use `link_approx="mc"'),
        (lambda: la(x, link_approx="exact"), ValueError, "link_approx='exact'"),
        (
            lambda: la.optimize_prior_precision(prior_structure="diag"),
            NotImplementedError,
            r"requires hessian_structure=.*'kron'.*\. Use `prior_structure=\"scalar\"`\.$",
        ),
        (
            lambda: la.optimize_prior_precision(method="gridsearch"),
            ValueError,
            "Pass `val_loader=`",
        ),
        (
            lambda: la.optimize_prior_precision(
                method="gridsearch", prior_structure="layerwise", val_loader=data
            ),
            NotImplementedError,
            "got prior_structure='layerwise'. Use",
        ),
        (
            lambda: la.optimize_prior_precision(
                method="gridsearch", pred_type="nn", val_loader=data
            ),
            NotImplementedError,
            "got pred_type='nn' and link_approx='probit'. Use",
        ),
    ]
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()
    data, _ = loader("regression")
    la = Laplace(network(), "regression", "all")
    la.fit(data)
    with pytest.raises(ValueError, match="has 3 entries, but had a single entry at the fit"):
        la.sigma_noise = torch.ones(3)
