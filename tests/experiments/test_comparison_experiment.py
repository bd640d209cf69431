"""The comparison of All-CNN-C's posteriors as an experiment: the README's picture."""

import os
from pathlib import Path

import pytest
from small_cifar import train_arguments, write_image_folder

from laplace_debias.cli import main
from laplace_debias.experiments.posteriors.comparison import METHODS
from laplace_debias.experiments.shared.methods import FULL
from laplace_debias.problems.storage import read_tensors, write_tensors
from laplace_debias.report.tables import read_csv

TINY = """
check_examples: 64
comparison:
  batch_size: 4
  draws: 1
  prior_precisions: [0.1, 1.0, 10.0]
  params: weights
  full_examples: 8
  validation_examples: 4
  test_examples: 8
  ood_examples: 4
  severities: [5]
  eval_batch_size: 8
"""


def config_in(folder: Path) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory) -> Path:
    return write_image_folder(tmp_path_factory.mktemp("cifar"))


@pytest.fixture(scope="module")
def checkpoint(image_folder) -> Path:
    path = image_folder / "net.safetensors"
    assert main(train_arguments(image_folder, path)) == 0
    return path


def arguments_of(image_folder: Path, checkpoint: Path, output: Path) -> list[str]:
    return [
        *("experiment", "comparison"),
        f"--config={config_in(output.parent)}",
        f"--data={image_folder}",
        f"--checkpoint={checkpoint}",
        f"--cache={image_folder / 'cache'}",
        f"--output={output}",
        "--min_accuracy=0",
        "--device=cpu",
        "--comparison.params=last_layer",
        "--comparison.full_examples=20",
        "--comparison.draws=1",
        "--progress=false",
    ]


@pytest.mark.slow
def test_it_runs_from_a_config_with_flags_on_top(image_folder, checkpoint, tmp_path, capsys):
    assert main(arguments_of(image_folder, checkpoint, tmp_path / "out")) == 0
    rows = read_csv(tmp_path / "out" / "sweep.csv")
    assert {row["prior_precision"] for row in rows if row["method"] == FULL} == {0.1, 1.0, 10.0}
    printed = capsys.readouterr().out
    assert "20 of the 30 training images" in " ".join(printed.split())
    assert "Test accuracy of the trained network, 20 images" in printed
    assert "holds no split" not in printed
    assert "20 of the 30" in (tmp_path / "out" / "table.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_it_says_where_a_checkpoint_has_no_split(
    image_folder, checkpoint, tmp_path, capsys, monkeypatch
):
    tensors = {k: v for k, v in read_tensors(checkpoint).items() if not k.startswith("split")}
    write_tensors(tmp_path / "bare.safetensors", tensors)
    monkeypatch.setattr(
        "laplace_debias.experiments.posteriors.comparison_experiment.NUM_VALIDATION", 10
    )
    arguments = arguments_of(image_folder, tmp_path / "bare.safetensors", tmp_path / "out")
    assert main(arguments) == 0
    assert "holds no split" in capsys.readouterr().out


def test_it_refuses_a_network_that_knows_nothing(image_folder, checkpoint, tmp_path, capsys):
    arguments = arguments_of(image_folder, checkpoint, tmp_path / "out")
    assert main([*arguments, "--min_accuracy=0.99"]) == 2
    assert "min_accuracy" in capsys.readouterr().err


REAL = {name: os.environ.get(f"LAPLACE_DEBIAS_{name}") for name in ("DATA", "CHECKPOINT")}


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.skipif(
    not all(REAL.values()),
    reason="set LAPLACE_DEBIAS_DATA and LAPLACE_DEBIAS_CHECKPOINT to run it",
)
def test_smoke_run_on_the_real_network(tmp_path):
    config = f"--config={config_in(tmp_path)}"
    flags = [f"--data={REAL['DATA']}", f"--checkpoint={REAL['CHECKPOINT']}"]
    command = ["experiment", "comparison", config, *flags, "--progress=false"]
    assert main([*command, f"--output={tmp_path / 'out'}"]) == 0
    rows = read_csv(tmp_path / "out" / "sweep.csv")
    assert {row["method"] for row in rows} == set(METHODS)
    assert len(rows) == 1 + 3 * (1 + 1 + 1)
