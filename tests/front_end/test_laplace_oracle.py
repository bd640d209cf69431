"""`Laplace` against the dense float64 oracle: every step of the method, for every small network."""

import re
from dataclasses import replace

import oracle
import pytest
import torch
from cases import one_axis_at_a_time
from torch import nn
from torch.func import functional_call

from laplace_debias import Laplace
from laplace_debias.curvature.layers.backends import why_not_backpack
from laplace_debias.laplace.functional.linearised import moments
from laplace_debias.laplace.functional.sampled_outputs import linearised_outputs, network_outputs

NUM_DATA = 40
DELTA = 0.7
MODES = ["debiased", "full", "mini"]


def close(actual, expected, tolerance=1e-8):
    scale = expected.abs().max().clamp_min(1e-12)
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * scale


class Case:
    """A small network, two halves of its data, and the package's fit."""

    def __init__(self, name, **options):
        self.model, self.x, self.y, self.likelihood, self.sigma = oracle.SMALL_MODELS[name]()
        self.first = (self.x[:3], self.y[:3])
        self.second = (self.x[3:], self.y[3:])
        self.la = Laplace(
            self.model, self.likelihood, prior_precision=DELTA, sigma=self.sigma, **options
        )

    def fit(self, mode):
        loader = [self.first, self.second]
        return self.la.fit(loader, mode=mode, num_data=NUM_DATA)

    def data(self, mode):
        """The inputs that directions and magnitudes come from."""
        if mode == "full":
            return self.x, self.x
        if mode == "debiased":
            return self.first[0], self.second[0]
        return self.first[0], self.first[0]

    def factors(self, x, layer):
        return oracle.kfac_factors(self.model, x, self.likelihood, layer, self.sigma)

    def dense_blocks(self, mode, curvature):
        """The oracle's blocks, by projectors onto eigenspaces, which do not depend on a basis."""
        directions, magnitudes = self.data(mode)
        blocks = []
        for name in self.la.posterior.curvature.blocks:
            layer, _, role = name.rpartition(".")
            direction_factors = self.factors(directions, layer)
            magnitude_factors = self.factors(magnitudes, layer)
            if role == "bias":
                unit = torch.ones(1, 1, dtype=torch.float64)
                direction_factors = {"A": unit, "G": direction_factors["bias"]}
                magnitude_factors = {"A": unit, "G": magnitude_factors["bias"]}
            if curvature == "kfac":
                measured = oracle.kfac_block(magnitude_factors)
            else:
                measured = oracle.ggn_block(
                    self.model, magnitudes, self.likelihood, name, self.sigma
                )
            blocks.append(oracle.pooled_block(direction_factors, measured))
        return blocks


def operator_blocks(la):
    return [block.to_dense() for block in la.posterior.curvature.blocks.values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode", "curvature"), one_axis_at_a_time(oracle.SMALL_MODELS, MODES, ["ekfac", "kfac"])
)
def test_curvature_equals_the_dense_construction(name, mode, curvature):
    case = Case(name, curvature=curvature)
    case.fit(mode)
    dense = case.dense_blocks(mode, curvature)
    for actual, expected in zip(operator_blocks(case.la), dense, strict=True):
        close(actual, expected)


@pytest.mark.parametrize("name", oracle.SMALL_MODELS)
def test_full_kfac_is_the_kronecker_product_of_the_factors(name):
    case = Case(name)
    case.fit("full")
    for block, actual in zip(case.la.block_names, operator_blocks(case.la), strict=True):
        layer, _, role = block.rpartition(".")
        factors = case.factors(case.x, layer)
        expected = factors["bias"] if role == "bias" else oracle.kfac_block(factors)
        close(actual, expected)


@pytest.mark.parametrize(("name", "mode"), one_axis_at_a_time(oracle.SMALL_MODELS, MODES))
def test_functional_covariance_equals_dense_jacobians(name, mode):
    case = Case(name)
    la = case.fit(mode)
    covariance = oracle.posterior_covariance(operator_blocks(la), NUM_DATA, DELTA)
    J = oracle.flat_jacobian(case.model, case.x, la.param_names)
    mean, actual = la.functional(case.x)
    close(mean, case.model(case.x).detach())
    close(actual, oracle.functional_covariance(J, covariance))
    close(la.functional(case.x, diagonal=True)[1], actual.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize(("name", "mode"), one_axis_at_a_time(oracle.SMALL_MODELS, MODES))
def test_log_marginal_likelihood_includes_every_constant(name, mode):
    case = Case(name)
    la = case.fit(mode)
    x = case.x
    if mode == "mini":
        x = x[:3]
    nll = oracle.nll(case.likelihood, case.model(x), case.y[: len(x)], case.sigma)
    precision = oracle.posterior_precision(operator_blocks(la), NUM_DATA, DELTA)
    theta = oracle.flat_parameters(case.model, la.param_names)
    expected = oracle.log_marginal_likelihood(
        nll.sum() * NUM_DATA / len(x), theta, precision, torch.full_like(theta, DELTA)
    )
    close(la.log_marginal_likelihood(), expected.detach())


@pytest.mark.parametrize("name", ["conv2d", "regression_per_output"])
def test_posterior_products_and_sample_root_are_dense_ones(name):
    case = Case(name)
    posterior = case.fit("debiased").posterior
    dense = oracle.posterior_covariance(operator_blocks(case.la), NUM_DATA, DELTA)
    close(posterior.covariance.to_dense(), dense)
    close(posterior.precision.to_dense(), torch.linalg.inv(dense))
    root = posterior.scale.to_dense()
    close(root @ root.T, dense)
    # A sample is the mean plus the root's block structure times a standard normal vector.
    draws = case.la.sample(3, torch.Generator().manual_seed(1))
    noise = torch.randn(
        3, len(dense), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    for draw, z in zip(draws - case.la.mean, noise, strict=True):
        mahalanobis = draw @ torch.linalg.inv(dense) @ draw
        close(mahalanobis, z @ z)


def test_a_linear_regression_is_exact():
    """Evidence and predictive covariance are those of the Gaussian process, in closed form."""
    model = torch.nn.Linear(3, 2).double()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, generator=g, dtype=torch.float64)
    x_new = torch.randn(4, 3, generator=g, dtype=torch.float64)
    y = torch.randn(6, 2, generator=g, dtype=torch.float64)
    sigma = torch.tensor([0.3, 1.5])
    J = oracle.flat_jacobian(model, x, ["weight", "bias"]).flatten(0, 1)
    J_new = oracle.flat_jacobian(model, x_new, ["weight", "bias"]).flatten(0, 1)
    noise = sigma.double().square().repeat(6)
    precision = J.T @ (J / noise[:, None]) + DELTA * torch.eye(8).double()
    mode = torch.linalg.solve(precision, J.T @ (y.flatten() / noise))
    torch.nn.utils.vector_to_parameters(mode, model.parameters())
    la = Laplace(model, "regression", "full", sigma=sigma, prior_precision=DELTA).fit([(x, y)])
    kernel = J @ J.T / DELTA + noise.diag()
    marginal = torch.distributions.MultivariateNormal(torch.zeros(12).double(), kernel)
    close(la.log_marginal_likelihood(), marginal.log_prob(y.flatten()))
    covariance_between = J_new @ J.T / DELTA
    expected = J_new @ J_new.T / DELTA - covariance_between @ torch.linalg.solve(
        kernel, covariance_between.T
    )
    close(la.functional(x_new, joint=True)[1].reshape(8, 8), expected)


@pytest.mark.parametrize("points", [1, 2, 9])
def test_grids_of_covariances_equal_one_posterior_each(points):
    """Few and many prior precisions take different routes."""
    case = Case("conv2d")
    la = case.fit("debiased")
    grid = torch.logspace(-3, 3, points).double()
    deltas = grid[:, None].expand(-1, len(la.block_names)) * torch.rand(len(la.block_names))
    for kind in ("covariance", "variances"):
        _, covariances = moments(la._state, case.x, deltas, kind)
        for point, covariance in zip(deltas, covariances, strict=True):
            la.prior_precision = point
            close(covariance, la.functional(case.x, diagonal=kind == "variances")[1])


def test_sample_covariance_converges_to_the_posterior_covariance():
    case = Case("regression")
    la = case.fit("debiased")
    dense = oracle.posterior_covariance(operator_blocks(la), NUM_DATA, DELTA)
    draws = la.sample(200_000, torch.Generator().manual_seed(0))
    error = torch.cov(draws.T) - dense
    # The standard error of a Gaussian's sample covariance entry (Wishart).
    deviation = ((dense**2 + torch.outer(dense.diag(), dense.diag())) / len(draws)).sqrt()
    assert (error.abs() / deviation).max() < 5.5
    assert ((draws.mean(0) - la.mean).abs() / (dense.diag() / len(draws)).sqrt()).max() < 5


@pytest.mark.parametrize(
    ("name", "curvature"), one_axis_at_a_time(oracle.SMALL_MODELS, ["kfac", "ekfac"])
)
def test_debiased_with_the_same_batch_twice_is_mini(name, curvature):
    mini = Case(name, curvature=curvature)
    twice = Case(name, curvature=curvature)
    mini.fit("mini")
    twice.la.fit_batches([twice.first], [twice.first], num_data=NUM_DATA)
    for actual, expected in zip(operator_blocks(twice.la), operator_blocks(mini.la), strict=True):
        close(actual, expected, 1e-10)


@pytest.mark.parametrize("name", oracle.SMALL_MODELS)
def test_one_datum_with_one_position_gives_the_exact_ggn(name):
    """K-FAC is exact for a single example where a layer has a single position."""
    model, x, y, likelihood, sigma = oracle.SMALL_MODELS[name]()
    la = Laplace(model, likelihood, sigma=sigma).fit_batches([(x[:1], y[:1])])
    checked = 0
    for block in la.block_names:
        layer, _, role = block.rpartition(".")
        a, _ = oracle.layer_statistics(model, x[:1], likelihood, layer, sigma)
        if role == "bias" or a.shape[1] == 1:
            exact = oracle.ggn_block(model, x[:1], likelihood, block, sigma)
            close(la.posterior.curvature.blocks[block].to_dense(), exact)
            checked += 1
    assert checked


FOR_BACKPACK = [
    name for name, make in oracle.SMALL_MODELS.items() if why_not_backpack(make()[0]) is None
]


@pytest.mark.parametrize("name", FOR_BACKPACK)
def test_backends_agree(name):
    backpack = Case(name, backend="backpack").fit("full")
    hooks = Case(name, backend="hooks").fit("full")
    for actual, expected in zip(operator_blocks(hooks), operator_blocks(backpack), strict=True):
        close(actual, expected, 1e-10)


@pytest.mark.parametrize("backend", ["backpack", "hooks"])
@pytest.mark.parametrize("fisher", ["mc", "empirical"])
def test_other_fishers_use_the_gradients_of_labels(fisher, backend):
    """With one Linear layer the G factor is the mean outer product of the label gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3)).double().eval()
    x = torch.randn(5000, 4).double()
    y = torch.randint(3, (5000,))
    la = Laplace(model, fisher=fisher, backend=backend)
    la.fit_batches([(x, y)], generator=torch.Generator().manual_seed(0))
    actual = la.posterior.curvature.blocks["0.bias"].to_dense()
    p = model(x).softmax(1).detach()
    if fisher == "empirical":
        g = p - torch.nn.functional.one_hot(y, 3)
        close(actual, g.T @ g / len(x))
    else:
        exact = torch.diag(p.mean(0)) - p.T @ p / len(x)
        assert (actual - exact).abs().max() < 4 * 0.5 / len(x) ** 0.5


def test_mc_labels_do_not_depend_on_the_batch_size():
    case = Case("conv2d", fisher="mc", mc_samples=2)
    blocks = []
    for size in (6, 2, 1):
        batches = list(zip(case.x.split(size), case.y.split(size), strict=True))
        case.la.fit_batches(batches, generator=torch.Generator().manual_seed(3))
        blocks.append(operator_blocks(case.la))
    for blocks_of_small_batches in blocks[1:]:
        for actual, expected in zip(blocks_of_small_batches, blocks[0], strict=True):
            close(actual, expected, 1e-10)


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
@pytest.mark.parametrize("name", ["conv2d_all", "regression"])
def test_results_do_not_depend_on_the_memory_bound(name, curvature):
    """The tightest bound cuts the cotangents of a single example, too."""
    tightest = _needed_bytes(lambda: Case(name, memory_bound=1).fit("full"))
    case = Case(name, memory_bound=tightest, curvature=curvature)
    x = case.x
    tight = case.fit("full")
    wide = Case(name, memory_bound=2**28, curvature=curvature).fit("full")
    for actual, expected in zip(operator_blocks(wide), operator_blocks(tight), strict=True):
        close(actual, expected, 1e-10)
    for diagonal in (False, True):
        tight._state = bounded(tight.fitted, 1)
        needed = _needed_bytes(lambda d=diagonal: tight.functional(x, d))
        tight._state = bounded(tight.fitted, needed)
        close(tight.functional(x, diagonal)[1], wide.functional(x, diagonal)[1], 1e-10)


def bounded(fitted, memory_bound):
    return replace(fitted, config=replace(fitted.config, memory_bound=memory_bound))


def _needed_bytes(compute):
    """The number of bytes that the error about a small memory bound asks for."""
    with pytest.raises(ValueError, match=r"`memory_bound=.*` is smaller") as error:
        compute()
    return int(re.search(r"needs? (\d+) bytes", str(error.value))[1])


@pytest.mark.parametrize("name", ["conv2d", "mlp_tanh", "binary", "regression"])
def test_linearised_samples_follow_the_dense_jacobian(name):
    case = Case(name)
    la = case.fit("full")
    draws = la.sample(11, torch.Generator().manual_seed(0))
    J = oracle.flat_jacobian(case.model, case.x, la.param_names)
    expected = case.model(case.x).detach() + torch.einsum("bcd,sd->sbc", J, draws - la.mean)
    close(linearised_outputs(case.model, la.param_names, case.x, draws), expected)
    sampled = network_outputs(case.model, la.param_names, case.x, draws)
    shapes = [case.model.get_parameter(n).shape for n in la.param_names]
    for draw, outputs in zip(draws, sampled, strict=True):
        entries = draw.split([shape.numel() for shape in shapes])
        values = {n: v.view(s) for n, v, s in zip(la.param_names, entries, shapes, strict=True)}
        close(outputs, functional_call(case.model, values, (case.x,)).detach())


def slow_crossfit(factors, sizes):
    """Cross-fitted magnitudes of one factor, written out fold by fold and vector by vector."""
    magnitudes_of_folds = []
    for fold, (factor, size) in enumerate(zip(factors, sizes, strict=True)):
        sum_of_other_folds = sum(
            factors[other] * sizes[other] for other in range(len(factors)) if other != fold
        )
        _, vectors = oracle.eigen(sum_of_other_folds / (sum(sizes) - size))
        magnitudes_of_folds.append([size / sum(sizes) * (u @ factor @ u) for u in vectors.T])
    return torch.stack([sum(values) for values in zip(*magnitudes_of_folds, strict=True)])


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_crossfit_kfac_equals_a_slow_loop(likelihood):
    """On a network whose factors have full rank, so that every eigenbasis is unique."""
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 4)
    ).double()
    x = torch.randn(50, 4).double()
    y = torch.randint(4, (50,))
    if likelihood == "regression":
        y = torch.randn(50, 4).double()
    sigma = 1.0 if likelihood == "regression" else None
    la = Laplace(model.eval(), likelihood, sigma=sigma).fit_batches(
        [(x[:20], y[:20]), (x[20:], y[20:])], folds=3
    )
    sizes = [17, 17, 16]
    for layer in ("0", "2"):
        folds = [oracle.kfac_factors(model, x[k::3], likelihood, layer, sigma) for k in range(3)]
        factors = oracle.kfac_factors(model, x, likelihood, layer, sigma)
        weight = la.posterior.curvature.blocks[f"{layer}.weight"]
        assert oracle.diagonalises(weight.U_G, factors["G"])
        assert oracle.diagonalises(weight.U_A, factors["A"])
        expected = torch.outer(
            slow_crossfit([f["G"] for f in folds], sizes),
            slow_crossfit([f["A"] for f in folds], sizes),
        )
        # The softmax has a direction without curvature, along which any sign of rounding may stand.
        close(weight.magnitudes, expected, 1e-10)
        bias = la.posterior.curvature.blocks[f"{layer}.bias"]
        close(bias.magnitudes[:, 0], slow_crossfit([f["bias"] for f in folds], sizes), 1e-10)


def test_crossfit_needs_enough_examples():
    case = Case("regression")
    with pytest.raises(ValueError, match="2 to 6 folds, got 7"):
        case.la.fit_batches([(case.x, case.y)], folds=7)
    with pytest.raises(ValueError, match="Remove `magnitudes="):
        case.la.fit_batches([case.first], [case.second], folds=2)


@pytest.mark.parametrize(
    ("curvature", "num_positions", "tolerance"),
    [
        ("kfac", 1, 1e-11),  # A product of two vectors per output, exact.
        ("ekfac", 2, 2e-4),  # Columns that share a weight: within 5 % by construction.
    ],
)
def test_covariances_of_a_grid_of_wide_blocks_are_the_dense_ones(
    curvature, num_positions, tolerance
):
    torch.manual_seed(0)
    layers = [nn.Linear(190, 180), nn.Tanh(), nn.Flatten(), nn.Linear(180 * num_positions, 3)]
    model = nn.Sequential(*layers).double().eval()
    x = torch.randn(600, num_positions, 190).double()
    y = torch.randint(3, (600,))
    la = Laplace(model, curvature=curvature, params="weights").fit([(x, y)])
    grid = torch.logspace(-4, 8, 13, dtype=torch.float64)
    _, covariances = moments(la.fitted, x[:4], grid)
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    for example in range(4):
        outputs = model(x[example : example + 1])[0]
        expected = torch.zeros(len(grid), 3, 3).double()
        for block, weight in zip(la.posterior.curvature.blocks.values(), weights, strict=True):
            J = torch.stack([torch.autograd.grad(f, weight, retain_graph=True)[0] for f in outputs])
            eigen_jacobian = (block.U_G.T @ J @ block.U_A).flatten(1)
            for point, delta in enumerate(grid):
                variances = 1 / (600 * block.magnitudes.flatten() + delta)
                expected[point] += (eigen_jacobian * variances) @ eigen_jacobian.T
        errors = (covariances[:, example] - expected).flatten(1).norm(dim=1)
        assert (errors < tolerance * expected.flatten(1).norm(dim=1)).all()
    # The chosen value has the same score when it is evaluated by itself.
    held_out = torch.randn(300, num_positions, 190).double()
    data = [(held_out, torch.multinomial(model(held_out).softmax(1), 1)[:, 0])]
    tuned = la.tune(data)
    assert la.evaluate(data)["nll"] == pytest.approx(tuned.value, rel=1e-5)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "lowrank", "full", "gp"])
def test_matrices_of_the_posterior_are_indexed_by_parameters(curvature, joint, tmp_path):
    if joint and curvature in ("lowrank", "full", "gp"):
        pytest.skip("a single block cannot be joint")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double().eval()
    data = [(torch.randn(20, 3, dtype=torch.float64), torch.arange(20) % 2)]
    la = Laplace(model, curvature=curvature, joint=joint).fit(data)
    la.save(tmp_path / "posterior.safetensors")
    for posterior in (
        la.posterior,
        Laplace.load(tmp_path / "posterior.safetensors", model).posterior,
    ):
        for matrix in (posterior.covariance, posterior.precision, posterior.scale):
            dense = matrix.to_dense()
            close(matrix["0.weight", "2.bias"].to_dense(), dense[:15, 30:])
            close(matrix["0.bias", "0.bias"].to_dense(), dense[15:20, 15:20])
            with pytest.raises(KeyError, match=r"names \['0.weight', '0.bias', '2.weight'"):
                matrix["bias", "bias"]
