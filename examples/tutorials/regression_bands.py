# %% [markdown]
# # Regression with error bars
#
# A regression network returns a single number. A posterior adds two kinds of uncertainty: the noise
# of the targets, and the uncertainty of the network itself, which grows where there are no data.
#
# ## Data with a gap

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.cat([torch.empty(60).uniform_(-4, -1), torch.empty(60).uniform_(1, 5)])[:, None]
y = x.sin() + 0.15 * torch.randn_like(x)

model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(1500):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
model = model.eval()

# %% [markdown]
# ## Fit and tune
#
# The network has 151 parameters, so the full curvature matrix is cheap. With so few data, we hold
# none out: `tune_evidence` chooses the noise and the prior precision by the marginal likelihood of
# the training data. If you can hold out data, prefer `tune`.

# %%
from laplace_debias import Laplace

# sigma=1.0 is only a starting value; `tune_evidence` estimates the noise.
la = Laplace(model, likelihood="regression", curvature="full", sigma=1.0)
la.fit(DataLoader(TensorDataset(x, y), batch_size=20))
tuned = la.tune_evidence(sigma=True)
print(f"noise {float(tuned.sigma):.3f} (true: 0.150), prior precision {tuned.prior_precision:.3g}")

# %% [markdown]
# ## Two bands
#
# `functional` returns the mean and the covariance of the network's outputs, without the noise of
# the targets. `marginals` returns the predictive distribution of new targets, which includes the
# noise; its quantiles are prediction intervals.

# %%
grid = torch.linspace(-6, 8, 400)[:, None]
mean, covariance = la.functional(grid)
mean = mean.squeeze()
deviation = covariance.squeeze().sqrt()
target = la.marginals(grid)
low, high = target.icdf(torch.tensor([0.025, 0.975]).view(2, 1, 1)).squeeze(-1)

figure, ax = plt.subplots(figsize=(7.5, 4), layout="constrained")
ax.fill_between(grid[:, 0], low, high, alpha=0.25, linewidth=0, label="95 % of new targets")
ax.fill_between(
    grid[:, 0],
    mean - 1.96 * deviation,
    mean + 1.96 * deviation,
    alpha=0.4,
    linewidth=0,
    label="95 % for the network's output",
)
ax.plot(grid, mean, label="mean")
ax.plot(grid, grid.sin(), "--", color="grey", linewidth=1, label="true function")
ax.plot(x, y, ".", color="black", markersize=3, label="data")
ax.set(xlabel="x", ylabel="y", ylim=(-3, 3))
ax.legend(frameon=False, ncols=2, loc="lower left")
plt.show()

# %% [markdown]
# Near the data, both bands are narrow, and the width of the outer band comes from the noise. In the
# gap and beyond the data, the inner band widens, because networks that fit the data equally well
# disagree there.

# %%
for name, place in {"at the data": -2.5, "in the gap": 0.0, "outside": 8.0}.items():
    _, variance = la.functional(torch.tensor([[place]]))
    print(f"standard deviation of the output {name} (x = {place}): {float(variance.sqrt()):.3f}")

# %% [markdown]
# ## How wide should the band be? The prior precision
#
# A small prior precision lets the parameters vary far from the trained ones, which widens the band
# away from the data. The log marginal likelihood shows which value explains the data best.

# %%
figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
for ax, precision in zip(axes, (0.01, float(tuned.prior_precision), 100.0)):
    la.prior_precision = precision
    mean, variance = la.functional(grid)
    mean = mean.squeeze()
    deviation = variance.squeeze().sqrt()
    ax.fill_between(
        grid[:, 0], mean - 1.96 * deviation, mean + 1.96 * deviation, alpha=0.4, linewidth=0
    )
    ax.plot(grid, mean)
    ax.plot(x, y, ".", color="black", markersize=2)
    ax.set(
        title=f"δ = {precision:.3g}, log evidence {float(la.log_marginal_likelihood()):.1f}",
        ylim=(-3, 3),
        xlabel="x",
    )
plt.show()

# %% [markdown]
# ## Next steps
#
# - Get intervals for your own data: [Get intervals for a regression](../how-to/regression.md).
# - Get intervals with guaranteed coverage: [Conformal intervals](../how-to/conformal.md).
