"""Function space with independent outputs: one process per output, with its own kernel."""

import math

import oracle
import pytest
import torch
from cases import others_slow
from failing_loader import FailingLoader, LoaderError
from function_space_cases import SIZE, batches, examples, network
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.curvature.fits import checkpoint

DELTA = 0.7
SIGMA = torch.tensor([0.4, 0.9], dtype=torch.float64)
LIKELIHOODS = ("regression", "classification")


def laplace(model, likelihood, **options):
    if likelihood == "regression":
        options["sigma"] = SIGMA
    return Laplace(
        model, likelihood, "gp", prior_precision=DELTA, independent_outputs=True, **options
    )


def precisions(model, likelihood, data, inputs=None, names=None, delta=DELTA):
    """The precision of every output's copy of the parameters, `[C, D, D]`.

    P_c = δ + Σ_n Λ_ncc J_ncᵀ J_nc, or projected onto the span of the rows J_zc, with the mean of
    what is left for all other directions.
    """
    names = names or [name for name, _ in model.named_parameters()]
    J = oracle.flat_jacobian(model, data, names)
    sigma = SIGMA if likelihood == "regression" else None
    hessians = oracle.loss_hessian(likelihood, model(data), sigma)
    eye = torch.eye(J.shape[2], dtype=J.dtype)
    matrices = []
    for c in range(J.shape[1]):
        C = sum(hessians[n, c, c] * J[n, c].outer(J[n, c]) for n in range(len(data)))
        if inputs is not None:
            J_z = oracle.flat_jacobian(model, inputs, names)[:, c]
            _, values, U = torch.linalg.svd(J_z, full_matrices=False)
            U = U[values > 1e-9 * values.max()].T
            inside = U @ U.T
            outside = eye - inside
            tau = torch.trace(outside @ C) / torch.trace(outside)
            C = inside @ C @ inside + tau * outside
        matrices.append(delta * eye + C)
    return torch.stack(matrices)


def covariances(model, x_new, matrices, names=None):
    """Variances of each output by its own precision; zero between outputs. `[B, C, B, C]`."""
    names = names or [name for name, _ in model.named_parameters()]
    J = oracle.flat_jacobian(model, x_new, names)
    result = J.new_zeros(len(x_new), J.shape[1], len(x_new), J.shape[1])
    for c, matrix in enumerate(matrices):
        result[:, c, :, c] = J[:, c] @ torch.linalg.solve(matrix, J[:, c].T)
    return result


def by_example(joint):
    return torch.stack([joint[n, :, n] for n in range(len(joint))])


@pytest.mark.parametrize("number", [None, 4])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_each_output_has_the_posterior_of_its_own_kernel(likelihood, number):
    model = network(likelihood)
    x, y = examples(likelihood)
    inputs = None if number is None else examples(likelihood, number, 3)[0]
    x_new, _ = examples(likelihood, 5, 2)
    la = laplace(model, likelihood, inducing=inputs).fit(batches(x, y))
    matrices = precisions(model, likelihood, x, inputs)
    expected = covariances(model, x_new, matrices)
    mean, covariance = la.functional(x_new)
    oracle.close(covariance, by_example(expected), 1e-8)
    assert torch.equal(mean, model(x_new))
    variances = by_example(expected).diagonal(dim1=1, dim2=2)
    oracle.close(la.functional(x_new, diagonal=True)[1], variances, 1e-8)
    oracle.close(la.functional(x_new, joint=True)[1], expected, 1e-8)
    for joint in (False, True):
        differentiable = la.functional(x_new, joint=joint, differentiable=True)[1]
        oracle.close(differentiable, expected if joint else by_example(expected), 1e-8)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_evidence_is_that_of_a_copy_of_the_parameters_per_output(likelihood):
    model = network(likelihood)
    x, y = examples(likelihood)
    la = laplace(model, likelihood).fit(batches(x, y))
    theta = oracle.flat_parameters(model, la.param_names)
    sigma = SIGMA if likelihood == "regression" else None
    for delta in (DELTA, 3.0):
        log_dets = [torch.logdet(P) for P in precisions(model, likelihood, x, delta=delta)]
        prior = len(log_dets) * (len(theta) * math.log(delta) - delta * theta.square().sum())
        nll = oracle.nll(likelihood, model(x), y, sigma).sum()
        expected = -nll + (prior - sum(log_dets)) / 2
        oracle.close(la.log_marginal_likelihood(delta), expected.detach(), 1e-9)
    tuned = la.tune_evidence(sigma=False if likelihood == "regression" else None)
    best = la.log_marginal_likelihood()
    for factor in (0.9, 1.1):
        assert la.log_marginal_likelihood(factor * tuned.prior_precision) < best


def test_the_evidence_of_the_noise_has_its_optimum():
    model = network("regression")
    x, y = examples("regression")
    la = laplace(model, "regression").fit(batches(x, y))
    la.tune_evidence(sigma=True)
    theta = oracle.flat_parameters(model, la.param_names)

    def log_evidence(factor):
        sigma = factor * la.sigma
        hessian = sigma**-2
        J = oracle.flat_jacobian(model, x, la.param_names)
        delta = la.prior_precision
        value = -oracle.nll("regression", model(x), y, sigma).sum()
        for c in range(2):
            P = hessian[c] * J[:, c].T @ J[:, c] + delta * torch.eye(len(theta)).double()
            value -= (torch.logdet(P) - len(theta) * delta.log() + delta * theta @ theta) / 2
        return value

    oracle.close(la.log_marginal_likelihood(), log_evidence(1.0).detach(), 1e-8)
    assert max(log_evidence(0.97), log_evidence(1.03)) < log_evidence(1.0)


def test_the_last_layer_has_one_process_per_output():
    model = network("classification")
    x, y = examples("classification")
    x_new, _ = examples("classification", 5, 2)
    la = laplace(model, "classification", params="last_layer").fit(batches(x, y))
    matrices = precisions(model, "classification", x, names=la.param_names)
    expected = by_example(covariances(model, x_new, matrices, la.param_names))
    oracle.close(la.functional(x_new)[1], expected, 1e-8)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_with_all_examples_it_is_laplace_torch_s(likelihood):
    peer = pytest.importorskip("laplace")
    model = network(likelihood)
    x, y = examples(likelihood)
    x_new, _ = examples(likelihood, 5, 2)
    options = {"sigma_noise": 1.0} if likelihood == "regression" else {}
    theirs = peer.FunctionalLaplace(
        model,
        likelihood,
        n_subset=SIZE,
        prior_precision=DELTA,
        independent_outputs=True,
        **options,
    )
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=8))
    _, expected = theirs._glm_predictive_distribution(x_new)
    options = {"sigma": 1.0} if likelihood == "regression" else {}
    la = Laplace(
        model, likelihood, "gp", prior_precision=DELTA, independent_outputs=True, **options
    ).fit(batches(x, y))
    # It solves with Cholesky factors in single precision.
    torch.testing.assert_close(la.functional(x_new)[1], expected.double(), rtol=2e-4, atol=2e-5)


def test_requested_outputs_and_small_memory_change_nothing():
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))
    model = model.double().eval()
    g = torch.Generator().manual_seed(4)
    x = torch.randn(9, 1, 3, 3, generator=g, dtype=torch.float64)
    y = torch.arange(9) % 3
    x_new = torch.randn(4, 1, 3, 3, generator=g, dtype=torch.float64)
    outputs = torch.tensor([[2, 0], [1, 1], [0, 2], [1, 0]])
    expected = covariances(model, x_new, precisions(model, "classification", x, x[:4]))
    covariance = by_example(expected)
    for bound in (None, 2048):
        la = laplace(model, "classification", inducing=x[:4], memory_bound=bound)
        la.fit(batches(x, y, [5, 4]))
        oracle.close(la.functional(x_new)[1], covariance, 1e-8)
        pairs = torch.stack([covariance[n][c][:, c] for n, c in enumerate(outputs)])
        oracle.close(la.functional(x_new, outputs=outputs)[1], pairs, 1e-8)
        rows = torch.stack([expected[n, outputs[n]] for n in range(4)])
        joint = torch.stack([rows[:, :, n][:, :, outputs[n]] for n in range(4)], dim=2)
        oracle.close(la.functional(x_new, outputs=outputs, joint=True)[1], joint, 1e-8)


@pytest.mark.parametrize("fisher", ["mc", "empirical"])
def test_other_fisher_matrices_have_their_diagonal(fisher):
    model = network("classification")
    x, y = examples("classification")
    x_new, _ = examples("classification", 5, 2)
    la = laplace(model, "classification", fisher=fisher, mc_samples=200 if fisher == "mc" else 1)
    la.fit([(x, y)], generator=torch.Generator().manual_seed(0))
    covariance = la.functional(x_new)[1]
    J = oracle.flat_jacobian(model, x, la.param_names)
    residuals = model(x).softmax(1) - nn.functional.one_hot(y, 3)
    entries = residuals.square()
    if fisher == "mc":
        probs = model(x).softmax(1)
        entries = probs * (1 - probs)
    eye = torch.eye(J.shape[2], dtype=J.dtype)
    matrices = [DELTA * eye + (entries[:, c, None] * J[:, c]).T @ J[:, c] for c in range(3)]
    expected = by_example(covariances(model, x_new, matrices)).detach()
    oracle.close(covariance, expected, 1e-8 if fisher == "empirical" else 0.1)


@pytest.mark.parametrize("mode", ["mini", *others_slow(["debiased", "crossfit"])])
def test_other_modes_are_those_of_each_output(mode):
    model = network("regression")
    x, y = examples("regression")
    x_new, _ = examples("regression", 5, 2)
    data = batches(x, y)
    la = laplace(model, "regression").fit(data, mode, SIZE)
    for c in range(2):
        single_model = nn.Sequential(*model, _Output(c)).eval()
        options = {"sigma": float(SIGMA[c]), "prior_precision": DELTA}
        single_output = Laplace(single_model, "regression", "gp", **options)
        single_output.fit([(x, y[:, c : c + 1]) for x, y in data], mode, SIZE)
        oracle.close(
            la.functional(x_new)[1][:, c, c], single_output.functional(x_new)[1][:, 0, 0], 1e-8
        )


class _Output(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index

    def forward(self, x):
        return x[:, self.index : self.index + 1]


@pytest.mark.parametrize("number", [4, None])
def test_it_is_tuned_updated_saved_and_loaded(number, tmp_path):
    model = network("classification")
    x, y = examples("classification")
    first, second = batches(x, y)
    x_new, labels = examples("classification", 40, 2)
    la = laplace(model, "classification", inducing=number).fit([first])
    inputs = la.posterior.curvature.blocks["output 0"].U.inducing.inputs
    la.update([second])
    together = laplace(model, "classification", inducing=inputs).fit([first, second])
    oracle.close(la.functional(x_new)[1], together.functional(x_new)[1], 1e-8)
    evidence = together.log_marginal_likelihood()
    oracle.close(la.log_marginal_likelihood(), evidence, 1e-8)
    tuned = la.tune([(x_new, labels)], grid=[0.1, 3.0], link="probit")
    for point in tuned.table:
        matrices = precisions(model, "classification", x, inputs, delta=point["prior_precision"])
        variances = by_example(covariances(model, x_new, matrices)).diagonal(dim1=1, dim2=2)
        logits = model(x_new) / (1 + math.pi / 8 * variances).sqrt()
        nll = nn.functional.cross_entropy(logits, labels)
        oracle.close(torch.tensor(point["nll"], dtype=torch.float64), nll.detach(), 1e-8)
    la.save(tmp_path / "posterior")
    loaded = Laplace.load(tmp_path / "posterior", model)
    assert torch.equal(loaded.functional(x_new)[1], la.functional(x_new)[1])
    assert loaded.log_marginal_likelihood() == la.log_marginal_likelihood()
    assert repr(loaded) == repr(la)
    assert "gp, independent outputs" in repr(la)
    third = examples("classification", 5, 8)
    updated = [each.update([third]).functional(x_new)[1] for each in (la, loaded)]
    assert torch.equal(*updated)


def test_an_interrupted_fit_continues_with_the_output_it_had_reached(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "EVERY", 0.0)
    model = network("classification")
    data = batches(*examples("classification"), [6, 6, 12])
    x_new, _ = examples("classification", 5, 2)
    fitted = [laplace(model, "classification").fit(data)]
    # The inputs are read first, then all batches of the first output.
    fit = laplace(model, "classification").fit
    with pytest.raises(LoaderError):
        fit(FailingLoader(data, 3 + 3 + 2), num_data=SIZE, resume=tmp_path / "state")
    la = laplace(model, "classification").fit(data, num_data=SIZE, resume=tmp_path / "state")
    fitted.append(la)
    assert torch.equal(*[each.functional(x_new)[1] for each in fitted])
    with pytest.raises(LoaderError):
        fit(FailingLoader(data, 8), num_data=SIZE, resume=tmp_path / "state")
    with pytest.raises(ValueError, match="independent outputs was True, is now False"):
        Laplace(model, curvature="gp").fit(data, num_data=SIZE, resume=tmp_path / "state")


@pytest.mark.parametrize("number", [None, 4])
def test_the_plan_counts_the_tensors_of_every_output(number):
    model = network("classification")
    data = DataLoader(TensorDataset(*examples("classification")), batch_size=8)
    la = laplace(model, "classification", inducing=number)
    planned = la.plan(data).posterior
    blocks = la.fit(data).posterior.curvature.blocks.values()
    num_bytes = next(iter(blocks)).U.inducing.inputs.nbytes + la.mean.nbytes
    num_bytes += sum(block.U.coefficients.nbytes + block.magnitudes.nbytes for block in blocks)
    assert abs(planned - num_bytes) <= 64 * len(la.param_names)


def test_parameters_have_no_single_distribution():
    model = network("classification")
    la = laplace(model, "classification").fit(batches(*examples("classification")))
    x, _ = examples("classification", 3, 2)
    for call in (
        lambda: la.sample(2),
        lambda: la.predict(x, method="nn", samples=3),
        lambda: la.posterior.precision,
        lambda: la.posterior.covariance,
        lambda: la.posterior.log_prob(la.mean),
    ):
        with pytest.raises(
            ValueError,
            match=r"each of the 3 outputs has its own distribution .*fit again with",
        ):
            call()


MISPLACED = "^`independent_outputs` applies only to curvature=\"gp\", got 'kfac'. Remove `ind"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"curvature": "kfac", "independent_outputs": True}, ValueError, MISPLACED),
        ({"curvature": "gp", "independent_outputs": 2}, TypeError, "independent_outputs"),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Laplace(network("classification"), **options)


@pytest.mark.parametrize("memory_bound", [None, 8000])
@pytest.mark.parametrize("positions", [[-1], [2, 0]])
def test_chosen_positions_have_the_processes_of_their_outputs(positions, memory_bound):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    x = torch.randn(20, 3, 3, dtype=torch.float64)
    y = torch.randint(2, (20, 3))
    la = laplace(model, "classification", memory_bound=memory_bound).fit([(x, y)])
    inputs = x[:4]
    size = 2 * len(positions)
    options = {"positions": torch.tensor(positions)}

    variances = la.functional(inputs, diagonal=True)[1][:, positions]
    actual = la.functional(inputs, diagonal=True, **options)[1]
    torch.testing.assert_close(actual, variances)

    covariance = la.functional(inputs)[1].view(4, 3, 2, 3, 2)
    expected = covariance[:, positions][:, :, :, positions].reshape(4, size, size)
    torch.testing.assert_close(la.functional(inputs, **options)[1], expected)

    covariance = la.functional(inputs, joint=True)[1].view(4, 3, 2, 4, 3, 2)
    expected = covariance[:, positions][:, :, :, :, positions].reshape(4, size, 4, size)
    torch.testing.assert_close(la.functional(inputs, joint=True, **options)[1], expected)


def sequences(length, size=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(size, length, 3, generator=g, dtype=torch.float64)
    return x, torch.randint(2, (size, length), generator=g)


@pytest.fixture
def tagger():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()


def test_positions_without_a_process_are_refused(tagger):
    la = laplace(tagger, "classification").fit([sequences(5)])
    longer, labels = sequences(7, seed=1)
    message = "a process for each of 10 outputs, but these inputs have more outputs"
    calls = (
        lambda: la.functional(longer),
        lambda: la.functional(longer, diagonal=True),
        lambda: la.functional(longer, joint=True),
        lambda: la.functional(longer, positions=-1),
        lambda: la.predict(longer),
        lambda: la.evaluate([(longer, labels)]),
    )
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    # The network treats each position alone, so the first positions have the same processes.
    expected = la.functional(longer[:, :5])[1][:, :6, :6]
    torch.testing.assert_close(la.functional(longer[:, :3])[1], expected)


@pytest.mark.parametrize("lengths", [(5, 7), (5, 3)])
def test_batches_of_other_lengths_are_refused(tagger, lengths):
    first, second = (sequences(length) for length in lengths)
    with pytest.raises(ValueError, match="Each inducing input has 10 outputs, but the examples"):
        laplace(tagger, "classification", inducing=first[0], class_dim=-1).fit([first, second])
    la = laplace(tagger, "classification", class_dim=-1).fit([first])
    covariance = la.functional(first[0])[1]
    with pytest.raises(ValueError, match="Each inducing input has 10 outputs, but the examples"):
        la.update([second])
    torch.testing.assert_close(la.functional(first[0])[1], covariance)
