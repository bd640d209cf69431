"""The error that `la.thin` reports, and the true error: `python -m benchmarks.thin_errors`.

`--network All-CNN-C` needs `LAPLACE_DEBIAS_DATA` and `LAPLACE_DEBIAS_CHECKPOINT`.
"""

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import ours
from benchmarks.links import train_small
from benchmarks.settings import Settings
from benchmarks.thin import DELTA, ImageSettings
from laplace_debias import Laplace
from laplace_debias.sources.changed import shuffled_patches

_RESNET = "ResNet on digits"


@dataclass(frozen=True)
class Problem:
    """A posterior, and the data on which its thin version is tested.

    Attributes:
        posterior: The posterior over all parameters.
        inputs: The inputs from which the inputs of `thin` and the new inputs are drawn.
        x_test: Test images.
        y_test: Their labels.
    """

    posterior: Laplace
    inputs: Tensor
    x_test: Tensor
    y_test: Tensor


def build_problem(network: str) -> Problem:
    """Fit the posterior of a network: `"ResNet on digits"` or `"All-CNN-C"`."""
    if network == _RESNET:
        model, split = train_small(network, seed=0)
        la = Laplace(model).fit([split.train])
        la.tune([split.validation])
        x_test, y_test = split.test
        return Problem(la, torch.cat([split.validation[0], x_test]), x_test, y_test)
    settings = ImageSettings()
    la = ours.fitted(settings)
    la.prior_precision = DELTA
    validation_images, _ = settings.data(5_000, seed=2)
    x_test, y_test = settings.data(10_000)
    return Problem(la, validation_images, x_test, y_test)


def metrics(la: Laplace, x: Tensor, y: Tensor) -> str:
    """Format NLL and calibration for images, and the AUROC of images with permuted patches."""
    report = la.evaluate([(x, y)], {"patches": [(shuffled_patches(x, 0, seed=0), y)]})
    return ", ".join(f"{name} {report[name]:.4f}" for name in ("nll", "ece", "auroc_patches"))


def main() -> None:
    """Print the reported and the true error, for repeatedly drawn inputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=(_RESNET, "All-CNN-C"), default=_RESNET)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--inputs", type=int, default=32, help="number of inputs for thin")
    parser.add_argument(
        "--fresh", type=int, default=256, help="number of new inputs for the true error"
    )
    parser.add_argument(
        "--metrics", type=int, default=0, help="number of test images for the metrics (All-CNN-C)"
    )
    parser.add_argument("--error", type=float, default=1e-3)
    options = parser.parse_args()
    Settings().start()
    problem = build_problem(options.network)
    full = problem.posterior
    new_inputs, pool = problem.inputs.tensor_split([options.fresh])
    full_variances = full.functional(new_inputs, diagonal=True)[1]
    num_covered = 0
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "full.safetensors"
        full.save(path)
        for draw in range(options.draws):
            thin = Laplace.load(path, full.model)
            generator = torch.Generator().manual_seed(draw)
            indices = torch.randperm(len(pool), generator=generator)[: options.inputs]
            report = thin.thin(pool[indices], error=options.error)
            thin_variances = thin.functional(new_inputs, diagonal=True)[1]
            relative_errors = (thin_variances / full_variances).sqrt() - 1
            error = float(relative_errors.abs().amax(1).mean())
            num_covered += abs(error - report.error) <= report.half_width
            ratios.append(error / report.error)
            print(f"{report.message} On {len(new_inputs)} new ones: {error:.2g}.", flush=True)
    if options.metrics:
        x = problem.x_test[: options.metrics]
        y = problem.y_test[: options.metrics]
        print(f"whole: {metrics(full, x, y)}", flush=True)
        print(f"thin: {metrics(thin, x, y)}", flush=True)
    print(
        f"{options.network}: covered in {num_covered} of {len(ratios)} draws; true over "
        f"reported error {statistics.median(ratios):.2f} in the median, {max(ratios):.2f} at most."
    )


if __name__ == "__main__":
    main()
