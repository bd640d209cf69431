"""The command line of the experiments; without a name it lists them."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

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
    """Run the experiment that the first argument names; the other arguments are its options.

    Args:
        arguments: The name and the options. Default: those of the command line.

    Returns:
        The rows of the experiment's table; None for `train`, or if only help was requested.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    name = arguments[0] if arguments else ""
    if name not in EXPERIMENTS:
        print("usage: python -m examples.paper NAME [--help] [options]")
        for listed_name, summary in EXPERIMENTS.items():
            print(f"  {listed_name:22}{summary}")
        # Without a name, the list is what was asked for; an unknown name is an error.
        sys.exit(2 if name else 0)
    experiment = importlib.import_module(f"examples.paper.{name}")
    program = f"python -m examples.paper {name}"
    command_line = CommandLine(experiment.Settings, program, EXPERIMENTS[name])
    settings_and_notes = command_line.settings(arguments[1:])
    if settings_and_notes is None:
        return None
    settings, _ = settings_and_notes
    return experiment.run(settings)


if __name__ == "__main__":
    main()
