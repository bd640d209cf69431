"""A posterior is finite and right at any scale, or it is refused by name where it is made."""

import math

import oracle
import pytest
import torch
from torch import nn

from laplace_debias import Laplace

CURVATURES = ["kfac", "ekfac", "diag", "lowrank", "full"]


# ------------------------------------------------------------- any scale: right, or refused


def piecewise_linear(dtype):
    """Its derivatives do not cancel at any scale of the inputs, as those of tanh do."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)).to(dtype).eval()


def dense_blocks(la, model, x, sigma):
    """The curvature by blocks of the package's order, in double precision; EKFAC in its basis."""
    if la.block_names == ["parameters"]:
        return [oracle.ggn(model, x, "regression", la.param_names, sigma)]
    blocks = []
    for name in la.block_names:
        exact = oracle.ggn_block(model, x, "regression", name, sigma)
        layer, _, role = name.rpartition(".")
        if la._settings.curvature == "diag":
            exact = exact.diagonal().diag()
        elif role == "weight":
            factors = oracle.kfac_factors(model, x, "regression", layer, sigma)
            if la._settings.curvature == "kfac":
                exact = oracle.kfac_block(factors)
            else:
                block = la.posterior.curvature.blocks[name]
                U = torch.kron(block.U_G.double(), block.U_A.double())
                exact = oracle.measured_block(U, exact)[0]
        blocks.append(exact)
    return blocks


def check_at(dtype, curvature, scale, sigma, delta, num_data, log):
    model = piecewise_linear(dtype)
    x = scale * torch.randn(6, 2, generator=torch.Generator().manual_seed(2)).to(dtype)
    y = model(x).detach()
    try:
        la = Laplace(
            model, "regression", curvature, sigma=sigma, prior_precision=delta
        ).fit_batches([(x, y)], num_data=num_data)
    except ValueError as e:
        return "refused: " + str(e)[:60]
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    exact, X = piecewise_linear(dtype).double(), x.double()
    blocks = dense_blocks(la, exact, X, sigma)
    P = la.posterior.precision.to_dense().double()
    size = 0
    kappa = 1
    errs = []
    for C in blocks:
        part = slice(size, size + len(C)); size += len(C)
        expected = num_data * C + delta * torch.eye(len(C)).double()
        err = (P[part, part] - expected).abs().max() / expected.diagonal().max()
        errs.append(float(err / eps))
        kappa = max(kappa, float(expected.diagonal().max() / delta))
    expected = oracle.posterior_precision(blocks, num_data, delta)
    draws = la.sample(3)
    bad = []
    if not draws.isfinite().all(): bad.append("sample")
    ml = la.log_marginal_likelihood()
    if not ml.isfinite(): bad.append("ml")
    ferr = None
    try:
        mean, cov = la.functional(x)
        if not cov.isfinite().all(): bad.append("functional")
        var = la.functional(x, diagonal=True)[1]
        if not (var >= 0).all(): bad.append("negative")
        J = oracle.flat_jacobian(exact, X, la.param_names)
        if kappa * eps < 1e-4:
            want = torch.stack([j @ torch.linalg.solve(expected, j.T) for j in J])
            ferr = ((cov.double() - want).abs().amax((1,2)) / (want.diagonal(dim1=1,dim2=2).amax(1)+tiny)).max().item()
        pr = la.predict(x)
        if not (pr.mean.isfinite().all() and pr.variance.isfinite().all()): bad.append("predict")
    except ValueError as e:
        bad.append("VE " + str(e)[:80].replace("\n"," "))
    except Exception as e:
        bad.append(repr(e)[:80])
    return f"err {max(errs):.2g} eps, kappa {kappa:.1g}, ferr {ferr} {bad}"
