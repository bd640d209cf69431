"""K-FAC's inverse as a preconditioner for CG: `python -m benchmarks.preconditioners`.

The benchmark counts the products with the GGN that CG needs to solve `(GGN + c I) x = g` to a
relative residual of 1e-3, without a preconditioner and with the inverse of `KFAC + c I`. Here, g is
the gradient on test images. The numbers of products do not depend on the machine. The data are
scikit-learn's digits.
"""

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from laplace_debias.curvature import GGN, KFAC
from laplace_debias.linalg import cg, inverse
from laplace_debias.operators import Identity

NUM_TRAINING = 1000
DAMPINGS = (1e-4, 1e-2, 1.0)
TOLERANCE = 1e-3
LOSS = nn.CrossEntropyLoss()

Examples = tuple[Tensor, Tensor]


def digits() -> tuple[Examples, Examples]:
    """Load training and test images `[n, 64]`, standardised, in float64, with labels."""
    images, targets = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x = ((torch.tensor(images) / 16 - 0.3053) / 0.3760)[order]
    y = torch.tensor(targets)[order]
    return (x[:NUM_TRAINING], y[:NUM_TRAINING]), (x[NUM_TRAINING:], y[NUM_TRAINING:])


def dense(*widths: int) -> nn.Sequential:
    """Build a network of linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def convolutional() -> nn.Sequential:
    """Build a network of two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


NETWORKS: dict[str, Callable[[], nn.Sequential]] = {
    "linear, 64-10": lambda: dense(64, 10),
    "one hidden layer, 64-16-10": lambda: dense(64, 16, 10),
    "one hidden layer, 64-256-10": lambda: dense(64, 256, 10),
    "four hidden layers, 64-64-64-64-64-10": lambda: dense(64, 64, 64, 64, 64, 10),
    "two convolutions": convolutional,
}


def train_network(build: Callable[[], nn.Sequential], epochs: int, data: Examples) -> nn.Module:
    """Build a network and train it with Adam, in batches of 50."""
    torch.manual_seed(1)
    model = build().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x, y = data
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(50):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.eval()


def num_products(model: nn.Module, data: Examples, test: Examples) -> list[tuple[int, int]]:
    """Return the numbers of products without and with the preconditioner, for each damping."""
    A = GGN(model, LOSS, [data])
    K = KFAC(model, LOSS, [data])
    gradients = torch.autograd.grad(LOSS(model(test[0]), test[1]), list(model.parameters()))
    b = torch.cat([gradient.flatten() for gradient in gradients])
    rows = []
    for damping in DAMPINGS:
        shift = damping * Identity(len(b))
        plain = cg(A + shift, b, tol=TOLERANCE, max_iter=5000)
        preconditioned = cg(
            A + shift, b, tol=TOLERANCE, max_iter=5000, preconditioner=inverse(K + shift)
        )
        assert plain.converged
        assert preconditioned.converged
        rows.append((plain.num_matvecs, preconditioned.num_matvecs))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of numbers of products."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--epochs", nargs="+", type=int, default=[0, 40])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data, test = digits()
    titles = " | ".join(f"c = {damping:g}" for damping in DAMPINGS)
    print(f"| network | parameters | epochs | {titles} |")
    print("|---|---:|---:|" + "---:|" * len(DAMPINGS))
    for name in options.networks:
        for epochs in options.epochs:
            model = train_network(NETWORKS[name], epochs, data)
            size = sum(parameter.numel() for parameter in model.parameters())
            counts = num_products(model, data, test)
            cells = " | ".join(f"{plain} → {preconditioned}" for plain, preconditioned in counts)
            print(f"| {name} | {size:,} | {epochs} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
