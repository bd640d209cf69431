# %% [markdown]
# # An ImageNet network: the last layer
#
# A posterior over the last layer needs one forward pass over the training data, and its predictions
# cost hardly more than the network's. This works for every classifier in timm and torchvision,
# whatever its last layer is called.
#
# The network here is timm's smallest EfficientNet, trained briefly on a few digits, so that the
# notebook downloads nothing. With your own weights, `timm.create_model(name, checkpoint_path=...)`
# replaces the training.

# %%
import timm
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
small = torch.tensor(pixels / 8 - 1).float().reshape(-1, 1, 8, 8)
images = nn.functional.interpolate(small, size=32, mode="bilinear").expand(-1, 3, -1, -1)
digits = TensorDataset(images, torch.tensor(labels))
train, validation, test = random_split(digits, [300, 300, len(digits) - 600])

model = timm.create_model("test_efficientnet", num_classes=10)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(20):
    for x, y in DataLoader(train, batch_size=25, shuffle=True, drop_last=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
model = model.eval()

# %% [markdown]
# ## Fit, tune, compare
#
# `params="last_layer"` finds the layer that computes the outputs, so you don't need to know its
# name.

# %%
from laplace_debias import Laplace
from laplace_debias.metrics import compare

la = Laplace(model, params="last_layer").fit(DataLoader(train, batch_size=100))
print(la.param_names)

held_out = DataLoader(test, batch_size=200)
network_report = la.evaluate(held_out, method="map")
tuned = la.tune(DataLoader(validation, batch_size=100))
posterior_report = la.evaluate(held_out)
print(tuned)

# %%
print(compare(posterior_report, network_report))

# %% [markdown]
# Each row is the posterior's value minus the network's, with a 95 % interval over the same images.
# `laplace-debias report` makes the same comparison for your own data, in one command:
#
# ```bash
# laplace-debias report --timm resnet18 --checkpoint net.safetensors --data folder \
#     --output runs/mine
# ```
#
# ## What a prediction costs

# %%
import time

batch = images[:64]


def median_milliseconds(function):
    """Median of 20 calls."""
    times = []
    for _ in range(20):
        start = time.perf_counter()
        function(batch)
        times.append(time.perf_counter() - start)
    return 1000 * sorted(times)[10]


with torch.no_grad():
    forward_time = median_milliseconds(model)
predict_time = median_milliseconds(la.predict)
print(f"prediction / forward pass: {predict_time / forward_time:.1f}")

# %% [markdown]
# ## Next steps
#
# - Write a report on your own images: [Use the command line](../how-to/command-line.md).
# - Deploy the posterior: [Serve predictions](../how-to/serving.md).
