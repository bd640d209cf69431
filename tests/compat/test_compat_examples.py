"""The examples of laplace-torch's documentation run with one changed import.

https://github.com/aleximmer/Laplace, docs/index.md, docs/regression_example.md and
docs/calibration_example.md.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias.compat.laplace_torch import Laplace, marglik_training

laplace = pytest.importorskip("laplace", reason="compares with laplace-torch")
masks = pytest.importorskip("laplace.utils")
BackPackGGN = pytest.importorskip("laplace.curvature").BackPackGGN

NUM_OUTPUTS = {"classification": 3, "regression": 1}


def network(likelihood):
    torch.manual_seed(711)
    layers = nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, NUM_OUTPUTS[likelihood])
    return nn.Sequential(*layers).double()


def loader(likelihood):
    g = torch.Generator().manual_seed(1)
    x = 4 * torch.rand(40, 1, generator=g, dtype=torch.float64) - 2
    noise = 0.3 * torch.randn(40, 1, generator=g, dtype=torch.float64)
    y = x.sin() + noise
    if likelihood == "classification":
        y = torch.bucketize(y.squeeze(1), torch.tensor([-0.5, 0.5]))
    return DataLoader(TensorDataset(x, y), batch_size=40)


def trained(likelihood):
    """A network after some steps, in evaluation mode."""
    model = network(likelihood)
    x, y = loader(likelihood).dataset.tensors
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss = nn.MSELoss() if likelihood == "regression" else nn.CrossEntropyLoss()
    for _ in range(100):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model.eval()


def hyper_parameters():
    return [torch.ones(1, dtype=torch.float64, requires_grad=True) for _ in range(2)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"subset_of_weights": "all", "hessian_structure": "kron"},
        {"subset_of_weights": "all", "hessian_structure": "full"},
        {"subset_of_weights": "all", "hessian_structure": "diag"},
        {"subset_of_weights": "all", "hessian_structure": "lowrank"},
        {"subset_of_weights": "all", "hessian_structure": "gp"},
        {"subset_of_weights": "all", "hessian_structure": "gp", "independent_outputs": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "default",
)
def test_the_marginal_likelihood_has_derivatives_in_prior_precision_and_noise(options):
    """`ml = la.log_marginal_likelihood(prior_prec, obs_noise); ml.backward()`."""
    la = Laplace(trained("regression"), "regression", **options)
    la.fit(loader("regression"))
    log_prior, log_sigma = hyper_parameters()
    la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp()).backward()
    assert float(la.sigma_noise) == pytest.approx(float(log_sigma.detach().exp()))
    step = 1e-4
    for parameter in (log_prior, log_sigma):
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * step
                values.append(la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp()))
                parameter -= sign * step
        slope = (values[0] - values[1]) / (2 * step)
        torch.testing.assert_close(parameter.grad[0], slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_precisions_of_each_parameter_and_the_noise_have_derivatives(structure):
    la = Laplace(trained("regression"), "regression", "all", structure)
    la.fit(loader("regression"))
    precisions = torch.linspace(0.5, 2, la.n_params, dtype=torch.float64)
    _, log_sigma = hyper_parameters()
    la.log_marginal_likelihood(precisions, log_sigma.exp()).backward()
    step = 1e-4
    centre = log_sigma.detach()
    higher = la.log_marginal_likelihood(precisions, (centre + step).exp())
    lower = la.log_marginal_likelihood(precisions, (centre - step).exp())
    slope = (higher - lower) / (2 * step)
    torch.testing.assert_close(log_sigma.grad[0], slope, rtol=1e-5, atol=1e-6)


def test_hyper_parameters_by_adam_are_those_of_laplace_torch():
    """The loop of the regression example."""
    data = loader("regression")
    results = []
    for library in (Laplace, laplace.Laplace):
        la = library(
            trained("regression"), "regression", subset_of_weights="all", hessian_structure="full"
        )
        la.fit(data)
        log_prior, log_sigma = hyper_parameters()
        optimizer = torch.optim.Adam([log_prior, log_sigma], lr=1e-1)
        for _ in range(60):
            optimizer.zero_grad()
            (-la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())).backward()
            optimizer.step()
        results.append(torch.cat([log_prior, log_sigma]).detach())
        assert 0.2 < float(la.sigma_noise) < 0.45
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prior_structure", ["scalar", "layerwise"])
def test_training_by_the_marginal_likelihood_of_classes_has_the_same_course(prior_structure):
    results = []
    for function in (marglik_training, laplace.marglik_training):
        la, model, margliks, losses = function(
            model=network("classification"),
            train_loader=loader("classification"),
            likelihood="classification",
            hessian_structure="diag",
            backend=BackPackGGN,
            n_epochs=6,
            optimizer_kwargs={"lr": 1e-2},
            prior_structure=prior_structure,
            n_hypersteps=5,
            marglik_frequency=2,
        )
        assert margliks[-1] < margliks[0]
        results.append((la, model, losses))
    (ours, our_model, our_losses), (theirs, their_model, their_losses) = results
    # This library returns the losses of epochs with a fit, which are every second one.
    assert our_losses == pytest.approx(their_losses[1::2], rel=1e-4)
    for parameter, expected in zip(our_model.parameters(), their_model.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5)
    # laplace-torch returns the prior precision before the last step of Adam, which is at most 0.1.
    ratios = ours.prior_precision / theirs.prior_precision.detach()
    assert ratios.log().abs().max() < 0.12
    ours.prior_precision = theirs.prior_precision.detach()
    x, _ = loader("classification").dataset.tensors
    torch.testing.assert_close(ours(x), theirs(x).to(ours(x)), rtol=1e-4, atol=1e-5)


class TakesABatch(nn.Module):
    """A network whose only argument is a mapping."""

    def __init__(self):
        super().__init__()
        self.layers = network("classification")

    def forward(self, batch):
        return self.layers(batch["image"])


def test_training_by_the_marginal_likelihood_on_mappings():
    x, y = loader("classification").dataset.tensors
    data = DataLoader([{"image": x[n], "class": y[n]} for n in range(40)], batch_size=40)
    batch = next(iter(data))
    results = []
    for function in (marglik_training, laplace.marglik_training):
        la, model, _, losses = function(
            TakesABatch(),
            data,
            n_epochs=4,
            optimizer_kwargs={"lr": 1e-2},
            prior_structure="scalar",
            n_hypersteps=5,
            dict_key_x="image",
            dict_key_y="class",
        )
        results.append((la, model(batch), losses))
    (ours, our_outputs, our_losses), (theirs, their_outputs, their_losses) = results
    assert our_losses == pytest.approx(their_losses, rel=1e-4)
    torch.testing.assert_close(our_outputs, their_outputs, rtol=1e-4, atol=1e-5)
    ours.prior_precision = theirs.prior_precision.detach()
    probs = ours(batch)
    torch.testing.assert_close(probs, theirs(batch).to(probs), rtol=1e-4, atol=1e-5)


def test_training_by_the_marginal_likelihood_finds_the_noise():
    """The call of the regression example."""
    la, model, margliks, losses = marglik_training(
        model=network("regression"),
        train_loader=loader("regression"),
        likelihood="regression",
        hessian_structure="full",
        backend=BackPackGGN,
        n_epochs=25,
        optimizer_kwargs={"lr": 1e-2},
        prior_structure="scalar",
    )
    x, y = loader("regression").dataset.tensors
    mean, variance = la(x)
    assert variance.shape == (40, 1, 1)
    torch.testing.assert_close(mean, model(x))
    assert losses[-1] < losses[0]
    assert min(margliks) == pytest.approx(-float(la.log_marginal_likelihood()))
    # The residuals are those of the noise.
    assert float(la.sigma_noise) == pytest.approx(float((mean - y).std()), rel=0.25)


@pytest.mark.parametrize(
    "mask",
    [
        lambda model: masks.LargestMagnitudeSubnetMask(model, n_params_subnet=12),
        lambda model: masks.ModuleNameSubnetMask(model, module_names=["2"]),
    ],
    ids=["magnitude", "modules"],
)
def test_subnetworks_of_laplace_torchs_masks(mask):
    model = trained("classification")
    indices = mask(model).select()
    results = []
    for library in (Laplace, laplace.Laplace):
        la = library(
            model,
            "classification",
            subset_of_weights="subnetwork",
            hessian_structure="full",
            subnetwork_indices=indices,
        )
        la.fit(loader("classification"))
        results.append(la(loader("classification").dataset.tensors[0]))
    torch.testing.assert_close(results[0], results[1].to(results[0]), rtol=1e-4, atol=1e-5)


def test_the_calibration_example_has_the_same_predictions_and_a_larger_evidence():
    data = loader("classification")
    x, _ = data.dataset.tensors
    posteriors = []
    for library in (Laplace, laplace.Laplace):
        la = library(
            trained("classification"),
            "classification",
            subset_of_weights="last_layer",
            hessian_structure="kron",
        )
        la.fit(data)
        la.optimize_prior_precision(method="marglik")
        posteriors.append(la)
    ours, theirs = posteriors
    assert ours.log_marginal_likelihood() >= theirs.log_marginal_likelihood() - 1e-5
    ours.prior_precision = theirs.prior_precision.detach()
    torch.testing.assert_close(ours(x), theirs(x).to(ours(x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prior_structure": "diag"}, NotImplementedError, 'Use `prior_structure="layerwise"`'),
        ({"likelihood": "reward_modeling"}, ValueError, "`likelihood='reward_modeling'` is not"),
        ({"hessian_structure": "gp"}, ValueError, "Use one of 'kron', 'full', 'diag'"),
        ({"sigma_noise_init": 0.3}, NotImplementedError, "`fix_sigma_noise=True`"),
        ({"scheduler_kwargs": {"gamma": 0.9}}, ValueError, "Pass `scheduler_cls=`"),
        (
            {"likelihood": "classification", "sigma_noise_init": 0.3},
            ValueError,
            "`sigma_noise_init` applies only to likelihood=.regression.",
        ),
        (
            {"likelihood": "classification", "fix_sigma_noise": True},
            ValueError,
            "`fix_sigma_noise` applies only to likelihood=.regression.",
        ),
    ],
)
def test_training_options_without_equivalent_are_refused(options, error, message):
    options = {"likelihood": "regression", "n_epochs": 1, **options}
    with pytest.raises(error, match=message):
        marglik_training(network("regression"), loader("regression"), **options)


def test_the_noise_of_training_may_be_fixed_and_weight_decay_is_left_to_the_prior():
    la, *_ = marglik_training(
        network("regression"),
        loader("regression"),
        "regression",
        optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.1},
        scheduler_cls=torch.optim.lr_scheduler.StepLR,
        scheduler_kwargs={"step_size": 2},
        n_epochs=2,
        prior_prec_init=torch.tensor([2.0]),
        sigma_noise_init=torch.tensor([0.3]),
        fix_sigma_noise=True,
    )
    assert float(la.sigma_noise) == pytest.approx(0.3)
    assert len(la.prior_precision) == 4


def test_members_of_the_enumerations_are_their_names(tmp_path):
    """`Likelihood.CLASSIFICATION` is accepted for "classification", and so on."""
    data = loader("classification")
    x, _ = data.dataset.tensors
    model = trained("classification")
    by_member = Laplace(
        model,
        laplace.Likelihood.CLASSIFICATION,
        laplace.SubsetOfWeights.ALL,
        laplace.HessianStructure.DIAG,
    )
    by_name = Laplace(model, "classification", "all", "diag")
    for la in (by_member, by_name):
        la.fit(data)
    by_member.optimize_prior_precision(
        pred_type=laplace.PredType.GLM,
        method=laplace.TuningMethod.MARGLIK,
        prior_structure=laplace.PriorStructure.DIAG,
    )
    by_name.optimize_prior_precision(method="marglik", prior_structure="diag")
    for link in (laplace.LinkApprox.BRIDGE, laplace.LinkApprox.PROBIT):
        expected = by_name(x, link_approx=link.value)
        assert torch.equal(by_member(x, laplace.PredType.GLM, link_approx=link), expected)
    torch.save(by_member.state_dict(), tmp_path / "la.bin")
    by_name.load_state_dict(torch.load(tmp_path / "la.bin"))
    assert torch.equal(by_name(x), by_member(x))
