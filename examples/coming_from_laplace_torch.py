"""Coming from laplace-torch: its calls in comments, our calls below, and the differences.

Run with `python examples/coming_from_laplace_torch.py`. The whole table is in
docs/coming-from/laplace-torch.md.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Run each step of a session; return the printed numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="steps of training")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data and the network")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    y = torch.randint(3, (600,))
    x = torch.randn(600, 2) + 1.5 * torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])[y]
    train_loader = DataLoader(TensorDataset(x[:200], y[:200]), batch_size=50)
    val_loader = DataLoader(TensorDataset(x[200:400], y[200:400]), batch_size=50)
    test_loader = DataLoader(TensorDataset(x[400:], y[400:]), batch_size=50)
    model = nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Linear(50, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(options.steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:200]), y[:200]).backward()
        optimizer.step()
    model.eval()
    results = {}

    # laplace-torch: la = Laplace(model, "classification", subset_of_weights="last_layer",
    #                             hessian_structure="kron")
    # The defaults differ: laplace-torch uses the last layer, this library `params="all"`.
    la = Laplace(model, "classification", params="last_layer", curvature="kfac")

    # laplace-torch: la.fit(train_loader)
    # Our `fit` returns the object. A second fit starts from scratch; nothing is added up.
    la.fit(train_loader)

    # laplace-torch: la.optimize_prior_precision(method="marglik")
    # Our method searches a bounded range; laplace-torch takes steps of Adam. Both set the prior
    # precision.
    results["prior precision by the marginal likelihood"] = la.tune_evidence().prior_precision

    # laplace-torch: la.log_marginal_likelihood()
    # Both include every constant, and use separate blocks for a weight and its bias.
    results["log marginal likelihood"] = float(la.log_marginal_likelihood())

    # laplace-torch: la.optimize_prior_precision(method="gridsearch", val_loader=val_loader)
    # Our method makes one pass over the data for the whole grid, and uses the NLL as the score.
    results["prior precision by validation"] = la.tune(val_loader, link="probit").prior_precision

    # laplace-torch: probs = la(x, pred_type="glm", link_approx="probit")
    # Our method returns a distribution: `.probs`, `.entropy()`, `.log_prob(y)`, `.sample()`. Its
    # probit is one of several links here, and not the default; `tune` also finds a temperature.
    probs = la.predict(x[400:], link="probit").probs
    results["NLL"] = float(nn.functional.nll_loss(probs.log(), y[400:]))

    # laplace-torch: la(x, pred_type="glm", link_approx="mc", n_samples=1000)
    generator = torch.Generator().manual_seed(0)
    sampled = la.predict(x[400:], samples=1000, generator=generator).probs
    results["largest difference of probit and samples"] = float((probs - sampled).abs().max())

    # laplace-torch: la(x, pred_type="nn", link_approx="mc", n_samples=100)
    # Both run the network with sampled weights; our method never changes the user's model.
    old_parameters = [parameter.detach().clone() for parameter in model.parameters()]
    la.predict(x[400:], method="nn", samples=100, generator=generator)
    changes = [
        (parameter.detach() - old_parameter).abs().max()
        for parameter, old_parameter in zip(model.parameters(), old_parameters, strict=True)
    ]
    results["largest change of the model"] = float(torch.stack(changes).max())

    # laplace-torch: f_mean, f_var = la._glm_predictive_distribution(x)
    _mean, covariance = la.functional(x[400:])  # [B, C] and [B, C, C], a public method here
    results["mean variance of the logits"] = float(covariance.diagonal(dim1=1, dim2=2).mean())

    # laplace-torch: torch.save(la.state_dict(), path); la.load_state_dict(torch.load(path))
    # Our file is a safetensors file without pickle. `load` rejects a model with other weights.
    with tempfile.TemporaryDirectory() as folder:
        la.save(Path(folder) / "posterior.safetensors")
        loaded = Laplace.load(Path(folder) / "posterior.safetensors", model)
    results["largest difference after loading"] = float(
        (loaded.predict(x[400:], link="probit").probs - probs).abs().max()
    )

    # laplace-torch has no call for these metrics; you would write the loop yourself.
    results |= {f"evaluate: {key}": float(value) for key, value in la.evaluate(test_loader).items()}
    for name, value in results.items():
        print(f"{name}: {value:.4g}")
    return results


if __name__ == "__main__":
    main()
