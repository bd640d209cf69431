"""The error that `la.thin` reports, and the true error: `python -m benchmarks.thin_errors`.

`--network All-CNN-C` needs `LAPLACE_DEBIAS_DATA` and `LAPLACE_DEBIAS_CHECKPOINT`.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import ours
from benchmarks.links import trained
from benchmarks.settings import Settings
from benchmarks.thin import DELTA, ImageSettings
from laplace_debias import Laplace
from laplace_debias.sources.changed import shuffled_patches

_RESNET = "ResNet on digits"


def posterior(network: str) -> tuple[Laplace, Tensor, tuple[Tensor, Tensor]]:
    """Return a posterior, inputs from which inputs for `thin` are drawn, and test examples."""
    if network == _RESNET:
        model, (x, y, x_val, y_val, *test) = trained(network, 0)
        la = Laplace(model).fit([(x, y)])
        la.tune([(x_val, y_val)])
        return la, torch.cat([x_val, test[0]]), (test[0], test[1])
    settings = ImageSettings()
    la = ours.fitted(settings)
    la.prior_precision = DELTA
    return la, settings.data(5_000, seed=2)[0], settings.data(10_000)


def metrics(la: Laplace, x: Tensor, y: Tensor) -> str:
    """Format NLL and calibration for images, and the AUROC of images with permuted patches."""
    report = la.evaluate([(x, y)], {"patches": [(shuffled_patches(x, 0, seed=0), y)]})
    return ", ".join(f"{name} {report[name]:.4f}" for name in ("nll", "ece", "auroc_patches"))


def main() -> None:
    """Print the reported and the true error, for repeatedly drawn inputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=(_RESNET, "All-CNN-C"), default=_RESNET)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--inputs", type=int, default=32, help="that are given to thin")
    parser.add_argument("--fresh", type=int, default=256, help="new ones")
    parser.add_argument("--metrics", type=int, default=0, help="test images (All-CNN-C)")
    parser.add_argument("--error", type=float, default=1e-3)
    options = parser.parse_args()
    Settings().start()
    whole, inputs, (x, y) = posterior(options.network)
    fresh, pool = inputs.tensor_split([options.fresh])
    variances = whole.functional(fresh, diagonal=True)[1]
    covered, ratios = 0, list[float]()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "whole.safetensors"
        whole.save(file)
        for draw in range(options.draws):
            la = Laplace.load(file, whole.model)
            generator = torch.Generator().manual_seed(draw)
            chosen = torch.randperm(len(pool), generator=generator)[: options.inputs]
            told = la.thin(pool[chosen], error=options.error)
            thin = la.functional(fresh, diagonal=True)[1]
            error = float(((thin / variances).sqrt() - 1).abs().amax(1).mean())
            covered += abs(error - told.error) <= told.half_width
            ratios.append(error / told.error)
            print(f"{told.message} On {len(fresh)} new ones: {error:.2g}.", flush=True)
    some = slice(options.metrics)
    for name, each in {"whole": whole, "thin": la}.items() if options.metrics else ():
        print(f"{name}: {metrics(each, x[some], y[some])}", flush=True)
    print(
        f"{options.network}: covered in {covered} of {len(ratios)} draws; true over told error "
        f"{statistics.median(ratios):.2f} in the median, {max(ratios):.2f} at most."
    )


if __name__ == "__main__":
    main()
