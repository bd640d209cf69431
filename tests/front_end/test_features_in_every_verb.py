"""Posteriors of every origin are evaluated, tuned, saved and loaded like those of a plain fit."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import GaussianPrior, Laplace, posterior_as_prior
from laplace_debias.curvature import FunctionModel, Subnetwork
from laplace_debias.training import OnlineCurvature, marginal_likelihood_training

GRID = [0.1, 1.0, 10.0]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()


def data(seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(30, 4, generator=g, dtype=torch.float64)
    return x, torch.randint(3, (30,), generator=g)


def batches(seed=1):
    x, y = data(seed)
    return list(zip(x.split(11), y.split(11), strict=True))


def online():
    measured = OnlineCurvature(network(), refresh=2, every=1, fisher="exact")
    for x, y in batches():
        measured.update(x, y)
    return measured.posterior(num_data=30)


def by_marginal_likelihood():
    model = network()
    loader = DataLoader(TensorDataset(*data()), batch_size=10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run = marginal_likelihood_training(
        model, loader, "classification", optimizer=optimizer, epochs=3
    )
    return run.laplace


def function_of_parameters():
    g = torch.Generator().manual_seed(2)
    parameters = {
        "W": torch.randn(4, 3, generator=g, dtype=torch.float64),
        "b": torch.randn(3, generator=g, dtype=torch.float64),
    }
    model = FunctionModel(lambda p, x: (x @ p["W"]).tanh() + p["b"], parameters)
    return Laplace(model, curvature="full").fit(batches())


def entries():
    return Laplace(Subnetwork(network(), [0, 7, 21, 30]), curvature="full").fit(batches())


def with_a_prior():
    earlier = Laplace(network(), prior_precision=0.5).fit(batches())
    return Laplace(network(), prior=posterior_as_prior(earlier)).fit(batches(seed=3))


def with_a_precision_per_parameter():
    model = network()
    names = [name for name, _ in model.named_parameters()]
    size = sum(parameter.numel() for parameter in model.parameters())
    precisions = torch.linspace(0.5, 2, size, dtype=torch.float64)
    prior = GaussianPrior(torch.zeros_like(precisions), precisions, names)
    return Laplace(model, curvature="diag", prior=prior).fit(batches())


def updated():
    return Laplace(network(), curvature="ekfac").fit(batches()).update(batches(seed=3))


def weighted():
    x, y = data()
    weights = torch.rand(30, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return Laplace(network()).fit([(x, y, weights)], num_data=20)


def with_a_bridge():
    la = Laplace(network()).fit(batches())
    la.link = "bridge"
    return la


def in_function_space():
    return Laplace(network(), curvature="gp", inducing=6).fit(batches())


def in_function_space_by_output():
    la = Laplace(network(), curvature="gp", inducing=6, independent_outputs=True)
    return la.fit(batches())


FEATURES = [
    online,
    by_marginal_likelihood,
    function_of_parameters,
    entries,
    with_a_prior,
    with_a_precision_per_parameter,
    updated,
    weighted,
    with_a_bridge,
    in_function_space,
    in_function_space_by_output,
]


def check_evaluation(la):
    """The NLL and the accuracy are those of the predicted probabilities."""
    x, y = data(seed=4)
    probs = la.predict(x).probs
    report = la.evaluate(batches(seed=4))
    nll = -probs.gather(1, y.unsqueeze(1)).log().mean()
    assert report["nll"].value == pytest.approx(float(nll), rel=1e-6)
    accuracy = (probs.argmax(1) == y).double().mean()
    assert report["accuracy"].value == pytest.approx(float(accuracy))
    assert report["nll"].low < report["nll"].value < report["nll"].high
    return report


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_every_verb_has_the_numbers_of_its_predictions(feature, tmp_path):
    la = feature()
    check_evaluation(la)
    scores = []
    result = la.tune(batches(seed=4), grid=GRID, link=la.link)
    for delta in GRID:
        la.prior_precision = delta
        scores.append(check_evaluation(la)["nll"].value)
    assert [row["nll"] for row in result.table] == pytest.approx(scores, rel=1e-6)
    assert result.prior_precision == GRID[scores.index(min(scores))]
    la.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", la.model)
    report = check_evaluation(loaded)
    assert report["nll"].value == check_evaluation(la)["nll"].value
    again = loaded.tune(batches(seed=4), grid=GRID, link=loaded.link)
    for row, expected in zip(again.table, result.table, strict=True):
        assert row == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("feature", [online, with_a_prior, updated, with_a_bridge])
def test_a_loaded_posterior_has_the_same_derivatives_in_its_inputs(feature, tmp_path):
    la = feature()
    la.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", la.model)
    gradients = []
    for posterior in (la, loaded):
        x = data(seed=4)[0][:3].requires_grad_()
        entropy = posterior.predict(x, differentiable=True).entropy().sum()
        gradients.append(torch.autograd.grad(entropy, x)[0])
    assert gradients[0].norm() > 0
    torch.testing.assert_close(gradients[1], gradients[0])
