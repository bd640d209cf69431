"""Other libraries, which share no code with this one, come to the same numbers.

Results that differ only by a convention are converted before they are compared. The libraries split
a block's scale between its two factors in different ways. Only this one has exact blocks for the
biases of convolutions, so biases are compared only in layers that do not share them.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, Link
from laplace_debias.curvature import EKFAC, KFAC, EmpiricalFisher, Fisher
from laplace_debias.linalg import frobenius_norm, inverse, trace
from laplace_debias.operators import Identity

_NOT_INSTALLED = "not installed: pip install '.[bench]'"


@pytest.fixture
def problem():
    """A convolutional network whose shared weights have no biases, and a batch."""
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, bias=False),
        nn.Tanh(),
        nn.Conv2d(3, 4, 3, stride=2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    x = torch.randn(7, 2, 6, 6).double()
    y = torch.randint(3, (7,))
    return model.double().eval(), x, y


def _dense_blocks(la):
    return {name: block.to_dense() for name, block in la.posterior.curvature.blocks.items()}


def _assert_equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def _factors_of_curvlinops(curvlinops, problem, fisher):
    model, x, y = problem
    operator = curvlinops.KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        [(x, y)],
        fisher_type=getattr(curvlinops.FisherType, fisher),
        check_deterministic=False,
    )
    operator.compute_kronecker_factors()
    return operator._gradient_covariances, operator._input_covariances


@pytest.mark.parametrize("backend", ["hooks", "backpack"])
def test_curvlinops_has_the_same_exact_kfac(problem, backend):
    """It puts 1/T into A, but this library puts it into G; the product is the same."""
    curvlinops = pytest.importorskip("curvlinops", reason=_NOT_INSTALLED)
    model, x, y = problem
    G, A = _factors_of_curvlinops(curvlinops, problem, "TYPE2")
    ours = _dense_blocks(Laplace(model, backend=backend).fit_batches([(x, y)]))
    for layer in ("0", "2", "5"):
        _assert_equal(ours[f"{layer}.weight"], torch.kron(G[layer], A[layer]))
    _assert_equal(ours["5.bias"], G["5"])


def test_curvlinops_has_the_same_exact_ekfac(problem):
    curvlinops = pytest.importorskip("curvlinops", reason=_NOT_INSTALLED)
    model, x, y = problem
    parameters = [model[0].weight, model[2].weight, model[5].weight]
    operator = curvlinops.EKFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        parameters,
        [(x, y)],
        fisher_type=curvlinops.FisherType.TYPE2,
        check_deterministic=False,
    )
    theirs = torch.from_numpy(operator.to_scipy() @ torch.eye(operator.shape[0]).double().numpy())
    la = Laplace(model, curvature="ekfac", params="weights").fit_batches([(x, y)])
    _assert_equal(torch.block_diag(*_dense_blocks(la).values()), theirs)


class TestLaplaceTorch:
    """The whole posterior: predictions, evidence and tuning."""

    @pytest.fixture
    def both_posteriors(self, problem):
        laplace = pytest.importorskip("laplace", reason=_NOT_INSTALLED)
        model, x, y = problem
        theirs = laplace.Laplace(
            model, "classification", subset_of_weights="all", hessian_structure="kron"
        )
        theirs.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))
        return Laplace(model).fit_batches([(x, y)]), theirs

    def test_functional_covariances_are_equal(self, both_posteriors):
        ours, theirs = both_posteriors
        x = torch.randn(4, 2, 6, 6).double()
        for delta in (0.01, 1.0, 30.0):
            ours.prior_precision = delta
            theirs.prior_precision = delta
            mean, covariance = theirs._glm_predictive_distribution(x)
            _assert_equal(ours.functional(x), (mean, covariance))

    def test_predictions_are_equal(self, both_posteriors):
        ours, theirs = both_posteriors
        x = torch.randn(4, 2, 6, 6).double()
        _assert_equal(
            ours.predict(x, link="probit").probs, theirs(x, pred_type="glm", link_approx="probit")
        )

    def test_marginal_likelihoods_are_equal(self, both_posteriors):
        ours, theirs = both_posteriors
        for delta in (0.01, 1.0, 30.0):
            value = theirs.log_marginal_likelihood(
                prior_precision=torch.tensor([delta], dtype=torch.float64)
            )
            _assert_equal(ours.log_marginal_likelihood(delta), value.detach().reshape(()))

    def test_samples_have_the_same_covariance(self, both_posteriors):
        """The rows of the identity, as standard normal draws, give a root of the covariance."""
        ours, theirs = both_posteriors
        size = len(ours.mean)
        root = theirs.posterior_precision.bmm(torch.eye(size).double(), exponent=-0.5)
        root = root.reshape(size, size)
        _assert_equal(ours.posterior.covariance.to_dense(), root.T @ root)


def test_tuning_on_a_grid_finds_the_prior_precision_of_laplace_torch():
    laplace = pytest.importorskip("laplace", reason=_NOT_INSTALLED)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double().eval()
    with torch.no_grad():
        model[2].weight *= 8  # Confident predictions make the posterior matter.
    x = torch.randn(40, 3).double()
    y = torch.distributions.Categorical(logits=model(x)).sample()
    ours = Laplace(model, prior_precision=3.0).fit([(x, y)])
    theirs = laplace.Laplace(model, "classification", "all", "kron")
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=40))
    x = torch.randn(400, 3).double()
    y = ours.predict(x, link="probit").sample()
    theirs.optimize_prior_precision(
        pred_type="glm",
        method="gridsearch",
        val_loader=DataLoader(TensorDataset(x, y), batch_size=100),
        grid_size=21,
        link_approx="probit",
        # The default loss is a running mean that is not reset between the points of the grid.
        loss=lambda probs, labels: nn.functional.nll_loss(probs.log(), labels),
    )
    grid = torch.logspace(-4, 4, 21)
    tuned = ours.tune([(x, y)], grid=grid, link=Link("probit"))
    assert grid[0] < tuned.prior_precision < grid[-1]
    assert tuned.prior_precision == pytest.approx(float(theirs.prior_precision), rel=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_laplace_torch_has_the_same_temperature_and_prior_mean(problem, temperature):
    """Both libraries divide the loss by T."""
    laplace = pytest.importorskip("laplace", reason=_NOT_INSTALLED)
    model, x, y = problem
    theirs = laplace.Laplace(
        model,
        "classification",
        subset_of_weights="all",
        hessian_structure="kron",
        temperature=temperature,
        prior_mean=0.2,
    )
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))
    ours = Laplace(model, temperature=temperature, prior_mean=0.2).fit_batches([(x, y)])
    x = torch.randn(4, 2, 6, 6).double()
    expected = theirs(x, pred_type="glm", link_approx="probit")
    _assert_equal(ours.predict(x, link="probit").probs, expected)
    expected = theirs.log_marginal_likelihood()
    _assert_equal(ours.log_marginal_likelihood(), expected.squeeze())


@pytest.fixture
def perceptron():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    return model, torch.randn(8, 4).double(), torch.randint(3, (8,))


def test_backpack_has_the_same_diagonal_factors_and_gradients(perceptron):
    from backpack import backpack, extend
    from backpack.extensions import KFLR, BatchGrad, DiagGGNExact, SumGradSquared

    model, x, y = perceptron
    loss = nn.CrossEntropyLoss()
    data = [(x, y)]
    twin = extend(copy.deepcopy(model))
    with backpack(DiagGGNExact(), KFLR(), BatchGrad(), SumGradSquared()):
        extend(nn.CrossEntropyLoss())(twin(x), y).backward()
    diagonal = torch.cat([p.diag_ggn_exact.flatten() for p in twin.parameters()])
    ours = Laplace(model, curvature="diag").fit_batches(data).posterior.curvature
    _assert_equal(ours.to_dense().diagonal(), diagonal)
    blocks = KFAC(model, loss, data).blocks.blocks
    for name, parameter in twin.named_parameters():
        if name.endswith("weight"):
            G, A = parameter.kflr
            block = torch.kron(G, A)
        else:
            (block,) = parameter.kflr
        _assert_equal(blocks[name].to_dense(), block)
    fisher = EmpiricalFisher(model, loss, data).to_dense()
    gradients = torch.cat([p.grad_batch.flatten(1) for p in twin.parameters()], 1)
    _assert_equal(fisher, len(x) * gradients.T @ gradients)
    squares = torch.cat([p.sum_grad_squared.flatten() for p in twin.parameters()])
    _assert_equal(fisher.diagonal(), len(x) * squares)


def test_backpack_has_the_same_diagonal_in_the_order_of_the_parameters():
    """The entries of a transposed convolution's block are in a different order."""
    from backpack import backpack, extend
    from backpack.extensions import DiagGGNExact

    model = nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
    model = model.double().eval()
    x, y = torch.randn(6, 2, 3, 3).double(), torch.randint(3, (6,))
    twin = extend(copy.deepcopy(model))
    with backpack(DiagGGNExact()):
        extend(nn.CrossEntropyLoss())(twin(x), y).backward()
    expected = torch.cat([p.diag_ggn_exact.flatten() for p in twin.parameters()])
    la = Laplace(model, curvature="diag").fit_batches([(x, y)])
    precision = la.posterior.precision.to_dense().diagonal()
    _assert_equal((precision - la.prior_precision) / la.num_data, expected)
    assert la.posterior.order is not None
    curvature = la.posterior.curvature.to_dense().diagonal()
    _assert_equal(curvature, expected[la.posterior.order])


@pytest.fixture
def double_by_default():
    """nngeometry makes some of its tensors in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_by_default")
def test_nngeometry_has_the_same_fisher_matrices(perceptron):
    pytest.importorskip("nngeometry", reason=_NOT_INSTALLED)
    from nngeometry.layercollection import LayerCollection
    from nngeometry.metrics import FIM
    from nngeometry.object import PMatDense, PMatDiag, PMatEKFAC, PMatKFAC, PVector

    model, x, y = perceptron
    loss = nn.CrossEntropyLoss()
    data = [(x, y)]
    loader = DataLoader(TensorDataset(x, y), batch_size=3)

    def theirs(representation):
        return FIM(model, loader, representation, "classif_logits")

    diagonal = Laplace(model, curvature="diag").fit_batches(data).posterior.curvature
    _assert_equal(diagonal.to_dense().diagonal(), theirs(PMatDiag).get_diag())
    ekfac = theirs(PMatEKFAC)
    ekfac.update_diag(loader)
    fisher = Fisher(model, loss, data)
    vector = torch.randn(fisher.shape[0]).double()
    their_vector = PVector(LayerCollection.from_model(model), vector_repr=vector)
    for ours, expected in (
        (fisher, theirs(PMatDense)),
        (KFAC(model, loss, data, joint=True), theirs(PMatKFAC)),
        (EKFAC(model, loss, data, joint=True), ekfac),
    ):
        _assert_equal(ours.to_dense(), expected.to_torch())
        _assert_equal(ours @ vector, expected.mv(their_vector).to_torch())
        _assert_equal(vector @ (ours @ vector), expected.vTMv(their_vector))
        _assert_equal(trace(ours).value, expected.trace())
        _assert_equal(frobenius_norm(ours).value, expected.frobenius_norm())
    damped = inverse(EKFAC(model, loss, data, joint=True) + 0.1 * Identity(len(vector)))
    _assert_equal(damped @ vector, ekfac.solve(their_vector, regul=0.1).to_torch())
