"""Links compared with the network and temperature scaling: `python -m benchmarks.links`.

Moments of the outputs are computed once for a grid of prior precisions. Every link, temperature and
prior precision is then a formula on the same examples. For the All-CNN-C, the moments take a long
time. `--checkpoint PATH --cache FOLDER` stores them in a folder, some images of every set at a
time, and continues after the stored images; `--cache FOLDER` reads the stored moments.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import sklearn.datasets
import torch
import yaml
from torch import Tensor, nn
from torch.distributions import Distribution

from laplace_debias import Laplace
from laplace_debias.assessment.temperature import fit_temperature
from laplace_debias.curvature.losses.likelihoods import Categorical
from laplace_debias.curvature.losses.likelihoods.base import probit
from laplace_debias.curvature.network.batch import Batch
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.laplace import links
from laplace_debias.laplace.functional.linearised import moments
from laplace_debias.laplace.links import FORMULAS, Formula, Link, at_temperatures
from laplace_debias.laplace.tuning.grid_metrics import evaluate_grid
from laplace_debias.laplace.tuning.tune import DEFAULT_GRID, TEMPERATURES, choose, links_to_try
from laplace_debias.metrics import auroc
from laplace_debias.sources import SourceSettings, load

TABLES = ("wine", "digits", "digits, 15 % wrong labels", "breast cancer")
SETS = ("test", "severity 5", "digits", "patches")
GRIDS = {
    "all": 10 ** torch.arange(3.2, 5, 0.4).double(),
    "last_layer": 10 ** torch.arange(-2, 6.1, 0.4).double(),
}
"""The prior precisions of the All-CNN-C's moments."""
_AT_ONCE = 10
_SOFTMAX = Categorical()
# Draws take a long time, so these links try fewer temperatures.
_STEPS = {"exact": 4, "projected": 2}


@dataclass(frozen=True)
class Moments:
    """The moments of n examples: mean `[n, C]`, covariances `[P, n, C, C]`, labels, grid `[P]`."""

    mean: Tensor
    covariances: Tensor
    labels: Tensor
    grid: Tensor

    @classmethod
    def of(cls, la: Laplace, x: Tensor, y: Tensor, grid: Tensor) -> "Moments":
        """Compute the moments of a fit."""
        mean, covariances = moments(la.fitted, x, grid)
        return cls(mean.double(), covariances.double(), y, grid)

    def log_probs(self, delta: float, link: Link) -> Tensor:
        """Compute the log-probability of every class, without covariance for δ = ∞."""
        at = (self.grid == delta).nonzero()
        covariance = self.covariances[at[0, 0]] if len(at) else self.covariances[0] * 0
        return link.logits(_SOFTMAX, self.mean, covariance).log_softmax(-1)

    def losses(self, delta: float, link: Link) -> Tensor:
        """Compute the negative log-likelihood of every example."""
        return -self.log_probs(delta, link).gather(1, self.labels[:, None])[:, 0]

    def first(self, number: int) -> "Moments":
        """Return the moments of the first examples."""
        parts = self.mean[:number], self.covariances[:, :number], self.labels[:number]
        return Moments(*parts, self.grid)


def projected(mean: Tensor, covariance: Tensor) -> Tensor:
    """Compute the probit of the logits without their common part."""
    centred = covariance - covariance.mean(-1, keepdim=True)
    centred = centred - centred.mean(-2, keepdim=True)
    return probit(mean - mean.mean(-1, keepdim=True), centred)


def tuned(
    validation: Moments, names: Sequence[str], temperatures: Sequence[float]
) -> tuple[float, Link]:
    """Return the prior precision and the link with the lowest validation NLL."""
    every = [
        (float(validation.losses(delta, Link(name, T)).mean()), delta, Link(name, T))
        for delta in validation.grid.tolist()
        for name in names
        for T in temperatures
    ]
    return min(every, key=lambda at: at[0])[1:]


def by_rule(validation: Moments) -> tuple[float, Link]:
    """Return the choice of `Laplace.tune` on its first grid."""

    def predict(x: Inputs, grid: Tensor, by: Sequence[Link]) -> Iterator[tuple[int, Distribution]]:
        for number, covariance in enumerate(
            [*validation.covariances, 0 * validation.covariances[0]]
        ):
            logits = [link.logits(_SOFTMAX, validation.mean, covariance) for link in by]
            yield number, torch.distributions.Categorical(logits=torch.stack(logits))

    data = [Batch(validation.mean, validation.labels)]
    table = evaluate_grid(
        predict,
        data,
        _SOFTMAX,
        "nll",
        prior_precisions=validation.grid.tolist(),
        links=links_to_try(links.default_link(_SOFTMAX, validation.mean.shape), None),
    )
    setting = choose(table).setting
    return table.prior_precisions[setting.point], table.links[setting.link]


def methods_of(validation: Moments) -> dict[str, tuple[float, Link]]:
    """Return δ (∞ for no posterior) and the link of every method, tuned on validation examples."""
    T = fit_temperature(validation.mean, validation.labels, "classification")
    # T is limited to the range of `tune`. If all validation examples are classified correctly, the
    # optimum is T = 0.
    T = min(max(T, TEMPERATURES[0]), TEMPERATURES[-1])
    found = {
        "network": (torch.inf, Link("probit")),
        "temperature scaling": (torch.inf, Link("probit", T)),
    }
    for name in FORMULAS:
        found[name] = tuned(validation, [name], [1.0])
        found[f"{name}, tempered"] = tuned(validation, [name], TEMPERATURES[:: _STEPS.get(name, 1)])
    few = validation.first(20)
    found |= {"tune": by_rule(validation), "tune, 20 examples": by_rule(few)}
    found["probit, 20 examples"] = tuned(few, ["probit"], [1.0])
    return found


def compared(runs: Sequence[tuple[Moments, dict[str, Moments]]]) -> list[dict]:
    """Return a row for every method, over the test examples of all runs.

    Args:
        runs: For each run, the validation moments, and the moments by set. The labels of OOD sets
            are -1.
    """
    chosen = [methods_of(validation) for validation, _ in runs]
    rows = []
    for method in chosen[0]:
        row: dict = {"method": method}
        row["chosen"] = [f"{of[method][0]:.3g}, {of[method][1]}" for of in chosen]
        for name in runs[0][1]:
            parts = [
                (sets[name], sets["test"], of[method], of["temperature scaling"])
                for of, (_, sets) in zip(chosen, runs, strict=True)
            ]
            if (parts[0][0].labels < 0).any():
                # These scores are larger for out-of-distribution examples.
                scores = [
                    [-(p := m.log_probs(*at)).exp().mul(p).sum(1) for m in (test, ood)]
                    for ood, test, at, _ in parts
                ]
                row[f"auroc {name}"] = float(np.mean([auroc(*pair) for pair in scores]))
                continue
            losses = torch.cat([moments.losses(*at) for moments, _, at, _ in parts])
            reference = torch.cat([moments.losses(*at) for moments, _, _, at in parts])
            difference = losses - reference
            row[f"nll {name}"] = float(losses.mean())
            row[f"behind {name}"] = float(difference.mean())
            row[f"half width {name}"] = 1.96 * float(difference.std()) / len(difference) ** 0.5
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------- problems


def table(name: str, seed: int) -> list[Tensor]:
    """Return training, validation and test inputs and labels: two, one and two fifths."""
    x, y = getattr(sklearn.datasets, f"load_{name.partition(',')[0].replace(' ', '_')}")(
        return_X_y=True
    )
    g = torch.Generator().manual_seed(seed)
    x, y = torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y)
    order = torch.randperm(len(y), generator=g)
    x, y = x[order], y[order].clone()
    if "wrong" in name:
        wrong = torch.rand(len(y), generator=g) < 0.15
        y[wrong] = torch.randint(10, (int(wrong.sum()),), generator=g)
    half, most = 2 * len(y) // 5, 3 * len(y) // 5
    # All pixels get the same scale, because some pixels are equal in all training images.
    along = None if "digits" in name else 0
    x = (x - x[:half].mean(along)) / x[:half].std(along)
    return [x[:half], y[:half], x[half:most], y[half:most], x[most:], y[most:]]


class Residual(nn.Sequential):
    """A block whose outputs are added to its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        """Shape `[B, C, H, W]`."""
        return torch.relu(x + super().forward(x))


def network(name: str, num_features: int, num_classes: int) -> nn.Module:
    """Build a small residual network for images of digits, or a multi-layer perceptron."""
    if name != "ResNet on digits":
        sizes = [num_features, 50, 50, num_classes]
        layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1])
    blocks = [
        Residual(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))
        for _ in range(3)
    ]
    stem = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(512, num_classes))


def trained(name: str, seed: int) -> tuple[nn.Module, Sequence[Tensor]]:
    """Train a small network; return it with x and y for training, validation and test."""
    source = "digits, 15 % wrong labels" if "ResNet" in name else name
    x, y, *others = table(source, seed)
    torch.manual_seed(seed)
    model = network(name, x.shape[1], int(y.max()) + 1)
    optimiser = torch.optim.Adam(model.parameters(), 2e-3, weight_decay=1e-4)
    for _ in range(30 if "ResNet" in name else 100):
        for part in torch.randperm(len(y)).split(32):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimiser.step()
    return model.eval(), (x, y, *others)


def small(name: str, params: str, seed: int) -> tuple[Moments, dict[str, Moments]]:
    """Train, fit and predict a small network."""
    model, (x, y, x_val, y_val, x_test, y_test) = trained(name, seed)
    la = Laplace(model, params=params).fit([(x, y)])
    sets = {"test": Moments.of(la, x_test, y_test, DEFAULT_GRID)}
    return Moments.of(la, x_val, y_val, DEFAULT_GRID), sets


def cache(folder: Path, kind: str, checkpoint: Path, examples: int) -> None:
    """Compute and store moments of the All-CNN-C, for the same random images at every call.

    Args:
        folder: The folder for the moments.
        kind: `all`, cross-fitted on 512 images as in the report, or `last_layer`.
        checkpoint: The trained network.
        examples: The number of images of every set.
    """
    given = yaml.safe_load(Path("configs/allcnnc_cifar10.yaml").read_text())
    given |= {"corruptions": (5,), "checkpoint": checkpoint, "progress": False}
    loaded = load(SourceSettings(**given))
    la = Laplace(loaded.model, params=kind)
    train = loaded.train
    if kind == "all":
        x, y = (torch.cat(parts) for parts in zip(*islice(loaded.train, 11), strict=True))
        train = [(x[:512], y[:512])]
    la.fit(train, "crossfit" if kind == "all" else "full", num_data=loaded.num_train)
    assert loaded.validation is not None
    sets = {"val": loaded.validation, "test": loaded.test, "severity5": loaded.shifts[5]}
    sets |= loaded.ood
    chosen = {}
    for name, batches in sets.items():
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:examples]
        chosen[name] = x[order], y[order]
    for start in range(0, examples, _AT_ONCE):
        for name, (x, y) in chosen.items():
            path, some = folder / f"{kind}_{name}_{start:05}.npz", slice(start, start + _AT_ONCE)
            if len(y[some]) and not path.exists():
                found = Moments.of(la, x[some], y[some], GRIDS[kind])
                covariances = found.covariances.float()
                np.savez(path, mean=found.mean, cov=covariances, y=found.labels, grid=found.grid)


def cached(folder: Path, kind: str) -> tuple[Moments, dict[str, Moments]]:
    """Read the moments of the All-CNN-C that `cache` stored."""
    found = {}
    for name in ("val", *SETS):
        parts = [
            np.load(path) for path in sorted(folder.glob(f"{kind}_{name.replace(' ', '')}_*.npz"))
        ]
        labels = torch.cat([torch.as_tensor(part["y"]) for part in parts])
        found[name] = Moments(
            torch.cat([torch.as_tensor(part["mean"]) for part in parts]).double(),
            torch.cat([torch.as_tensor(part["cov"]) for part in parts], 1).double(),
            labels if name not in SETS[2:] else torch.full_like(labels, -1),
            torch.as_tensor(parts[0]["grid"]),
        )
    return found.pop("val"), found


def main() -> None:
    """Print a row for every method of every problem, and write them as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[*TABLES, "ResNet on digits"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cache", type=Path, help="the All-CNN-C's moments")
    parser.add_argument("--checkpoint", type=Path, help="the All-CNN-C, to compute them")
    parser.add_argument("--kind", default="all", choices=GRIDS)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=Path("results/links.json"))
    options = parser.parse_args()
    FORMULAS["projected"] = Formula(
        at_temperatures(projected), at_temperatures(probit), "differences"
    )
    found = {}
    if options.checkpoint:
        cache(options.cache, options.kind, options.checkpoint, options.examples)
    if options.cache:
        found[f"All-CNN-C, {options.kind}"] = compared([cached(options.cache, options.kind)])
    for name in () if options.cache else options.only:
        for params in ("all", "last_layer"):
            found[f"{name}, {params}"] = compared(
                [small(name, params, seed) for seed in range(options.seeds)]
            )
    for problem, rows in found.items():
        print(problem)
        for row in rows:
            numbers = [f"{key} {v:.4f}" for key, v in row.items() if isinstance(v, float)]
            print(f"  {row['method']:22}", *numbers, *row["chosen"][:2], sep="  ", flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
