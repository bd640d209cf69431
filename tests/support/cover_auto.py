"""Compare the error that a fit with `mode="auto"` reports with the true error.

`python tests/support/cover_auto.py --network deep --first 120` trains a network on 24,000 noisy
digits and fits it at two tolerances, in `--draws` orders of the data. The true error is the error
against the fit to all digits, on 200 new inputs. It is the largest one over the prior precisions of
the fit's curve.
"""

import argparse
import itertools
import time
import warnings

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Auto, Laplace
from laplace_debias.laplace.functional.linearised import moments

NUM_DATA = 24_000
NUM_INPUTS = 200
TOLERANCES = (0.1, 0.05)


def perceptron(*widths, activation):
    layers = [nn.Flatten()]
    for width_in, width_out in itertools.pairwise((64, *widths, 10)):
        layers += [nn.Linear(width_in, width_out), activation()]
    return nn.Sequential(*layers[:-1])


def convolutions():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(384, 10),
    )


NETWORKS = {
    "mlp": lambda: perceptron(64, 64, activation=nn.ReLU),
    "deep": lambda: perceptron(40, 40, 40, activation=nn.Tanh),
    "conv": convolutions,
}


def noisy_digits(number, generator):
    """Draw digits and add noise: images `[number, 1, 8, 8]` and labels `[number]`."""
    images, labels = load_digits(return_X_y=True)
    indices = torch.randint(len(labels), (number,), generator=generator)
    x = (torch.from_numpy(images).float()[indices].view(-1, 1, 8, 8) / 16 - 0.3053) / 0.376
    y = torch.from_numpy(labels)[indices].long()
    return x + 0.6 * torch.randn(x.shape, generator=generator), y


def train_network(name, x, y):
    torch.manual_seed(0)
    model = NETWORKS[name]()
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(12):
        for batch in torch.randperm(len(y), generator=generator).split(200):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
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
    model = train_network(options.network, x, y)
    data = TensorDataset(x.double(), y)
    inputs = noisy_digits(NUM_INPUTS, generator)[0].double()
    full = Laplace(model).fit(DataLoader(data, 1000))
    for tolerance in TOLERANCES:
        reported_over_true = []
        num_examples = []
        seconds = 0.0
        for seed in range(options.first, options.first + options.draws):
            order = torch.Generator().manual_seed(seed)
            start = time.process_time()
            loader = DataLoader(data, 50, shuffle=True, generator=order)
            la = Laplace(model).fit(Auto(loader, tolerance))
            seconds += time.process_time() - start
            report = la.fit_report
            grid = torch.tensor(list(report.curve), dtype=torch.float64)
            _, variances = moments(la.fitted, inputs, grid, "variances")
            _, full_variances = moments(full.fitted, inputs, grid, "variances")
            errors = ((variances / full_variances).log() / 2).square().mean((1, 2)).sqrt()
            reported_over_true.append(report.error / float(errors.max()))
            num_examples.append(report.num_examples)
        ratios = torch.tensor(reported_over_true)
        print(
            f"{options.network}, tolerance {tolerance}: covered {int((ratios >= 1).sum())} of "
            f"{len(ratios)}, reported/true {ratios.median():.2f} in the median, "
            f"{min(num_examples)} to {max(num_examples)} examples, "
            f"{seconds / len(ratios):.2f} CPU s",
            flush=True,
        )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
