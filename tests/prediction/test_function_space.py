"""A Gaussian process with the network's tangent kernel is a low-rank posterior of all its rows."""

import math

import oracle
import pytest
import torch
from torch import nn

from laplace_debias import Laplace

DELTA = 0.7


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()


def examples(num_examples, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num_examples, 3, generator=g, dtype=torch.float64)
    return x, torch.randint(3, (num_examples,), generator=g)


def kernel_form(model, x, inducing, num_data):
    """Covariances of the outputs at x, and the log-determinant of the precision, by kernels.

    Σ = K** − K*m S (N/m) (I + (N/m) Sᵀ Kmm S)⁻¹ Sᵀ Km*, with K = J Jᵀ/δ and S the root of the loss
    Hessian at the m inducing inputs. No matrix of the parameters' size is formed.
    """
    names = [name for name, _ in model.named_parameters()]
    J = oracle.flat_jacobian(model, x, names)
    J_m = oracle.flat_jacobian(model, inducing, names).flatten(0, 1)
    S = torch.block_diag(*oracle.loss_hessian_root("classification", model(inducing)))
    scale = num_data / len(inducing)
    inner = torch.eye(len(S), dtype=S.dtype) + scale * S.T @ (J_m @ J_m.T / DELTA) @ S
    covariances = []
    for J_n in J:
        K_nm = J_n @ J_m.T / DELTA @ S
        covariances.append(J_n @ J_n.T / DELTA - scale * K_nm @ torch.linalg.solve(inner, K_nm.T))
    log_det = J.shape[2] * math.log(DELTA) + torch.logdet(inner)
    return torch.stack(covariances), log_det


def tolerance(la, num_data):
    """The share of a variance that directions with little curvature may have.

    Directions with less than 1e-7 of the largest eigenvalue are left out: there the posterior is
    the prior.
    """
    largest = float(la.posterior.curvature.blocks["parameters"].magnitudes.max())
    return num_data * 1e-7 * largest / DELTA


def low_rank(model, x, y, num_data):
    la = Laplace(model, curvature="lowrank", rank=x.shape[0] * 3, prior_precision=DELTA)
    return la.fit_batches([(x, y)], num_data=num_data)


@pytest.mark.parametrize(("num_inducing", "num_data"), [(20, 20), (4, 20), (1, 20)])
def test_all_rows_of_some_examples_are_the_process_with_these_inducing_inputs(
    num_inducing, num_data
):
    model = network()
    x, y = examples(num_inducing, 1)
    new, _ = examples(6, 2)
    la = low_rank(model, x, y, num_data)
    expected, log_det = kernel_form(model, new, x, num_data)
    oracle.close(la.functional(new)[1], expected, tolerance(la, num_data))
    error = abs(float(la.posterior.log_det_precision() - log_det))
    assert error <= len(la.mean) * tolerance(la, num_data)


@pytest.mark.parametrize("num_inducing", [20, 4])
def test_the_posterior_of_the_whole_matrix_is_the_process_to_rounding(num_inducing):
    model = network()
    x, y = examples(num_inducing, 1)
    new, _ = examples(6, 2)
    la = Laplace(model, curvature="full", prior_precision=DELTA)
    la.fit_batches([(x, y)], num_data=20)
    expected, log_det = kernel_form(model, new, x, 20)
    oracle.close(la.functional(new)[1], expected, 1e-8)
    oracle.close(la.posterior.log_det_precision(), log_det, 1e-8)
