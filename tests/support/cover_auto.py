"""Does the error that `mode="auto"` tells cover the true one where the fit stopped?

`python tests/support/cover_auto.py --network deep --first 120` trains a network on 24,000
noisy digits and fits it at two tolerances, in so many orders of the data. The true error is
that against the exact fit of all of them, on 200 further inputs, the largest over the curve.
"""

import argparse
import time
import warnings

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Auto, Laplace
from laplace_debias.laplace.functional.linearised import moments

NUM_DATA, NUM_INPUTS, TOLERANCES = 24_000, 200, (0.1, 0.05)


def perceptron(*widths, activation):
    layers = [nn.Flatten()]
    for before, after in zip((64, *widths), (*widths, 10), strict=True):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def convolutions():
    return nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(384, 10)),
    )


NETWORKS = {
    "mlp": lambda: perceptron(64, 64, activation=nn.ReLU),
    "deep": lambda: perceptron(40, 40, 40, activation=nn.Tanh),
    "conv": convolutions,
}


def noisy_digits(number, generator):
    """Digits at random, with noise: images `[number, 1, 8, 8]` and labels."""
    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    index = torch.randint(len(labels), (number,), generator=generator)
    x = (images.float()[index].view(-1, 1, 8, 8) / 16 - 0.3053) / 0.376
    return x + 0.6 * torch.randn(x.shape, generator=generator), labels[index].long()


def trained(name, x, y):
    torch.manual_seed(0)
    model, generator = NETWORKS[name](), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(12):
        for part in torch.randperm(len(y), generator=generator).split(200):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    return model.double().eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=NETWORKS, default="mlp")
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="seed of the first draw")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(5)
    x, y = noisy_digits(NUM_DATA, generator)
    model, data = trained(options.network, x, y), TensorDataset(x.double(), y)
    inputs = noisy_digits(NUM_INPUTS, generator)[0].double()
    full = Laplace(model).fit(DataLoader(data, 1000))
    for tolerance in TOLERANCES:
        ratios, seconds, examples = [], 0.0, []
        for seed in range(options.first, options.first + options.draws):
            order, start = torch.Generator().manual_seed(seed), time.process_time()
            loader = DataLoader(data, 50, shuffle=True, generator=order)
            la = Laplace(model).fit(Auto(loader, tolerance))
            seconds += time.process_time() - start
            grid = torch.tensor(list(la.fit_report.curve), dtype=torch.float64)
            ours, exact = (moments(of.fitted, inputs, grid, "variances")[1] for of in (la, full))
            error = ((ours / exact).log() / 2).square().mean((1, 2)).sqrt().max()
            ratios.append(la.fit_report.error / float(error))
            examples.append(la.fit_report.num_examples)
        found = torch.tensor(ratios)
        print(
            f"{options.network}, tolerance {tolerance}: covered {int((found >= 1).sum())} of "
            f"{len(found)}, told/true {found.median():.2f} in the median, {min(examples)} to "
            f"{max(examples)} examples, {seconds / len(found):.2f} CPU s",
            flush=True,
        )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
