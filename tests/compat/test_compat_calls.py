"""The calls of laplace-torch's own tests, made on both libraries and compared."""

import oracle
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import OneArgument
from laplace_debias.compat import laplace_torch
from laplace_debias.compat.laplace_torch import Laplace, marglik_training
from laplace_debias.compat.laplace_torch.absent import (
    ABSENT_ARGUMENTS,
    ABSENT_ATTRIBUTES,
    ABSENT_CLASSES,
)

laplace = pytest.importorskip("laplace", reason="compares with laplace-torch")

LIKELIHOODS = ["classification", "regression"]
STRUCTURES = ["diag", "full", "kron"]
SUBSETS = ["all", "last_layer"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double().eval()


class Rewards(nn.Module):
    """A reward of each input `[B, 1]`, or of both inputs of each pair `[B, 2]`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x):
        rewards = self.layers(x)
        if x.ndim == 3:
            return rewards.squeeze(-1)
        return rewards


def loader(likelihood, seed=1, batch_size=10):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(10, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(2, (10,), generator=generator)
    if likelihood == "regression":
        y = torch.randn(10, 2, generator=generator, dtype=torch.float64)
    if likelihood == "reward_modeling":
        x = torch.randn(10, 2, 3, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, y), batch_size)


def both_libraries(likelihood, model=None, **options):
    """A posterior of this library and one of laplace-torch, not fitted."""
    if likelihood == "regression":
        options.setdefault("sigma_noise", 0.3)
    options.setdefault("prior_precision", 0.7)
    if model is None:
        model = network()
    return [library(model, likelihood, **options) for library in (Laplace, laplace.Laplace)]


def fitted(likelihood, model=None, **options):
    posteriors = both_libraries(likelihood, model, **options)
    for la in posteriors:
        la.fit(loader(likelihood))
    return posteriors


def close(actual, expected):
    # laplace-torch computes some of it in single precision.
    expected = expected.to(actual)
    torch.testing.assert_close(actual, expected.reshape(actual.shape), rtol=1e-4, atol=1e-5)


def assert_same_predictions(ours, theirs, x):
    """Probabilities are the same, or the mean and the covariance of a regression."""
    actual = ours(x)
    expected = theirs(x)
    if isinstance(expected, tuple):
        for moment, expected_moment in zip(actual, expected, strict=True):
            close(moment, expected_moment)
    else:
        close(actual, expected)


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_terms_of_the_marginal_likelihood(likelihood, structure, subset):
    ours, theirs = fitted(likelihood, subset_of_weights=subset, hessian_structure=structure)
    for la in (ours, theirs):
        if likelihood == "regression":
            close(la.sigma_noise.double(), torch.tensor(0.3))
            la.sigma_noise = 0.72
    assert ours.n_data == theirs.n_data == 10
    for name in (
        *("mean", "log_likelihood", "prior_precision_diag", "scatter"),
        *("log_det_prior_precision", "log_det_posterior_precision", "log_det_ratio"),
    ):
        close(getattr(ours, name), getattr(theirs, name))
    value = torch.randn(ours.n_params, dtype=torch.float64)
    close(ours.square_norm(value), theirs.square_norm(value))
    close(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood())
    Js = torch.randn(4, 2, ours.n_params, dtype=torch.float64)
    close(ours.functional_variance(Js), theirs.functional_variance(Js))
    close(ours.functional_covariance(Js), theirs.functional_covariance(Js))
    if likelihood == "regression":
        hyper_parameters = torch.tensor(0.4), torch.tensor(1.3)
        close(
            ours.log_marginal_likelihood(*hyper_parameters),
            theirs.log_marginal_likelihood(*hyper_parameters),
        )


@pytest.mark.parametrize("structure", ["diag", "full"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_a_temperature_and_means_of_the_prior(likelihood, structure):
    num_params = len(parameters_to_vector(network().parameters()))
    for mean in (1.0, torch.ones(1), torch.ones(()), torch.ones(num_params)):
        options = {"prior_mean": mean, "temperature": 1.1, "prior_precision": 1e-2}
        ours, theirs = fitted(
            likelihood, subset_of_weights="all", hessian_structure=structure, **options
        )
        assert ours.temperature == theirs.temperature == 1.1
        close(ours.prior_mean, torch.as_tensor(mean))
        for name in ("scatter", "posterior_precision"):
            close(getattr(ours, name), getattr(theirs, name))
        if (
            likelihood == "classification"
        ):  # For regression, laplace-torch has the normaliser of T = 1.
            close(ours.log_likelihood, theirs.log_likelihood)


@pytest.mark.parametrize(
    "precision", [10.6, torch.tensor(10.6), torch.tensor([10.6]), torch.rand(4) + 1]
)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_prior_precisions_of_all_and_of_each_layer(structure, precision):
    ours, theirs = fitted(
        "regression",
        subset_of_weights="all",
        hessian_structure=structure,
        prior_precision=precision,
    )
    close(ours.prior_precision_diag, theirs.prior_precision_diag)
    x = loader("regression").dataset.tensors[0]
    assert_same_predictions(ours, theirs, x)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_named_last_layer(structure):
    ours, theirs = fitted("classification", hessian_structure=structure, last_layer_name="1")
    assert ours.n_params == theirs.n_params == 12
    x = loader("classification").dataset.tensors[0]
    for link in ("probit", "bridge", "bridge_norm"):
        close(ours(x, pred_type="glm", link_approx=link), theirs(x, link_approx=link))


@pytest.mark.parametrize(
    "mask", ["LargestMagnitudeSubnetMask", "RandomSubnetMask", "ModuleNameSubnetMask"]
)
@pytest.mark.parametrize("structure", ["diag", "full"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_masks_of_subnetworks(likelihood, structure, mask):
    model = network()
    options = {"module_names": ["0"]} if mask.startswith("Module") else {"n_params_subnet": 6}
    subnetmask = getattr(laplace.utils, mask)(model, **options)
    subnetmask.select(loader(likelihood))
    ours, theirs = fitted(
        likelihood,
        model,
        subset_of_weights="subnetwork",
        hessian_structure=structure,
        subnetwork_indices=subnetmask.indices,
    )
    assert ours.n_params == len(subnetmask.indices)
    x = loader(likelihood).dataset.tensors[0]
    assert_same_predictions(ours, theirs, x)


@pytest.mark.parametrize(
    "indices",
    [
        torch.tensor([0, -1]),
        torch.tensor([32, 40]),
        torch.tensor([0, 0, 5]),
        torch.tensor([], dtype=torch.long),
    ],
    ids=["negative", "too_large", "twice", "empty"],
)
def test_bad_indices_are_refused_by_both(indices):
    for library in (Laplace, laplace.Laplace):
        with pytest.raises(ValueError, match=r".+"):
            library(
                network(),
                "regression",
                subset_of_weights="subnetwork",
                hessian_structure="full",
                subnetwork_indices=indices,
            )


@pytest.mark.parametrize("structure", STRUCTURES)
def test_reward_models(structure):
    torch.manual_seed(0)
    ours, theirs = fitted(
        "reward_modeling",
        Rewards().double().eval(),
        subset_of_weights="all",
        hessian_structure=structure,
    )
    close(ours.log_likelihood, theirs.log_likelihood)
    x = torch.randn(6, 3, dtype=torch.float64)
    mean, variance = ours(x)
    their_mean, their_variance = theirs(x)
    close(mean, their_mean)
    if structure == "kron":
        # laplace-torch has other factors for a network that is called twice per example.
        return
    close(variance, their_variance)
    close(ours.posterior_precision, theirs.posterior_precision)
    assert ours.predictive_samples(x, n_samples=7).shape == (7, 6, 1)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_kronecker_factors_and_marginal_likelihoods_of_unequal_batches(likelihood):
    ours, theirs = both_libraries(likelihood, subset_of_weights="all", hessian_structure="kron")
    for la in (ours, theirs):
        la.fit(loader(likelihood, batch_size=4))
    expected = theirs.posterior_precision.to_matrix()
    torch.testing.assert_close(ours.posterior_precision.to_dense(), expected)
    torch.testing.assert_close(
        ours.log_marginal_likelihood(), theirs.log_marginal_likelihood().detach().squeeze()
    )


class TakesABatch(nn.Module):
    """A network whose only argument is a mapping."""

    def __init__(self, key):
        super().__init__()
        self.layers = network()
        self.key = key

    def forward(self, batch):
        return self.layers(batch[self.key])


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("subset", SUBSETS)
def test_mappings_with_keys_of_the_user(likelihood, subset):
    keys = {"dict_key_x": "image", "dict_key_y": "class"}
    options = {"subset_of_weights": subset, **keys}
    ours, theirs = both_libraries(likelihood, TakesABatch("image"), **options)
    x, y = loader(likelihood).dataset.tensors
    data = DataLoader([{"image": x[n], "class": y[n]} for n in range(10)], batch_size=4)
    ours.fit(data)
    theirs.fit(data)
    batch = next(iter(data))
    assert_same_predictions(ours, theirs, batch)
    close(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood().detach())
    draws = [
        ours.predictive_samples(inputs, "nn", 5, generator=torch.Generator().manual_seed(0))
        for inputs in (batch, OneArgument(batch))
    ]
    assert torch.equal(*draws)
    restored = both_libraries(likelihood, TakesABatch("image"), **options)[0]
    restored.load_state_dict(ours.state_dict())
    restored.fit(data, override=False)
    assert restored.n_data == 20
    with pytest.raises(ValueError, match=r"`dict_key_x` is 'pixels'\. Pass the name"):
        Laplace(TakesABatch("image"), likelihood, dict_key_x="pixels").fit(data)
    with pytest.raises(ValueError, match=r"`dict_key_y` is 'labels'\. Pass the name"):
        Laplace(TakesABatch("image"), likelihood, dict_key_x="image").fit(data)


def test_keys_of_mappings_are_refused_for_reward_models():
    with pytest.raises(NotImplementedError, match="Remove `dict_key_x=`"):
        Laplace(Rewards(), "reward_modeling", dict_key_x="input_ids")


def test_models_that_take_the_whole_batch():
    model = TakesABatch("input_ids")
    ours, theirs = both_libraries("classification", model, subset_of_weights="all")
    x, y = loader("classification").dataset.tensors
    batch = {"input_ids": x, "labels": y}
    theirs.fit(DataLoader([{"input_ids": x[n], "labels": y[n]} for n in range(10)], batch_size=10))
    ours.fit([(OneArgument(batch), y)])
    close(ours(OneArgument(batch)), theirs(batch))


@pytest.mark.parametrize("independent", [False, True])
def test_function_space_with_all_data(independent):
    options = {"hessian_structure": "gp", "n_subset": 10, "independent_outputs": independent}
    ours, theirs = fitted("regression", subset_of_weights="all", **options)
    x = torch.randn(6, 3, dtype=torch.float64)
    for actual, expected in zip(ours(x, pred_type="gp"), theirs(x, pred_type="gp"), strict=True):
        close(actual, expected)
    for actual, expected in zip(
        ours(x, "gp", joint=True), theirs(x, "gp", joint=True), strict=True
    ):
        close(actual, expected)


def test_the_scatter_of_independent_outputs_is_that_in_the_marginal_likelihood():
    model = network()
    options = {"subset_of_weights": "all", "hessian_structure": "gp", "independent_outputs": True}
    la = Laplace(
        model, "regression", sigma_noise=0.3, prior_precision=0.7, prior_mean=0.1, **options
    )
    data = loader("regression")
    la.fit(data)
    x, y = data.dataset.tensors
    names = [name for name, _ in model.named_parameters()]
    log_det_ratio = 0.0
    for output in range(2):
        J = oracle.flat_jacobian(model, x, names)[:, output]
        precision = 0.7 * torch.eye(la.n_params).double() + J.T @ J / 0.3**2
        log_det_ratio += torch.logdet(precision / 0.7)
    parameters = parameters_to_vector(model.parameters()).detach()
    scatter = 2 * 0.7 * (parameters - 0.1).square().sum()
    noise = torch.distributions.Normal(0.0, torch.tensor(0.3).double())
    log_likelihood = noise.log_prob(y - model(x)).sum()
    torch.testing.assert_close(la.scatter, scatter)
    torch.testing.assert_close(
        la.log_marginal_likelihood(), log_likelihood - (log_det_ratio + la.scatter) / 2
    )


@pytest.mark.parametrize("diagonal_output", [False, True])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_gradients_with_respect_to_the_inputs(likelihood, diagonal_output):
    gradients = []
    for la in fitted(
        likelihood, subset_of_weights="all", hessian_structure="full", enable_backprop=True
    ):
        x = loader(likelihood).dataset.tensors[0].clone().requires_grad_()
        prediction = la(x, diagonal_output=diagonal_output)
        if likelihood == "regression":
            prediction = prediction[1]
        (gradient,) = torch.autograd.grad(prediction.square().sum(), x)
        gradients.append(gradient)
    close(*gradients)


DRAWS = {
    "functional": lambda la, x, seeded: la.functional_samples(x, n_samples=5, generator=seeded),
    "diagonal": lambda la, x, seeded: la.functional_samples(x, "glm", 5, True, seeded),
    "predictive": lambda la, x, seeded: la.predictive_samples(x, n_samples=5, generator=seeded),
    "mc": lambda la, x, seeded: la(x, link_approx="mc", n_samples=5, generator=seeded),
}


@pytest.mark.parametrize("draws", DRAWS.values(), ids=DRAWS)
def test_draws_have_the_derivatives_of_finite_differences(draws):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    la = Laplace(model, "classification", "all", "kron", enable_backprop=True)
    la.fit(loader("classification"))
    x = torch.randn(3, 3, dtype=torch.float64).requires_grad_()
    direction = torch.randn(3, 3, dtype=torch.float64)

    def weighted_sum(points):
        drawn = draws(la, points, torch.Generator().manual_seed(2))
        return (drawn * torch.arange(drawn.numel()).view_as(drawn)).sum()

    (gradient,) = torch.autograd.grad(weighted_sum(x), x)
    step = 1e-5 * direction
    difference = (weighted_sum(x + step) - weighted_sum(x - step)).detach() / 2e-5
    torch.testing.assert_close((gradient * direction).sum(), difference, rtol=1e-6, atol=0)


def test_differentiable_draws_have_the_moments_of_the_linearised_network():
    la = Laplace(network(), "regression", "all", "kron", enable_backprop=True)
    la.fit(loader("regression"))
    x = torch.randn(3, 3, dtype=torch.float64)
    mean, covariance = la(x)
    for diagonal_output in (False, True):
        generator = torch.Generator().manual_seed(0)
        draws = la.functional_samples(x, "glm", 40_000, diagonal_output, generator)
        if diagonal_output:
            covariance = covariance.diagonal(dim1=1, dim2=2).diag_embed()
        scale = float(covariance.diagonal(dim1=1, dim2=2).max())
        torch.testing.assert_close(draws.mean(0), mean, rtol=0, atol=5 * (scale / 40_000) ** 0.5)
        estimate = torch.stack([draws[:, row].T.cov() for row in range(3)])
        torch.testing.assert_close(estimate, covariance, rtol=0, atol=0.04 * scale)


def test_draws_from_a_singular_covariance_have_no_gradients():
    """Without a bias, the outputs at zero have no variance, so laplace-torch cannot draw either."""
    model = nn.Linear(3, 2, bias=False).double()
    options = {"subset_of_weights": "all", "hessian_structure": "full", "enable_backprop": True}
    ours, theirs = fitted("regression", model, **options)
    x = torch.randn(3, 3, dtype=torch.float64)
    x[1] = 0
    x.requires_grad_()
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        theirs.functional_samples(x)
    with pytest.raises(torch.linalg.LinAlgError, match=r"input 1 \(1 of 3 inputs\)"):
        ours.functional_samples(x)
    draws = ours.functional_samples(x, n_samples=5, diagonal_output=True)
    assert draws.requires_grad
    assert not draws[:, 1].any()
    with torch.no_grad():
        draws = ours.functional_samples(x, n_samples=5)
    assert not draws[:, 1].any()
    assert draws[:, 0].std(0).all()


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("subset", SUBSETS)
def test_networks_with_drawn_weights_have_the_gradients_of_laplace_torch(likelihood, subset):
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double().eval()
    options = {"subset_of_weights": subset, "hessian_structure": "diag", "enable_backprop": True}
    posteriors = fitted(likelihood, model, **options)
    parameters = posteriors[0].sample(20)
    gradients = []
    for la in posteriors:
        # Both libraries draw the same parameters.
        drawn = la.posterior.posterior if isinstance(la, Laplace) else la
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(drawn), "sample", lambda *_: parameters)
            x = loader(likelihood).dataset.tensors[0].clone().requires_grad_()
            # laplace-torch keeps the graph only in this method.
            draws = la.predictive_samples(x, "nn", n_samples=20)
            (gradient,) = torch.autograd.grad(draws.square().sum(), x)
            gradients.append(gradient)
            with torch.no_grad():
                assert not la.predictive_samples(x, "nn", n_samples=20).requires_grad
    close(*gradients)
    prediction = posteriors[0](x, pred_type="nn", link_approx="mc")
    for moment in prediction if likelihood == "regression" else (prediction,):
        assert moment.requires_grad


@pytest.mark.parametrize(
    "options",
    [
        {"subset_of_weights": "all", "hessian_structure": "kron"},
        {"subset_of_weights": "last_layer", "hessian_structure": "full"},
        {"subset_of_weights": "subnetwork", "subnetwork_indices": torch.tensor([1, 8, 11])},
    ],
    ids=["all", "last_layer", "subnetwork"],
)
def test_a_state_dict_is_saved_and_loaded(options, tmp_path):
    la = Laplace(network(), "regression", **options)
    la.fit(loader("regression"))
    la.optimize_prior_precision()
    la.sigma_noise = 1231
    torch.save(la.state_dict(), tmp_path / "state.bin")
    loaded = Laplace(network(), "regression", **options)
    loaded.load_state_dict(torch.load(tmp_path / "state.bin"))
    assert loaded.sigma_noise == la.sigma_noise == 1231
    x = loader("regression").dataset.tensors[0]
    for actual, expected in zip(loaded(x), la(x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    curvature = la.posterior.posterior.curvature.to_dense() * 10
    loaded.fit(loader("regression"), override=False)
    torch.testing.assert_close(loaded.posterior.posterior.curvature.to_dense() * 20, 2 * curvature)


def test_a_state_dict_of_other_options_is_refused():
    la = Laplace(network(), "regression", "all", "diag")
    la.fit(loader("regression"))
    state = la.state_dict()
    wide = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 2)).double().eval()
    posteriors = [
        Laplace(wide, "regression", "all", "diag"),
        Laplace(network(), "regression", "all", "kron"),
        Laplace(network(), "regression", "last_layer", "diag"),
        Laplace(network(), "classification", "all", "diag"),
    ]
    for posterior in posteriors:
        with pytest.raises(ValueError, match=r"parameters|The state has"):
            posterior.load_state_dict(state)
    with pytest.raises(ValueError, match="A state of laplace-torch cannot be loaded"):
        la.load_state_dict({"mean": la.mean})


def test_a_loaded_state_keeps_the_backend():
    options = {"subset_of_weights": "all", "backend": "CurvlinopsEF", "prior_precision": 0.7}
    la = Laplace(network(), "classification", **options)
    la.fit(loader("classification"))
    loaded = Laplace(la.model, "classification", **options)
    loaded.load_state_dict(la.state_dict())
    for library in (la, loaded):
        library.fit(loader("classification", seed=2), override=False)
    assert torch.equal(la.posterior_variance, loaded.posterior_variance)


@pytest.mark.parametrize(("structure", "size"), [("diag", 32), ("full", 32), ("full", 4)])
def test_the_prior_precision_of_each_parameter_is_known_before_the_fit(structure, size):
    precision = torch.rand(size, generator=torch.Generator().manual_seed(3)).double() + 0.1
    options = {"subset_of_weights": "all", "hessian_structure": structure}
    ours, theirs = both_libraries("regression", prior_precision=precision, **options)
    close(ours.prior_precision_diag, theirs.prior_precision_diag)


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("structure", ["diag", "full"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_prior_precisions_of_each_parameter(likelihood, structure, subset):
    options = {"subset_of_weights": subset, "hessian_structure": structure, "prior_mean": 0.1}
    num_params = len(parameters_to_vector(network().parameters()))
    size = num_params if subset == "all" else 12
    precision = torch.rand(size, generator=torch.Generator().manual_seed(3)).double() + 0.1
    if subset == "all":
        posteriors = fitted(likelihood, prior_precision=precision, **options)
    else:  # laplace-torch determines the size of the last layer during the fit.
        posteriors = fitted(likelihood, **options)
        for la in posteriors:
            la.prior_precision = precision
    ours, theirs = posteriors
    x = loader(likelihood).dataset.tensors[0]

    def assert_same():
        names = ("prior_precision_diag", "scatter", "posterior_precision", "posterior_variance")
        for name in names if structure == "diag" else names[:3]:
            close(getattr(ours, name), getattr(theirs, name))
        close(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood())
        assert_same_predictions(ours, theirs, x)

    assert_same()
    for value in (2 * precision, torch.tensor(0.7), precision):
        for la in posteriors:
            la.prior_precision = value
        assert_same()
    gradients = []
    for la in posteriors:
        value = (3 * precision).requires_grad_()
        la.log_marginal_likelihood(value).backward()
        gradients.append(value.grad)
    close(*gradients)
    for la in posteriors:
        la.prior_precision = precision
        if likelihood == "regression":
            la.sigma_noise = 0.8
    assert_same()


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_a_full_matrix_with_prior_precisions_of_each_weight_and_bias(likelihood, tmp_path):
    model = network()
    precision = torch.tensor([0.3, 2.0, 1.1, 0.6], dtype=torch.float64)
    options = {"subset_of_weights": "all", "hessian_structure": "full", "prior_mean": 0.1}
    posteriors = fitted(likelihood, model, prior_precision=precision, **options)
    ours, theirs = posteriors
    x = loader(likelihood).dataset.tensors[0]
    names = ("prior_precision", "prior_precision_diag", "scatter", "posterior_precision")
    for name in (*names, "log_det_prior_precision", "log_det_posterior_precision"):
        close(getattr(ours, name), getattr(theirs, name))
    assert_same_predictions(ours, theirs, x)
    gradients = []
    for la in posteriors:
        value = (3 * precision).requires_grad_()
        la.log_marginal_likelihood(value).backward()
        gradients.append(value.grad)
    close(*gradients)
    close(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood())
    torch.save(ours.state_dict(), tmp_path / "state.pt")
    loaded = Laplace(model, likelihood, **options)
    loaded.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(loaded.posterior_precision, ours.posterior_precision)
    for la in posteriors:
        la.fit(loader(likelihood, seed=2), override=False)
    close(ours.posterior_precision, theirs.posterior_precision)


def test_the_last_layer_takes_prior_precisions_before_its_first_fit():
    options = {"subset_of_weights": "last_layer", "hessian_structure": "diag"}
    precision = torch.rand(12, dtype=torch.float64) + 0.1
    la = Laplace(network(), "classification", prior_precision=precision, **options)
    torch.testing.assert_close(la.prior_precision, precision)
    la.fit(loader("classification"))
    later = Laplace(network(), "classification", **options)
    later.fit(loader("classification"))
    later.prior_precision = precision
    assert torch.equal(la.posterior_precision, later.posterior_precision)
    precision = torch.tensor([0.3, 2.0]).double()
    for structure in STRUCTURES:
        options["hessian_structure"] = structure
        by_layer = Laplace(network(), "classification", prior_precision=precision, **options)
        by_layer.fit(loader("classification"))
        expected = torch.cat([precision[:1].expand(10), precision[1:].expand(2)])
        torch.testing.assert_close(by_layer.prior_precision_diag, expected)


@pytest.mark.parametrize("structure", ["kron", "lowrank"])
def test_the_first_batch_decides_how_many_prior_precisions_a_last_layer_takes(structure):
    la = Laplace(network(), "classification", "last_layer", structure)
    la.prior_precision = torch.ones(7)
    batches = iter(loader("classification", batch_size=2))
    with pytest.raises(ValueError, match=r"has shape \(7,\)\. Pass one number, or one for each"):
        la.fit(batches)
    assert len(list(batches)) == 4


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_a_wrong_number_of_prior_precisions_is_named_until_it_is_corrected(structure):
    la = Laplace(network(), "classification", "last_layer", structure)
    la.prior_precision = torch.ones(7)
    x = loader("classification").dataset.tensors[0]
    message = r"7 entries, but there are 12 parameters"
    for refused in (
        lambda: la.fit(loader("classification")),
        lambda: la(x),
        la.log_marginal_likelihood,
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    la.prior_precision = 0.7
    expected = Laplace(network(), "classification", "last_layer", structure, prior_precision=0.7)
    expected.fit(loader("classification"))
    assert torch.equal(la(x), expected(x))


def test_prior_precisions_of_each_parameter_are_saved_and_survive_an_update(tmp_path):
    precision = torch.rand(32, dtype=torch.float64) + 0.1
    options = {"subset_of_weights": "all", "hessian_structure": "full"}
    model = network()
    posteriors = fitted("classification", model, prior_precision=precision, **options)
    ours, theirs = posteriors
    torch.save(ours.state_dict(), tmp_path / "state.pt")
    loaded = Laplace(model, "classification", **options)
    loaded.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(loaded.posterior_precision, ours.posterior_precision)
    for la in posteriors:
        la.fit(loader("classification", seed=2), override=False)
    close(ours.posterior_precision, theirs.posterior_precision)


def test_the_marginal_likelihood_has_its_optimum_in_each_precision():
    (ours, _) = fitted("regression", subset_of_weights="all", hessian_structure="diag")
    ours.optimize_prior_precision(prior_structure="diag")
    best = ours.prior_precision.clone()
    assert best.shape == (32,)
    value = best.clone().requires_grad_()
    ours.log_marginal_likelihood(value).backward()
    slopes = best * value.grad
    torch.testing.assert_close(slopes, torch.zeros_like(slopes), rtol=0, atol=1e-9)
    for factor in (0.8, 1.25):
        for index in range(32):
            moved = best.clone()
            moved[index] *= factor
            assert ours.log_marginal_likelihood(moved) < ours.log_marginal_likelihood(best)


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_the_optimum_in_each_precision_does_not_depend_on_the_unit_of_the_targets(unit):
    torch.manual_seed(0)
    x = torch.randn(40, 3).double()
    y = torch.randn(40, 2).double()
    posteriors = []
    for factor in (1.0, unit):
        torch.manual_seed(1)
        model = nn.Linear(3, 2).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        la = Laplace(model, "regression", "all", "diag", sigma_noise=0.5 * factor)
        la.fit([(x, factor * y)])
        la.optimize_prior_precision(prior_structure="diag")
        posteriors.append(la)
    reference, la = posteriors
    torch.testing.assert_close(la.prior_precision * unit**2, reference.prior_precision)


@pytest.mark.parametrize(
    ("structure", "precision", "message"),
    [
        ("kron", torch.ones(32), r"32 entries, but there are 32 parameters in 4 blocks"),
        ("lowrank", torch.ones(32), r"Pass one number. For .kron. and .diag., you can also"),
        ("lowrank", torch.ones(4), r"4 entries, but there are 32 parameters in 1 blocks"),
        ("full", torch.ones(3), r"for .full., one number per weight or bias"),
        ("diag", torch.ones(31), r"31 entries, but there are 32 parameters"),
        ("diag", -torch.ones(32), "must be positive and finite"),
    ],
)
def test_prior_precisions_of_a_wrong_size_are_refused_before_the_fit(structure, precision, message):
    options = {"subset_of_weights": "all", "hessian_structure": structure}
    with pytest.raises(ValueError, match=message):
        Laplace(network(), "classification", prior_precision=precision, **options)
    la = Laplace(network(), "classification", **options)
    la.fit(loader("classification"))
    variance = la.posterior_variance
    with pytest.raises(ValueError, match=message):
        la.prior_precision = precision
    assert torch.equal(la.posterior_variance, variance)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_a_refused_prior_precision_changes_nothing(structure):
    precision = torch.rand(32, dtype=torch.float64) + 0.1
    options = {"subset_of_weights": "all", "hessian_structure": structure}
    la = Laplace(network(), "classification", prior_precision=precision, **options)
    la.fit(loader("classification"))
    covariance = la.posterior_covariance.to_dense()
    with pytest.raises(ValueError, match=r"too small for torch\.float64"):
        la.prior_precision = torch.full((32,), 1e-310, dtype=torch.float64)
    assert torch.equal(la.prior_precision, precision)
    assert torch.equal(la.posterior_covariance.to_dense(), covariance)


def test_the_posterior_is_computed_anew_only_after_a_change():
    precision = torch.rand(32, dtype=torch.float64) + 0.1
    la = Laplace(network(), "regression", "all", "full", prior_precision=precision)
    la.fit(loader("regression"))

    def change(name, value):
        earlier = la.posterior
        assert la.posterior is earlier
        setattr(la, name, value)
        assert la.posterior is not earlier

    change("sigma_noise", 0.5)
    change("temperature", 2.0)
    change("prior_mean", 0.1)
    change("prior_precision", 2 * precision)
    expected = Laplace(network(), "regression", "all", "full", 0.5, 2 * precision, 0.1, 2.0)
    expected.fit(loader("regression"))
    close(la.posterior_precision, expected.posterior_precision)


NAMES = [
    "DiagLaplace",
    "FullLaplace",
    "KronLaplace",
    "DiagLLLaplace",
    "FullLLLaplace",
    "KronLLLaplace",
]


@pytest.mark.parametrize("name", NAMES)
def test_classes_by_structure(name):
    model = network()
    posteriors = [
        # The noise and the prior precision are passed by position.
        getattr(library, name)(model, "regression", 0.3, 0.7, prior_mean=0.1)
        for library in (laplace_torch, laplace)
    ]
    for la in posteriors:
        la.fit(loader("regression"))
    ours, theirs = posteriors
    close(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood())
    x = loader("regression").dataset.tensors[0]
    assert_same_predictions(ours, theirs, x)


def test_the_class_of_low_ranks_has_them():
    data = loader("classification")
    by_class = laplace_torch.LowRankLaplace(network(), "classification")
    options = {"subset_of_weights": "all", "hessian_structure": "lowrank"}
    by_name = Laplace(network(), "classification", **options)
    for la in (by_class, by_name):
        la.fit(data)
    x = data.dataset.tensors[0]
    assert torch.equal(by_class(x), by_name(x))


def test_layers_of_a_full_matrix_have_no_prior_precision_of_their_own():
    (la, _) = fitted("classification", subset_of_weights="all", hessian_structure="full")
    with pytest.raises(NotImplementedError, match='"layerwise"` requires hessian_structure='):
        la.optimize_prior_precision(prior_structure="layerwise")
    with pytest.raises(NotImplementedError, match='"layerwise"` requires hessian_structure='):
        laplace_torch.marglik_training(
            network(), loader("classification"), "classification", "full"
        )


def test_a_state_of_another_last_layer_is_refused():
    first = Laplace(network(), "classification", last_layer_name="0")
    last = Laplace(network(), "classification")
    named = Laplace(network(), "classification", last_layer_name="1")
    for la in (first, last, named):
        la.fit(loader("classification"))
    for la, saved in ((first, last), (last, first), (named, first)):
        with pytest.raises(ValueError, match="last_layer_name"):
            la.load_state_dict(saved.state_dict())
    loaded = Laplace(network(), "classification", last_layer_name="0")
    loaded.load_state_dict(first.state_dict())
    assert loaded.n_params == first.n_params == 20
    # A state of an earlier version does not name the layer.
    state = named.state_dict()
    state.pop("last_layer_name")
    loaded = Laplace(network(), "classification", last_layer_name="1")
    loaded.load_state_dict(state)
    assert loaded.n_params == named.n_params


@pytest.mark.parametrize("mean", [0.0, 0.3, torch.linspace(0.0, 1.0, 12, dtype=torch.float64)])
def test_the_prior_mean_of_a_last_layer_can_be_read_before_the_first_fit(mean):
    posteriors = both_libraries("classification", prior_mean=mean)
    for la in posteriors:
        close(torch.as_tensor(la.prior_mean), torch.as_tensor(mean))
        la.fit(loader("classification"))
    ours, theirs = posteriors
    close(ours.prior_mean, theirs.prior_mean)
    close(ours.scatter, theirs.scatter)


@pytest.mark.parametrize("precisions", [2.0, torch.linspace(0.5, 2.0, 30)])
def test_temperature_and_prior_mean_can_be_set(precisions):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    data = DataLoader(TensorDataset(torch.randn(20, 4), torch.randint(2, (20,))), 10)

    def fitted(**options):
        la = Laplace(model, "classification", "all", "diag", prior_precision=precisions, **options)
        la.fit(data)
        return la

    la = fitted()
    la.temperature = 0.5
    la.prior_mean = 0.3
    expected = fitted(temperature=0.5, prior_mean=0.3)
    assert la.temperature == 0.5
    assert float(la.prior_mean.flatten()[0]) == pytest.approx(0.3)
    close(la.posterior_variance, expected.posterior_variance)
    close(la.log_marginal_likelihood(), expected.log_marginal_likelihood())


# ------------------------------------------------------------------------------- absent names


def test_every_class_of_laplace_torch_is_here_or_has_a_replacement():
    backends = {name for name in laplace.curvature.__all__ if name.endswith(("GGN", "EF"))}
    masks = {name for name in laplace.utils.__all__ if name.endswith("SubnetMask")}
    names = set(laplace.__all__) | backends | masks - {"SubnetMask", "RandomSubnetMask"}
    assert names - set(laplace_torch.__all__) == set(ABSENT_CLASSES)
    for name, advice in ABSENT_CLASSES.items():
        with pytest.raises(ImportError) as caught:
            exec(f"from laplace_debias.compat.laplace_torch import {name}")
        assert str(caught.value).endswith(advice)
    with pytest.raises(ImportError, match="cannot import name 'no_such'"):
        exec("from laplace_debias.compat.laplace_torch import no_such")


def test_an_absent_argument_is_explained():
    la = Laplace(network(), "classification")
    calls = {
        "feature_reduction": lambda: Laplace(network(), "classification", feature_reduction=None),
        "fitting": lambda: la(torch.randn(1, 3).double(), fitting=True),
        "n_steps": lambda: la.optimize_prior_precision(method="marglik", n_steps=10),
        "loss": lambda: la.optimize_prior_precision(loss=nn.CrossEntropyLoss()),
        "progress_bar": lambda: marglik_training(network(), [], progress_bar=True),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value).endswith(
            f"unexpected keyword argument {name!r}: {ABSENT_ARGUMENTS[name]}"
        )
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'no_such'$"):
        Laplace(network(), "classification", no_such=1)


def test_an_absent_attribute_is_explained():
    la = Laplace(network(), "classification", subset_of_weights="all")
    for name, advice in ABSENT_ATTRIBUTES.items():
        with pytest.raises(AttributeError) as caught:
            getattr(la, name)
        assert str(caught.value).endswith(advice)
    with pytest.raises(AttributeError, match=r"Use la\.posterior\.predict\.$"):
        la.predict(torch.randn(1, 3))
    with pytest.raises(AttributeError, match=r"no attribute 'no_such'$"):
        _ = la.no_such
    la.fit(loader("classification"))
    assert la.posterior.posterior.curvature.shape == (la.n_params, la.n_params)
    x = torch.randn(1, 3).double()
    assert la(x).shape[-1] == 2
    assert la.posterior.functional(x, diagonal=True)[1].shape == (1, 2)


@pytest.mark.usefixtures("unchecked")  # passes wrong types
def test_a_prior_precision_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match=r"^prior_precision must be a real number or several"):
        Laplace(network(), "classification", prior_precision="1.5")
    la = Laplace(network(), "classification")
    with pytest.raises(TypeError, match=r"^prior_precision must be a real number or several"):
        la.prior_precision = "1.5"


def test_a_misspelt_attribute_is_not_set():
    la = Laplace(network(), "classification")
    for wrong, name in (("prior_precison", "prior_precision"), ("sigma_nois", "sigma_noise")):
        with pytest.raises(AttributeError, match=rf"{wrong!r}\. Did you mean {name!r}\?$"):
            setattr(la, wrong, 2.0)
    la.note = "an attribute of the user"
    la.enable_backprop = True
    la.prior_precision = 2.0
    assert la.prior_precision.item() == 2.0


def test_a_fit_takes_the_number_of_examples():
    la = Laplace(network(), "classification", subset_of_weights="all")
    data = loader("classification").dataset
    dropping = DataLoader(data, batch_size=len(data) - 1, drop_last=True)
    with pytest.raises(ValueError, match=rf"pass `num_data={len(data)}`"):
        la.fit(dropping)
    la.fit(dropping, num_data=len(data))
    assert la.n_data == len(data)
    curvature = la.posterior.posterior.curvature.to_dense()
    la.fit(DataLoader(data, batch_size=len(data) - 1, sampler=range(len(data) - 1)))
    torch.testing.assert_close(curvature, la.posterior.posterior.curvature.to_dense())
