"""Draw the figures of the explanation pages into docs/images, as `make figures` does.

The networks are trained here, which takes a minute on one core.
"""

from dataclasses import dataclass
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
BLUE = "#0072B2"
ORANGE = "#D55E00"
GREY = "#666666"


def train_network(
    model: nn.Module, x: Tensor, y: Tensor, steps: int, rate: float = 1e-2, decay: float = 0.0
) -> nn.Module:
    """Minimise the cross-entropy of all data with Adam; return the network in eval mode."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=decay)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def save(figure: Figure, name: str) -> None:
    """Write a figure with a white background, and close it."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGES / f"{name}.png", dpi=140, facecolor="white")
    plt.close(figure)


def draw_valley() -> None:
    """Draw the negative log posterior of two parameters, and its Laplace approximation.

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

    distances = torch.linspace(-3, 3, 300, dtype=torch.float64)
    for index, (colour, name) in enumerate(((BLUE, "flat direction"), (ORANGE, "sharp direction"))):
        points = mode[:, None] + eigenvectors[:, index, None] * distances
        value = negative_log_posterior(points[0], points[1]) - closure().detach()
        parabola = eigenvalues[index] / 2 * distances**2
        axes[1].plot(distances, value, color=colour, label=name)
        axes[1].plot(distances, parabola, "--", color=colour, linewidth=1)
    axes[1].set(
        xlabel="distance from the trained parameters",
        ylabel="rise of the loss (sum)",
        ylim=(0, 4),
        title="the loss and its parabola (dashed)",
    )
    axes[1].legend(frameon=False, fontsize=9)
    save(figure, "valley")


def confidence_map(ax: Axes, probs: Tensor, x: Tensor, y: Tensor, title: str) -> object:
    """Draw the confidence on a square grid of inputs, with the data on it.

    Args:
        ax: The axes.
        probs: The probabilities at the points of the grid, `[points, 2]`.
        x: The data, `[n, 2]`.
        y: The classes, `[n]`.
        title: The title of the axes.

    Returns:
        The image, for a colour bar.
    """
    side = int(len(probs) ** 0.5)
    confidence = probs.max(1).values.reshape(side, side)
    image = ax.imshow(
        confidence, origin="lower", extent=(-6, 6, -6, 6), vmin=0.5, vmax=1, cmap="viridis"
    )
    for label, marker in ((0, "o"), (1, "^")):
        points = x[y == label]
        ax.plot(
            points[:, 0], points[:, 1], marker, color="white", markeredgecolor="black", markersize=4
        )
    ax.set(title=title, xticks=[], yticks=[])
    return image


def draw_moons() -> None:
    """Draw the confidence of a network and of its posterior, near the data and far away."""
    torch.manual_seed(0)
    points, labels = make_moons(120, noise=0.15, random_state=0)
    x = torch.tensor(points).float() * 1.5 - torch.tensor([0.75, 0.4])
    y = torch.tensor(labels)
    model = nn.Sequential(
        nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
    )
    model = train_network(model, x, y, 800, decay=1e-3)
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


@dataclass(frozen=True)
class TrainedDigits:
    """Digits with noisy labels, and a network that is trained on the first 500 of them.

    Attributes:
        x: All images, `[n, 64]`.
        y: All labels, `[n]`.
        model: The network.
    """

    x: Tensor
    y: Tensor
    model: nn.Module


def noisy_digits(steps: int) -> TrainedDigits:
    """Replace one label in ten by a random one, and train a network for some steps."""
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x = torch.tensor(pixels / 16).float()[order]
    y = torch.tensor(labels)[order]
    is_random = torch.rand(len(y)) < 0.1
    y[is_random] = torch.randint(10, (int(is_random.sum()),))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return TrainedDigits(x, y, train_network(model, x[:500], y[:500], steps))


def draw_bias(digits: TrainedDigits) -> None:
    """Draw the curvature along a mini-batch's top eigenvectors, on the batch and on other data."""
    x = digits.x[:500]
    y = digits.y[:500]
    loss = nn.CrossEntropyLoss()
    curvature_on_batch = []
    curvature_on_other_data = []
    generator = torch.Generator().manual_seed(0)
    for start in range(0, 480, 48):
        in_batch = torch.zeros(500, dtype=torch.bool)
        in_batch[start : start + 48] = True
        batch_ggn = GGN(digits.model, loss, [(x[in_batch], y[in_batch])])
        other_ggn = GGN(digits.model, loss, [(x[~in_batch], y[~in_batch])])
        eigenvalues, eigenvectors = eigsh(batch_ggn, k=25, generator=generator)
        curvature_on_batch.append(eigenvalues)
        curvature_on_other_data.append((eigenvectors * (other_ggn @ eigenvectors)).sum(0))
    full_ggn = GGN(digits.model, loss, [(x, y)])
    full_eigenvalues = eigsh(full_ggn, k=25, generator=generator).values
    figure, ax = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    index = range(1, 26)
    for curvature, colour, marker, name in (
        (curvature_on_batch, BLUE, "o", "measured on the same 48 examples"),
        (curvature_on_other_data, ORANGE, "s", "measured on the other 452"),
    ):
        values = torch.stack(curvature)
        ax.plot(index, values.T, color=colour, alpha=0.15, linewidth=0.8)
        ax.plot(index, values.mean(0), marker, color=colour, markersize=4, label=name)
    ax.plot(index, full_eigenvalues, "--", color=GREY, linewidth=1, label="eigenvalues for all 500")
    ax.set(
        yscale="log",
        xlabel="eigenvector of the mini-batch, largest eigenvalue first",
        ylabel="curvature along it",
    )
    ax.legend(frameon=False, fontsize=9)
    save(figure, "mini_batch_bias")


def draw_prior(digits: TrainedDigits) -> None:
    """Draw the test NLL and the over-confidence against the prior precision."""
    la = Laplace(digits.model, params="last_layer")
    la.fit(DataLoader(TensorDataset(digits.x[:500], digits.y[:500]), batch_size=100))
    la.link = Link("probit")
    x_test = digits.x[800:]
    y_test = digits.y[800:]
    network_probs = digits.model(x_test).softmax(1).detach()
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
            float(metric(network_probs, y_test)),
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
    """Draw questions from top to bottom; "yes" leads to the right.

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
    draw_bias(noisy_digits(steps=150))
    draw_prior(noisy_digits(steps=60))


if __name__ == "__main__":
    main()
