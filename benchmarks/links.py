"""Links compared with the network and temperature scaling: `python -m benchmarks.links`.

Moments of the outputs are computed once for a grid of prior precisions. Every link, temperature and
prior precision is then a formula on the same examples. For the All-CNN-C, the moments take a long
time. `--checkpoint PATH --cache FOLDER` stores them in a folder, some images of every set at a
time, and continues after the stored images; `--cache FOLDER` reads the stored moments.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise, product
from pathlib import Path

import numpy as np
import sklearn.datasets
import torch
import yaml
from torch import Tensor, nn
from torch.distributions import Distribution

from laplace_debias import Laplace
from laplace_debias.assessment.temperature import fit_temperature
from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.losses.likelihoods import Categorical
from laplace_debias.curvature.losses.likelihoods.base import probit
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.laplace import links
from laplace_debias.laplace.functional.linearised import moments
from laplace_debias.laplace.links import FORMULAS, Formula, Link, at_temperatures
from laplace_debias.laplace.tuning.grid_metrics import evaluate_grid
from laplace_debias.laplace.tuning.tune import DEFAULT_GRID, TEMPERATURES, choose, links_to_try
from laplace_debias.metrics import auroc
from laplace_debias.sources import SourceSettings, load

TABLES = ("wine", "digits", "digits, 15 % wrong labels", "breast cancer")
SHIFTS = ("test", "severity 5")
OUT_OF_DISTRIBUTION = ("digits", "patches")
GRIDS = {
    "all": 10 ** torch.arange(3.2, 5, 0.4).double(),
    "last_layer": 10 ** torch.arange(-2, 6.1, 0.4).double(),
}
"""The prior precisions of the All-CNN-C's moments."""
_IMAGES_PER_FILE = 10
_SOFTMAX = Categorical()
# Draws take a long time, so these links try only every n-th temperature.
_TEMPERATURE_STEPS = {"exact": 4, "projected": 2}

Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Setting:
    """The hyper-parameters of a method.

    Attributes:
        prior_precision: δ; infinity stands for the network without a posterior.
        link: The link, with its temperature.
    """

    prior_precision: float
    link: Link

    def __str__(self) -> str:
        return f"{self.prior_precision:.3g}, {self.link}"


@dataclass(frozen=True)
class Moments:
    """The moments of the outputs for n examples.

    Attributes:
        mean: The means of the logits, `[n, C]`.
        covariances: The covariances of the logits at each prior precision, `[P, n, C, C]`.
        labels: The classes, `[n]`; -1 for out-of-distribution examples.
        grid: The prior precisions, `[P]`.
    """

    mean: Tensor
    covariances: Tensor
    labels: Tensor
    grid: Tensor

    @classmethod
    def compute(cls, la: Laplace, x: Tensor, y: Tensor, grid: Tensor) -> "Moments":
        """Compute the moments of a fit."""
        mean, covariances = moments(la.fitted, x, grid)
        return cls(mean.double(), covariances.double(), y, grid)

    def log_probs(self, setting: Setting) -> Tensor:
        """Compute the log-probability of every class, `[n, C]`."""
        covariance = torch.zeros_like(self.covariances[0])
        indices = (self.grid == setting.prior_precision).nonzero()
        if len(indices) > 0:
            covariance = self.covariances[indices[0, 0]]
        return setting.link.logits(_SOFTMAX, self.mean, covariance).log_softmax(-1)

    def losses(self, setting: Setting) -> Tensor:
        """Compute the negative log-likelihood of every example, `[n]`."""
        return -self.log_probs(setting).gather(1, self.labels[:, None])[:, 0]

    def entropies(self, setting: Setting) -> Tensor:
        """Compute the entropy of every example's predictive, `[n]`."""
        log_probs = self.log_probs(setting)
        return -(log_probs.exp() * log_probs).sum(1)

    def first(self, number: int) -> "Moments":
        """Return the moments of the first examples."""
        return Moments(
            self.mean[:number], self.covariances[:, :number], self.labels[:number], self.grid
        )


@dataclass(frozen=True)
class Run:
    """The moments of one trained network.

    Attributes:
        validation: The moments by which each method is tuned.
        sets: The moments of the sets to compare, by name; the set `"test"` is always present.
    """

    validation: Moments
    sets: dict[str, Moments]


def projected(mean: Tensor, covariance: Tensor) -> Tensor:
    """Compute the probit of the logits without their common part."""
    centred = covariance - covariance.mean(-1, keepdim=True)
    centred = centred - centred.mean(-2, keepdim=True)
    return probit(mean - mean.mean(-1, keepdim=True), centred)


def best_setting(
    validation: Moments, formulas: Sequence[str], temperatures: Sequence[float]
) -> Setting:
    """Return the setting with the lowest validation NLL; the first one if several are equal."""
    settings = [
        Setting(delta, Link(formula, temperature))
        for delta, formula, temperature in product(validation.grid.tolist(), formulas, temperatures)
    ]
    return min(settings, key=lambda setting: float(validation.losses(setting).mean()))


def setting_of_tune(validation: Moments) -> Setting:
    """Return the choice of `Laplace.tune` on its first grid."""

    def predict(
        x: Inputs, grid: Tensor, links: Sequence[Link], network_links: Sequence[Link]
    ) -> Iterator[tuple[int, Distribution]]:
        for index, covariance in enumerate(validation.covariances):
            logits = [link.logits(_SOFTMAX, validation.mean, covariance) for link in links]
            yield index, torch.distributions.Categorical(logits=torch.stack(logits))

    default_link = links.default_link(_SOFTMAX, validation.mean.shape)
    table = evaluate_grid(
        predict,
        [Batch(validation.mean, validation.labels)],
        _SOFTMAX,
        "nll",
        prior_precisions=validation.grid.tolist(),
        links=links_to_try(default_link, None),
    )
    setting = choose(table).setting
    return Setting(table.prior_precisions[setting.point], table.links[setting.link])


def tune_methods(validation: Moments) -> dict[str, Setting]:
    """Tune every method on validation examples, and return its setting."""
    temperature = fit_temperature(validation.mean, validation.labels, "classification")
    # The temperature is limited, because the optimum is zero if all validation examples are
    # classified correctly.
    temperature = min(max(temperature, TEMPERATURES[0]), TEMPERATURES[-1])
    settings = {
        "network": Setting(torch.inf, Link("probit")),
        "temperature scaling": Setting(torch.inf, Link("probit", temperature)),
    }
    for formula in FORMULAS:
        temperatures = TEMPERATURES[:: _TEMPERATURE_STEPS.get(formula, 1)]
        settings[formula] = best_setting(validation, [formula], [1.0])
        settings[f"{formula}, tempered"] = best_setting(validation, [formula], temperatures)
    few = validation.first(20)
    settings["tune"] = setting_of_tune(validation)
    settings["tune, 20 examples"] = setting_of_tune(few)
    settings["probit, 20 examples"] = best_setting(few, ["probit"], [1.0])
    return settings


def compare_methods(runs: Sequence[Run]) -> list[dict]:
    """Return a row for every method, over the test examples of all runs."""
    settings_by_run = [tune_methods(run.validation) for run in runs]
    references = [settings["temperature scaling"] for settings in settings_by_run]
    rows = []
    for method in settings_by_run[0]:
        settings = [settings_of_run[method] for settings_of_run in settings_by_run]
        row: dict = {"method": method, "chosen": [str(setting) for setting in settings]}
        for name in runs[0].sets:
            if (runs[0].sets[name].labels < 0).any():
                row[f"auroc {name}"] = mean_auroc(runs, name, settings)
            else:
                losses = concatenate_losses(runs, name, settings)
                difference = losses - concatenate_losses(runs, name, references)
                half_width = 1.96 * float(difference.std()) / len(difference) ** 0.5
                row[f"nll {name}"] = float(losses.mean())
                row[f"behind {name}"] = float(difference.mean())
                row[f"half width {name}"] = half_width
        rows.append(row)
    return rows


def concatenate_losses(runs: Sequence[Run], name: str, settings: Sequence[Setting]) -> Tensor:
    """Compute the losses of a set's examples in all runs, with one setting per run."""
    pairs = zip(runs, settings, strict=True)
    return torch.cat([run.sets[name].losses(setting) for run, setting in pairs])


def mean_auroc(runs: Sequence[Run], name: str, settings: Sequence[Setting]) -> float:
    """Compute how well entropies separate a set from the test examples, averaged over runs."""
    aurocs = []
    for run, setting in zip(runs, settings, strict=True):
        test_entropies = run.sets["test"].entropies(setting)
        aurocs.append(auroc(test_entropies, run.sets[name].entropies(setting)))
    return float(np.mean(aurocs))


# ------------------------------------------------------------------------------- problems


@dataclass(frozen=True)
class Split:
    """Inputs and labels for training, validation and test."""

    train: Examples
    validation: Examples
    test: Examples


def load_table(name: str, seed: int) -> Split:
    """Load a data set of scikit-learn: two fifths for training, one for validation, two for test.

    Args:
        name: One of `TABLES`.
        seed: The seed of the order, and of the wrong labels.
    """
    dataset = name.partition(",")[0].replace(" ", "_")
    features, targets = getattr(sklearn.datasets, f"load_{dataset}")(return_X_y=True)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(targets), generator=generator)
    x = torch.as_tensor(features, dtype=torch.float32)[order]
    y = torch.as_tensor(targets)[order]
    if "wrong" in name:
        is_wrong = torch.rand(len(y), generator=generator) < 0.15
        y[is_wrong] = torch.randint(10, (int(is_wrong.sum()),), generator=generator)
    train_end = 2 * len(y) // 5
    validation_end = 3 * len(y) // 5
    # All pixels get the same scale, because some pixels are equal in all training images.
    dim = None if "digits" in name else 0
    x = (x - x[:train_end].mean(dim)) / x[:train_end].std(dim)
    return Split(
        (x[:train_end], y[:train_end]),
        (x[train_end:validation_end], y[train_end:validation_end]),
        (x[validation_end:], y[validation_end:]),
    )


class Residual(nn.Sequential):
    """A block whose outputs are added to its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        """Shape `[B, C, H, W]`."""
        return torch.relu(x + super().forward(x))


def network(name: str, num_features: int, num_classes: int) -> nn.Module:
    """Build a small residual network for images of digits, or a multi-layer perceptron."""
    if name != "ResNet on digits":
        sizes = [num_features, 50, 50, num_classes]
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise(sizes):
            layers += [nn.Linear(width_in, width_out), nn.ReLU()]
        return nn.Sequential(*layers[:-1])
    blocks = [
        Residual(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))
        for _ in range(3)
    ]
    stem = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(512, num_classes))


def train_small(name: str, seed: int) -> tuple[nn.Module, Split]:
    """Train a small network; return it in eval mode, with its data.

    Args:
        name: One of `TABLES`, or `"ResNet on digits"`.
        seed: The seed of the data and of the training.
    """
    is_resnet = "ResNet" in name
    split = load_table("digits, 15 % wrong labels" if is_resnet else name, seed)
    x, y = split.train
    torch.manual_seed(seed)
    model = network(name, x.shape[1], int(y.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3, weight_decay=1e-4)
    for _ in range(30 if is_resnet else 100):
        for batch in torch.randperm(len(y)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.eval(), split


def run_small(name: str, params: str, seed: int) -> Run:
    """Train a small network, fit a posterior over `params`, and compute its moments."""
    model, split = train_small(name, seed)
    la = Laplace(model, params=params).fit([split.train])
    test = Moments.compute(la, *split.test, DEFAULT_GRID)
    validation = Moments.compute(la, *split.validation, DEFAULT_GRID)
    return Run(validation, {"test": test})


def store_moments(folder: Path, params: str, checkpoint: Path, num_images: int) -> None:
    """Compute and store moments of the All-CNN-C, for the same random images at every call.

    Args:
        folder: The folder for the moments.
        params: `all`, cross-fitted on 512 images as in the report, or `last_layer`.
        checkpoint: The trained network.
        num_images: The number of images of every set.
    """
    config = yaml.safe_load(Path("configs/allcnnc_cifar10.yaml").read_text())
    config |= {"corruptions": (5,), "checkpoint": checkpoint, "progress": False}
    loaded = load(SourceSettings(**config))
    la = Laplace(loaded.model, params=params)
    if params == "all":
        x, y = concatenate(islice(loaded.train, 11))
        la.fit([(x[:512], y[:512])], "crossfit", num_data=loaded.num_train)
    else:
        la.fit(loaded.train, "full", num_data=loaded.num_train)
    assert loaded.validation is not None
    sets = {"val": loaded.validation, "test": loaded.test, "severity5": loaded.shifts[5]}
    sets |= loaded.ood
    images = {}
    for name, batches in sets.items():
        x, y = concatenate(batches)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:num_images]
        images[name] = x[order], y[order]
    for start in range(0, num_images, _IMAGES_PER_FILE):
        for name, (x, y) in images.items():
            path = folder / f"{params}_{name}_{start:05}.npz"
            indices = slice(start, start + _IMAGES_PER_FILE)
            if len(y[indices]) > 0 and not path.exists():
                chunk = Moments.compute(la, x[indices], y[indices], GRIDS[params])
                np.savez(
                    path,
                    mean=chunk.mean,
                    cov=chunk.covariances.float(),
                    y=chunk.labels,
                    grid=chunk.grid,
                )


def concatenate(batches: Iterable[Examples]) -> Examples:
    """Join batches of images and labels."""
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


def read_run(folder: Path, params: str) -> Run:
    """Read the moments of the All-CNN-C that `store_moments` stored."""
    validation = read_moments(folder, params, "val")
    sets = {}
    for name in SHIFTS:
        sets[name] = read_moments(folder, params, name)
    for name in OUT_OF_DISTRIBUTION:
        ood = read_moments(folder, params, name)
        sets[name] = replace(ood, labels=torch.full_like(ood.labels, -1))
    return Run(validation, sets)


def read_moments(folder: Path, params: str, name: str) -> Moments:
    """Read the moments of one set, which are stored in several files."""
    paths = sorted(folder.glob(f"{params}_{name.replace(' ', '')}_*.npz"))
    files = [np.load(path) for path in paths]

    def join(key: str, dim: int = 0) -> Tensor:
        return torch.cat([torch.as_tensor(file[key]) for file in files], dim)

    return Moments(
        mean=join("mean").double(),
        covariances=join("cov", dim=1).double(),
        labels=join("y"),
        grid=torch.as_tensor(files[0]["grid"]),
    )


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
    rows_by_problem = {}
    if options.checkpoint:
        store_moments(options.cache, options.kind, options.checkpoint, options.examples)
    if options.cache:
        run = read_run(options.cache, options.kind)
        rows_by_problem[f"All-CNN-C, {options.kind}"] = compare_methods([run])
    else:
        for name, params in product(options.only, ("all", "last_layer")):
            runs = [run_small(name, params, seed) for seed in range(options.seeds)]
            rows_by_problem[f"{name}, {params}"] = compare_methods(runs)
    for problem, rows in rows_by_problem.items():
        print(problem)
        for row in rows:
            numbers = [f"{key} {v:.4f}" for key, v in row.items() if isinstance(v, float)]
            print(f"  {row['method']:22}", *numbers, *row["chosen"][:2], sep="  ", flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(rows_by_problem, indent=1))


if __name__ == "__main__":
    main()
