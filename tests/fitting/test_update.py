"""Updates with new data: the precision of new data adds up, and the evidence follows."""

import oracle
import pytest
import torch
from cases import others_slow
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Auto, Laplace, posterior_as_prior

DELTA = 0.7
STRUCTURES = ["kfac", "ekfac", "diag", "lowrank", "full"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()


def examples(size, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, generator=g, dtype=torch.float64)
    return x, torch.randint(3, (size,), generator=g)


FIRST = examples(14, 1)
SECOND = examples(9, 2)
UNION = torch.cat([FIRST[0], SECOND[0]]), torch.cat([FIRST[1], SECOND[1]])


def laplace(curvature, **options):
    if curvature == "lowrank":
        options["rank"] = 60  # all directions
    return Laplace(network(), curvature=curvature, prior_precision=DELTA, **options)


def precision(la):
    return la.posterior.precision.to_dense()


def assert_same(actual, expected, tolerance=1e-10):
    oracle.close(precision(actual), precision(expected), tolerance)
    oracle.close(actual.functional(UNION[0])[1], expected.functional(UNION[0])[1], tolerance)
    evidence = actual.log_marginal_likelihood()
    torch.testing.assert_close(evidence, expected.log_marginal_likelihood(), rtol=tolerance, atol=0)
    assert actual.num_data == expected.num_data


# `lowrank` leaves out eigenvalues below 1e-7 of the largest one, in each of its decompositions.
TOLERANCES = {"lowrank": 1e-6}


@pytest.mark.parametrize("curvature", ["kfac", "diag", "lowrank", "full"])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_an_update_is_the_fit_to_all_data(curvature, fisher):
    updated = laplace(curvature, fisher=fisher).fit([FIRST]).update([SECOND])
    fitted = laplace(curvature, fisher=fisher).fit([FIRST, SECOND])
    assert_same(updated, fitted, TOLERANCES.get(curvature, 1e-10))


def test_the_precision_is_the_prior_and_the_dense_ggn_of_all_data():
    model = network()
    names = [name for name, _ in model.named_parameters()]
    ggn = oracle.ggn(model, UNION[0], "classification", names)
    expected = 23 * ggn + DELTA * torch.eye(len(ggn), dtype=torch.float64)
    la = laplace("full").fit([FIRST]).update([SECOND])
    oracle.close(precision(la), expected, 1e-10)
    theta = oracle.flat_parameters(model, names)
    nll = oracle.nll("classification", model(UNION[0]), UNION[1]).sum()
    evidence = oracle.log_marginal_likelihood(nll, theta, expected, torch.full_like(theta, DELTA))
    torch.testing.assert_close(la.log_marginal_likelihood(), evidence.detach(), rtol=1e-10, atol=0)
    la = laplace("lowrank").fit([FIRST]).update([SECOND])
    oracle.close(precision(la), expected, TOLERANCES["lowrank"])


def test_ekfac_has_the_exact_curvature_of_all_data_along_the_earlier_directions():
    la = laplace("ekfac").fit([FIRST])
    bases = {name: (b.U_G, b.U_A) for name, b in la.posterior.curvature.blocks.items()}
    la.update([SECOND])
    for name, (U_G, U_A) in bases.items():
        U = torch.kron(U_G, U_A)
        ggn = oracle.ggn_block(la.model, UNION[0], "classification", name)
        block = la.posterior.curvature.blocks[name]
        oracle.close(block.magnitudes.flatten(), torch.diagonal(U.T @ ggn @ U), 1e-10)


def wider():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3)).double().eval()


def with_dead_units():
    model = wider()
    with torch.no_grad():
        model[0].bias[:4] = -100.0
    return model


def with_groups():
    torch.manual_seed(1)
    layers = [
        nn.Unflatten(1, (4, 3)),
        nn.Conv1d(4, 10, 2, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(20, 3),
    ]
    return nn.Sequential(*layers).double().eval()


FEW = 4
EKFAC_CASES = {
    # The earlier factors have null spaces on both sides.
    "few examples": (wider, {}),
    # The first layer's G and the second layer's A have null spaces for all data.
    "dead units": (with_dead_units, {}),
    "groups": (with_groups, {}),
    "joint": (wider, {"joint": True}),
    "rank": (wider, {"rank": 5}),
}


def ekfac_update(name, order, path=None, as_prior=False, dtype=torch.float64):
    make, options = EKFAC_CASES[name]
    model = make().to(dtype)
    g = torch.Generator().manual_seed(4)
    x = torch.randn(60, 12, generator=g, dtype=torch.float64).to(dtype)
    y = torch.randint(3, (60,), generator=g)
    first, second = (x[:FEW][order], y[:FEW][order]), (x[FEW:], y[FEW:])
    la = Laplace(model, curvature="ekfac", **options).fit([first])
    if path is not None:
        la.save(path)
        la = Laplace.load(path, model)
    if as_prior:
        la = Laplace(model, curvature="ekfac", prior=posterior_as_prior(la), **options)
        la.fit([second])
    else:
        # Directions stay, so that the second update depends on the same bases.
        la.update([(second[0][:20], second[1][:20])]).update([(second[0][20:], second[1][20:])])
    return la.posterior.precision.to_dense()


@pytest.mark.parametrize("name", EKFAC_CASES)
@pytest.mark.parametrize("way", ["update", "loaded", "prior"])
def test_an_ekfac_update_does_not_depend_on_the_order_of_the_earlier_examples(name, way, tmp_path):
    def precision_of(order, path):
        return ekfac_update(
            name, order, path=path if way == "loaded" else None, as_prior=way == "prior"
        )

    expected = precision_of(torch.arange(FEW), tmp_path / "first.safetensors")
    reordered = precision_of(torch.tensor([2, 0, 3, 1]), tmp_path / "second.safetensors")
    oracle.close(reordered, expected, 1e-10)


def test_an_ekfac_update_in_single_precision_does_not_depend_on_the_order_either():
    orders = torch.arange(FEW), torch.tensor([2, 0, 3, 1])
    sorted_update, permuted_update = (
        ekfac_update("few examples", order, dtype=torch.float32) for order in orders
    )
    oracle.close(permuted_update, sorted_update, 1e-5)


def test_an_ekfac_update_averages_new_curvature_over_null_spaces_and_keeps_its_trace():
    model = wider()
    g = torch.Generator().manual_seed(4)
    x = torch.randn(60, 12, generator=g, dtype=torch.float64)
    y = torch.randint(3, (60,), generator=g)
    la = Laplace(model, curvature="ekfac", params=["0.weight"]).fit([(x[:FEW], y[:FEW])])
    earlier = la.posterior.curvature.blocks["0.weight"]
    la.update([(x[FEW:], y[FEW:])])
    updated = la.posterior.curvature.blocks["0.weight"]
    new_magnitudes = (60 * updated.magnitudes - FEW * earlier.magnitudes) / (60 - FEW)
    U = torch.kron(earlier.U_G, earlier.U_A)
    ggn = oracle.ggn_block(model, x[FEW:], "classification", "0.weight")
    exact = torch.diagonal(U.T @ ggn @ U).reshape(10, 12)
    rank_G = int((earlier.magnitudes.sum(1) > 1e-12).sum())
    assert 0 < rank_G < 9
    exact[:, FEW:] = exact[:, FEW:].mean(1, keepdim=True)
    exact[rank_G:] = exact[rank_G:].mean(0, keepdim=True)
    oracle.close(new_magnitudes, exact, 1e-10)
    torch.testing.assert_close(new_magnitudes.sum(), exact.sum(), rtol=1e-10, atol=0)


def convolutions():
    torch.manual_seed(1)
    return (
        nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
        .double()
        .eval()
    )


@pytest.mark.parametrize("is_first_dead", [False, True])
def test_a_group_without_curvature_so_far_takes_that_of_the_new_data(is_first_dead):
    model = convolutions()
    g = torch.Generator().manual_seed(3)
    x = torch.rand(12, 2, 4, 4, generator=g, dtype=torch.float64)
    y = torch.randint(3, (12,), generator=g)
    first = x[:6].clone()
    if is_first_dead:
        first[:, 1] = 0  # The inputs of the second group, so that its A is zero.
    names = ["0.weight", "3.weight"]
    la = Laplace(model, params=names, prior_precision=DELTA).fit([(first, y[:6])])
    new_fit = Laplace(model, params=names, prior_precision=DELTA).fit([(x[6:], y[6:])])
    earlier = la.posterior.curvature.blocks["0.weight"].to_dense()
    new_curvature = new_fit.posterior.curvature.blocks["0.weight"].to_dense()
    la.update([(x[6:], y[6:])])
    updated = la.posterior.curvature.blocks["0.weight"].to_dense()
    fitted = Laplace(model, params=names).fit([(first, y[:6]), (x[6:], y[6:])])
    expected = fitted.posterior.curvature.blocks["0.weight"].to_dense()
    half = len(updated) // 2
    oracle.close(updated[:half, :half], expected[:half, :half], 1e-10)
    if is_first_dead:
        assert not earlier[half:, half:].any()
        expected[half:, half:] = new_curvature[half:, half:] / 2
    oracle.close(updated, expected, 1e-10)


def wide():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(300, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()


@pytest.mark.parametrize("second_size", [20, 200])
def test_factors_of_few_examples_are_added_as_rows_or_as_matrices(second_size):
    g = torch.Generator().manual_seed(4)
    x = torch.randn(10 + second_size, 300, generator=g, dtype=torch.float64)
    y = torch.randint(3, (len(x),), generator=g)
    first, second = (x[:10], y[:10]), (x[10:], y[10:])
    updated = Laplace(wide()).fit([first])
    assert updated.posterior.curvature.blocks["0.weight"].U_A.shape == (300, 10)
    updated.update([second])
    fitted = Laplace(wide()).fit([first, second])
    V = torch.randn(len(fitted.mean), 5, generator=g, dtype=torch.float64)
    oracle.close(updated.posterior.precision @ V, fitted.posterior.precision @ V, 1e-10)
    has_few_rows = second_size == 20
    assert (updated.posterior.curvature.blocks["0.weight"].U_A.shape[1] < 300) == has_few_rows


@pytest.mark.parametrize(("groups", "channels", "rank"), [(2, 4, 3), (4, 16, 1), (2, 64, 2)])
def test_an_ekfac_update_of_groups_along_few_directions(groups, channels, rank):
    torch.manual_seed(0)
    layers = nn.Conv2d(channels, channels, 2, groups=groups), nn.Flatten(), nn.Linear(channels, 3)
    model = nn.Sequential(nn.Unflatten(1, (channels, 2, 2)), *layers).double().eval()
    g = torch.Generator().manual_seed(4)
    x = torch.randn(24, 4 * channels, generator=g, dtype=torch.float64)
    y = torch.randint(3, (24,), generator=g)
    la = Laplace(model, curvature="ekfac", params=["1.weight"], rank=rank).fit([(x[:12], y[:12])])
    earlier = la.posterior.curvature.blocks["1.weight"]
    updated = la.update([(x[12:], y[12:])]).posterior.curvature.blocks["1.weight"]
    ggn = oracle.ggn_block(model, x, "classification", "1.weight")
    trace = (updated.magnitudes * updated.multiplicities).sum()
    torch.testing.assert_close(trace, ggn.trace(), rtol=1e-10, atol=0)
    # The leading direction of each group is not part of an eigenspace.
    size = len(ggn) // groups
    for group in range(groups):
        entries = slice(group * size, (group + 1) * size)
        leading = torch.kron(earlier.U_G[group, :, 0], earlier.U_A[group, :, 0])
        exact = leading @ ggn[entries, entries] @ leading
        oracle.close(updated.magnitudes[group, 0, 0], exact, 1e-10)


@pytest.mark.parametrize("rank", [2, 0.9])
def test_a_rank_keeps_the_trace_of_all_data(rank):
    g = torch.Generator().manual_seed(4)
    x = torch.randn(30, 300, generator=g, dtype=torch.float64)
    y = torch.randint(3, (30,), generator=g)
    updated = Laplace(wide(), rank=rank).fit([(x[:12], y[:12])]).update([(x[12:], y[12:])])
    fitted = Laplace(wide()).fit([(x, y)])
    for name, block in fitted.posterior.curvature.blocks.items():
        truncated = updated.posterior.curvature.blocks[name]
        trace = (truncated.magnitudes * truncated.multiplicities).sum()
        expected = (block.magnitudes * block.multiplicities).sum()
        torch.testing.assert_close(trace, expected, rtol=1e-10, atol=0)


def kronecker_factors(block):
    """G and A of a Kronecker product, up to one scale."""
    dense = block.to_dense().reshape(*block.sizes, *block.sizes)
    return torch.einsum("iaja->ij", dense), torch.einsum("iaib->ab", dense)


@pytest.mark.parametrize("mode", ["mini", "debiased", "crossfit"])
def test_kfac_of_few_batches_is_averaged_factor_by_factor(mode):
    batches = [(x, y) for x, y in zip(FIRST[0].split(7), FIRST[1].split(7), strict=True)]
    la = laplace("kfac").fit(batches, mode=mode, num_data=14)
    traces = [scales.trace_A for scales in la.posterior.factor_scales.values()]
    earlier = [kronecker_factors(b) for b in la.posterior.curvature.blocks.values()]
    second = laplace("kfac").fit([SECOND])
    la.update([SECOND])
    measured_on = UNION[0][7:14] if mode == "debiased" else UNION[0][:7]
    hidden = torch.tanh(la.model[0](measured_on))
    expected_traces = [
        measured_on.square().sum(1).mean(), torch.ones(()), hidden.square().sum(1).mean(),
        torch.ones(()),
    ]  # fmt: skip
    torch.testing.assert_close(torch.stack(traces), torch.stack(expected_traces).double())
    for (name, block), (G, A), trace in zip(
        la.posterior.curvature.blocks.items(), earlier, traces, strict=True
    ):
        new_G, new_A = kronecker_factors(second.posterior.curvature.blocks[name])
        new_trace = second.posterior.factor_scales[name].trace_A
        factors_G = 14 * G / trace + 9 * new_G / new_trace
        scale_A = trace / A.trace() if A.trace() else 0.0
        factors_A = 14 * A * scale_A + 9 * new_A * new_trace / new_A.trace()
        oracle.close(block.to_dense(), torch.kron(factors_G, factors_A) / 23**2, 1e-9)


def factor_traces(la, name):
    """The traces of G and A."""
    block = la.posterior.curvature.blocks[name]
    trace_A = la.posterior.factor_scales[name].trace_A
    return (block.magnitudes * block.multiplicities).sum() / trace_A, trace_A


@pytest.mark.parametrize("mode", ["mini", "debiased", "crossfit"])
def test_thin_factors_of_few_batches_keep_their_scale(mode):
    g = torch.Generator().manual_seed(4)
    x = torch.randn(30, 300, generator=g, dtype=torch.float64)
    y = torch.randint(3, (30,), generator=g)
    batches = [(x[:10], y[:10]), (x[10:20], y[10:20])]
    la = Laplace(wide()).fit(batches, mode=mode, num_data=20)
    measured_on = x[10:20] if mode == "debiased" else x[:10]
    trace_G, trace_A = factor_traces(la, "0.weight")
    torch.testing.assert_close(trace_A, measured_on.square().sum(1).mean())
    new_trace_G, new_trace_A = factor_traces(Laplace(wide()).fit([(x[20:], y[20:])]), "0.weight")
    la.update([(x[20:], y[20:])])
    updated_trace_G, updated_trace_A = factor_traces(la, "0.weight")
    torch.testing.assert_close(updated_trace_A, (2 * trace_A + new_trace_A) / 3)
    torch.testing.assert_close(updated_trace_G, (2 * trace_G + new_trace_G) / 3)


def test_the_last_layer_is_updated():
    updated = laplace("kfac", params="last_layer").fit([FIRST]).update([SECOND])
    assert_same(updated, laplace("kfac", params="last_layer").fit([FIRST, SECOND]))


def test_a_fit_in_rounds_is_updated():
    x, y = examples(400, 12)
    loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
    generator = torch.Generator().manual_seed(0)
    la = laplace("kfac").fit(Auto(loader, tolerance=0.5, examples=300), generator=generator)
    trace = la.posterior.factor_scales["0.weight"].trace_A
    new_fit = laplace("kfac").fit([SECOND])
    new_trace = new_fit.posterior.factor_scales["0.weight"].trace_A
    la.update([SECOND])
    assert la.num_data == 409
    updated = la.posterior.factor_scales["0.weight"].trace_A
    torch.testing.assert_close(updated, (400 * trace + 9 * new_trace) / 409)
    with pytest.raises(RuntimeError, match='fit with `mode="auto"` creates'):
        la.fit_report


def test_diagonals_and_matrices_of_any_mode_add_up_exactly():
    batches = [(x, y) for x, y in zip(FIRST[0].split(7), FIRST[1].split(7), strict=True)]
    for curvature in ("diag", "full"):
        for mode in ("mini", "debiased", "crossfit"):
            la = laplace(curvature).fit(batches, mode=mode, num_data=1000)
            earlier = precision(la)
            new_precision = precision(laplace(curvature).fit([SECOND]))
            expected = earlier + new_precision - DELTA * torch.eye(len(earlier))
            oracle.close(precision(la.update([SECOND])), expected, 1e-10)
            assert la.num_data == 1009


@pytest.mark.parametrize("curvature", others_slow(STRUCTURES, "kfac", "ekfac"))
def test_num_data_scales_the_new_data(curvature):
    doubled = laplace(curvature).fit([FIRST]).update([SECOND], num_data=18)
    twice = laplace(curvature).fit([FIRST]).update([SECOND, SECOND])
    assert_same(doubled, twice, TOLERANCES.get(curvature, 1e-10))


@pytest.mark.parametrize("curvature", others_slow(STRUCTURES, "kfac", "lowrank"))
def test_a_loaded_posterior_is_updated_like_that_of_the_fit(curvature, tmp_path):
    la = laplace(curvature).fit([FIRST])
    la.save(tmp_path / "first.safetensors")
    loaded = Laplace.load(tmp_path / "first.safetensors", la.model)
    assert_same(loaded.update([SECOND]), la.update([SECOND]), 1e-12)
    la.save(tmp_path / "both.safetensors")
    again = Laplace.load(tmp_path / "both.safetensors", la.model)
    assert_same(again, la, 1e-15)
    third = examples(5, 9)
    assert_same(again.update([third]), la.update([third]), 1e-12)


@pytest.mark.parametrize(
    "options",
    [{"fisher": "empirical"}, {"fisher": "mc", "mc_samples": 3}, {"fisher": "signs"}],
    ids=lambda options: options["fisher"],
)
def test_a_loaded_posterior_is_updated_with_the_fisher_matrix_of_the_fit(options, tmp_path):
    la = laplace("diag", **options).fit([FIRST], generator=torch.Generator().manual_seed(0))
    la.save(tmp_path / "posterior.safetensors")
    loaded, exact, one_sample = (
        Laplace.load(tmp_path / "posterior.safetensors", network(), **overrides)
        for overrides in ({}, {"fisher": "exact"}, {"fisher": "mc"})
    )
    for posterior in (la, loaded, exact, one_sample):
        posterior.update([SECOND], generator=torch.Generator().manual_seed(1))
    assert torch.equal(precision(loaded), precision(la))
    for different in (exact, one_sample):
        assert not torch.allclose(precision(different), precision(la), rtol=1e-3)
    with pytest.raises(ValueError, match="applies only to"):
        Laplace.load(tmp_path / "posterior.safetensors", network(), fisher="exact", mc_samples=2)


@pytest.mark.parametrize("curvature", others_slow(STRUCTURES, "kfac"))
def test_a_tuned_noise_stays_and_scales_the_new_data(curvature):
    x, _ = UNION
    y = 0.3 * torch.randn(23, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    options = {"rank": 60} if curvature == "lowrank" else {}

    def regression(sigma):
        return Laplace(network(), "regression", curvature, sigma=sigma, **options)

    la = regression(1.0).fit([(x[:14], y[:14])])
    la.tune_evidence(sigma=True)
    sigma = float(la.sigma)
    delta = la.prior_precision
    la.update([(x[14:], y[14:])])
    assert float(la.sigma) == sigma
    torch.testing.assert_close(la.prior_precision, delta)
    directions = regression(sigma).fit([(x[:14], y[:14])])
    expected = directions.update([(x[14:], y[14:])])
    expected.prior_precision = delta
    assert_same(la, expected, TOLERANCES.get(curvature, 1e-9))
    la.tune_evidence(sigma=True)
    expected.tune_evidence(sigma=True)
    torch.testing.assert_close(la.sigma, expected.sigma, rtol=1e-5, atol=0)


def test_an_assumed_noise_is_neither_estimated_again_nor_warned_of():
    x, _ = UNION
    y = torch.randn(23, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    with pytest.warns(UserWarning, match="estimated from the residuals"):
        la = Laplace(network(), "regression").fit([(x[:14], y[:14])])
    sigma = la.sigma
    la.update([(x[14:], y[14:])])
    torch.testing.assert_close(la.sigma, sigma)


def test_weighted_examples_add_their_weights():
    weights = torch.full((9,), 2.0, dtype=torch.float64)
    la = laplace("kfac").fit([FIRST]).update([(*SECOND, weights)])
    assert_same(la, laplace("kfac").fit([FIRST]).update([SECOND, SECOND]))


def test_tuning_and_evaluation_follow_an_update():
    updated = laplace("kfac").fit([FIRST]).update(DataLoader(TensorDataset(*SECOND), batch_size=4))
    fitted = laplace("kfac").fit([FIRST, SECOND])
    held_out = [examples(120, 11)]
    tuned = updated.tune(held_out)
    assert tuned.prior_precision == fitted.tune(held_out).prior_precision
    torch.testing.assert_close(
        updated.evaluate(held_out)["nll"].value, fitted.evaluate(held_out)["nll"].value
    )
    theta = updated.sample(3, torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        updated.posterior.log_prob(theta), fitted.posterior.log_prob(theta), rtol=1e-9, atol=1e-9
    )


def test_what_cannot_be_updated_is_refused_before_work_starts(tmp_path):
    with pytest.raises(RuntimeError, match="not fitted yet"):
        laplace("kfac").update([SECOND])
    thin = Laplace(wide(), prior_precision=100.0)
    x = torch.randn(8, 300, dtype=torch.float64)
    thin.fit([(x, torch.arange(8) % 3)]).thin(x, error=0.5)
    with pytest.raises(ValueError, match="saved before `thin`"):
        thin.update([(x, torch.arange(8) % 3)])
    la = laplace("kfac").fit([FIRST])
    with pytest.raises(TypeError, match="Pass a DataLoader"):
        la.update(SECOND[0])
    with pytest.raises(ValueError, match="at least one batch"):
        la.update([])
    with torch.no_grad():
        la.model[0].weight += 1
    with pytest.raises(RuntimeError, match="changed since the fit"):
        la.update([SECOND])
