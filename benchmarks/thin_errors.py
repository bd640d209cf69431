"""Is the error that `la.thin` tells that of new inputs? `python -m benchmarks.thin_errors`.

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

_RESNET = "ResNet on digits"


def posterior(network: str, fresh: int) -> tuple[Laplace, Tensor, Tensor]:
    """A posterior, inputs that directions may be chosen by, and new ones."""
    if network == _RESNET:
        model, (x, y, x_val, y_val, x_test, _) = trained(network, 0)
        la = Laplace(model).fit([(x, y)])
        la.tune([(x_val, y_val)])
        return la, x_val, x_test[:fresh]
    settings = ImageSettings()
    la = ours.fitted(settings)
    la.prior_precision = DELTA
    images = settings.data(2_000 + fresh, seed=2)[0]
    return la, images[fresh:], images[:fresh]


def main() -> None:
    """Print what was told and what is, for inputs drawn again and again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=(_RESNET, "All-CNN-C"), default=_RESNET)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--inputs", type=int, default=32, help="that are given to thin")
    parser.add_argument("--fresh", type=int, default=256, help="new ones")
    parser.add_argument("--error", type=float, default=1e-3)
    options = parser.parse_args()
    Settings().start()
    whole, pool, fresh = posterior(options.network, options.fresh)
    variances = whole.functional(fresh, diagonal=True)[1]
    covered, ratios = 0, list[float]()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "whole.safetensors"
        whole.save(file)
        for draw in range(options.draws):
            la = Laplace.load(file, whole.model)
            generator = torch.Generator().manual_seed(draw)
            some = torch.randperm(len(pool), generator=generator)[: options.inputs]
            told = la.thin(pool[some], error=options.error)
            thin = la.functional(fresh, diagonal=True)[1]
            error = float(((thin / variances).sqrt() - 1).abs().amax(1).mean())
            covered += abs(error - told.error) <= told.half_width
            ratios.append(error / told.error)
            print(f"{told.message} On {len(fresh)} new ones: {error:.2g}.", flush=True)
    print(
        f"{options.network}: covered in {covered} of {len(ratios)} draws; true over told error "
        f"{statistics.median(ratios):.2f} in the median, {max(ratios):.2f} at most."
    )


if __name__ == "__main__":
    main()
