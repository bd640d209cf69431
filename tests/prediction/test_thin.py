"""Posteriors of thin directions, against the dense matrices that they stand for."""

import warnings
from dataclasses import replace
from functools import partial

import oracle
import pytest
import torch
from cases import one_axis_at_a_time
from language import GPT
from networks_of_tokens import Words
from torch import nn

from laplace_debias import Gaussian, Laplace
from laplace_debias.curvature.fits import gram_factor
from laplace_debias.laplace import thinning
from laplace_debias.laplace.functional import linearised
from laplace_debias.operators import BlockDiagonal, EigenKronecker, Permuted
from laplace_debias.operators.exact import exact_trace
from laplace_debias.operators.structures.directions import is_thin

DELTA = 0.7
NUM_DATA = 30
close = partial(oracle.close, tolerance=1e-10)


def words():
    return Words(), torch.randint(6, (6, 3)), torch.randint(3, (6,))


def tagger():
    """Outputs at positions, [B, T, C]."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    return model, torch.randn(6, 3, 4), torch.randint(2, (6, 3))


def grouped():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=4), nn.Flatten(),
        nn.Linear(4, 3),
    )  # fmt: skip
    return model, torch.randn(6, 2, 4, 4), torch.randint(3, (6,))


def many_outputs():
    """An example has fewer cotangents at positions than half of the outputs of a group."""
    model = nn.Sequential(nn.Conv2d(2, 32, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    return model, torch.randn(6, 2, 3, 4), torch.randint(3, (6,))


def convolution():
    return oracle.SMALL_MODELS["conv2d_all"]()[:3]


def mlp():
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    return model, torch.randn(6, 5), torch.randint(3, (6,))


MODELS = {
    build.__name__: build for build in (convolution, mlp, words, tagger, grouped, many_outputs)
}
# The shares of the directions of G and of A that are kept, by the sides that become thin.
SHARES = {
    "both": (1 / 2, 1 / 2),
    "G": (1 / 2, 1),
    "A": (1, 1 / 2),
    "none": (0, 0),
    "all but one": (0.99, 0.99),
}


def fitted(name, **options):
    torch.manual_seed(0)
    model, x, y = MODELS[name]()
    model = model.double().eval()
    if x.is_floating_point():
        x = x.double()
    la = Laplace(model, prior_precision=DELTA, **options)
    la.fit([(x[:3], y[:3]), (x[3:], y[3:])], mode="debiased", num_data=NUM_DATA)
    return la, x


def pooled(values, dim, rank):
    """The first magnitudes along a dimension, and the mean of the others."""
    first = values.narrow(dim, 0, rank)
    remaining = values.narrow(dim, rank, values.shape[dim] - rank)
    return torch.cat([first, remaining.mean(dim, keepdim=True)], dim)


def thin_block(block, shares):
    """A block that keeps the first directions of each side that is not of axes."""
    bases = []
    magnitudes = block.magnitudes
    for dim, directions, share in zip((-2, -1), (block.U_G, block.U_A), shares, strict=True):
        if directions is None or share == 1:
            bases.append(directions)
            continue
        rank = int(share * directions.shape[-1])
        bases.append(directions[..., :rank])
        magnitudes = pooled(magnitudes, dim, rank)
    return EigenKronecker(*bases, magnitudes)


def with_blocks(la, change):
    """`la` with other curvature blocks."""
    posterior = la.posterior
    blocks = {name: change(block) for name, block in posterior.curvature.blocks.items()}
    curvature = BlockDiagonal(blocks)
    la._replace(replace(la._state, posterior=posterior.changed(curvature=curvature)))
    return la


def thin(name, sides, **options):
    """A fit with fewer directions on these sides of its blocks, a key of `SHARES`."""
    la, x = fitted(name, **options)
    return with_blocks(la, lambda block: thin_block(block, SHARES[sides])), x


EACH_CASE = pytest.mark.parametrize(
    ("name", "sides", "options"),
    one_axis_at_a_time(
        MODELS,
        SHARES,
        [
            pytest.param({}, id="kfac"),
            pytest.param({"curvature": "ekfac"}, id="ekfac"),
            pytest.param({"joint": True}, id="joint"),
            pytest.param({"params": "weights"}, id="weights"),
        ],
    ),
)


@EACH_CASE
def test_functional_covariances_are_those_of_the_dense_matrix(name, sides, options):
    la, x = thin(name, sides, **options)
    covariance = torch.linalg.inv(la.posterior.precision.to_dense())
    J = oracle.flat_jacobian(la.model, x, la.param_names)
    expected = J @ covariance @ J.mT
    _, actual = la.functional(x)
    close(actual, expected)
    variances = expected.diagonal(dim1=1, dim2=2)
    close(la.functional(x, diagonal=True)[1].flatten(1), variances)
    joint = torch.einsum("nid,de,mje->nimj", J, covariance, J)
    close(la.functional(x, joint=True)[1], joint)
    outputs = torch.tensor([[1, 0]]).expand(len(x), -1)
    close(la.functional(x, outputs=outputs)[1], expected[:, [1, 0]][:, :, [1, 0]])
    close(la.functional(x, True, outputs)[1], variances[:, [1, 0]])
    close(la.functional(x, outputs=outputs, joint=True)[1], joint[:, [1, 0]][:, :, :, [1, 0]])
    grid = torch.logspace(-2, 2, 5).double()
    for kind in ("covariance", "variances"):
        _, moments_of_grid = linearised.moments(la._state, x, grid, kind)
        for delta, moment in zip(grid, moments_of_grid, strict=True):
            la.prior_precision = delta
            close(moment, la.functional(x, diagonal=kind == "variances")[1])


@EACH_CASE
def test_the_posterior_is_that_of_its_dense_precision(name, sides, options):
    la, _ = thin(name, sides, **options)
    posterior = la.posterior
    size = len(la.mean)
    C = posterior.curvature
    if posterior.order is not None:
        C = Permuted(C, posterior.order)
    C = C.to_dense()
    dense = NUM_DATA * C + DELTA * torch.eye(size).double()
    inverse = torch.linalg.inv(dense)
    close(posterior.precision.to_dense(), dense)
    close(posterior.covariance.to_dense(), inverse)
    root = posterior.scale.to_dense()
    close(root @ root.mT, inverse)
    delta = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    value = posterior.log_det_precision(delta)
    dense_at_delta = NUM_DATA * C + 2 * torch.eye(size).double()
    close(value, torch.logdet(dense_at_delta))
    close(torch.autograd.grad(value, delta)[0], torch.linalg.inv(dense_at_delta).trace())
    # A sample is the symmetric root times the noise.
    generator = torch.Generator().manual_seed(1)
    draws = la.sample(4, generator) - la.mean
    noise = torch.randn(4, size, generator=generator.manual_seed(1), dtype=torch.float64)
    if posterior.order is not None:
        noise = torch.empty_like(noise).index_copy_(1, posterior.order, noise)
    whole, _ = fitted(name, **options)
    lengths = torch.einsum("sd,de,se->s", draws, dense, draws)
    close(lengths, noise.square().sum(1))
    whole_blocks = whole.posterior.curvature.blocks
    if all(
        block.magnitudes.shape != whole_blocks[block_name].magnitudes.shape
        for block_name, block in posterior.curvature.blocks.items()
    ):
        close(draws, noise @ root)


@pytest.mark.parametrize("name", MODELS)
def test_thin_is_whole_where_the_remaining_magnitudes_are_equal(name):
    def levelled(block):
        """The whole block with each remainder's magnitudes replaced by their mean."""
        magnitudes = block.magnitudes
        for dim, U in ((-2, block.U_G), (-1, block.U_A)):
            if U is not None:
                size = U.shape[-1]
                rank = size // 2
                first = pooled(magnitudes, dim, rank)
                remaining = first.narrow(dim, rank, 1).repeat_interleave(size - rank, dim)
                magnitudes = torch.cat([first.narrow(dim, 0, rank), remaining], dim)
        return EigenKronecker(block.U_G, block.U_A, magnitudes)

    whole, x = fitted(name)
    la, _ = thin(name, "both")
    with_blocks(whole, levelled)
    mean, covariance = la.functional(x)
    whole_mean, whole_covariance = whole.functional(x)
    close(mean, whole_mean)
    close(covariance, whole_covariance)
    close(la.log_marginal_likelihood(), whole.log_marginal_likelihood())
    close(la.posterior.covariance.to_dense(), whole.posterior.covariance.to_dense())
    trace = la.posterior.curvature.to_dense().trace()
    close(trace, fitted(name)[0].posterior.curvature.to_dense().trace())
    for per in (None, "block", "kind"):
        tuning = la.tune_evidence(per=per)
        whole_tuning = whole.tune_evidence(per=per)
        assert tuning.value == pytest.approx(whole_tuning.value, rel=1e-10)
        if per is not None:
            for row, whole_row in zip(tuning.table, whole_tuning.table, strict=True):
                expected = pytest.approx(whole_row["num_determined"], abs=1e-6)
                assert row["num_determined"] == expected


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("power", range(-6, 7, 3))
def test_small_remainders_are_not_lost_beside_large_precisions(power, diagonal):
    """Activations a millionth off the kept directions, whose precision is up to 1e12 δ."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Flatten(), nn.Linear(12, 3)).double()
    la = Laplace(model.eval(), params=["0.weight"])
    x = torch.randn(6, 3, 8).double()
    la.fit([(x, torch.randint(3, (6,)))])
    U = la.posterior.curvature.blocks["0.weight"].U_A
    kept_directions = U[:, :3]
    remaining_directions = U[:, 3:]
    magnitudes = torch.tensor([1e6 / la.num_data] * 3 + [0.0]).double().expand(4, -1).contiguous()
    with_blocks(la, lambda _: EigenKronecker(None, kept_directions, magnitudes))
    delta = 10.0**power
    la.prior_precision = delta
    kept_coordinates = torch.randn(6, 3, 3).double()
    remaining_coordinates = 1e-6 * torch.randn(6, 3, 5).double()
    x = kept_coordinates @ kept_directions.T + remaining_coordinates @ remaining_directions.T
    J = oracle.flat_jacobian(la.model, x, la.param_names).unflatten(2, (4, 8))
    J_kept = (J @ kept_directions).flatten(2)
    J_remaining = (J @ remaining_directions).flatten(2)
    # The reference computes no difference either: it uses the coordinates that x was built from.
    W = model[2].weight.unflatten(1, (3, 4))
    exact_J_remaining = torch.einsum("cto,nti->ncoi", W, remaining_coordinates).flatten(2)
    assert (exact_J_remaining - J_remaining).abs().max() < 1e-8 * J_remaining.abs().max()
    expected = J_kept @ J_kept.mT / (1e6 + delta) + exact_J_remaining @ exact_J_remaining.mT / delta
    actual = la.functional(x, diagonal)[1]
    # A difference of squares would be off by some 1e-3.
    if diagonal:
        expected = expected.diagonal(dim1=1, dim2=2)
    close(actual, expected, tolerance=1e-7)


def test_positions_of_a_language_model_go_through_its_head():
    torch.manual_seed(0)
    model = GPT(11, 6, 1, 8, 2).double().eval()
    x = torch.randint(11, (4, 6))
    la = Laplace(model, params="supported", prior_precision=DELTA)
    la.fit([(x, torch.randint(11, (4, 6)))])
    with_blocks(la, lambda block: thin_block(block, SHARES["both"]))
    expected = la.functional(x)[1].unflatten(1, (6, 11)).unflatten(3, (6, 11))
    close(la.functional(x, positions=-1)[1], expected[:, -1, :, -1])
    variances = la.functional(x, True, positions=[1, 3])[1]
    expected_variances = torch.stack(
        [expected[:, p, :, p].diagonal(dim1=1, dim2=2) for p in (1, 3)], 1
    )
    close(variances, expected_variances)


@EACH_CASE
def test_a_file_gives_the_same_posterior_again(name, sides, options, tmp_path):
    la, x = thin(name, sides, **options)
    whole, _ = fitted(name, **options)
    for saved, path in ((la, tmp_path / "thin"), (whole, tmp_path / "whole")):
        saved.save(path)
        loaded = Laplace.load(path, saved.model)
        mean, covariance = saved.functional(x)
        loaded_mean, loaded_covariance = loaded.functional(x)
        assert torch.equal(mean, loaded_mean)
        assert torch.equal(covariance, loaded_covariance)
        assert torch.equal(saved.log_marginal_likelihood(), loaded.log_marginal_likelihood())


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_an_exported_last_layer_answers_as_predict_does(likelihood, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double().eval()
    x = torch.randn(6, 5).double()
    if likelihood == "regression":
        y = torch.randn(6, 3).double()
        options = {"sigma": 0.5}
    else:
        y = torch.randint(3, (6,))
        options = {}
    la = Laplace(model, likelihood, params="last_layer", **options).fit([(x, y)])
    with_blocks(la, lambda block: thin_block(block, SHARES["both"]))
    la.export(tmp_path / "model.pt2", x)
    answers = torch.export.load(tmp_path / "model.pt2").module()(x)
    variances = la.functional(x)[1].diagonal(dim1=1, dim2=2)
    if likelihood == "regression":
        variances = variances + 0.25
    close(answers["variance"], variances)


def test_single_precision_gives_the_same_to_rounding():
    la, x = thin("convolution", "both")
    expected = la.functional(x)[1]
    model = oracle.SMALL_MODELS["conv2d_all"]()[0].float().eval()
    posterior = la.posterior
    single = Laplace(model, prior_precision=DELTA).fit([(x.float(), torch.randint(3, (len(x),)))])
    narrow = posterior.curvature.to(torch.float32)
    posterior = single.posterior.changed(curvature=narrow, num_data=posterior.num_data)
    single._replace(replace(single._state, posterior=posterior))
    covariance = single.functional(x.float())[1].double()
    close(covariance, expected, tolerance=1e-4)


def wide(likelihood="classification", num_examples=100, **options):
    """A network of two wide layers, fitted to few examples, and inputs like them."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh()).append(
        nn.Linear(30, 3)
    )
    decay = torch.logspace(0, -3, 30).double()
    x = decay * torch.randn(200, 30, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (200,), generator=generator)
    la = Laplace(model.double().eval(), likelihood, prior_precision=30.0, **options)
    return la.fit([(x[:num_examples], y[:num_examples])], num_data=100), x[100:]


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
@pytest.mark.parametrize("error", [1e-2, 1e-3])
def test_thin_finds_few_directions_and_tells_their_error(curvature, error, tmp_path):
    la, x = wide(curvature=curvature)
    la.save(tmp_path / "whole")
    whole = Laplace.load(tmp_path / "whole", la.model)
    report = la.thin(x[:40], error)
    la.save(tmp_path / "thin")

    def errors(inputs):
        """Relative error of each input's standard deviations, the largest over the outputs."""
        deviations = la.functional(inputs, True)[1].sqrt()
        whole_deviations = whole.functional(inputs, True)[1].sqrt()
        return (deviations / whole_deviations - 1).abs().amax(1)

    assert errors(x[0:40:2]).max() <= error
    errors_of_other_inputs = errors(x[1:40:2])
    assert report.num_inputs == 20
    assert report.error == pytest.approx(errors_of_other_inputs.mean().item())
    assert report.largest == pytest.approx(errors_of_other_inputs.max().item())
    # The quantile of Student's distribution of 19 degrees of freedom is 2.093.
    half_width = 2.093 * errors_of_other_inputs.std().item() / 20**0.5
    assert report.half_width == pytest.approx(half_width, rel=1e-3)
    mean_error_of_new_inputs = errors(x[40:]).mean().item()
    assert report.error / 2 < mean_error_of_new_inputs < 2 * report.error
    size = (tmp_path / "thin").stat().st_size
    whole_size = (tmp_path / "whole").stat().st_size
    assert report.share == pytest.approx(size / whole_size, abs=0.02)
    assert report.share < 0.5
    assert f"Kept {100 * report.share:.1f} % of the posterior." in report.message
    # Much fewer directions would not do, and the curvature keeps its trace.
    assert errors(x[0:40:2]).max() > error / 4
    close(exact_trace(la.posterior.curvature), exact_trace(whole.posterior.curvature))
    again, _ = wide(curvature=curvature)
    assert again.thin(x[:40], error) == report


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
def test_a_thin_posterior_is_made_thinner(monkeypatch, curvature):
    """A fit to few examples has thin factors from the start; it is thinned twice after that."""
    monkeypatch.setattr(gram_factor, "_THIN_FROM", 2)
    la, x = wide(curvature=curvature, num_examples=9)
    assert any(is_thin(block.U_A) for block in la.posterior.curvature.blocks.values())
    for error in (1e-3, 1e-1):
        deviations_before = la.functional(x[:20], True)[1].sqrt()
        trace = exact_trace(la.posterior.curvature)
        report = la.thin(x[:20], error)
        deviations_after = la.functional(x[:20], True)[1].sqrt()
        assert report.share < 1
        assert (deviations_after / deviations_before - 1)[::2].abs().max() <= error
        close(exact_trace(la.posterior.curvature), trace)


def test_less_error_keeps_more():
    shares = []
    for error in (1e-1, 1e-2, 1e-3, 1e-4):
        la, x = wide()
        shares.append(la.thin(x[:10], error).share)
    assert shares == sorted(shares)
    assert shares[0] < 0.8 * shares[-1]


@pytest.fixture
def few_steps(monkeypatch):
    """Makes a bisection that does not end an error."""
    num_steps = 0

    def counted(fitted, threshold):
        nonlocal num_steps
        num_steps += 1
        assert num_steps < 100, "the bisection does not end"
        return compress(fitted, threshold)

    compress = thinning.compress
    monkeypatch.setattr(thinning, "compress", counted)


@pytest.mark.parametrize("sigma", [1e-10, 1e-17])
def test_small_noise_in_single_precision_keeps_what_double_precision_keeps(few_steps, sigma):
    """The squared ratios of the curvature to the prior precision exceed float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).eval()
    x = torch.randn(64, 6) * torch.logspace(0, -2, 6)
    y = torch.randn(64, 2)
    shares = []
    for dtype in (torch.float64, torch.float32):
        la = Laplace(model.to(dtype), Gaussian(sigma), curvature="kfac", prior_precision=1e-3)
        report = la.fit([(x.to(dtype), y.to(dtype))]).thin(x[:20].to(dtype), 1e-2)
        shares.append(report.share)
    assert shares[1] == pytest.approx(shares[0], rel=0.2)


@pytest.mark.parametrize("error", [1e-23, 1e-160])
def test_an_error_whose_square_is_zero_keeps_nearly_everything(few_steps, error):
    la, x = wide()
    report = la.thin(x[:10], error)
    assert report.share > 0.9
    assert report.largest < 1e-12


def test_thin_looks_at_the_prior_precision_and_the_temperature_at_hand():
    shares = []
    for delta, temperature in ((30.0, 1.0), (3.0, 1.0), (3.0, 10.0)):
        la, x = wide()
        la.prior_precision = delta
        la.temperature = temperature
        report = la.thin(x[:10], 1e-2)
        shares.append(report.share)
    assert shares[0] < shares[1]
    assert shares[2] == pytest.approx(shares[0])


def test_directions_are_chosen_by_their_magnitudes_not_their_places():
    """Debiased magnitudes are not sorted."""
    la, x = wide()

    def reverse(block):
        """The block with its directions, if it has any, in reversed order."""
        U_G = block.U_G
        U_A = block.U_A
        magnitudes = block.magnitudes
        if U_G is not None:
            U_G = U_G.flip(-1)
            magnitudes = magnitudes.flip(-2)
        if U_A is not None:
            U_A = U_A.flip(-1)
            magnitudes = magnitudes.flip(-1)
        return EigenKronecker(U_G, U_A, magnitudes)

    reversed_la, _ = wide()
    with_blocks(reversed_la, reverse)
    report = la.thin(x[:10], 1e-2)
    reversed_report = reversed_la.thin(x[:10], 1e-2)
    assert report.share == reversed_report.share
    close(la.functional(x)[1], reversed_la.functional(x)[1])


def test_groups_keep_as_many_directions_each():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    x = torch.randn(40, 16, 4, 4).double()
    y = torch.randint(3, (40,))
    decay = torch.logspace(0, -1.5, 8).double()
    x *= torch.cat([decay, decay / 3])[:, None, None]
    la = Laplace(model.double().eval(), prior_precision=0.1).fit([(x, y)])
    variances = la.functional(x, True)[1]
    report = la.thin(x, 1e-2)
    U_A = la.posterior.curvature.blocks["0.weight"].U_A
    assert U_A.shape[:2] == (2, 72)
    assert 0 < U_A.shape[2] < 36
    assert ((la.functional(x, True)[1] / variances).sqrt() - 1).abs().max() < 2e-2
    assert report.share < 1


def test_thin_takes_positions_of_sequences():
    torch.manual_seed(0)
    model = GPT(11, 6, 1, 16, 2).double().eval()
    x = torch.randint(11, (8, 6))
    position_per_example = torch.arange(8)[:, None] % 6
    for positions in (-1, [1, 3], position_per_example):
        la = Laplace(model, params="weights", prior_precision=1e3)
        la.fit([(x, torch.randint(11, (8, 6), generator=torch.Generator().manual_seed(0)))])
        variances_before = la.functional(x, True, positions=positions)[1]
        report = la.thin(x, 1e-2, positions=positions)
        variances_after = la.functional(x, True, positions=positions)[1]
        assert ((variances_after / variances_before).sqrt() - 1).abs()[::2].max() <= 1e-2
        assert report.num_inputs == 4


@pytest.mark.usefixtures("unchecked")
def test_wrong_calls_of_thin():
    la, x = wide()
    with pytest.raises(RuntimeError, match="not fitted"):
        Laplace(la.model).thin(x)
    for error in (0.0, -1e-3, float("nan"), float("inf"), torch.ones(2)):
        with pytest.raises(ValueError, match="`error` must be positive and finite"):
            la.thin(x, error)
    with pytest.raises(TypeError, match="error must be a real number"):
        la.thin(x, "small")
    with pytest.raises(ValueError, match="Pass at least two inputs"):
        la.thin(x[:1])
    for curvature in ("diag", "full", "lowrank"):
        unsupported, _ = wide(curvature=curvature, params=["4.weight"])
        with pytest.raises(ValueError, match=f".kfac. or .ekfac..*'{curvature}'"):
            unsupported.thin(x)
    assert la.thin(x[:2], 1e-2).half_width == float("inf")


@pytest.mark.parametrize("mode", ["full", "debiased"])
def test_fits_to_few_examples_become_thinner(mode):
    """The remainder of a fit to few rows may have a large curvature on the second batch."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 20), nn.Tanh(), nn.Linear(20, 3)).double().eval()
    x = torch.logspace(0, -3, 300) * torch.randn(80, 300, generator=generator)
    x = x.double()
    y = torch.randint(3, (40,), generator=generator)
    for delta in (1e-3, 1.0, 1e3):
        la = Laplace(model, prior_precision=delta)
        la.fit([(x[:20], y[:20]), (x[20:40], y[20:])], mode=mode, num_data=40)
        block = la.posterior.curvature.blocks["0.weight"]
        assert block.U_A.shape[1] < 150
        variances_before = la.functional(x[40:], True)[1]
        trace = exact_trace(block)
        report = la.thin(x[40:], 1e-3)
        variances_after = la.functional(x[40:], True)[1]
        assert ((variances_after / variances_before).sqrt() - 1).abs()[::2].max() <= 1e-3
        close(exact_trace(la.posterior.curvature.blocks["0.weight"]), trace)
        assert report.share <= 1
    assert report.share < 0.6


def random_errors(seed):
    """The report of `thin` for a random network and posterior, and the errors of new inputs."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    d, h, num_extra_inputs = (
        int(torch.randint(10, 40, (1,), generator=generator)) for _ in range(3)
    )
    decades, power, bound = torch.rand(3, generator=generator).tolist()
    if seed % 2:
        model = nn.Sequential(
            nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Flatten(),
            nn.Linear(32, 3),
        )  # fmt: skip
        scale = torch.logspace(0, -2 * decades, 4)[:, None, None]
        shape = (4, 6, 6)
    else:
        model = nn.Sequential(
            nn.Linear(d, h), nn.Tanh(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 3)
        )
        scale = torch.logspace(0, -3 * decades, d)
        shape = (d,)
    sizes = 1 + torch.rand(1200, *[1] * len(shape), generator=generator)
    x = (scale * sizes * torch.randn(1200, *shape, generator=generator)).double()
    y = torch.randint(3, (200,), generator=generator)
    la = Laplace(model.double().eval(), prior_precision=10 ** (3 * power))
    mode = "debiased" if seed % 4 > 1 else "full"
    la.fit([(x[:100], y[:100]), (x[100:200], y[100:])], mode=mode, num_data=200)
    inputs_of_thinning = x[200 : 220 + num_extra_inputs]
    new_inputs = x[260:]
    variances_before = la.functional(new_inputs, True)[1]
    report = la.thin(inputs_of_thinning, 10 ** (-1 - 2 * bound))
    return report, ((la.functional(new_inputs, True)[1] / variances_before).sqrt() - 1).abs().amax(
        1
    )


@pytest.mark.slow
def test_the_interval_covers_the_error_of_new_inputs():
    cases = [random_errors(seed) for seed in range(100)]
    covered = [
        abs(errors.mean().item() - report.error) <= report.half_width for report, errors in cases
    ]
    # If each is covered with 95 %, fewer than 88 of 100 are covered once in 200 times.
    assert sum(covered) >= 88
    ratios = sorted(errors.mean().item() / report.error for report, errors in cases)
    assert ratios[50] < 2


def test_small_magnitudes_do_not_join_a_large_remainder():
    """The second batch of a debiased fit may measure a large remainder beside small magnitudes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Flatten(), nn.Linear(12, 3)).double()
    x = torch.randn(6, 3, 8).double()
    la = Laplace(model.eval(), params=["0.weight"]).fit([(x, torch.randint(3, (6,)))])
    U_A = la.posterior.curvature.blocks["0.weight"].U_A[:, :3]
    magnitudes = torch.tensor([1e3, 1e-6, 1e-6, 1e2]).double().expand(4, -1).contiguous()
    with_blocks(la, lambda _: EigenKronecker(None, U_A, magnitudes / la.num_data))
    variances_before = la.functional(x, True)[1]
    assert la.thin(x, 1e-3).error < 1e-3
    assert ((la.functional(x, True)[1] / variances_before).sqrt() - 1).abs().max() < 1e-3


@pytest.mark.parametrize("is_saved", [False, True])
def test_what_a_thin_posterior_cannot_do_is_said(is_saved, tmp_path):
    """Its evidence, and prior precisions below that of the thinning."""
    la, x = wide()
    la.prior_precision = 1.0
    data = [(x, torch.randint(3, (len(x),)))]
    full_evidence = la.log_marginal_likelihood().item()
    la.thin(x[:40], 0.1)
    if is_saved:
        la.save(tmp_path / "thin.safetensors")
        la = Laplace.load(tmp_path / "thin.safetensors", la.model)
    with pytest.warns(UserWarning, match="lower bound of its log marginal likelihood"):
        evidence = la.log_marginal_likelihood().item()
    assert evidence < full_evidence
    for per in (None, "block"):
        with pytest.raises(ValueError, match="Call `tune_evidence` before `thin`"):
            la.tune_evidence(per=per)
    smaller = la.tune(data, grid=[0.1])
    assert "thinned at the prior precision 1. At 0.1, the error" in smaller.message
    for delta in (1.0, 10.0):
        assert "thinned" not in la.tune(data, grid=[delta]).message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.prior_precision = 1.0
        la.prior_precision = torch.full((len(la.block_names),), 2.0)
    below = torch.ones(len(la.block_names))
    below[-1] = 0.1
    for value in (0.1, below):
        with pytest.warns(UserWarning, match="thinned at the prior precision 1. At 0.1, the error"):
            la.prior_precision = value
    # Another fit has all its directions again.
    la.fit(data)
    assert not any("thinned" in note for note in la.tune(data, grid=[0.1]).notes)
    assert la.tune_evidence().value > evidence


def test_the_limit_of_a_thin_regression_moves_with_its_noise():
    """At k times the noise, curvature and limit are k⁻² of what they were."""
    la, x = wide()
    model = la.model
    y = model(x).detach() + 0.1 * torch.randn(len(x), 3)
    la = Laplace(model, "regression", sigma=1.0).fit([(x, y)])
    la.thin(x[:40], 0.01)
    tuning = la.tune([(x, y)], sigma=True)
    factor = float(tuning.sigma)
    assert la.fitted.thinned_at == pytest.approx([factor**-2] * len(la.block_names))
    is_below = tuning.prior_precision < factor**-2 * (1 - 1e-6)
    assert ("was thinned" in tuning.message) == is_below
