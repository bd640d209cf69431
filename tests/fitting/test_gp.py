"""The posterior in function space: the full one from kernels, or its projection onto a span."""

import math

import oracle
import pytest
import torch
from function_space_cases import SIZE, batches, examples, network
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace

DELTA = 0.7
SIGMA = 0.4
LIKELIHOODS = ("regression", "classification", "binary")


def laplace(model, likelihood, curvature="gp", **options):
    if likelihood == "regression":
        options["sigma"] = SIGMA
    return Laplace(model, likelihood, curvature, prior_precision=DELTA, **options)


def function_space(model, likelihood, x, data, inputs, names=None):
    """Covariances of the outputs at x, and log det P, by kernels between inputs.

    K*Z (K_ZZ + Σ_n K_Zn Λ_n K_nZ)⁺ K_Z* + s (K** − Q**) with K = J Jᵀ/δ, Q = K_·Z K_ZZ⁺ K_Z· and
    1/s = 1 + Σ_n tr Λ_n (K_nn − Q_nn) / (D − k), where k is the rank of K_ZZ. No matrix of the
    parameters' size is formed.
    """
    names = names or [name for name, _ in model.named_parameters()]
    sigma = SIGMA if likelihood == "regression" else None
    J = oracle.flat_jacobian(model, x, names)
    J_n = oracle.flat_jacobian(model, data, names).flatten(0, 1)
    J_z = oracle.flat_jacobian(model, inputs, names).flatten(0, 1)
    root = torch.block_diag(*oracle.loss_hessian_root(likelihood, model(data), sigma))
    K_zz = J_z @ J_z.T / DELTA
    K_zn = J_z @ J_n.T / DELTA @ root
    tolerance = {"hermitian": True, "rtol": 1e-13}
    prior = torch.linalg.pinv(K_zz, **tolerance)
    posterior = torch.linalg.pinv(K_zz + K_zn @ K_zn.T, **tolerance)
    Q_nn = K_zn.T @ prior @ K_zn
    residual_trace = torch.trace(root.T @ J_n @ J_n.T @ root / DELTA - Q_nn)
    size = J.shape[2]
    num_remaining = size - int(torch.linalg.matrix_rank(K_zz, **tolerance))
    remainder = 1 + float(residual_trace) / num_remaining if num_remaining else 1.0
    covariances = []
    for rows in J:
        K = rows @ J_z.T / DELTA
        residual = rows @ rows.T / DELTA - K @ prior @ K.T
        covariances.append(K @ posterior @ K.T + residual / remainder)
    log_det = size * math.log(DELTA) + num_remaining * math.log(remainder)
    identity = torch.eye(len(Q_nn), dtype=Q_nn.dtype)
    return torch.stack(covariances), log_det + torch.logdet(identity + Q_nn)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_with_all_examples_it_is_the_full_posterior(likelihood):
    model = network(likelihood)
    x, y = examples(likelihood)
    x_new = torch.cat([4 * examples(likelihood, 6, 2)[0], x[:3]])
    la = laplace(model, likelihood).fit(batches(x, y))
    names = la.param_names
    sigma = SIGMA if likelihood == "regression" else None
    curvature = oracle.ggn(model, x, likelihood, names, sigma)
    covariance = oracle.posterior_covariance([curvature], SIZE, DELTA)
    J = oracle.flat_jacobian(model, x_new, names)
    oracle.close(la.functional(x_new)[1], oracle.functional_covariance(J, covariance), 1e-8)
    full = laplace(model, likelihood, "full").fit(batches(x, y))
    oracle.close(la.functional(x_new)[1], full.functional(x_new)[1], 1e-8)
    oracle.close(la.functional(x_new, joint=True)[1], full.functional(x_new, joint=True)[1], 1e-8)
    oracle.close(la.log_marginal_likelihood(), full.log_marginal_likelihood(), 1e-8)
    precision = la.posterior.precision.to_dense()
    oracle.close(precision, full.posterior.precision.to_dense(), 1e-8)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_with_few_inputs_it_is_the_formula_with_all_examples_in_the_sum(likelihood):
    model = network(likelihood)
    x, y = examples(likelihood)
    inputs, _ = examples(likelihood, 5, 3)
    x_new, _ = examples(likelihood, 6, 2)
    la = laplace(model, likelihood, inducing=inputs).fit(batches(x, y))
    covariance, log_det = function_space(model, likelihood, x_new, x, inputs)
    oracle.close(la.functional(x_new)[1], covariance, 1e-8)
    oracle.close(la.posterior.log_det_precision(), log_det, 1e-8)
    full = laplace(model, likelihood, "full").fit(batches(x, y))
    assert la.log_marginal_likelihood() <= full.log_marginal_likelihood()
    trace = torch.trace(full.posterior.precision.to_dense())
    oracle.close(torch.trace(la.posterior.precision.to_dense()), trace)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_last_layer_has_its_own_process(likelihood):
    model = network(likelihood)
    x, y = examples(likelihood)
    inputs, _ = examples(likelihood, 3, 3)
    x_new, _ = examples(likelihood, 6, 2)
    la = laplace(model, likelihood, params="last_layer", inducing=inputs).fit(batches(x, y))
    covariance, log_det = function_space(model, likelihood, x_new, x, inputs, la.param_names)
    oracle.close(la.functional(x_new)[1], covariance, 1e-8)
    oracle.close(la.posterior.log_det_precision(), log_det, 1e-8)


@pytest.mark.parametrize("memory_bound", [None, 2048, 8192])
def test_the_memory_bound_changes_nothing(memory_bound):
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))
    model = model.double().eval()
    g = torch.Generator().manual_seed(4)
    x = torch.randn(9, 1, 3, 3, generator=g, dtype=torch.float64)
    y = torch.arange(9) % 3
    la = laplace(model, "classification", inducing=x[:4], memory_bound=memory_bound)
    la.fit(batches(x, y, [5, 4]))
    x_new = torch.randn(4, 1, 3, 3, generator=g, dtype=torch.float64)
    covariance, _ = function_space(model, "classification", x_new, x, x[:4])
    oracle.close(la.functional(x_new)[1], covariance, 1e-8)
    variances = covariance.diagonal(dim1=1, dim2=2)
    oracle.close(la.functional(x_new, diagonal=True)[1], variances, 1e-8)


def test_rows_are_kept_only_within_the_memory_bound():
    model = network("regression")
    x, y = examples("regression")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    row_bytes = 8 * num_parameters
    for bound, are_kept in ((4 * row_bytes, False), (100 * row_bytes, True)):
        la = laplace(model, "regression", inducing=x[:5], memory_bound=bound).fit([(x, y)])
        inducing_rows = la.posterior.curvature.blocks["parameters"].U.inducing_rows
        rows = [next(iter(blocks.values())) for _, blocks in inducing_rows.parts()]
        assert sum(map(len, rows)) == 10
        assert 2 * row_bytes * max(map(len, rows)) <= bound
        assert (inducing_rows.inducing.rows_in_memory() is not None) == are_kept


@pytest.mark.parametrize("mode", ["mini", "debiased", "crossfit"])
def test_other_modes_with_all_examples_are_those_of_all_eigenvectors(mode):
    model = network("regression")
    x, y = examples("regression")
    x_new, _ = examples("regression", 6, 2)
    # More rows than parameters: the span is the whole space.
    data = batches(torch.cat([x, -x]), torch.cat([y, y]), [30, 18])
    la = laplace(model, "regression").fit(data, mode, 48)
    full = laplace(model, "regression", "full").fit(data, mode, 48)
    oracle.close(la.functional(x_new)[1], full.functional(x_new)[1], 1e-7)


def test_debiased_curvature_is_measured_along_the_directions_of_other_data():
    model = network("classification")
    x, y = examples("classification")
    directions, magnitudes = batches(x, y)
    la = laplace(model, "classification", inducing=x[:4])
    la.fit_batches([directions], [magnitudes])
    U = la.posterior.curvature.blocks["parameters"].directions
    first = oracle.ggn(model, directions[0], "classification", la.param_names)
    second = oracle.ggn(model, magnitudes[0], "classification", la.param_names)
    projected = U.T @ first @ U
    oracle.close(projected, torch.diag(projected.diagonal()), 1e-8)
    oracle.close(U.T @ U, torch.eye(U.shape[1], dtype=U.dtype), 1e-8)
    precision = U.T @ la.posterior.precision.to_dense() @ U
    expected = 24 * (U.T @ second @ U).diagonal() + DELTA
    oracle.close(precision.diagonal(), expected, 1e-7)


@pytest.mark.parametrize("number", [4, None])
def test_an_update_is_the_fit_to_all_data_with_the_same_inputs(number):
    model = network("classification")
    x, y = examples("classification")
    first, second = batches(x, y)
    x_new, _ = examples("classification", 6, 2)
    la = laplace(model, "classification", inducing=number).fit([first])
    inputs = la.posterior.curvature.blocks["parameters"].U.inducing.inputs
    la.update([second])
    together = laplace(model, "classification", inducing=inputs).fit([first, second])
    oracle.close(la.functional(x_new)[1], together.functional(x_new)[1], 1e-8)
    evidence = together.log_marginal_likelihood()
    oracle.close(la.log_marginal_likelihood(), evidence, 1e-8)


@pytest.mark.parametrize("inducing", [5, None])
def test_it_is_tuned_evaluated_saved_and_loaded(inducing, tmp_path):
    model = network("classification")
    x, y = examples("classification")
    la = laplace(model, "classification", inducing=inducing).fit(batches(x, y))
    x_new, labels = examples("classification", 40, 2)
    tuned = la.tune([(x_new, labels)], grid=[0.1, 3.0], link="probit")
    for point in tuned.table:
        la.prior_precision = point["prior_precision"]
        probs = la.predict(x_new, link="probit").probs
        nll = -probs.gather(1, labels[:, None]).log().mean()
        oracle.close(torch.tensor(point["nll"], dtype=torch.float64), nll)
    la.prior_precision = tuned.prior_precision
    la.save(tmp_path / "posterior")
    loaded = Laplace.load(tmp_path / "posterior", model)
    assert torch.equal(loaded.functional(x_new)[1], la.functional(x_new)[1])
    assert torch.equal(loaded.predict(x_new).probs, la.predict(x_new).probs)
    assert (
        loaded.evaluate([(x_new, labels)])["nll"].value
        == la.evaluate([(x_new, labels)])["nll"].value
    )
    assert loaded.log_marginal_likelihood() == la.log_marginal_likelihood()


def test_parameters_are_drawn_by_kernels():
    model = network("regression")
    x, y = examples("regression")
    la = laplace(model, "regression", inducing=6).fit(batches(x, y))
    num_parameters = len(la.mean)
    scale = la.posterior.scale.to_dense()
    oracle.close(scale @ scale, la.posterior.covariance.to_dense(), 1e-8)
    noise = torch.randn(5, num_parameters, generator=generator(), dtype=torch.float64)
    oracle.close(la.sample(5, generator=generator()) - la.mean, noise @ scale, 1e-8)


def generator():
    return torch.Generator().manual_seed(7)


def test_sampled_functions_have_the_covariance():
    model = network("regression")
    x, y = examples("regression")
    x_new, _ = examples("regression", 4, 2)
    la = laplace(model, "regression", inducing=6).fit(batches(x, y))
    steps = la.sample(4000, generator=generator()) - la.mean
    J = oracle.flat_jacobian(model, x_new, la.param_names).flatten(0, 1)
    functions = steps @ J.T
    covariance = la.functional(x_new, joint=True)[1].reshape(8, 8)
    sampled = functions.T @ functions / len(functions)
    # Four standard errors of the entries of a Wishart matrix.
    variances = covariance.diagonal()
    errors = ((covariance.square() + variances.outer(variances)) / len(functions)).sqrt()
    assert (sampled - covariance).abs().lt(4 * errors).all()


def test_a_network_in_single_precision():
    model = network("classification")
    x, y = examples("classification")
    x_new = torch.cat([4 * examples("classification", 6, 2)[0], x])
    full = laplace(model, "classification", "full").fit(batches(x, y))
    la = laplace(network("classification").float(), "classification")
    la.fit(batches(x.float(), y))
    contrasts = torch.eye(3, dtype=torch.float64) - 1 / 3
    for delta, tolerance in ((1e-3, 1e-3), (10.0, 1e-5)):
        la.prior_precision = full.prior_precision = delta
        variances = contrasts @ la.functional(x_new.float())[1].double() @ contrasts
        expected = contrasts @ full.functional(x_new)[1] @ contrasts
        ratios = variances.diagonal(dim1=1, dim2=2) / expected.diagonal(dim1=1, dim2=2)
        assert (ratios - 1).abs().max() < tolerance


def test_without_any_derivative_the_posterior_is_the_prior():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False)).double().eval()
    with torch.no_grad():
        model[0].bias -= 100.0
    x, y = examples("regression")
    la = laplace(model, "regression", inducing=4).fit(batches(x, y))
    oracle.close(la.posterior.precision.to_dense(), DELTA * torch.eye(24, dtype=torch.float64))
    assert la.functional(x)[1].abs().max() == 0


def test_the_examples_are_drawn_without_replacement():
    model = network("regression")
    x, y = examples("regression")
    for number in (1, 7, 24):
        drawn = []
        for sizes in ([10, 14], [24]):
            la = laplace(model, "regression", inducing=number).fit(batches(x, y, sizes))
            drawn.append(la.posterior.curvature.blocks["parameters"].U.inducing.inputs)
        assert torch.equal(*drawn)
        matches = (drawn[0][:, None] == x).all(2)
        assert matches.sum(1).eq(1).all()
        assert matches.sum(0).le(1).all()


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_each_inducing_example_has_the_rows_that_those_before_leave_most_of(likelihood):
    model = network(likelihood)
    x, y = examples(likelihood)
    la = laplace(model, likelihood, inducing=7).fit(batches(x, y))
    residual = oracle.flat_jacobian(model, x, la.param_names)
    for inducing_input in la.posterior.curvature.blocks["parameters"].U.inducing.inputs:
        example = int((x == inducing_input).all(1).nonzero())
        assert example == int(residual.square().sum((1, 2)).argmax())
        _, values, directions = torch.linalg.svd(residual[example], full_matrices=False)
        V = directions[values > 1e-9]
        residual = residual - residual @ V.T @ V


@pytest.mark.parametrize(
    ("inducing", "error", "message"),
    [
        (25, ValueError, "`inducing=25` is more than the number of examples in the data, 24"),
        (torch.zeros(4, 2).double(), ValueError, r"`inducing` has shape \(4, 2\).*\[M, 3\]"),
        (torch.zeros(0, 3).double(), ValueError, r"`inducing` has shape \(0, 3\)"),
        (torch.zeros(3).double(), ValueError, r"`inducing` has shape \(3,\)"),
        (torch.zeros(4, 3), TypeError, r"`inducing` is torch.float32.*torch.float64"),
    ],
)
def test_inducing_inputs_that_do_not_fit_the_data_are_refused(inducing, error, message):
    model = network("regression")
    data = TensorDataset(*examples("regression"))
    la = laplace(model, "regression", inducing=inducing)
    with pytest.raises(error, match=message):
        la.fit(DataLoader(data, batch_size=8))
    assert "fit: none yet" in repr(la)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"inducing": 0}, ValueError, "inducing must be at least 1"),
        ({"inducing": 2.5}, TypeError, "inducing must be a whole number"),
        (
            {"inducing": 4, "curvature": "kfac"},
            ValueError,
            '`inducing` applies only to curvature="gp"',
        ),
        ({"rank": 4}, ValueError, "`rank` applies only to"),
        ({"joint": True}, ValueError, "joint=True"),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        laplace(network("regression"), "regression", **options)


def test_data_that_can_be_read_only_once_are_refused():
    model = network("regression")
    data = batches(*examples("regression"))
    la = laplace(model, "regression")
    with pytest.raises(TypeError, match="needs two passes over the data"):
        la.fit(iter(data))
    with pytest.raises(TypeError, match="needs two passes over the data"):
        la.fit_batches(iter(data[:1]), data[1:])


def test_inputs_that_are_no_tensor_are_refused():
    class OfDict(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, inputs):
            return self.layer(inputs)

    x, y = torch.randn(4, 3), torch.randn(4, 2)
    la = Laplace(OfDict().eval(), "regression", "gp", sigma=1.0)
    with pytest.raises(TypeError, match=r"must be a tensor.*lowrank"):
        la.fit([{"inputs": x, "labels": y}])


def test_a_kernel_beyond_the_memory_is_refused_with_the_remedy(monkeypatch):
    model = network("classification")
    data = batches(*examples("classification"))
    monkeypatch.setattr(
        "laplace_debias.laplace.fitting.fit.available_memory", lambda device: 100_000
    )
    laplace(model, "classification", inducing=4).fit(data)
    with pytest.raises(ValueError, match=r"Nothing was fitted.*fewer inducing inputs"):
        laplace(model, "classification", inducing=20).fit(data)


@pytest.mark.slow
def test_with_some_inputs_it_is_nearer_to_the_full_posterior_than_laplace_torch():
    peer = pytest.importorskip("laplace")
    model = network("classification")
    x, _ = examples("classification", 64)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    labels = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimiser.step()
    x_new, _ = examples("classification", 40, 2)
    contrasts = torch.eye(3, dtype=torch.float64) - 1 / 3

    def deviations(covariance):
        return (contrasts @ covariance @ contrasts).diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()

    full = laplace(model, "classification", "full").fit([(x, labels)])
    expected = deviations(full.functional(x_new)[1])
    for num_inducing in (8, 16, 32):
        la = laplace(model, "classification", inducing=num_inducing).fit([(x, labels)])
        theirs = peer.FunctionalLaplace(
            model, "classification", n_subset=num_inducing, prior_precision=DELTA
        )
        theirs.fit(DataLoader(TensorDataset(x, labels), batch_size=num_inducing))
        _, covariance = theirs._glm_predictive_distribution(x_new)
        distance = (deviations(la.functional(x_new)[1]) - expected).norm()
        assert distance < 0.7 * (deviations(covariance.double()) - expected).norm()


def test_a_later_fit_of_a_loaded_posterior_has_the_same_inputs(tmp_path):
    model = network("classification")
    x, y = examples("classification")
    inputs, _ = examples("classification", 5, 3)
    for inducing in (inputs, 5, None):
        la = laplace(model, "classification", inducing=inducing).fit(batches(x, y))
        la.save(tmp_path / "posterior")
        loaded = Laplace.load(tmp_path / "posterior", model).fit(batches(x, y))
        blocks = [each.posterior.curvature.blocks["parameters"] for each in (la, loaded)]
        assert torch.equal(*[block.U.inducing.inputs for block in blocks])


def test_the_identity_of_a_fit_changes_with_the_inducing_inputs():
    model = network("classification")
    x, _ = examples("classification")
    marks = [
        laplace(model, "classification", inducing=inducing)._state.config.structure.inducing_mark
        for inducing in (None, 4, x[:4], x[1:5])
    ]
    assert len(set(marks)) == 4


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float16])
def test_inputs_of_any_dtype_are_saved(tmp_path, dtype):
    torch.manual_seed(0)
    if dtype.is_floating_point:
        model = nn.Linear(3, 3).to(dtype).eval()
        x = torch.randn(20, 3).to(dtype)
    else:
        model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)).eval()
        x = torch.randint(7, (20,), dtype=dtype)
    la = Laplace(model, curvature="gp", inducing=5).fit([(x, torch.randint(3, (20,)))])
    la.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", model)
    assert torch.equal(loaded.functional(x)[1], la.functional(x)[1])


def test_inputs_that_a_file_cannot_store_are_refused_before_the_fit():
    class Magnitude(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x.abs())

    x = torch.randn(20, 3, dtype=torch.complex64)
    with pytest.raises(TypeError, match="complex64, which a file of the posterior cannot store"):
        Laplace(Magnitude().eval(), curvature="gp").fit([(x, torch.randint(3, (20,)))])
