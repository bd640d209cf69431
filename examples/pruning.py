"""Which weights a network does not need: optimal brain damage against magnitude pruning.

Setting a weight w to zero increases the loss by about ½ w² c, where c is the curvature along this
weight (LeCun et al., 1990). The diagonal of the GGN is estimated from products; the diagonal of
EKFAC is computed exactly without products.

Run with `python examples/pruning.py`; picture in results/pruning.png.
"""

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from laplace_debias.curvature import EKFAC, GGN
from laplace_debias.linalg import diagonal
from laplace_debias.report.style import OKABE_ITO, save, style_axes

EPOCHS = 40
NUM_PRODUCTS = 400  # products with the GGN, to estimate its diagonal
SPARSITIES = (0.0, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)


def digits() -> TensorDataset:
    """Handwritten digits, 8 × 8 pixels with mean 0 and variance 1, in a random order."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    order = torch.randperm(len(x))
    return TensorDataset(((x - 0.3053) / 0.3760)[order], torch.tensor(labels)[order])


def network() -> nn.Sequential:
    """A small all-convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(24, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 10, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def train_network(model: nn.Module, data: Dataset, epochs: int) -> nn.Module:
    """Return your network; here, a small network that is trained until it is over-confident."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=50, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def main() -> None:
    """Train, estimate the curvature, and prune by three rules."""
    torch.manual_seed(0)
    training, test = random_split(digits(), [1297, 500])
    model = train_network(network(), training, EPOCHS)
    batches = DataLoader(training, batch_size=250)
    x_test, y_test = test[:]

    # Only weights are pruned, because there are few biases.
    A = GGN(model, nn.CrossEntropyLoss(), batches, params="weights")
    generator = torch.Generator().manual_seed(0)
    estimate = diagonal(A, num_matvecs=NUM_PRODUCTS, generator=generator)
    relative_error = float(estimate.standard_error.norm() / estimate.value.norm())
    ekfac = EKFAC(model, nn.CrossEntropyLoss(), batches, params="weights")
    print(
        f"{A.shape[0]:,} weights. Diagonal of the GGN from {estimate.num_matvecs} products: "
        f"relative standard error {relative_error:.1%}"
    )
    weights = torch.cat([model.get_parameter(name).detach().flatten() for name in A.layout.names])
    rules = {
        "magnitude": weights.abs(),
        "½ w² diag(GGN), estimated": weights.square() * estimate.value.clamp(min=0) / 2,
        "½ w² diag(EKFAC)": weights.square() * diagonal(ekfac).value / 2,
    }

    def accuracy(pruned: Tensor) -> float:
        with torch.no_grad():
            outputs = functional_call(model, A.layout.unflatten(pruned), (x_test,))
        return float((outputs.argmax(1) == y_test).double().mean())

    accuracies: dict[str, list[float]] = {}
    for name, saliency in rules.items():
        order = saliency.argsort()
        accuracies[name] = []
        for sparsity in SPARSITIES:
            pruned = weights.clone()
            pruned[order[: round(sparsity * len(order))]] = 0
            accuracies[name].append(accuracy(pruned))
    print(f"{'weights pruned':28s}" + "".join(f"{sparsity:>7.0%}" for sparsity in SPARSITIES))
    for name, values in accuracies.items():
        print(f"{name:28s}" + "".join(f"{value:7.3f}" for value in values))

    figure = Figure(figsize=(5.6, 3.6), layout="constrained", facecolor="white")
    ax = figure.subplots()
    colours = ("black", "blue", "green")
    for (name, values), colour in zip(accuracies.items(), colours, strict=True):
        ax.plot(SPARSITIES, values, "o-", markersize=4, color=OKABE_ITO[colour], label=name)
    ax.set(xlabel="Share of the weights set to zero", ylabel="Test accuracy ↑")
    ax.legend(frameon=False)
    style_axes(ax)
    save(figure, "results/pruning.png")
    print("Picture: results/pruning.png")


if __name__ == "__main__":
    main()
