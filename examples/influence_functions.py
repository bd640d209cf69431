"""Influence functions: which training images decrease the test loss, and which increase it.

Some training labels are deliberately wrong. Increasing the weight of training example n by ε
changes the trained parameters by −ε H⁻¹ ∇ℓ_n, and the test loss by −ε ∇L_test ᵀ H⁻¹ ∇ℓ_n (Koh &
Liang, 2017). A single linear system, solved by conjugate gradients, gives the influence of all
examples. Mislabelled images should turn out to be the most harmful. The exact inverse of K-FAC as
the preconditioner saves many products for the last layer and few products for all parameters; for
other networks, it needs more products (`python -m benchmarks.preconditioners`).

Run with `python examples/influence_functions.py`; picture in results/influence_functions.png.
"""

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.func import functional_call, jvp
from torch.utils.data import DataLoader, Dataset, TensorDataset

from laplace_debias.curvature import GGN, KFAC
from laplace_debias.linalg import cg, inverse
from laplace_debias.operators import Identity
from laplace_debias.report.style import save

EPOCHS = 40
DAMPING = 1e-4
NUM_WRONG = 50


def digits() -> TensorDataset:
    """Handwritten digits, 8 × 8 pixels with mean 0 and variance 1, in a random order."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    order = torch.randperm(len(x))
    return TensorDataset(((x - 0.3053) / 0.3760)[order], torch.tensor(labels)[order])


def trained(model: nn.Module, data: Dataset, epochs: int) -> nn.Module:
    """Return your network; here, a small network that is trained until it is over-confident."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=50, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def main() -> None:
    """Train, solve one linear system, rank the training images."""
    torch.manual_seed(0)
    data = digits()
    x, labels = data[:1000]
    x_test, y_test = data[1000:]
    wrong = torch.randperm(len(x))[:NUM_WRONG]
    y = labels.clone()
    y[wrong] = (y[wrong] + torch.randint(1, 10, (NUM_WRONG,))) % 10
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
    trained(model, TensorDataset(x, y), EPOCHS)
    loss = nn.CrossEntropyLoss()

    print(f"Training images: {len(y)}, {NUM_WRONG} of them with a wrong label")
    batches = [(x, y)]
    test_gradients = dict(
        zip(
            dict(model.named_parameters()),
            torch.autograd.grad(loss(model(x_test), y_test), list(model.parameters())),
            strict=True,
        )
    )
    for params in ("last_layer", "all"):
        A = GGN(model, loss, batches, params)
        shift = DAMPING * Identity(A.shape[0])
        b = A.layout.flatten({name: test_gradients[name] for name in A.layout.names})
        near = inverse(KFAC(model, loss, batches, params) + shift)
        plain = cg(A + shift, b, tol=1e-3, max_iter=1000)
        solution = cg(A + shift, b, tol=1e-3, max_iter=1000, preconditioner=near)
        print(
            f"CG on GGN + {DAMPING} I, {params}, {len(b):,} parameters: {plain.num_matvecs} "
            f"products ({plain.status.value}); with K-FAC as the preconditioner "
            f"{solution.num_matvecs} ({solution.status.value})"
        )

    # One forward pass computes the derivative of all losses along s: ∇ℓ_nᵀ s for every n.
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    direction = A.layout.unflatten(solution.x)

    def losses(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(
            functional_call(model, values, (x,)), y, reduction="none"
        )

    _, slopes = jvp(losses, (parameters,), (direction,))
    influence = -slopes / len(y)  # the effect of a second copy of the example on the mean test loss

    order = influence.argsort(descending=True)
    is_wrong = torch.zeros(len(y), dtype=torch.bool)
    is_wrong[wrong] = True
    for count in (25, 50, 100):
        found = int(is_wrong[order[:count]].sum())
        print(f"Mislabelled among the {count} most harmful: {found} (by chance {count * 0.05:.0f})")
    with torch.no_grad():
        by_loss = losses(parameters).argsort(descending=True)
    print(f"Mislabelled among the 50 of greatest loss: {int(is_wrong[by_loss[:50]].sum())}")

    figure = Figure(figsize=(9, 3.4), layout="constrained", facecolor="white")
    axes = figure.subplots(2, 10)
    rows = (("harmful", order[:10]), ("helpful", order.flip(0)[:10]))
    for (name, chosen), row in zip(rows, axes, strict=True):
        for n, ax in zip(chosen.tolist(), row, strict=True):
            ax.imshow(x[n, 0], cmap="gray_r")
            truth = "" if not is_wrong[n] else f"\nis a {int(labels[n])}"
            ax.set_title(
                f"label {int(y[n])}{truth}", fontsize=8, color="#D55E00" if truth else "black"
            )
            ax.set_xlabel(f"{1e3 * float(influence[n]):+.2f}e-3", fontsize=7)
            ax.set(xticks=[], yticks=[])
        row[0].set_ylabel(f"most {name}", fontsize=9)
    figure.suptitle("Change of the mean test loss if the training image counted twice", fontsize=10)
    save(figure, "results/influence_functions.png")
    print("Picture: results/influence_functions.png")


if __name__ == "__main__":
    main()
