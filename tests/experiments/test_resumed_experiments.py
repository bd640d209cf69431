"""The experiments, broken off in the middle and resumed, comes to what an unbroken run does."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from laplace_debias.experiments.registry import EXPERIMENTS
from laplace_debias.experiments.shared import store
from laplace_debias.experiments.shared.recipe import RecipeChanges
from laplace_debias.problems import get_problem, save_checkpoint

DIGITS = {"problem": "convnet-digits", "progress": False, "device": "cpu"}
BIAS = {"full_examples": 20, "num_directions": 2, "tol": 0.1}
TINY = {
    "contours": BIAS | {"batch_size": 10, "draws": 1},
    "directional_curvature": BIAS | {"batch_sizes": (10,)},
    "overlaps": BIAS | {"full_examples": 12, "batch_sizes": (4,), "cg_steps": 2},
    "conjugate_gradients": {
        **{"batch_size": 8, "iterations": 2},
        **{"train_examples": 10, "test_examples": 10},
    },
    "laplace": {
        **{"batch_size": 4, "draws": 2, "folds": 2, "prior_precisions": (1.0,), "chunk_size": 4},
        **{"full_examples": 8, "test_examples": 8, "train_examples": 4, "severities": (5,)},
    },
    "hessian_free": {"batch_size": 20, "steps": 1, "draws": 1, "max_iter": 2},
    "kfac_batch_size": {
        **{"full_examples": 16, "batch_sizes": (4,), "draws": 2, "others": 1, "num_directions": 5},
    },
    "over_training": BIAS
    | {"recipe": RecipeChanges(epochs=2), "batch_size": 10, "draws": 1, "num_checkpoints": 2},
    "model_size": BIAS
    | {"recipe": RecipeChanges(epochs=1), "batch_size": 10, "draws": 1}
    | {"models": ((0, 2), (1, 2))},
    "debiasing": {
        **{"batch_size": 4, "draws": 2, "ekfac_draws": 1, "groups": 4, "folds": (2, 4)},
        **{"further_batches": 1, "average_batch_size": 2, "average_decays": (0.5,)},
        **{"full_examples": 12, "ekfac_full_examples": 6, "test_examples": 4},
        **{"prior_precisions": (1.0,)},
    },
    "kfac_error": {"batch_size": 4, "num_batches": 2, "draws": 2, "folds": 2, "probes": 4},
}
TRAIN_THEMSELVES = ("over_training", "model_size", "hessian_free")


# What runs on a WideResNet is `directional_curvature`; the clock gives no run the same times; the
# comparison cannot be resumed.
LEFT_OUT = ("wide_resnet", "runtime", "comparison")
OTHERS = [entry for entry in EXPERIMENTS if entry.name not in LEFT_OUT]
# All go through one store: one of them always runs, the rest with the slow tests.
ALWAYS = "contours"


@pytest.mark.slow
@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=entry.name, marks=[] if entry.name == ALWAYS else pytest.mark.slow)
        for entry in OTHERS
    ],
)
def test_a_run_broken_off_in_the_middle_comes_to_the_same(entry, tmp_path, monkeypatch):
    options = {**DIGITS, **TINY[entry.name]}
    if entry.name not in TRAIN_THEMSELVES:
        options["checkpoint"] = tmp_path / "network.safetensors"
        save_checkpoint(get_problem(options["problem"]).model(), options["checkpoint"])
    # What is drawn is in the tables, and drawing takes the most time here.
    monkeypatch.setattr(store, "save", lambda figure, path: None)
    written: list[str] = []
    limit = 10**6

    def counting(write):
        def counted(content, path):
            paths = [arg for arg in (content, path) if isinstance(arg, Path)]
            if paths[0].parent.name == "parts" and paths[0].stem not in store._INPUTS:
                if len(written) == limit:
                    raise KeyboardInterrupt
                written.append(paths[0].name)
            write(content, path)

        return counted

    for name in ("write_csv", "write_tensors"):
        monkeypatch.setattr(store, name, counting(getattr(store, name)))

    def run(folder: str, resume: bool = False) -> dict[str, bytes]:
        settings = entry.settings(**options, output=tmp_path / folder, resume=resume)
        entry.run(settings, Console(file=io.StringIO(), width=200))
        return {path.name: path.read_bytes() for path in sorted(settings.output.glob("*.csv"))}

    unbroken = run("unbroken")
    assert unbroken
    every = written.copy()
    assert len(every) > 1
    written.clear()
    limit = len(every) // 2
    with pytest.raises(KeyboardInterrupt):
        run("broken")
    written.clear()
    limit = 10**6
    assert run("broken", resume=True) == unbroken
    assert written == every[len(every) // 2 :]  # what was there is not made again
