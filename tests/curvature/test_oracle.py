"""The oracle against itself: every quantity by a second route, and the regimes of exactness."""

import oracle
import pytest
import torch
from torch import distributions, nn
from torch.func import functional_call, jacrev, jvp, vmap
from torch.nn import functional

EVERY = sorted(oracle.SMALL_MODELS)
T64 = torch.float64


def close(actual, expected, tolerance=1e-10):
    scale = max(1e-12, float(expected.detach().abs().max()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


def rand(*shape, seed=0):
    return torch.randn(*shape, dtype=T64, generator=torch.Generator().manual_seed(seed))


def names_of(model):
    return [name for name, _ in model.named_parameters()]


def sequential(*modules, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in modules:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return nn.Sequential(*modules).double().eval()


# ------------------------------------------------------------------------------ the models


@pytest.mark.parametrize("key", EVERY)
def test_small_models_are_small_seeded_and_in_float64(key):
    model, x, y, likelihood, sigma = oracle.SMALL_MODELS[key]()
    again, x2, y2, *_ = oracle.SMALL_MODELS[key]()
    assert sum(p.numel() for p in model.parameters()) < 600
    assert {p.dtype for p in model.parameters()} | {x.dtype} == {T64}
    assert isinstance(model, nn.Sequential)
    assert not model.training
    assert torch.equal(model(x), again(x2))
    assert torch.equal(y, y2)
    losses = oracle.nll(likelihood, model(x), y, sigma)
    assert losses.shape == (len(x),)
    assert losses.isfinite().all()
    # an example does not see the others
    close(torch.cat([model(x[n : n + 1]) for n in range(len(x))]), model(x), 1e-12)


def test_models_leave_the_random_state_alone():
    before = torch.get_rng_state()
    for build in oracle.SMALL_MODELS.values():
        build()
    assert torch.equal(before, torch.get_rng_state())


# ------------------------------------------------------------------------------ likelihoods


def test_nll_against_torch_distributions():
    f = rand(6, 4)
    y = torch.tensor([0, 3, 1, 2, 2, 0])
    close(
        oracle.nll("classification", f, y), -distributions.Categorical(logits=f).log_prob(y), 1e-14
    )
    for sigma in (0.6, torch.tensor([0.2, 1.0, 3.0, 0.7], dtype=T64)):
        values = rand(6, 4, seed=1)
        normal = distributions.Normal(f, torch.as_tensor(sigma, dtype=T64).expand_as(f))
        close(
            oracle.nll("regression", f, values, sigma), -normal.log_prob(values).sum(dim=1), 1e-13
        )
    labels = torch.tensor([0.0, 1, 1, 0, 1, 0], dtype=T64)
    bernoulli = distributions.Bernoulli(logits=f[:, 0])
    for targets in (labels, labels[:, None], labels.long()):
        close(oracle.nll("binary", f[:, :1], targets), -bernoulli.log_prob(labels), 1e-14)


def test_loss_hessian_against_closed_forms():
    f = rand(5, 4)
    p = f.softmax(dim=1)
    close(
        oracle.loss_hessian("classification", f),
        torch.diag_embed(p) - p[:, :, None] * p[:, None, :],
    )
    close(oracle.loss_hessian("regression", f, 0.5), 4 * torch.eye(4, dtype=T64).expand(5, 4, 4))
    sigma = torch.tensor([0.3, 1.0, 2.5, 0.8], dtype=T64)
    close(oracle.loss_hessian("regression", f, sigma), torch.diag(sigma**-2).expand(5, 4, 4))
    q = f[:, :1].sigmoid()
    close(oracle.loss_hessian("binary", f[:, :1]), (q * (1 - q))[:, :, None])


def test_loss_hessian_is_the_variance_of_the_score():
    # Fisher: E over y ~ p(y | f) of the outer product of the gradient, by summing over y
    f = rand(3, 4)
    fisher = torch.zeros(3, 4, 4, dtype=T64)
    for c in range(4):
        scores = f.softmax(dim=1) - functional.one_hot(torch.tensor(c), 4)
        fisher += f.softmax(dim=1)[:, c, None, None] * scores[:, :, None] * scores[:, None, :]
    close(oracle.loss_hessian("classification", f), fisher)


@pytest.mark.parametrize(
    ("likelihood", "num_outputs", "sigma"),
    [("classification", 4, None), ("regression", 3, 0.4), ("binary", 1, None)],
)
def test_loss_hessian_root(likelihood, num_outputs, sigma):
    f = rand(5, num_outputs)
    root = oracle.loss_hessian_root(likelihood, f, sigma)
    exact = oracle.loss_hessian(likelihood, f, sigma)
    close(root @ root.transpose(1, 2), exact)
    close((root**2).sum(dim=(1, 2)), exact.diagonal(dim1=1, dim2=2).sum(dim=1))


def test_loss_hessian_root_against_the_columns_of_the_softmax():
    # EQUATIONS: columns sqrt(p_c) (e_c - p)
    f = rand(5, 4)
    p = f.softmax(dim=1)
    columns = p.sqrt()[:, None, :] * (torch.eye(4, dtype=T64) - p[:, :, None])
    root = oracle.loss_hessian_root("classification", f)
    close(columns @ columns.transpose(1, 2), root @ root.transpose(1, 2))


# ---------------------------------------------------------------------- Jacobians, curvature


@pytest.mark.parametrize("key", EVERY)
def test_jacobians_against_vmap_and_forward_mode(key):
    model, x, *_ = oracle.SMALL_MODELS[key]()
    names = names_of(model)
    jacobians = oracle.per_example_jacobians(model, x, names)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def one(p, x_n):
        return functional_call(model, p, (x_n[None],))[0]

    batched = vmap(jacrev(one), in_dims=(None, 0))(parameters, x)
    direction = {name: rand(*p.shape, seed=3) for name, p in parameters.items()}
    _, along = jvp(lambda p: functional_call(model, p, (x,)), (parameters,), (direction,))
    for name in names:
        assert jacobians[name].shape == (*model(x).shape, *parameters[name].shape)
        close(jacobians[name], batched[name])
    flat = torch.cat([direction[name].reshape(-1) for name in names])
    close(oracle.flat_jacobian(model, x, names) @ flat, along)


@pytest.mark.parametrize("key", EVERY)
def test_ggn_against_matrix_free_products(key):
    model, x, _, likelihood, sigma = oracle.SMALL_MODELS[key]()
    names = names_of(model)
    dense = oracle.ggn(model, x, likelihood, names, sigma)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    direction = {name: rand(*p.shape, seed=4) for name, p in parameters.items()}
    flat = torch.cat([direction[name].reshape(-1) for name in names])

    # C v as the gradient of the mean of <J v held fixed, H f>
    outputs, along = jvp(lambda p: functional_call(model, p, (x,)), (parameters,), (direction,))
    told = torch.einsum("ncd,nd->nc", oracle.loss_hessian(likelihood, outputs, sigma), along)
    live = dict(model.named_parameters())
    product = torch.autograd.grad((model(x) * told.detach()).sum() / len(x), list(live.values()))
    close(dense @ flat, torch.cat([v.reshape(-1) for v in product]))
    close(dense, dense.T)
    assert torch.linalg.eigvalsh(dense)[0] > -1e-10 * dense.abs().max()


@pytest.mark.parametrize("key", EVERY)
def test_blocks_lie_on_the_joint_ggn(key):
    model, x, _, likelihood, sigma = oracle.SMALL_MODELS[key]()
    names = names_of(model)
    joint = oracle.ggn(model, x, likelihood, names, sigma)
    start = 0
    for name, p in model.named_parameters():
        end = start + p.numel()
        close(oracle.ggn_block(model, x, likelihood, name, sigma), joint[start:end, start:end])
        start = end
    assert start == len(joint)


@pytest.mark.parametrize(
    ("likelihood", "num_outputs", "sigma"),
    [
        ("classification", 3, None),
        ("regression", 3, torch.tensor([0.3, 1.0, 2.5], dtype=T64)),
        ("binary", 1, None),
    ],
)
def test_ggn_is_the_hessian_of_a_linear_model(likelihood, num_outputs, sigma):
    model = sequential(nn.Conv1d(2, num_outputs, 2), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    x = rand(6, 2, 5)
    y = oracle.any_targets(likelihood, model(x))
    names = names_of(model)
    exact = oracle.hessian(model, x, y, likelihood, names, sigma)
    close(oracle.ggn(model, x, likelihood, names, sigma), exact)


@pytest.mark.parametrize("key", ["conv2d", "mlp_tanh", "regression_per_output", "binary"])
def test_gradient_and_hessian_against_autograd_and_differences(key):
    model, x, y, likelihood, sigma = oracle.SMALL_MODELS[key]()
    names = names_of(model)
    gradient = oracle.gradient(model, x, y, likelihood, names, sigma)
    loss = oracle.nll(likelihood, model(x), y, sigma).mean()
    direct = torch.autograd.grad(loss, list(model.parameters()))
    close(gradient, torch.cat([g.reshape(-1) for g in direct]))
    hessian = oracle.hessian(model, x, y, likelihood, names, sigma)
    close(hessian, hessian.T)

    theta, v, step = oracle.flat_parameters(model, names), rand(len(gradient)), 1e-4
    mean_loss = oracle.mean_loss_of_flat(model, x, y, likelihood, names, sigma)
    second = (mean_loss(theta + step * v) - 2 * mean_loss(theta) + mean_loss(theta - step * v)) / (
        step**2
    )
    close(v @ hessian @ v, second.detach(), 1e-4)


@pytest.mark.parametrize("key", ["conv2d", "regression", "binary"])
def test_equation_5_the_ggn_of_a_partition_averages(key):
    model, x, _, likelihood, sigma = oracle.SMALL_MODELS[key]()
    names = names_of(model)
    parts = [oracle.ggn(model, x[i : i + 2], likelihood, names, sigma) for i in (0, 2, 4)]
    close(sum(parts) / 3, oracle.ggn(model, x, likelihood, names, sigma))


# -------------------------------------------------------------------------- Kronecker factors

CONVS = [
    nn.Conv1d(2, 3, 3, stride=2, padding=1),
    nn.Conv1d(2, 3, 2, dilation=2),
    nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
    nn.Conv2d(2, 3, 3, padding="same", dilation=2),
    nn.Conv2d(2, 3, 2, padding="same"),
    nn.Conv2d(2, 3, 2, padding="valid", stride=3),
    nn.Conv3d(2, 3, (2, 1, 2), stride=(1, 2, 1), padding=(1, 0, 1), dilation=(1, 1, 2)),
]


@pytest.mark.parametrize("layer", CONVS, ids=str)
def test_patches_times_weight_is_the_convolution(layer):
    layer = sequential(layer)[0]
    spatial = {1: (7,), 2: (7, 6), 3: (3, 4, 5)}[len(layer.kernel_size)]
    inputs = rand(3, 2, *spatial)
    patches = oracle.conv_patches(layer, inputs)
    weight = layer.weight.reshape(layer.out_channels, -1)
    rebuilt = (patches @ weight.T + layer.bias).transpose(1, 2)
    close(rebuilt, layer(inputs).flatten(start_dim=2))


@pytest.mark.parametrize("layer", [CONVS[2], CONVS[5]], ids=str)
def test_patches_against_unfold(layer):
    inputs = rand(3, 2, 7, 6)
    padding = (0, 0) if layer.padding == "valid" else layer.padding
    unfolded = functional.unfold(inputs, layer.kernel_size, layer.dilation, padding, layer.stride)
    assert torch.equal(oracle.conv_patches(layer, inputs), unfolded.transpose(1, 2))


@pytest.mark.parametrize("key", EVERY)
def test_statistics_give_the_exact_blocks(key):
    # the gradient of a column in the weight is sum_t g a^T; in the bias sum_t g
    model, x, _, likelihood, sigma = oracle.SMALL_MODELS[key]()
    for path in oracle.weighted_layers(model):
        a, g = oracle.layer_statistics(model, x, likelihood, path, sigma)
        per_column = torch.einsum("ntco,nti->ncoi", g, a).flatten(start_dim=2)
        block = torch.einsum("ncp,ncq->pq", per_column, per_column) / len(x)
        assert block.abs().max() > 1e-8  # no dead layer
        close(block, oracle.ggn_block(model, x, likelihood, f"{path}.weight", sigma))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("key", EVERY)
def test_bias_block_is_exact(key, sharing):
    model, x, _, likelihood, sigma = oracle.SMALL_MODELS[key]()
    for path in oracle.weighted_layers(model):
        if model.get_submodule(path).bias is None:
            continue
        factors = oracle.kfac_factors(model, x, likelihood, path, sigma, sharing)
        exact = oracle.ggn_block(model, x, likelihood, f"{path}.bias", sigma)
        assert exact.abs().max() > 1e-8
        close(factors["bias"], exact)


@pytest.mark.parametrize("key", EVERY)
def test_factors_against_einsum(key):
    model, x, _, likelihood, sigma = oracle.SMALL_MODELS[key]()
    for path in oracle.weighted_layers(model):
        a, g = oracle.layer_statistics(model, x, likelihood, path, sigma)
        num_data, num_positions = a.shape[:2]
        expand = oracle.kfac_factors(model, x, likelihood, path, sigma)
        close(expand["A"], torch.einsum("nti,ntj->ij", a, a) / num_data)
        close(expand["G"], torch.einsum("ntco,ntcp->op", g, g) / (num_data * num_positions))
        reduce = oracle.kfac_factors(model, x, likelihood, path, sigma, "reduce")
        a_mean, g_sum = a.mean(dim=1), g.sum(dim=1)
        close(reduce["A"], a_mean.T @ a_mean / num_data)
        close(reduce["G"], torch.einsum("nco,ncp->op", g_sum, g_sum) / num_data)
        if num_positions == 1:
            close(expand["A"], reduce["A"])
            close(expand["G"], reduce["G"])


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("key", ["mlp_tanh", "regression", "binary"])
def test_exact_for_one_datum_with_one_position(key, sharing):
    model, x, _, likelihood, sigma = oracle.SMALL_MODELS[key]()
    for path in oracle.weighted_layers(model):
        factors = oracle.kfac_factors(model, x[:1], likelihood, path, sigma, sharing)
        exact = oracle.ggn_block(model, x[:1], likelihood, f"{path}.weight", sigma)
        close(oracle.kfac_block(factors), exact)


def test_exact_for_one_datum_and_a_convolution_with_one_position():
    model = sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(3, 4))
    x = rand(1, 2, 3, 3)
    factors = oracle.kfac_factors(model, x, "classification", "0")
    close(oracle.kfac_block(factors), oracle.ggn_block(model, x, "classification", "0.weight"))


def test_not_exact_for_several_data():
    model, x, _, likelihood, sigma = oracle.SMALL_MODELS["mlp_tanh"]()
    block = oracle.kfac_block(oracle.kfac_factors(model, x, likelihood, "2", sigma))
    exact = oracle.ggn_block(model, x, likelihood, "2.weight", sigma)
    assert (block - exact).norm() > 0.01 * exact.norm()


@pytest.mark.parametrize("sigma", [0.5, torch.tensor([0.3, 1.0, 2.5], dtype=T64)], ids=str)
def test_exact_for_a_deep_linear_network_with_squared_loss(sigma):
    model = sequential(nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 3))
    x = rand(6, 4)
    for path in ("0", "1", "2"):
        factors = oracle.kfac_factors(model, x, "regression", path, sigma)
        exact = oracle.ggn_block(model, x, "regression", f"{path}.weight", sigma)
        close(oracle.kfac_block(factors), exact)


def test_expand_is_exact_for_a_deep_linear_network_that_answers_for_every_token():
    # 5 tokens, 3 outputs for each: the loss of an example is the sum over its tokens
    model = sequential(nn.Linear(4, 2), nn.Linear(2, 3), nn.Flatten())
    x = rand(6, 5, 4)
    for path in ("0", "1"):
        exact = oracle.ggn_block(model, x, "regression", f"{path}.weight", 0.5)
        expand = oracle.kfac_factors(model, x, "regression", path, 0.5, "expand")
        reduce = oracle.kfac_factors(model, x, "regression", path, 0.5, "reduce")
        close(oracle.kfac_block(expand), exact)
        assert (oracle.kfac_block(reduce) - exact).norm() > 0.01 * exact.norm()


def test_reduce_is_exact_for_a_deep_linear_network_that_pools():
    model = sequential(
        nn.Conv2d(2, 3, 2, padding=1), nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    x = rand(6, 2, 4, 3)
    for path in ("0", "1"):
        exact = oracle.ggn_block(model, x, "regression", f"{path}.weight", 0.5)
        expand = oracle.kfac_factors(model, x, "regression", path, 0.5, "expand")
        reduce = oracle.kfac_factors(model, x, "regression", path, 0.5, "reduce")
        close(oracle.kfac_block(reduce), exact)
        assert (oracle.kfac_block(expand) - exact).norm() > 0.01 * exact.norm()


# --------------------------------------------------------------- directions and magnitudes


@pytest.mark.parametrize("key", ["conv2d", "conv1d", "tokens", "regression"])
def test_debiased_block(key):
    model, x, _, likelihood, sigma = oracle.SMALL_MODELS[key]()
    for path in oracle.weighted_layers(model):
        one = oracle.kfac_factors(model, x[:3], likelihood, path, sigma)
        two = oracle.kfac_factors(model, x[3:], likelihood, path, sigma)
        close(oracle.debiased_block(one, one), oracle.kfac_block(one))

        U_G, U_A = oracle.eigen(one["G"])[1], oracle.eigen(one["A"])[1]
        Lambda = torch.outer((U_G.T @ two["G"] @ U_G).diag(), (U_A.T @ two["A"] @ U_A).diag())
        Z = rand(*Lambda.shape, seed=5)  # C applied to a weight, as matrices: U_G (.) U_A^T
        product = U_G @ (Lambda * (U_G.T @ Z @ U_A)) @ U_A.T
        block = oracle.debiased_block(one, two, U_G, U_A)
        close(block @ Z.reshape(-1), product.reshape(-1))
        close(block.trace(), oracle.kfac_block(two).trace())
        # a sign is free
        close(oracle.debiased_block(one, two, -U_G, U_A), block)


@pytest.mark.parametrize("key", ["conv2d", "conv1d", "tokens", "mlp_tanh"])
def test_ekfac_block(key):
    model, x, _, likelihood, sigma = oracle.SMALL_MODELS[key]()
    for path in oracle.weighted_layers(model):
        factors = oracle.kfac_factors(model, x[:3], likelihood, path, sigma)
        exact = oracle.ggn_block(model, x[3:], likelihood, f"{path}.weight", sigma)
        U_G, U_A = oracle.eigen(factors["G"])[1], oracle.eigen(factors["A"])[1]

        # DESIGN: mean over examples, sum over columns, of the squared rotated gradient
        a, g = oracle.layer_statistics(model, x[3:], likelihood, path, sigma)
        weight_gradients = torch.einsum("ntco,nti->ncoi", g, a)
        Lambda = ((U_G.T @ weight_gradients @ U_A) ** 2).sum(dim=1).mean(dim=0)
        U = oracle.kronecker_basis(factors, U_G, U_A)
        close(oracle.measured_block(U, exact)[1], Lambda.reshape(-1))
        block = oracle.ekfac_block(factors, exact, U_G, U_A)
        close(block, U @ torch.diag(Lambda.reshape(-1)) @ U.T)

        # of all matrices with these directions none is nearer to the exact block
        other = oracle.debiased_block(
            factors, oracle.kfac_factors(model, x[3:], likelihood, path, sigma)
        )
        assert (block - exact).norm() <= (other - exact).norm() * (1 + 1e-12)


def test_a_foreign_basis_is_refused():
    model, x, _, likelihood, sigma = oracle.SMALL_MODELS["mlp_tanh"]()
    factors = oracle.kfac_factors(model, x, likelihood, "0", sigma)
    foreign = torch.linalg.qr(rand(6, 6)).Q
    assert not oracle.diagonalises(foreign, factors["G"])
    with pytest.raises(AssertionError, match="U_G"):
        oracle.debiased_block(factors, factors, U_G=foreign)


def test_eigen():
    root = rand(6, 4)
    matrix = root @ root.T
    values, vectors = oracle.eigen(matrix)
    assert (values[:-1] >= values[1:]).all()
    close(vectors @ torch.diag(values) @ vectors.T, matrix)
    assert oracle.diagonalises(vectors, matrix)


# ------------------------------------------------------------------------------ the posterior


def test_posterior_covariance_block_by_block():
    roots = [rand(3, 2), rand(4, 4, seed=1)]
    blocks = [root @ root.T for root in roots]
    cov = oracle.posterior_covariance(blocks, 50, [0.5, torch.arange(1.0, 5.0, dtype=T64)])
    assert torch.equal(cov[:3, 3:], torch.zeros(3, 4, dtype=T64))
    one = 50 * blocks[0] + 0.5 * torch.eye(3, dtype=T64)
    two = 50 * blocks[1] + torch.diag(torch.arange(1.0, 5.0, dtype=T64))
    close(cov[:3, :3] @ one, torch.eye(3, dtype=T64))
    close(cov[3:, 3:] @ two, torch.eye(4, dtype=T64))
    # Eq. (9): (1/N) U diag(magnitudes + beta)^-1 U^T, beta = delta / N
    values, U = oracle.eigen(blocks[0])
    close(cov[:3, :3], U @ torch.diag(1 / (values + 0.5 / 50)) @ U.T / 50)
    close(
        oracle.posterior_covariance(blocks, 50, 2.0),
        oracle.posterior_covariance(blocks, 50, [2, 2]),
    )


def test_functional_covariance_is_that_of_linearised_samples():
    J, root = rand(3, 2, 5), rand(5, 5, seed=1)
    cov = root @ root.T
    # samples of unit covariance by construction: the columns of the root
    close(oracle.functional_covariance(J, cov), (J @ root) @ (J @ root).transpose(1, 2))


@pytest.mark.parametrize("sigma", [0.5, torch.tensor([0.3, 1.5], dtype=T64)], ids=str)
def test_bayesian_linear_regression_is_exact(sigma):
    # Laplace is exact here: evidence and predictive covariance in closed form
    model = sequential(nn.Linear(3, 2, bias=True))
    x, y, x_new = rand(6, 3), rand(6, 2, seed=1), rand(4, 3, seed=2)
    names = names_of(model)
    delta = torch.cat([torch.full((6,), 0.7, dtype=T64), torch.full((2,), 3.0, dtype=T64)])
    C = oracle.ggn(model, x, "regression", names, sigma)
    precision = oracle.posterior_precision([C], 6, [delta])

    # Newton's step from wherever we are ends in the mode
    theta = oracle.flat_parameters(model, names)
    g = 6 * oracle.gradient(model, x, y, "regression", names, sigma) + delta * theta
    theta = theta - torch.linalg.solve(precision, g)
    pieces = {"0.weight": theta[:6].reshape(2, 3), "0.bias": theta[6:]}
    nll_sum = oracle.nll("regression", functional_call(model, pieces, (x,)), y, sigma).sum()
    evidence = oracle.log_marginal_likelihood(nll_sum, theta, precision, delta)

    J = oracle.flat_jacobian(model, x, names).reshape(12, 8)
    noise = torch.as_tensor(sigma, dtype=T64).expand(6, 2).reshape(-1) ** 2
    kernel = J @ torch.diag(1 / delta) @ J.T + torch.diag(noise)
    marginal = distributions.MultivariateNormal(torch.zeros(12, dtype=T64), kernel)
    close(evidence, marginal.log_prob(y.reshape(-1)))

    J_new = oracle.flat_jacobian(model, x_new, names)
    cov = oracle.posterior_covariance([C], 6, [delta])
    for n in range(4):
        prior = J_new[n] @ torch.diag(1 / delta)
        expected = prior @ J_new[n].T - prior @ J.T @ torch.linalg.solve(kernel, J @ prior.T)
        close(oracle.functional_covariance(J_new, cov)[n], expected)


def test_equation_6_curvature_on_another_batch_is_a_mixture_of_its_spectrum():
    model, x, _, likelihood, sigma = oracle.SMALL_MODELS["mlp_tanh"]()
    one = oracle.ggn_block(model, x[:3], likelihood, "0.weight", sigma)
    two = oracle.ggn_block(model, x[3:], likelihood, "0.weight", sigma)
    (_, U), (values, V) = oracle.eigen(one), oracle.eigen(two)
    weights = (U.T @ V) ** 2
    close(weights.sum(dim=1), torch.ones(len(one), dtype=T64))
    close(oracle.measured_block(U, two)[1], weights @ values)
