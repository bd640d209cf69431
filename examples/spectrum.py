"""The edge of stability: the sharpness during training, and the spectrum at its end.

During gradient descent with step size η, the sharpness, which is the largest eigenvalue of the
Hessian, grows to 2/η and stays there (Cohen et al., 2021). After training, the example computes the
spectra of the Hessian and the GGN by stochastic Lanczos quadrature, and the traces of both.

Run with `python examples/spectrum.py`; picture in results/sharpness.png.
"""

from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from laplace_debias.curvature import GGN, Hessian
from laplace_debias.linalg import eigsh, spectral_density, trace
from laplace_debias.report.spectrum_plot import plot_spectral_density
from laplace_debias.report.style import OKABE_ITO, save, style_axes

STEP_SIZES = (0.1, 0.2)
NUM_STEPS = 600
EVERY = 25  # steps between two records
NUM_PRODUCTS = 100  # products per trace
NUM_PROBES = 10  # probes per spectral density
TOL = 1e-4  # tolerance of the eigenvalues at the end
LOSS = nn.MSELoss(reduction="sum")


def digits() -> TensorDataset:
    """Handwritten digits, 8 × 8 pixels with mean 0 and variance 1, in a random order."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    order = torch.randperm(len(x))
    return TensorDataset(((x - 0.3053) / 0.3760)[order], torch.tensor(labels)[order])


class Record(NamedTuple):
    """The sharpness and the loss before a gradient step."""

    step: int
    sharpness: float
    loss: float


def descend(
    step_size: float, x: Tensor, targets: Tensor, generator: torch.Generator
) -> tuple[nn.Module, list[Record]]:
    """Train by gradient descent; return the network and a record every `EVERY` steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).eval()
    # The parameters change in place, so the operator always uses the current values.
    H = Hessian(model, LOSS, [(x, targets)]) / (2 * len(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=step_size)
    history = []
    for step in range(NUM_STEPS + 1):
        loss = LOSS(model(x), targets) / len(x) / 2
        if step % EVERY == 0:
            sharpness = eigsh(H, k=1, tol=1e-3, generator=generator).values[0]
            history.append(Record(step, float(sharpness), float(loss.detach())))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.zero_grad()
    return model, history


def main() -> None:
    """Descend with two step sizes, track the sharpness, and compute the spectrum at the end."""
    torch.manual_seed(0)
    x, y = digits()[:500]
    targets = nn.functional.one_hot(y, 10).float()
    generator = torch.Generator().manual_seed(0)
    histories: dict[float, list[Record]] = {}
    for step_size in STEP_SIZES:
        model, history = descend(step_size, x, targets, generator)
        histories[step_size] = history
        first = history[0]
        last = history[-1]
        print(
            f"step size {step_size}: sharpness {first.sharpness:.2f} at first, "
            f"{last.sharpness:.2f} after {last.step} steps (2/η = {2 / step_size:.0f}); "
            f"loss {first.loss:.4f} to {last.loss:.5f}"
        )

    # The spectra are those of the last network.
    data = [(x, targets)]
    operators = {
        "Hessian": Hessian(model, LOSS, data) / (2 * len(x)),
        "GGN": GGN(model, LOSS, data) / (2 * len(x)),
    }
    densities = {}
    for name, A in operators.items():
        estimate = trace(A, "hutch++", num_matvecs=NUM_PRODUCTS, generator=generator)
        largest = eigsh(A, k=3, tol=TOL, generator=generator).values
        smallest = eigsh(A, k=1, which="smallest", tol=TOL, generator=generator).values[0]
        densities[name] = spectral_density(
            A, num_probes=NUM_PROBES, num_steps=60, generator=generator
        )
        eigenvalues = ", ".join(f"{float(value):.2f}" for value in largest)
        print(
            f"{name}: trace {float(estimate):.3f} ± {float(estimate.standard_error):.3f}; "
            f"eigenvalues {eigenvalues}, …, {float(smallest):.3f}"
        )

    figure = Figure(figsize=(12.8, 3.6), layout="constrained", facecolor="white")
    sharpness_ax, *density_axes = figure.subplots(1, 1 + len(densities))
    for (step_size, history), colour in zip(histories.items(), ("blue", "vermillion"), strict=True):
        steps = [record.step for record in history]
        sharpness = [record.sharpness for record in history]
        label = f"η = {step_size}"
        sharpness_ax.plot(
            steps, sharpness, "o-", markersize=3, color=OKABE_ITO[colour], label=label
        )
        sharpness_ax.axhline(2 / step_size, color=OKABE_ITO[colour], linestyle="--", linewidth=1)
    sharpness_ax.set(xlabel="Gradient step", ylabel="Sharpness (dashed: 2/η)")
    sharpness_ax.legend(frameon=False)
    style_axes(sharpness_ax)
    for ax, (name, density) in zip(density_axes, densities.items(), strict=True):
        plot_spectral_density(density, ax)
        ax.set_title(name)
    save(figure, "results/sharpness.png")
    print("Picture: results/sharpness.png")


if __name__ == "__main__":
    main()
