"""Second-order steps on the digits: Gauss-Newton by CG, natural gradient by K-FAC, and gradients.

All methods use the same 1,000 images in every step. With the quadratic q(d) = gᵀd + ½ dᵀG d of the
GGN, the Gauss-Newton step minimises q(d) + ½ λ‖d‖² with products alone. The natural-gradient step
takes its direction from K-FAC's exact inverse and its length from one product with the GGN (Martens
& Grosse, 2015). Both methods adapt λ to how well q predicts the loss, and reject steps that
increase the loss.

Run with `python examples/newton_step.py`; picture in results/newton_step.png.
"""

import time
from collections.abc import Callable

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from laplace_debias.curvature import GGN, KFAC
from laplace_debias.linalg import cg, inverse
from laplace_debias.operators import Identity, LinearOperator
from laplace_debias.report.style import OKABE_ITO, save, style_axes

NUM_STEPS = 20
SHOWN = (0, 1, 2, 5, 10, 20)
LOSS = nn.CrossEntropyLoss()

StepRule = Callable[[nn.Module, LinearOperator, float, Tensor], Tensor]
"""A function from the model, the GGN, the damping and the gradient to a step."""


def digits() -> TensorDataset:
    """Handwritten digits, 8 × 8 pixels with mean 0 and variance 1, in a random order."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    order = torch.randperm(len(x))
    return TensorDataset(((x - 0.3053) / 0.3760)[order], torch.tensor(labels)[order])


def network() -> nn.Module:
    """Return the network with the same initial weights for all methods."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).eval()


def second_order(batches: list[tuple[Tensor, Tensor]], step_rule: StepRule) -> list[float]:
    """Return losses before each step and after the last, with Levenberg-Marquardt damping."""
    model = network()
    x, y = batches[0]
    G = GGN(model, LOSS, batches)  # at the parameters at the time of each product
    parameters = list(model.parameters())
    losses = [float(LOSS(model(x), y).detach())]
    damping = 1.0
    for _ in range(NUM_STEPS):
        gradients = torch.autograd.grad(LOSS(model(x), y), parameters)
        g = torch.cat([gradient.flatten() for gradient in gradients])
        step = step_rule(model, G, damping, g)
        predicted_change = float(g @ step + step @ (G @ step) / 2)
        old_parameters = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            changes = G.layout.unflatten(step).values()
            for parameter, change in zip(parameters, changes, strict=True):
                parameter += change
            loss = float(LOSS(model(x), y))
            ratio = (loss - losses[-1]) / predicted_change
            if loss > losses[-1]:
                loss = losses[-1]
                for parameter, old_parameter in zip(parameters, old_parameters, strict=True):
                    parameter.copy_(old_parameter)
        losses.append(loss)
        if ratio > 0.75:
            damping *= 0.25
        elif ratio < 0.25:
            damping *= 4.0
    return losses


def gradient_descent(batches: list[tuple[Tensor, Tensor]], step_size: float) -> list[float]:
    """Return the same losses with plain gradient steps."""
    model = network()
    x, y = batches[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=step_size)
    losses = []
    for _ in range(NUM_STEPS + 1):
        optimizer.zero_grad()
        loss = LOSS(model(x), y)
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    return losses


def main() -> None:
    """Take a few steps of each kind and compare the losses."""
    torch.manual_seed(0)
    batches = [digits()[:1000]]

    def gauss_newton(model: nn.Module, G: LinearOperator, damping: float, g: Tensor) -> Tensor:
        return cg(G + damping * Identity(len(g)), -g, tol=1e-2, max_iter=50).x

    def natural(model: nn.Module, G: LinearOperator, damping: float, g: Tensor) -> Tensor:
        shift = damping * Identity(len(g))
        direction = -(inverse(KFAC(model, LOSS, batches) + shift) @ g)
        return direction * (-(g @ direction) / (direction @ ((G + shift) @ direction)))

    runs = {
        "Gauss-Newton (CG)": lambda: second_order(batches, gauss_newton),
        "natural gradient (K-FAC)": lambda: second_order(batches, natural),
        "gradient, step size 0.3": lambda: gradient_descent(batches, 0.3),
        "gradient, step size 1": lambda: gradient_descent(batches, 1.0),
        "gradient, step size 3": lambda: gradient_descent(batches, 3.0),
    }
    losses: dict[str, list[float]] = {}
    print(f"{'loss after so many steps:':26s}" + "".join(f"{step:9d}" for step in SHOWN))
    for name, run in runs.items():
        start = time.perf_counter()
        losses[name] = run()
        seconds = time.perf_counter() - start
        shown = "".join(f"{losses[name][step]:9.4f}" for step in SHOWN)
        print(f"{name:26s}{shown}   {seconds:.1f} s")

    figure = Figure(figsize=(5.6, 3.6), layout="constrained", facecolor="white")
    ax = figure.subplots()
    colours = ("blue", "green", "orange", "vermillion", "purple")
    for (name, values), colour in zip(losses.items(), colours, strict=True):
        ax.plot(values, color=OKABE_ITO[colour], label=name)
    ax.set(xlabel="Step", ylabel="Training loss (nats)", yscale="log")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(frameon=False)
    style_axes(ax)
    save(figure, "results/newton_step.png")
    print("Picture: results/newton_step.png")


if __name__ == "__main__":
    main()
