"""The posterior in function space: the full one from kernels, or its projection onto a span."""

import math

import oracle
import pytest
import torch
from torch import nn

from laplace_debias import Laplace

DELTA = 0.7
SIGMA = 0.4
SIZE = 24
LIKELIHOODS = ("regression", "classification", "binary")
NUM_OUTPUTS = {"regression": 2, "classification": 3, "binary": 1}


def network(likelihood):
    torch.manual_seed(0)
    layers = nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, NUM_OUTPUTS[likelihood])
    return nn.Sequential(*layers).double().eval()


def examples(likelihood, size=SIZE, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, generator=g, dtype=torch.float64)
    if likelihood == "regression":
        return x, torch.randn(size, 2, generator=g, dtype=torch.float64)
    if likelihood == "binary":
        return x, torch.randint(2, (size,), generator=g)
    return x, torch.randint(3, (size,), generator=g)


def laplace(model, likelihood, curvature="gp", **options):
    if likelihood == "regression":
        options["sigma"] = SIGMA
    return Laplace(model, likelihood, curvature, prior_precision=DELTA, **options)


def batches(x, y, sizes=(10, 14)):
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def function_space(model, likelihood, x, data, inputs, names=None):
    """Covariances of the outputs at x, and log det P, by kernels between inputs.

    K** − K*Z [K_ZZ⁺ − (K_ZZ + Σ_n K_Zn Λ_n K_nZ)⁺] K_Z* with K = J Jᵀ/δ, and the determinant of
    I + Λ^½ Q Λ^½ with Q = K_nZ K_ZZ⁺ K_Zn. No matrix of the parameters' size is formed.
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
    inverse = torch.linalg.pinv(K_zz, **tolerance)
    inner = inverse - torch.linalg.pinv(K_zz + K_zn @ K_zn.T, **tolerance)
    covariances = []
    for rows in J:
        K = rows @ J_z.T / DELTA
        covariances.append(rows @ rows.T / DELTA - K @ inner @ K.T)
    matrix = torch.eye(len(root), dtype=root.dtype) + K_zn.T @ inverse @ K_zn
    return torch.stack(covariances), J.shape[2] * math.log(DELTA) + torch.logdet(matrix)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_with_all_examples_it_is_the_full_posterior(likelihood):
    model = network(likelihood)
    x, y = examples(likelihood)
    new = torch.cat([4 * examples(likelihood, 6, 2)[0], x[:3]])
    la = laplace(model, likelihood).fit(batches(x, y))
    names = la.param_names
    sigma = SIGMA if likelihood == "regression" else None
    curvature = oracle.ggn(model, x, likelihood, names, sigma)
    covariance = oracle.posterior_covariance([curvature], SIZE, DELTA)
    J = oracle.flat_jacobian(model, new, names)
    oracle.close(la.functional(new)[1], oracle.functional_covariance(J, covariance), 1e-8)
    full = laplace(model, likelihood, "full").fit(batches(x, y))
    oracle.close(la.functional(new)[1], full.functional(new)[1], 1e-8)
    oracle.close(la.functional(new, joint=True)[1], full.functional(new, joint=True)[1], 1e-8)
    oracle.close(la.log_marginal_likelihood(), full.log_marginal_likelihood(), 1e-8)
    precision = la.posterior.precision.to_dense()
    oracle.close(precision, full.posterior.precision.to_dense(), 1e-8)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_with_few_inputs_it_is_the_formula_with_all_examples_in_the_sum(likelihood):
    model = network(likelihood)
    x, y = examples(likelihood)
    inputs, _ = examples(likelihood, 5, 3)
    new, _ = examples(likelihood, 6, 2)
    la = laplace(model, likelihood, inducing=inputs).fit(batches(x, y))
    covariance, log_det = function_space(model, likelihood, new, x, inputs)
    oracle.close(la.functional(new)[1], covariance, 1e-8)
    oracle.close(la.posterior.log_det_precision(), log_det, 1e-8)
