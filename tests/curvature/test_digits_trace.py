"""XTrace on the GGN of a network that has been trained on real images."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev, vmap

from examples.paper.data import digits
from examples.paper.networks import digits_net
from examples.paper.problems import Recipe, train
from laplace_debias.curvature import GGN
from laplace_debias.linalg import trace


def loss_roots(logits):
    """√p-columns L `[C, C]` with L Lᵀ = diag(p) − p pᵀ."""
    p = logits.softmax(0)
    return (p.diag() - torch.outer(p, p)) / p.sqrt()


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_the_error_of_xtrace_after_100_products_is_below_1_percent():
    torch.manual_seed(0)
    data, _ = digits()
    model = digits_net()
    train(model, data, Recipe(batch_size=50, cycles=((3, 0.1),), clip_norm=5.0))
    model.double()
    x, y = data.batch(torch.arange(80))
    x = x.double()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(p, image):
        return functional_call(model, p, (image[None],))[0]

    J = vmap(jacrev(outputs), (None, 0))(parameters, x)
    J = torch.cat([part.flatten(2) for part in J.values()], dim=2)  # [N, C, D]
    roots = vmap(loss_roots)(model(x).detach())
    rows = (roots.mT @ J).flatten(0, 1) / len(x) ** 0.5
    # The GGN's eigenvalues but for zeros; they decay, which XTrace is for.
    values = torch.linalg.eigvalsh(rows @ rows.T).flip(0)
    assert values[100] < 0.01 * values[0]
    assert (values > 1e-12 * values[0]).sum() > 500

    A = GGN(model, nn.CrossEntropyLoss(), [(x[:40], y[:40]), (x[40:], y[40:])])
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        estimate = trace(A, "xtrace", num_matvecs=100, generator=generator)
        assert estimate.num_matvecs == 100
        assert abs(float(estimate) / float(values.sum()) - 1) < 0.01
        assert estimate.standard_error < 0.01 * estimate.value
