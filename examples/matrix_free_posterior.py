"""Samples of a Laplace posterior with the exact curvature, from matrix-vector products alone.

The posterior of a network's D parameters is N(θ*, P⁻¹) with the precision P = N·GGN + δI. K-FAC and
related methods replace the GGN by a matrix that can be inverted. Here, the GGN is not approximated:
Lanczos multiplies a normal vector by P^-½, and every sample costs a few dozen products. The samples
are passed through the linearised network, and their spread is compared with the exact spread from
the D × D matrix, for which this network is small enough.

Run with `python examples/matrix_free_posterior.py`; picture in results/matrix_free_posterior.png.
"""

import time

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from laplace_debias.curvature import GGN, KFAC, Jacobian
from laplace_debias.linalg import inverse, sample_gaussian
from laplace_debias.operators import Dense, Identity, LinearOperator
from laplace_debias.report.style import OKABE_ITO, save, style_axes

NUM_STEPS = 300
NUM_SAMPLES = 50
NOISE = 0.1  # σ, the standard deviation of the targets
PRIOR_PRECISION = 1.0  # δ


def train_network(x: Tensor, y: Tensor) -> nn.Module:
    """Fit a small network to the data, in float64 for the comparison with the exact posterior."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)
    ).double()
    decay = PRIOR_PRECISION * 2 * NOISE**2 / len(x)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        squares = sum(parameter.square().sum() for parameter in model.parameters())
        (nn.functional.mse_loss(model(x), y) + decay / 2 * squares).backward()
        optimizer.step()
    return model.eval()


def spread(J: LinearOperator, covariance: LinearOperator) -> Tensor:
    """Compute standard deviations of the linearised outputs, `[points]`, from the covariance."""
    products = covariance @ J.T.to_dense()
    return (J @ products).diagonal().sqrt()


def main() -> None:
    """Sample the posterior, and compare the predictive's spread with the exact spread."""
    torch.manual_seed(1)
    x = torch.cat([torch.rand(40, 1) - 2, torch.rand(40, 1) + 1]).double()
    y = torch.sin(2 * x) + NOISE * torch.randn_like(x)
    model = train_network(x, y)
    loss = nn.MSELoss()
    data = [(x, y)]
    # torch's loss is the mean of (f − y)², the negative log-likelihood (f − y)² / (2σ²).
    scale = len(x) / (2 * NOISE**2)
    mean = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    prior = PRIOR_PRECISION * Identity(len(mean))
    precision = scale * GGN(model, loss, data) + prior

    start = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    samples = sample_gaussian(mean, precision, NUM_SAMPLES, generator=generator)
    seconds = time.perf_counter() - start
    print(f"{NUM_SAMPLES} samples of {len(mean)} parameters in {seconds:.1f} s")

    grid = torch.linspace(-3, 3, 61, dtype=torch.float64)[:, None]
    J = Jacobian(model, [(grid, grid)])
    outputs = model(grid).detach()[:, 0]
    deviations = J @ (samples - mean).T
    by_samples = deviations.square().mean(dim=1).sqrt()
    exact = spread(J, inverse(Dense(precision.to_dense())))
    kfac = spread(J, inverse(scale * KFAC(model, loss, data) + prior))
    for name, approximation in {"samples": by_samples, "K-FAC": kfac}.items():
        error = float((approximation / exact - 1).square().mean().sqrt())
        print(f"Standard deviation of the outputs by {name}: off by {error:.0%} (root mean square)")
    print(f"Expected of {NUM_SAMPLES} exact samples: {(2 * NUM_SAMPLES) ** -0.5:.0%}")

    figure = Figure(figsize=(5.6, 3.6), layout="constrained", facecolor="white")
    ax = figure.subplots()
    ax.plot(grid, outputs[:, None] + deviations[:, :10], color=OKABE_ITO["blue"], lw=0.6, alpha=0.6)
    ax.plot(grid, outputs - 2 * exact, color=OKABE_ITO["vermillion"])
    ax.plot(grid, outputs - 2 * kfac, "--", color=OKABE_ITO["green"])
    label = "exact, ± 2 standard deviations"
    ax.plot(grid, outputs + 2 * exact, color=OKABE_ITO["vermillion"], label=label)
    ax.plot(grid, outputs + 2 * kfac, "--", color=OKABE_ITO["green"], label="K-FAC")
    ax.plot(x, y, ".", color="black", markersize=3)
    ax.set(xlabel="x", ylabel="Output, ten samples", ylim=(-4, 4))
    ax.legend(frameon=False, loc="upper right")
    style_axes(ax)
    save(figure, "results/matrix_free_posterior.png")
    print("Picture: results/matrix_free_posterior.png")


if __name__ == "__main__":
    main()
