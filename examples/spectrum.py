"""The edge of stability: the sharpness during training, and the spectrum at its end.

During gradient descent with step size η, the sharpness, which is the largest eigenvalue of the
Hessian, grows to 2/η and stays there (Cohen et al., 2021). After training, the example computes the
spectra of the Hessian and the GGN by stochastic Lanczos quadrature, and the traces of both.

Run with `python examples/spectrum.py`; picture in results/sharpness.png.
"""

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from laplace_debias.curvature import GGN, Hessian
from laplace_debias.linalg import eigsh, spectral_density, trace
from laplace_debias.report.spectrum_plot import plot_spectral_density
from laplace_debias.report.style import OKABE_ITO, save, style_axes

STEP_SIZES = (0.1, 0.2)
NUM_STEPS = 600
EVERY = 25
NUM_PRODUCTS = 100  # products per trace
NUM_PROBES = 10  # probes per spectral density
TOL = 1e-4  # tolerance of the eigenvalues at the end


def digits() -> TensorDataset:
    """Handwritten digits, 8 × 8 pixels with mean 0 and variance 1, in a random order."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    order = torch.randperm(len(x))
    return TensorDataset(((x - 0.3053) / 0.3760)[order], torch.tensor(labels)[order])


def main() -> None:
    """Descend with two step sizes, track the sharpness, and compute the spectrum at the end."""
    torch.manual_seed(0)
    x, y = digits()[:500]
    targets = nn.functional.one_hot(y, 10).float()
    loss = nn.MSELoss(reduction="sum")

    def mean_loss(outputs: torch.Tensor) -> torch.Tensor:
        return loss(outputs, targets) / len(x) / 2

    histories: dict[float, list[tuple[int, float, float]]] = {}
    generator = torch.Generator().manual_seed(0)
    for step_size in STEP_SIZES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).eval()
        # The parameters change in place, so the operator always uses the current values.
        H = Hessian(model, loss, [(x, targets)]) / (2 * len(x))
        optimizer = torch.optim.SGD(model.parameters(), lr=step_size)
        history = []
        for step in range(NUM_STEPS + 1):
            value = mean_loss(model(x))
            if step % EVERY == 0:
                sharpness = eigsh(H, k=1, tol=1e-3, generator=generator).values[0]
                history.append((step, float(sharpness), float(value.detach())))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        model.zero_grad()
        histories[step_size] = history
        first, last = history[0], history[-1]
        print(
            f"step size {step_size}: sharpness {first[1]:.2f} at first, {last[1]:.2f} after "
            f"{last[0]} steps (2/η = {2 / step_size:.0f}); loss {first[2]:.4f} to {last[2]:.5f}"
        )

    G = GGN(model, loss, [(x, targets)]) / (2 * len(x))
    densities = {}
    for name, A in (("Hessian", H), ("GGN", G)):
        total = trace(A, "hutch++", num_matvecs=NUM_PRODUCTS, generator=generator)
        values, _ = eigsh(A, k=3, tol=TOL, generator=generator)
        lowest = eigsh(A, k=1, which="smallest", tol=TOL, generator=generator).values[0]
        densities[name] = spectral_density(
            A, num_probes=NUM_PROBES, num_steps=60, generator=generator
        )
        print(
            f"{name}: trace {float(total):.3f} ± {float(total.standard_error):.3f}; eigenvalues "
            f"{', '.join(f'{float(v):.2f}' for v in values)}, …, {float(lowest):.3f}"
        )

    figure = Figure(figsize=(12.8, 3.6), layout="constrained", facecolor="white")
    left, *others = figure.subplots(1, 1 + len(densities))
    for (step_size, history), colour in zip(histories.items(), ("blue", "vermillion"), strict=True):
        steps, sharpness, _ = zip(*history, strict=True)
        left.plot(
            steps, sharpness, "o-", markersize=3, color=OKABE_ITO[colour], label=f"η = {step_size}"
        )
        left.axhline(2 / step_size, color=OKABE_ITO[colour], linestyle="--", linewidth=1)
    left.set(xlabel="Gradient step", ylabel="Sharpness (dashed: 2/η)")
    left.legend(frameon=False)
    style_axes(left)
    for ax, (name, density) in zip(others, densities.items(), strict=True):
        plot_spectral_density(density, ax)
        ax.set_title(name)
    save(figure, "results/sharpness.png")
    print("Picture: results/sharpness.png")


if __name__ == "__main__":
    main()
