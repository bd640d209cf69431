# %% [markdown]
# # Curvature as linear algebra
#
# The Hessian of a network with D parameters has D² entries, which are too many to store. But
# multiplying it by a vector costs only about two gradients, and such products are enough to compute
# traces, eigenvalues, spectra and solutions of linear systems.
#
# ## A trained network

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
x = torch.tensor(pixels / 16).float()[:1000]
y = torch.tensor(labels)[:1000]
model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(100):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
model = model.eval()

# %% [markdown]
# ## Operators
#
# To construct an operator, pass the network, the loss and batches. `loss` is a torch module; with
# its default reduction, `"mean"`, the matrix is the curvature of the mean loss.

# %%
from laplace_debias.curvature import GGN, KFAC, Hessian

loss = nn.CrossEntropyLoss()
data = list(zip(x.split(250), y.split(250)))
H = Hessian(model, loss, data)
G = GGN(model, loss, data)
v = torch.randn(H.shape[0])
print(H.shape, float(v @ (H @ v)), float(v @ (G @ v)))

# %% [markdown]
# ## Traces with standard errors
#
# Each estimate comes with its standard error and the number of products. K-FAC stores its matrix in
# a structured form, so its trace is exact and needs no products.

# %%
from laplace_debias.linalg import trace

generator = torch.Generator().manual_seed(0)
estimate = trace(G, "hutch++", num_matvecs=60, generator=generator)
low, high = estimate.interval(0.95)
print(
    f"GGN: {float(estimate):.3f}, 95 % interval {low:.3f} to {high:.3f}, "
    f"{estimate.num_matvecs} products"
)
print(f"K-FAC: {float(trace(KFAC(model, loss, data))):.3f}")

# %% [markdown]
# ## The spectrum
#
# A few eigenvalues are large, and most are close to zero. The Hessian also has negative
# eigenvalues, whereas the GGN has none.

# %%
from laplace_debias.linalg import eigsh, spectral_density

values = eigsh(G, k=12, generator=generator).values
smallest = eigsh(H, k=1, which="smallest", generator=generator).values
print("GGN, largest:", [round(float(value), 3) for value in values[:5]])
print(f"Hessian, smallest: {float(smallest[0]):.4f}")

density = spectral_density(G, scale="log", num_probes=5, num_steps=150, generator=generator)
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
left.semilogy(range(1, 13), values, "o")
left.set(xlabel="index", ylabel="eigenvalue of the GGN")
right.plot(density.grid, density.density)
right.set(xscale="log", xlabel="eigenvalue", ylabel="spectral density")
plt.show()

# %% [markdown]
# ## Why mini-batches are biased
#
# Take the top eigenvectors of the GGN of 64 examples, and measure the curvature along them twice:
# on the same 64 examples, and on other ones. The first measurement is what a fit to the mini-batch
# would use. It is too large, because the directions were chosen for their extreme curvature on this
# very batch. This is why `Laplace` can take directions from one batch and magnitudes from another.

# %%
G_batch = GGN(model, loss, [(x[:64], y[:64])])
G_new = GGN(model, loss, [(x[64:], y[64:])])
vectors = eigsh(G_batch, k=12, generator=generator).vectors
curvature_batch = (vectors * (G_batch @ vectors)).sum(0)
curvature_new = (vectors * (G_new @ vectors)).sum(0)
figure, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
ax.semilogy(range(1, 13), curvature_batch, "o", label="on the same 64 examples")
ax.semilogy(range(1, 13), curvature_new, "s", label="on 936 other examples")
ax.set(xlabel="eigenvector of the mini-batch's GGN", ylabel="curvature along it")
ax.legend(frameon=False)
plt.show()
print(f"median ratio {float((curvature_batch / curvature_new).median()):.1f}")

# %% [markdown]
# ## Solving linear systems
#
# A damped Newton step solves (G + c I) s = −g.

# %%
from laplace_debias.linalg import cg
from laplace_debias.operators import Identity

model.zero_grad()
loss(model(x), y).backward()
gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
solution = cg(G + 0.01 * Identity(len(gradient)), -gradient)
print(solution.status, solution.num_matvecs, "products")

# %% [markdown]
# ## Next steps
#
# - See all operators and algorithms: [Operators and algorithms](../linear-algebra-reference.md).
# - Read why mini-batches are biased: [Why mini-batches are biased](../explanation/mini-batches.md).
