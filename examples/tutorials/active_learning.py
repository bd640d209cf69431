# %% [markdown]
# # Active learning
#
# Which images should be labelled next? Those for which plausible networks predict different labels.
# This can be measured by the mutual information between label and parameters (BALD; Houlsby et al.,
# 2011), which is high if the networks disagree, and low if they all agree that an image is
# ambiguous.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace

pixels, labels = load_digits(return_X_y=True)
x = torch.tensor(pixels / 16).float()
y = torch.tensor(labels)


def train_network(indices):
    """Train a small network on the labelled images, from the same start every time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-3)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
        optimizer.step()
    return model.eval()


# %% [markdown]
# ## The score of an image
#
# There are too few labels to hold any out, so we use `tune_evidence`, which chooses the prior
# precision by the marginal likelihood. `uncertainty` splits the entropy of a prediction into the
# part that more labels would remove (`epistemic`, which is the mutual information) and the rest.


# %%
def bald_scores(model, labelled, pool):
    """Compute the scores of the images in the pool, with a posterior from the labelled images."""
    la = Laplace(model, params="last_layer")
    la.fit(DataLoader(TensorDataset(x[labelled], y[labelled]), batch_size=100))
    la.tune_evidence()
    return la.uncertainty(x[pool], generator=torch.Generator().manual_seed(0)).epistemic


order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
labelled = order[:20]
pool = order[20:1200]
scores = bald_scores(train_network(labelled), labelled, pool)
figure, axes = plt.subplots(2, 8, figsize=(8, 2.4), layout="constrained")
for row, title, indices in (
    (axes[0], "highest", scores.argsort(descending=True)[:8]),
    (axes[1], "lowest", scores.argsort()[:8]),
):
    for ax, index in zip(row, indices):
        ax.imshow(x[pool[index]].reshape(8, 8), cmap="gray_r")
        ax.set(xticks=[], yticks=[])
    row[0].set_ylabel(title)
plt.show()

# %% [markdown]
# ## Ten images per round, compared with random selection


# %%
def learning_curve(method, seed, rounds=10, per_round=10):
    """Test accuracy before and after each round of labelling."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    labelled, pool, test = order.split([20, 1180, len(x) - 1200])
    accuracies = []
    for _ in range(rounds + 1):
        model = train_network(labelled)
        accuracies.append(float((model(x[test]).argmax(1) == y[test]).float().mean()))
        if method == "BALD":
            pool = pool[bald_scores(model, labelled, pool).argsort(descending=True)]
        labelled = torch.cat([labelled, pool[:per_round]])
        pool = pool[per_round:]
    return accuracies


curves = {
    method: torch.tensor([learning_curve(method, seed) for seed in range(5)])
    for method in ("random", "BALD")
}
figure, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
num_labels = range(20, 121, 10)
for (method, curve), colour in zip(curves.items(), ("grey", "tab:blue")):
    ax.plot(num_labels, curve.T, color=colour, alpha=0.25, linewidth=1)
    ax.plot(num_labels, curve.mean(0), color=colour, label=f"{method}, mean of 5 seeds")
ax.set(xlabel="labelled images", ylabel="test accuracy")
ax.legend(frameon=False)
plt.show()
gain = (curves["BALD"] - curves["random"])[:, -1]
print(
    "BALD minus random at 120 labels, for each seed:", [round(value, 3) for value in gain.tolist()]
)

# %% [markdown]
# ## Next steps
#
# - Compare the scores of uncertainty: [Scores](../method-predictives.md#scores-of-uncertainty).
# - Add the new labels without refitting: [Add new data](../how-to/new-data.md).
