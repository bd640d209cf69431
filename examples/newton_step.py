"""Second-order steps on the digits: Gauss-Newton by CG, natural gradient by K-FAC, and gradients.

All three see the same 1,000 images in every step. The Newton step solves (GGN + λI) d = −g by
products alone, the natural-gradient step by K-FAC's exact inverse.

Run with `python examples/newton_step.py`; picture in results/newton_step.png.
"""

import time
from collections.abc import Callable

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from laplace_debias.curvature import GGN, KFAC
from laplace_debias.linalg import cg, inverse
from laplace_debias.operators import Identity
from laplace_debias.problems import digits
from laplace_debias.report.style import OKABE_ITO, save, style_axes

NUM_STEPS = 20
DAMPING = 1e-2


def network() -> nn.Module:
    """The same start for all."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).eval()


def main() -> None:
    """Take a few steps of each kind and compare the losses."""
    data = digits().train
    batches = [data.batch(torch.arange(len(data)))]
    (x, y) = batches[0]
    loss = nn.CrossEntropyLoss()

    def newton(model: nn.Module, gradient: Tensor) -> Tensor:
        A = GGN(model, loss, batches) + DAMPING * Identity(len(gradient))
        return cg(A, -gradient, tol=1e-2, max_iter=50).x

    def natural(model: nn.Module, gradient: Tensor) -> Tensor:
        A = KFAC(model, loss, batches) + DAMPING * Identity(len(gradient))
        return -(inverse(A) @ gradient)

    def steepest(rate: float) -> Callable[[nn.Module, Tensor], Tensor]:
        return lambda model, gradient: -rate * gradient

    rules = {
        "Gauss-Newton (CG)": newton,
        "natural gradient (K-FAC)": natural,
        **{f"gradient, step size {rate}": steepest(rate) for rate in (0.1, 0.3, 1.0)},
    }
    losses: dict[str, list[float]] = {}
    for name, rule in rules.items():
        model = network()
        began = time.perf_counter()
        losses[name] = []
        for _ in range(NUM_STEPS):
            value = loss(model(x), y)
            gradient = torch.autograd.grad(value, list(model.parameters()))
            losses[name].append(float(value.detach()))
            step = rule(model, parameters_to_vector(gradient).detach())
            with torch.no_grad():
                vector_to_parameters(
                    parameters_to_vector(model.parameters()) + step, model.parameters()
                )
        with torch.no_grad():
            losses[name].append(float(loss(model(x), y)))
        shown = "  ".join(f"{losses[name][t]:8.4f}" for t in (0, 1, 2, 5, 10, 20))
        seconds = time.perf_counter() - began
        print(f"{name:26s} loss after 0, 1, 2, 5, 10, 20 steps: {shown}  {seconds:.1f} s")

    figure = Figure(figsize=(5.6, 3.6), layout="constrained", facecolor="white")
    ax = figure.subplots()
    colours = ("blue", "green", "orange", "vermillion", "purple")
    for (name, values), colour in zip(losses.items(), colours, strict=True):
        ax.plot(values, color=OKABE_ITO[colour], label=name)
    ax.set(xlabel="Step", ylabel="Training loss (nats)", yscale="log")
    ax.legend(frameon=False)
    style_axes(ax)
    save(figure, "results/newton_step.png")
    print("Picture: results/newton_step.png")


if __name__ == "__main__":
    main()
