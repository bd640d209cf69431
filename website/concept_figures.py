"""Draws the figures of the pages that explain the ideas, into docs/images; `make figures` runs it.

Everything is computed: the networks are trained here, which takes a minute on one core.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from sklearn.datasets import load_digits, make_moons
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, Link
from laplace_debias.curvature import GGN
from laplace_debias.linalg import eigsh
from laplace_debias.metrics import nll, overconfidence

IMAGES = Path(__file__).parents[1] / "docs" / "images"
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"


def trained(
    model: nn.Module, x: Tensor, y: Tensor, steps: int, rate: float = 1e-2, decay: float = 0.0
) -> nn.Module:
    """Minimise the cross-entropy of all data with Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=decay)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def save(figure: Figure, name: str) -> None:
    """Write a figure on white."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGES / f"{name}.png", dpi=140, facecolor="white")
    plt.close(figure)


def draw_valley() -> None:
    """The negative log posterior of two parameters, and the Gaussian of the Laplace approximation.

    The model is a logistic regression of one feature with an intercept, for 20 examples.
    """
    torch.manual_seed(3)
    x = torch.randn(20)
    y = (torch.rand(20) < torch.sigmoid(2.0 * x + 0.5)).double()
    x = x.double()
    precision = 0.2

    def negative_log_posterior(weight: Tensor, bias: Tensor) -> Tensor:
        logits = weight[..., None] * x + bias[..., None]
        loss = nn.functional.softplus(logits) - y * logits
        return loss.sum(-1) + precision / 2 * (weight**2 + bias**2)

    theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([theta], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = negative_log_posterior(theta[0], theta[1])
        value.backward()
        return value

    optimizer.step(closure)
    mode = theta.detach()
    hessian = torch.autograd.functional.hessian(lambda t: negative_log_posterior(t[0], t[1]), mode)
    eigenvalues, eigenvectors = torch.linalg.eigh(hessian)

    weight, bias = torch.meshgrid(
        torch.linspace(-1, 5, 300, dtype=torch.float64),
        torch.linspace(-1, 3, 300, dtype=torch.float64),
        indexing="ij",
    )
    density = (-(negative_log_posterior(weight, bias) - closure().detach())).exp()
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
    axes[0].contourf(weight, bias, density, levels=12, cmap="Blues")
    for deviations in (1, 2):
        axes[0].add_patch(
            Ellipse(
                tuple(mode.tolist()),
                *(2 * deviations / eigenvalues.sqrt()).tolist(),
                angle=float(torch.atan2(eigenvectors[1, 0], eigenvectors[0, 0]).rad2deg()),
                fill=False,
                edgecolor=ORANGE,
                linewidth=1.8,
                label=f"Laplace, {deviations} sd",
            )
        )
    axes[0].plot(*mode.tolist(), "o", color=ORANGE, markersize=5)
    axes[0].set(xlabel="weight", ylabel="bias", title="posterior (blue) and Gaussian", xlim=(-1, 5))
    axes[0].legend(frameon=False, loc="upper left", fontsize=9)

    along = torch.linspace(-3, 3, 300, dtype=torch.float64)
    for index, (colour, name) in enumerate(((BLUE, "flat direction"), (ORANGE, "sharp direction"))):
        points = mode[:, None] + eigenvectors[:, index, None] * along
        value = negative_log_posterior(points[0], points[1]) - closure().detach()
        axes[1].plot(along, value, color=colour, label=name)
        axes[1].plot(along, eigenvalues[index] / 2 * along**2, "--", color=colour, linewidth=1)
    axes[1].set(
        xlabel="distance from the trained parameters",
        ylabel="rise of the loss (sum)",
        ylim=(0, 4),
        title="the loss and its parabola (dashed)",
    )
    axes[1].legend(frameon=False, fontsize=9)
    save(figure, "valley")


def confidence_map(ax: Axes, probs: Tensor, x: Tensor, y: Tensor, title: str) -> object:
    """Confidence on a square grid of inputs, with the data on it."""
    size = int(len(probs) ** 0.5)
    shown = probs.max(1).values.reshape(size, size)
    image = ax.imshow(
        shown, origin="lower", extent=(-6, 6, -6, 6), vmin=0.5, vmax=1, cmap="viridis"
    )
    for label, marker in ((0, "o"), (1, "^")):
        chosen = x[y == label]
        ax.plot(
            chosen[:, 0], chosen[:, 1], marker, color="white", markeredgecolor="black", markersize=4
        )
    ax.set(title=title, xticks=[], yticks=[])
    return image


def draw_moons() -> None:
    """Confidence of a network and of its posterior, near the data and far away."""
    torch.manual_seed(0)
    points, labels = make_moons(120, noise=0.15, random_state=0)
    x = torch.tensor(points).float() * 1.5 - torch.tensor([0.75, 0.4])
    y = torch.tensor(labels)
    model = nn.Sequential(
        nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
    )
    model = trained(model, x, y, 800, decay=1e-3)
    axis = torch.linspace(-6, 6, 121)
    grid = torch.cartesian_prod(axis, axis).flip(1)
    la = Laplace(model, "classification").fit(DataLoader(TensorDataset(x, y), batch_size=60))
    la.tune_evidence()
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.8), layout="constrained")
    with torch.no_grad():
        confidence_map(axes[0], model(grid).softmax(1), x, y, "network")
    image = confidence_map(axes[1], la.predict(grid).probs, x, y, "Laplace")
    figure.colorbar(image, ax=axes, label="confidence")
    save(figure, "moons")


def noisy_digits(steps: int) -> tuple[Tensor, Tensor, nn.Module]:
    """Digits, of which one label in ten is random, and a network trained on the first 500."""
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16).float(), torch.tensor(labels)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    is_random = torch.rand(len(y)) < 0.1
    y[is_random] = torch.randint(10, (int(is_random.sum()),))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return x, y, trained(model, x[:500], y[:500], steps)


def draw_bias(x: Tensor, y: Tensor, model: nn.Module) -> None:
    """Curvature along the top eigenvectors of mini-batches, on the same batch and on other data."""
    loss = nn.CrossEntropyLoss()
    own_curvature, other_curvature = [], []
    generator = torch.Generator().manual_seed(0)
    everything = GGN(model, loss, [(x[:500], y[:500])])
    for start in range(0, 480, 48):
        own = slice(start, start + 48)
        others = torch.cat([torch.arange(start), torch.arange(start + 48, 500)])
        batch = GGN(model, loss, [(x[own], y[own])])
        values, vectors = eigsh(batch, k=25, generator=generator)
        products = GGN(model, loss, [(x[others], y[others])]) @ vectors
        own_curvature.append(values)
        other_curvature.append((vectors * products).sum(0))
    top = eigsh(everything, k=25, generator=generator).values
    figure, ax = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    index = range(1, 26)
    for curvature, colour, marker, name in (
        (own_curvature, BLUE, "o", "measured on the same 48 examples"),
        (other_curvature, ORANGE, "s", "measured on the other 452"),
    ):
        values = torch.stack(curvature)
        ax.plot(index, values.T, color=colour, alpha=0.15, linewidth=0.8)
        ax.plot(index, values.mean(0), marker, color=colour, markersize=4, label=name)
    ax.plot(index, top, "--", color=GREY, linewidth=1, label="eigenvalues for all 500")
    ax.set(
        yscale="log",
        xlabel="eigenvector of the mini-batch, largest eigenvalue first",
        ylabel="curvature along it",
    )
    ax.legend(frameon=False, fontsize=9)
    save(figure, "mini_batch_bias")


def draw_prior(x: Tensor, y: Tensor, model: nn.Module) -> None:
    """Test NLL and over-confidence against the prior precision."""
    la = Laplace(model, params="last_layer")
    la.fit(DataLoader(TensorDataset(x[:500], y[:500]), batch_size=100))
    la.link = Link("probit")
    x_test, y_test = x[800:], y[800:]
    network = model(x_test).softmax(1).detach()
    precisions = torch.logspace(-2, 4, 40)
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
    for ax, metric, label in (
        (axes[0], nll, "test NLL (nats)"),
        (axes[1], overconfidence, "mean confidence minus accuracy"),
    ):
        values = []
        for precision in precisions:
            la.prior_precision = float(precision)
            values.append(float(metric(la.predict(x_test).probs, y_test)))
        ax.plot(precisions, values, color=BLUE, label="Laplace, last layer")
        ax.axhline(
            float(metric(network, y_test)),
            color=GREY,
            linestyle="--",
            linewidth=1,
            label="network",
        )
        ax.set(xscale="log", xlabel="prior precision δ", ylabel=label)
    axes[1].axhline(0, color="black", linewidth=0.6)
    axes[1].legend(frameon=False, fontsize=9)
    save(figure, "prior_precision_digits")


DECISIONS = (
    (
        "Do you only need calibrated probabilities\nfor inputs like the training data?",
        "temperature scaling\n(la.tune compares it)",
    ),
    (
        "Do you only need error bars\nfor a small table of numbers?",
        "LaplaceRegressor\n(needs no held-out data)",
    ),
    (
        "Do you have to detect unfamiliar inputs,\nand can you afford all parameters?",
        'params="all"',
    ),
)
OTHERWISE = 'params="last_layer"'
ADDITION = "Several trained networks?\nCombine their posteriors in a Mixture."


def draw_decision_tree() -> None:
    """Questions from top to bottom; "yes" leads to the right.

    The addition applies to both of the last answers.
    """
    figure, ax = plt.subplots(figsize=(7.6, 3.9), layout="constrained")
    ax.set(xlim=(0, 10), ylim=(0, len(DECISIONS) + 1))
    ax.axis("off")
    question = {"boxstyle": "round,pad=0.4", "facecolor": "#E8F1FA", "edgecolor": BLUE}
    answer = {"boxstyle": "round,pad=0.4", "facecolor": "#FDEEE4", "edgecolor": ORANGE}
    arrow = {"arrowstyle": "->", "color": GREY}

    def box(x: float, y: float, text: str, style: dict[str, str]) -> None:
        ax.text(x, y, text, ha="center", va="center", fontsize=10, bbox=style)

    for row, (text, result) in enumerate(DECISIONS):
        y = len(DECISIONS) + 0.5 - row
        ax.annotate("", (6.1, y), (4.9, y), arrowprops=arrow)
        ax.text(5.4, y + 0.08, "yes", ha="center", va="bottom", fontsize=9, color=GREY)
        ax.annotate("", (2.6, y - 0.72), (2.6, y - 0.28), arrowprops=arrow)
        ax.text(2.75, y - 0.5, "no", va="center", fontsize=9, color=GREY)
        box(2.6, y, text, question)
        box(8.0, y, result, answer)
    box(2.6, 0.5, OTHERWISE, answer)
    addition = answer | {"facecolor": "white", "edgecolor": GREY, "linestyle": "--"}
    box(8.0, 0.5, ADDITION, addition)
    ax.annotate("", (6.1, 0.5), (4.1, 0.5), arrowprops=arrow | {"linestyle": "--"})
    ax.annotate("", (8.0, 0.85), (8.0, 1.25), arrowprops=arrow | {"linestyle": "--"})
    save(figure, "decision_tree")


def main() -> None:
    """Draw all figures."""
    draw_decision_tree()
    draw_valley()
    draw_moons()
    draw_bias(*noisy_digits(steps=150))
    draw_prior(*noisy_digits(steps=60))


if __name__ == "__main__":
    main()
