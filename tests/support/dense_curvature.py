"""The dense curvature for given output gradients, for every kind of curvature."""

import oracle
import torch


def dense_rows(model, x, columns, names):
    """Rows `sᵀ J` of the parameters, `[N, K, D]`."""
    return torch.einsum("nkc,ncd->nkd", columns, oracle.flat_jacobian(model, x, names))


def gram(rows):
    return torch.einsum("nkd,nke->de", rows, rows) / len(rows)


def dense_factors(model, x, columns, layer, weights=None):
    """A and G of a linear layer: its inputs, and the gradients in its bias.

    A is the mean over the examples with these weights; without weights, over those whose target
    counts: the loss of the others is zero.
    """
    inputs = []
    hook = model.get_submodule(layer).register_forward_hook(lambda m, a, o: inputs.append(a[0]))
    model(x)
    hook.remove()
    g = gram(dense_rows(model, x, columns, [f"{layer}.bias"]))
    if weights is None:
        weights = columns.flatten(1).any(1).double()
    a = inputs[0].detach()
    return {"A": a.T @ (weights[:, None] * a) / weights.sum(), "G": g, "bias": g}


def dense_curvature(la, curvature, x, columns, rank, weights=None):
    """Compute the curvature `[D, D]`, for EKFAC along the eigenvectors of the fit.

    Args:
        la: A fit of linear layers to all examples.
        curvature: The kind of curvature.
        x: The examples.
        columns: `[N, K, C]`, vectors whose outer products make the loss Hessian of each.
        rank: The rank of `"lowrank"`.
        weights: The weights of the examples in A, `[N]`.
    """
    model = la.model
    names = la.param_names
    exact = gram(dense_rows(model, x, columns, names))
    if curvature == "full":
        return exact
    if curvature == "diag":
        return exact.diagonal().diag()
    if curvature == "lowrank":
        values, U = oracle.eigen(exact)
        return U[:, :rank] @ values[:rank].diag() @ U[:, :rank].T
    blocks = []
    for name, block in la.posterior.curvature.blocks.items():
        layer, _, role = name.rpartition(".")
        factors = dense_factors(model, x, columns, layer, weights)
        if role == "bias":
            blocks.append(factors["bias"])
        elif curvature == "kfac":
            blocks.append(oracle.kfac_block(factors))
        else:
            exact_block = gram(dense_rows(model, x, columns, [name]))
            blocks.append(oracle.ekfac_block(factors, exact_block, block.U_G, block.U_A))
    return torch.block_diag(*blocks)
