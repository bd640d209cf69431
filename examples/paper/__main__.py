"""The command line of the experiments; without a name it lists them."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from examples.paper import common
from laplace_debias.commands.options import CommandLine

EXPERIMENTS = {
    "contours": "Figure 1: quadratics in the plane of their largest curvature",
    "directional_curvature": "Figures 2, 8-10, 19: slopes, curvatures along a batch's directions",
    "overlaps": "Figures 4, 11: overlaps of two batches' eigenspaces, CG's step sizes",
    "conjugate_gradients": "Figures 5, 13: loss along single-batch and debiased CG",
    "laplace": "Figures 6, 14-17: metrics of Laplace posteriors against the prior precision",
    "runtime": "Section B.6: run time of debiasing",
    "hessian_free": "Section 4.2.1: training by debiased Hessian-free steps",
    "kfac_batch_size": "Figure 20: K-FAC along its own eigenvectors against the batch size",
    "over_training": "Figure 21: the bias over the course of training",
    "model_size": "Figure 22: the bias against the number of parameters",
    "debiasing": "beyond the paper: ways to debias at equal data",
    "frontier": "beyond the paper: distance to exact full-batch against the time of a fit",
    "kfac_error": "beyond the paper: distance of K-FAC and EKFAC from the full GGN",
    "train": "train a test problem's network, and save it as --output",
}


def main(arguments: Sequence[str] | None = None) -> Any:
    """Run the experiment that the first argument names; the other arguments are its options."""
    name, *options = (sys.argv[1:] if arguments is None else list(arguments)) or [""]
    if name not in EXPERIMENTS:
        listed = "\n".join(f"  {known:22}{summary}" for known, summary in EXPERIMENTS.items())
        print(f"usage: python -m examples.paper NAME [--help] [options]\n{listed}")
        sys.exit(2 if name else 0)
    if name == "train":
        settings, run = common.Settings, common.run_train
    else:
        module = importlib.import_module(f"examples.paper.{name}")
        settings, run = module.Settings, module.run
    line = CommandLine(settings, f"python -m examples.paper {name}", EXPERIMENTS[name])
    read = line.settings(options)
    if read is None:
        return None
    chosen, _ = read
    return run(chosen)


if __name__ == "__main__":
    main()
