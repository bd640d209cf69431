"""The oracle against itself: every quantity by a second route, and the regimes of exactness."""

import oracle
import pytest
import torch
from torch import distributions, nn
from torch.func import functional_call, jacrev, jvp, vmap

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


# --------------------------------------------------------------- directions and magnitudes


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
