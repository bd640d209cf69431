"""A posterior is finite and correct at any scale, or fitting it raises an error that says why."""

import math

import oracle
import pytest
import torch
from cases import one_axis_at_a_time
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature.fits import dense as whole
from laplace_debias.laplace.state import posterior
from laplace_debias.laplace.state.posterior import GaussianPosterior
from laplace_debias.laplace.state.prior import Prior
from laplace_debias.operators import BlockDiagonal, EigenKronecker, LowRankPlusDiagonal

CURVATURES = ["kfac", "ekfac", "diag", "lowrank", "full"]
MODES = ["mini", "full", "debiased", "crossfit"]
DELTA = 0.7

pytest_unchecked = pytest.mark.usefixtures("unchecked")


def classifier():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).eval()


def two_batches():
    torch.manual_seed(4)
    return [(torch.randn(4, 3), torch.zeros(4).long()) for _ in range(2)]


def fit(la, batches, mode):
    if mode == "debiased":
        return la.fit_batches(batches[:1], batches[1:], num_data=40)
    folds = 2 if mode == "crossfit" else None
    return la.fit_batches(batches[:1] if mode == "mini" else batches, folds=folds, num_data=40)


# ------------------------------------------------- no curvature at all: the prior


def saturated():
    """A classifier whose softmax is 0 or 1 to the last digit of single precision."""
    model = classifier()
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([300.0, 0.0, -300.0]))
    return model


def assert_is_the_prior(la, x, num_seen):
    size = len(la.mean)
    P = la.posterior.precision.to_dense()
    torch.testing.assert_close(P, DELTA * torch.eye(size))
    J = oracle.flat_jacobian(la.model, x, la.param_names).double()
    # Units in the last place of sums of squares of `size` numbers.
    torch.testing.assert_close(la.functional(x)[1].double(), J @ J.mT / DELTA, rtol=1e-5, atol=1e-6)
    variances = la.functional(x, diagonal=True)[1].double()
    torch.testing.assert_close(variances, J.square().sum(2) / DELTA, rtol=1e-5, atol=0)
    draws = la.sample(2000, torch.Generator().manual_seed(0)) - la.mean
    assert draws.square().mean().item() == pytest.approx(1 / DELTA, rel=0.05)
    # −Σℓ + log N(θ*; 0, 1/δ) + D/2 log 2π − D/2 log δ
    expected = -0.5 * DELTA * la.mean.double().square().sum()
    torch.testing.assert_close(la.log_marginal_likelihood(), expected, rtol=1e-6, atol=1e-5)
    assert la.predict(x).probs.isfinite().all()
    assert num_seen == 8


@pytest.mark.parametrize(("curvature", "mode"), one_axis_at_a_time(CURVATURES, MODES))
def test_a_network_without_curvature_has_the_prior_for_a_posterior(curvature, mode, tmp_path):
    batches = two_batches()
    x = torch.cat([x for x, _ in batches])
    la = Laplace(saturated(), curvature=curvature, prior_precision=DELTA)
    assert_is_the_prior(fit(la, batches, mode), x, len(x))
    la.save(tmp_path / "posterior")
    assert_is_the_prior(Laplace.load(tmp_path / "posterior", la.model), x, len(x))


def test_compressed_rows_of_a_network_without_curvature(monkeypatch):
    batches = two_batches()
    x = torch.cat([x for x, _ in batches])
    monkeypatch.setattr(whole, "KEPT_ROWS", 0)
    la = Laplace(saturated(), curvature="lowrank", rank=1, prior_precision=DELTA)
    assert_is_the_prior(la.fit_batches(batches), x, len(x))


# ------------------------------------------------------------- infinite inputs


@pytest.mark.parametrize(
    ("curvature", "mode", "backend"), one_axis_at_a_time(CURVATURES, MODES, ["hooks", "backpack"])
)
def test_an_infinite_input_that_tanh_bounds_is_refused(curvature, mode, backend):
    # The diagonal has no directions to find: a debiased fit reads the second batch alone.
    reads_first = not (curvature == "diag" and mode == "debiased")
    places = [(0, 0), (0, 2)] if mode == "mini" else [(0, 2), (1, 1)]
    for bad_batch, example in places:
        batches = two_batches()
        batches[bad_batch][0][example, 1] = math.inf
        la = Laplace(classifier(), curvature=curvature, backend=backend)
        if bad_batch == 0 and not reads_first:
            assert fit(la, batches, mode).sample(1).isfinite().all()
            continue
        with pytest.raises(
            ValueError, match=r"0\.weight contains NaN or Inf. The inputs of layer '0'"
        ):
            fit(la, batches, mode)
        with pytest.raises(RuntimeError, match="not fitted"):
            la.posterior


def test_an_infinite_input_of_a_layer_that_is_not_bayesian_is_a_number_behind_tanh():
    posteriors = []
    for value in (math.inf, 1e4):  # tanh(1e4 w) = ±1 in single precision
        batches = two_batches()
        batches[0][0][1, 2] = value
        la = Laplace(classifier(), params=["2.weight", "2.bias"]).fit_batches(batches)
        posteriors.append(la.posterior.precision.to_dense())
    assert torch.equal(*posteriors)


# --------------------------------------------------------- what is refused where


def block_tensors():
    """Eigenvectors and magnitudes of two blocks, all in range."""
    eye = torch.eye(2)
    return {
        "first": {"U_G": eye.clone(), "U_A": torch.eye(3), "magnitudes": torch.ones(2, 3)},
        "second": {"U": torch.eye(4)[:, :2].clone(), "magnitudes": torch.ones(2)},
    }


def make_posterior(tensors, num_data=10, prior_precision=1.0, mean=None):
    first = tensors["first"]
    second = tensors["second"]
    blocks = {
        "first": EigenKronecker(first["U_G"], first["U_A"], first["magnitudes"]),
        "second": LowRankPlusDiagonal(second["U"], second["magnitudes"], 0.0),
    }
    delta = torch.as_tensor(prior_precision, dtype=torch.float64)
    mean = torch.zeros(10) if mean is None else mean
    return GaussianPosterior(mean, BlockDiagonal(blocks), num_data, Prior(delta))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("block", "tensor_name"),
    [
        ("first", "U_G"),
        ("first", "U_A"),
        ("first", "magnitudes"),
        ("second", "U"),
        ("second", "magnitudes"),
    ],
)
def test_no_part_of_a_posterior_may_be_infinite(block, tensor_name, value):
    tensors = block_tensors()
    assert make_posterior(tensors).sample(1).isfinite().all()
    tensors[block][tensor_name].view(-1)[1] = value
    kind = "curvature" if tensor_name == "magnitudes" else "eigenvectors"
    with pytest.raises(ValueError, match=f"Entries of the {kind} of {block} are NaN or Inf"):
        make_posterior(tensors)


def test_magnitudes_are_not_negative_and_the_mean_is_finite():
    tensors = block_tensors()
    tensors["second"]["magnitudes"][1] = -1e-30
    with pytest.raises(
        ValueError, match="The curvature of second is negative along some directions"
    ):
        make_posterior(tensors)
    with pytest.raises(ValueError, match="mean contains NaN or Inf"):
        make_posterior(block_tensors(), mean=torch.full((10,), math.nan))


def test_precisions_are_in_range_block_by_block():
    tiny = torch.finfo(torch.float32).tiny
    cases = [
        ([1.0, 0.9 * tiny], 1, 1.0, "prior precision of second.*too small.*float32"),
        ([1.0, 9e-30], 10**9, 1.0, "prior precision of second.*too small.*the data, 1000000000\\."),
        ([1.0, 1.1 / tiny], 1, 1.0, "precision of second is up to"),
        ([1.0, 1.0], 10, 0.11 / tiny, "precision of second is up to .*the data, 10\\."),
    ]
    for deltas, num_data, curvature, message in cases:
        tensors = block_tensors()
        tensors["second"]["magnitudes"][0] = curvature
        with pytest.raises(ValueError, match=message):
            make_posterior(tensors, num_data, deltas)
    tensors = block_tensors()
    tensors["first"]["magnitudes"][0] = 0.09 / tiny
    tensors["first"]["magnitudes"][1] = 0.0
    in_range = make_posterior(tensors, 10, [1.01 * 10 * tiny, 1.0])
    for operator, function in (
        (in_range.precision, lambda p: p),
        (in_range.covariance, torch.reciprocal),
        (in_range.scale, torch.rsqrt),
    ):
        expected = torch.tensor([0.9 / tiny] * 3 + [10.1 * tiny] * 3 + [11.0] * 2 + [1.0] * 2)
        dense = operator.to_dense()
        torch.testing.assert_close(dense, function(expected).diag(), rtol=1e-5, atol=0)
    assert in_range.sample(100, torch.Generator().manual_seed(0)).isfinite().all()


@pytest.mark.parametrize("value", [1e-300, 1e-39, 1e38, 1e300])
def test_a_prior_precision_out_of_range_is_refused_and_changes_nothing(value):
    batches = two_batches()
    message = r"too (small|large) for torch\.float32"
    with pytest.raises(ValueError, match=message):
        Laplace(classifier(), prior_precision=value).fit_batches(batches)
    la = Laplace(classifier()).fit_batches(batches)
    with pytest.raises(ValueError, match=message):
        la.prior_precision = value
    assert la.prior_precision == la.posterior.prior_precision == 1.0
    with pytest.raises(ValueError, match=r"prior precision|precision of"):
        la.tune(batches, grid=[1.0, value])
    wide = Laplace(classifier().double(), prior_precision=value)
    wide.fit_batches([(x.double(), y) for x, y in batches])
    assert wide.sample(3).isfinite().all()
    assert wide.log_marginal_likelihood().isfinite()


def test_a_prior_precision_in_range_is_refused_beside_the_curvature_that_is_there():
    la = Laplace(classifier()).fit_batches(two_batches())
    with pytest.raises(ValueError, match=r"prior precision of 0\.weight.*too small"):
        la.prior_precision = 8e-38  # N times the least normal number is 9.4e-38
    assert la.prior_precision == la.posterior.prior_precision == 1.0


def test_another_prior_precision_reads_no_block(monkeypatch):
    la = Laplace(classifier()).fit_batches(two_batches())
    expected = Laplace(classifier(), prior_precision=5.0).fit_batches(two_batches())

    def read(_):
        raise AssertionError("the blocks were read again")

    monkeypatch.setattr(posterior, "largest_curvatures", read)
    la.prior_precision = 5.0
    precisions = (each.posterior.precision.to_dense() for each in (la, expected))
    assert torch.equal(*precisions)


# ------------------------------------------------------------------ overflows elsewhere


def test_a_loss_that_overflows_is_refused():
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    x = torch.randn(3, 2)
    la = Laplace(model, "regression", sigma=1e-10)
    with pytest.raises(ValueError, match="The loss, summed over 3 examples, is inf"):
        la.fit_batches([(x, model(x).detach() + 1e15)])


def test_a_functional_covariance_that_overflows_is_refused():
    la = Laplace(nn.Linear(3, 3).eval(), prior_precision=1e-30).fit_batches(two_batches())
    assert la.functional(two_batches()[0][0])[1].isfinite().all()
    for call in (la.predict, la.functional):
        with pytest.raises(ValueError, match=r"covariance of the outputs overflows torch\.float32"):
            # Along the direction that does not change the softmax, curvature is 1e-8 of the largest
            # or less: 1e36 over that overflows, however it was rounded.
            call(torch.full((1, 3), 1e18))


def test_noise_that_is_lost_beside_the_variance_is_refused():
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 2)).eval()
    with torch.no_grad():
        model[1].weight.fill_(1.0)  # Both outputs are the same but for their noise.
    la = Laplace(model, "regression", params=["0.weight"], sigma=1e-9)
    zeros = torch.zeros(4, 1)
    la.fit_batches([(zeros, model(zeros).detach())])
    with pytest.raises(ValueError, match=r"predictive covariance is singular in torch\.float32"):
        la.predict(torch.ones(1, 1))
    assert la.predict(zeros).variance.tolist() == [pytest.approx([1e-18] * 2)] * 4


@pytest.mark.parametrize("num_data", [10**3, 10**6, 10**9, 10**12])
def test_variances_of_a_low_rank_posterior_in_single_precision(num_data):
    """The prior adds no variance along the directions, however large N λ / δ is."""
    model = piecewise_linear(torch.float32)
    x = torch.randn(3, 2)
    la = Laplace(model, "regression", "lowrank", rank=10).fit_batches(
        [(x, model(x).detach())], num_data=num_data
    )
    exact = piecewise_linear(torch.float64)
    C = oracle.ggn(exact, x.double(), "regression", la.param_names, 1.0)
    J = oracle.flat_jacobian(exact, x.double(), la.param_names)
    values, vectors = oracle.eigen(C)
    # Rows that make the curvature lie in its range: their variance is of the range alone.
    along = J @ vectors[:, :6]
    expected = (along / (num_data * values[:6] + 1.0)) @ along.mT
    # The range is known to single precision, and what is outside of it weighs 1/δ = 1.
    outside = (64 * torch.finfo(torch.float32).eps) ** 2 * J.square().sum(2).max().item()
    diagonal = expected.diagonal(dim1=1, dim2=2)
    variances = la.functional(x, diagonal=True)[1].double()
    torch.testing.assert_close(variances, diagonal, rtol=1e-4, atol=outside)
    assert (variances >= 0).all()
    torch.testing.assert_close(la.functional(x)[1].double(), expected, rtol=1e-3, atol=outside)


# ------------------------------------------------------------- any scale: right, or refused


def piecewise_linear(dtype):
    """A network whose derivatives, unlike those of tanh, do not cancel at any input scale."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)).to(dtype).eval()


def dense_blocks(la, model, x, sigma):
    """The curvature of each block in double precision; EKFAC along the package's directions."""
    curvature = la.posterior.curvature.blocks
    if list(curvature) == [whole.DENSE_BLOCK]:
        return [oracle.ggn(model, x, "regression", la.param_names, sigma)]
    blocks = []
    for name, block in curvature.items():
        exact = oracle.ggn_block(model, x, "regression", name, sigma)
        layer, _, role = name.rpartition(".")
        if block.U_G is None:
            exact = exact.diagonal().diag()
        elif role == "weight":
            factors = oracle.kfac_factors(model, x, "regression", layer, sigma)
            U = torch.kron(block.U_G.double(), block.U_A.double())
            is_kfac = la._state.config.structure.name == "kfac"
            exact = oracle.kfac_block(factors) if is_kfac else oracle.measured_block(U, exact)[0]
        blocks.append(exact)
    return blocks


def assert_right(la, x, blocks, jacobian):
    """Assert that the posterior differs from the dense one by rounding, and predicts finitely."""
    dtype = la.mean.dtype
    delta = la.prior_precision.item()
    num_data = la.num_data
    # Products and sums of a few rows, an eigendecomposition, and its rounding to the dtype.
    error = 64 * torch.finfo(dtype).eps
    tiny = torch.finfo(dtype).tiny
    expected = oracle.posterior_precision(blocks, num_data, delta)
    precision = la.posterior.precision.to_dense().double()
    start = 0
    largest = []
    for block in blocks:
        entries = slice(start, start + len(block))
        start = entries.stop
        largest.append(expected[entries, entries].diagonal().max())
        assert (
            precision[entries, entries] - expected[entries, entries]
        ).abs().max() <= error * largest[-1]
    condition = float(max(largest)) / delta
    assert la.sample(3).isfinite().all()
    assert la.log_marginal_likelihood().isfinite()
    priors = jacobian.square().sum(2) / delta
    if priors.max() > torch.finfo(dtype).max / 4:
        return
    covariance = la.functional(x.to(dtype))[1]
    variances = la.functional(x.to(dtype), diagonal=True)[1].double()
    assert covariance.isfinite().all()
    assert (variances <= priors * (1 + error) + tiny).all()
    # No eigenvalue is larger than the trace.
    bound = num_data * max(float(block.diagonal().sum()) for block in blocks) + delta
    assert (variances >= (1 - error) * delta * priors / bound - tiny).all()
    if condition * error < 1e-2:
        covariances = jacobian @ torch.linalg.solve(expected, jacobian.mT)
        scale = covariances.diagonal(dim1=1, dim2=2).amax(1)[:, None, None]
        difference = (covariance.double() - covariances).abs()
        assert (difference <= condition * error * scale + tiny).all()


def refused(la, batches, num_data):
    """Fit, and return the message of the `ValueError` that it raised, or None."""
    try:
        la.fit_batches(batches, num_data=num_data)
    except ValueError as error:
        return str(error)
    return None


# Scale of the inputs, sigma, and pairs of δ and N.
SCALES = {
    (1e-20, 1e-15): [(1e-30, 1), (1e30, 10**9)],
    (1e-20, 1e15): [(1.0, 1000)],
    (1e-8, 1.0): [(1e-30, 1), (1.0, 10**9)],
    (1.0, 1e-15): [(1.0, 1000), (1e30, 10**9)],
    (1.0, 1.0): [(1e-30, 10**9), (1.0, 1)],
    (1e8, 1.0): [(1.0, 10**9), (1e30, 1)],
    (1e20, 1e15): [(1e-30, 1), (1e30, 10**9)],
    (1e20, 1.0): [(1.0, 1000)],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("curvature", "dtype"), one_axis_at_a_time(CURVATURES, [torch.float32, torch.float64])
)
def test_at_any_scale_a_posterior_is_right_or_refused_by_name(curvature, dtype):
    model = piecewise_linear(dtype)
    exact = piecewise_linear(dtype).double()
    noise = torch.randn(3, 2, generator=torch.Generator().manual_seed(2))
    outcomes = {"right": 0, "refused": 0}
    for (scale, sigma), priors in SCALES.items():
        x = (scale * noise).to(dtype)
        jacobian, blocks = None, None
        for delta, num_data in priors:
            la = Laplace(model, "regression", curvature, sigma=sigma, prior_precision=delta)
            refusal = refused(la, [(x, model(x).detach())], num_data)
            if refusal is not None:
                names = (*la.block_names, "0.weight", "2.weight")
                assert any(f" of {name}" in refusal for name in names), refusal
                outcomes["refused"] += 1
                continue
            if blocks is None:
                jacobian = oracle.flat_jacobian(exact, x.double(), la.param_names)
                blocks = dense_blocks(la, exact, x.double(), sigma)
            assert_right(la, x, blocks, jacobian)
            outcomes["right"] += 1
    # Double precision holds all of these scales, single precision most of them.
    if dtype == torch.float64:
        assert outcomes == {"right": 14, "refused": 0}
    else:
        assert outcomes["right"] >= 8
        assert outcomes["refused"] >= 2


@pytest.mark.parametrize("curvature", CURVATURES)
def test_noise_too_small_for_the_dtype_is_refused(curvature):
    model = piecewise_linear(torch.float32)
    x = torch.randn(3, 2)
    la = Laplace(model, "regression", curvature, sigma=1e-30)
    with pytest.raises(ValueError, match=r"`sigma` is 1e-30, but its square is out of the range"):
        la.fit_batches([(x, model(x).detach())])
