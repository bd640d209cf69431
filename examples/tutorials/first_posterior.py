# %% [markdown]
# # Your first posterior
#
# You have a trained classifier and a data loader. In the next ten minutes you will fit a Laplace
# approximation, check whether its probabilities are calibrated, and see whether it recognises
# inputs that are unlike the training data.
#
# ## A trained network
#
# Any `nn.Module` will do; this one is trained on 500 handwritten digits of 8 × 8 pixels. One label
# in ten is random, to imitate the mistakes of human annotators.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
images = torch.tensor(pixels / 16).float()
labels = torch.tensor(labels)
is_random = torch.rand(len(labels)) < 0.1
labels[is_random] = torch.randint(10, (int(is_random.sum()),))
train, validation, test = random_split(TensorDataset(images, labels), [500, 300, 997])

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(60):
    for x, y in DataLoader(train, batch_size=50, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
model = model.eval()

# %% [markdown]
# ## Fit and tune
#
# A [Laplace approximation](../explanation/laplace.md) is a Gaussian distribution around the trained
# weights, the *posterior*. `fit` reads the training data once and estimates how sharply the loss
# rises around these weights: the sharper, the narrower the posterior. `tune` then uses held-out
# examples to choose how wide the posterior is (the prior precision) and how outputs become
# probabilities (the link and a temperature). Neither changes the model.

# %%
from laplace_debias import Laplace

la = Laplace(model, likelihood="classification", params="last_layer")
la.fit(DataLoader(train, batch_size=100))

test_images, test_labels = test[:]
shuffled = test_images.gather(1, torch.rand(test_images.shape).argsort(1))
# The network's own predictions.
network_probs = la.predict(test_images, method="map").probs
network_shuffled_probs = la.predict(shuffled, method="map").probs

tuned = la.tune(DataLoader(validation, batch_size=100))
probs = la.predict(test_images).probs
print(f"prior precision {tuned.prior_precision:.3g}")

# %% [markdown]
# ## Is it calibrated?
#
# A network is *calibrated* if about 80 % of the predictions made with a confidence of 80 % are
# correct. A reliability diagram shows the accuracy of the predictions in each bin of confidence.
# Points below the diagonal indicate overconfident predictions.

# %%
from laplace_debias.metrics import nll, reliability_curve

figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True, layout="constrained")
predictions = {"network": network_probs, "Laplace": probs}
for ax, (name, method_probs) in zip(axes, predictions.items()):
    curve = reliability_curve(method_probs, test_labels, num_bins=10)
    filled = curve.fraction > 0
    ax.plot([0, 1], [0, 1], "--", color="grey", linewidth=1)
    ax.plot(curve.confidence[filled], curve.accuracy[filled], "o-")
    test_nll = float(nll(method_probs, test_labels))
    ax.set(title=f"{name}: NLL {test_nll:.3f}", xlabel="mean confidence in the bin")
axes[0].set_ylabel("accuracy in the bin")
plt.show()

# %% [markdown]
# ## Does it notice unfamiliar inputs?
#
# Images with shuffled pixels are as bright as digits, but show none. The entropy of a prediction is
# 0 if the network is certain, and log 10 = 2.3 nats if it guesses. The AUROC is the probability
# that a shuffled digit has a higher entropy than a digit.

# %%
from laplace_debias.metrics import auroc, entropy

entropies = {
    "network": (entropy(network_probs), entropy(network_shuffled_probs)),
    "Laplace": (entropy(probs), entropy(la.predict(shuffled).probs)),
}
figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
bins = torch.linspace(0, 2.31, 24)
for ax, (name, (familiar, unfamiliar)) in zip(axes, entropies.items()):
    ax.hist(familiar, bins, alpha=0.7, label="test digits")
    ax.hist(unfamiliar, bins, alpha=0.7, label="shuffled digits")
    ax.set(title=f"{name}: AUROC {float(auroc(familiar, unfamiliar)):.2f}", xlabel="entropy (nats)")
axes[0].set_ylabel("images")
axes[1].legend(frameon=False)
plt.show()

# %% [markdown]
# ## Is the difference significant?
#
# `evaluate` computes every metric with a 95 % confidence interval, and `compare` computes the
# differences between two reports, paired example by example.

# %%
from laplace_debias.metrics import compare

test_loader = DataLoader(test, batch_size=100)
ood = {"shuffled": [(shuffled, test_labels)]}
posterior_report = la.evaluate(test_loader, ood)
network_report = la.evaluate(test_loader, ood, method="map")
difference = compare(posterior_report, network_report)
for name in ("accuracy", "nll", "overconfidence", "auroc_shuffled"):
    interval = difference[name]
    print(f"{name:15} Laplace minus network: {interval.low:+.3f} to {interval.high:+.3f}")

# %% [markdown]
# The posterior has a better NLL and separates shuffled digits from digits. With clean labels and
# plenty of data, the gain is small or zero: [Does it help?](../does-it-help.md) shows where it
# helped in a study of small problems.
#
# ## Keep it

# %%
la.save("posterior.safetensors")  # no pickle
restored = Laplace.load("posterior.safetensors", model)
print((restored.predict(test_images).probs - probs).abs().max().item())

# %% [markdown]
# ## Next steps
#
# - Use your own data: [Use your own batches and models](../how-to/batches.md).
# - Choose weights, curvature and data: [Choosing a posterior](../choosing.md).
# - Read what is computed: [What a Laplace approximation does](../explanation/laplace.md).
