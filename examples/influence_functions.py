"""Influence functions: which training images decrease the test loss, and which increase it.

Some training labels are deliberately wrong. Increasing the weight of training example n by ε
changes the trained parameters by −ε H⁻¹ ∇ℓ_n, and the test loss by −ε ∇L_test ᵀ H⁻¹ ∇ℓ_n (Koh &
Liang, 2017). A single linear system, solved by conjugate gradients, gives the influence of all
examples. Mislabelled images should turn out to be the most harmful. The exact inverse of K-FAC as
the preconditioner saves many products for the last layer and few products for all parameters; for
other networks, it needs more products (`python -m benchmarks.preconditioners`).

Run with `python examples/influence_functions.py`; picture in results/influence_functions.png.
"""

from collections.abc import Mapping

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.utils.data import DataLoader, Dataset, TensorDataset

from laplace_debias.curvature import GGN, KFAC
from laplace_debias.linalg import cg, inverse
from laplace_debias.operators import Identity
from laplace_debias.report.style import save

EPOCHS = 40
DAMPING = 1e-4
NUM_WRONG = 50
LOSS = nn.CrossEntropyLoss()


def digits() -> TensorDataset:
    """Handwritten digits, 8 × 8 pixels with mean 0 and variance 1, in a random order."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    order = torch.randperm(len(x))
    return TensorDataset(((x - 0.3053) / 0.3760)[order], torch.tensor(labels)[order])


def train_network(model: nn.Module, data: Dataset, epochs: int) -> nn.Module:
    """Return your network; here, a small network that is trained until it is over-confident."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=50, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def solve(
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    params: str,
    gradients: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Solve (GGN + DAMPING I) s = g by CG, and print how many products K-FAC saves.

    Args:
        model: The trained network.
        batches: The training data.
        params: The parameters, `"last_layer"` or `"all"`.
        gradients: The gradient g of every parameter of the model, by name.

    Returns:
        The solution s, by the names of the parameters.
    """
    A = GGN(model, LOSS, batches, params)
    shift = DAMPING * Identity(A.shape[0])
    g = A.layout.flatten({name: gradients[name] for name in A.layout.names})
    kfac_inverse = inverse(KFAC(model, LOSS, batches, params) + shift)
    plain = cg(A + shift, g, tol=1e-3, max_iter=1000)
    solution = cg(A + shift, g, tol=1e-3, max_iter=1000, preconditioner=kfac_inverse)
    print(
        f"CG on GGN + {DAMPING} I, {params}, {len(g):,} parameters: {plain.num_matvecs} "
        f"products ({plain.status.value}); with K-FAC as the preconditioner "
        f"{solution.num_matvecs} ({solution.status.value})"
    )
    return A.layout.unflatten(solution.x)


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
    train_network(model, TensorDataset(x, y), EPOCHS)

    print(f"Training images: {len(y)}, {NUM_WRONG} of them with a wrong label")
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(LOSS(model(x_test), y_test), list(parameters.values()))
    test_gradients = dict(zip(parameters, gradients, strict=True))
    solve(model, [(x, y)], "last_layer", test_gradients)
    direction = solve(model, [(x, y)], "all", test_gradients)

    def losses(parameters: dict[str, Tensor]) -> Tensor:
        outputs = functional_call(model, parameters, (x,))
        return nn.functional.cross_entropy(outputs, y, reduction="none")

    # One forward pass computes the derivative of all losses along s: ∇ℓ_nᵀ s for every n.
    trained_parameters = {name: parameter.detach() for name, parameter in parameters.items()}
    _, slopes = jvp(losses, (trained_parameters,), (direction,))
    influence = -slopes / len(y)  # the effect of a second copy of the example on the mean test loss

    order = influence.argsort(descending=True)
    is_wrong = torch.zeros(len(y), dtype=torch.bool)
    is_wrong[wrong] = True
    for count in (25, 50, 100):
        hits = int(is_wrong[order[:count]].sum())
        print(f"Mislabelled among the {count} most harmful: {hits} (by chance {count * 0.05:.0f})")
    with torch.no_grad():
        loss_order = losses(trained_parameters).argsort(descending=True)
    print(f"Mislabelled among the 50 of greatest loss: {int(is_wrong[loss_order[:50]].sum())}")

    figure = Figure(figsize=(9, 3.4), layout="constrained", facecolor="white")
    rows = {"harmful": order[:10], "helpful": order.flip(0)[:10]}
    for (name, indices), axes in zip(rows.items(), figure.subplots(2, 10), strict=True):
        for n, ax in zip(indices.tolist(), axes, strict=True):
            ax.imshow(x[n, 0], cmap="gray_r")
            if is_wrong[n]:
                title = f"label {int(y[n])}\nis a {int(labels[n])}"
                ax.set_title(title, fontsize=8, color="#D55E00")
            else:
                ax.set_title(f"label {int(y[n])}", fontsize=8, color="black")
            ax.set_xlabel(f"{1e3 * float(influence[n]):+.2f}e-3", fontsize=7)
            ax.set(xticks=[], yticks=[])
        axes[0].set_ylabel(f"most {name}", fontsize=9)
    figure.suptitle("Change of the mean test loss if the training image counted twice", fontsize=10)
    save(figure, "results/influence_functions.png")
    print("Picture: results/influence_functions.png")


if __name__ == "__main__":
    main()
