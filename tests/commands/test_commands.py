"""The commands demo and train, and the command line that runs them."""

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from rich.console import Console
from small_cifar import GRID, SETTINGS, train_arguments, write_image_folder

from laplace_debias.cli import main
from laplace_debias.commands import demo
from laplace_debias.experiments.posteriors.comparison_report import (
    distance_table,
    findings,
    severity_table,
    tuned_table,
)
from laplace_debias.experiments.shared.held_out import check_held_out
from laplace_debias.experiments.shared.methods import DEBIASED, FULL, MINI
from laplace_debias.experiments.shared.recipe import RecipeChanges
from laplace_debias.problems import (
    ALLCNNC_CIFAR10_RECIPE,
    Recipe,
    get_problem,
    random_split,
)
from laplace_debias.problems.storage import read_tensors
from laplace_debias.report.tables import read_csv

CONFIGS = Path(__file__).parents[2] / "configs"


# --- the demo ------------------------------------------------------------------------------------

TINY_DEMO = [
    "demo",
    "--train_examples=60",
    "--width=2",
    "--recipe.cycles=[[2, 0.05]]",
    "--comparison.batch_size=4",
    "--comparison.draws=2",
    "--comparison.prior_precisions=[0.1, 10.0]",
    "--comparison.validation_examples=20",
    "--comparison.test_examples=30",
    "--comparison.ood_examples=20",
    "--comparison.severities=[1, 5]",
    "--progress=false",
]


@pytest.mark.slow
def test_demo_command_writes_all_files_and_names_the_pictures(tmp_path, capsys):
    assert main([*TINY_DEMO, f"--output={tmp_path / 'out'}"]) == 0
    written = {path.name for path in (tmp_path / "out").iterdir()}
    pictures = {"prior_precision.png", "reliability.png", "severity.png"}
    tables = {"sweep.csv", "tuned.csv", "distances.csv", "table.md"}
    assert written == pictures | tables
    for name in pictures:
        with Image.open(tmp_path / "out" / name) as picture:
            assert len(np.unique(np.asarray(picture.convert("L")))) > 10
    printed = "".join(capsys.readouterr().out.split())
    assert all(name in printed for name in pictures)
    assert "all60trainingimages" in printed


@pytest.mark.slow
def test_tables_of_the_demo_agree_with_its_files(tmp_path):
    settings = demo.Settings(
        train_examples=60,
        width=2,
        recipe=Recipe(batch_size=20, cycles=((2, 0.05),)),
        comparison=SETTINGS,
        output=tmp_path,
        progress=False,
    )
    text = Console(record=True, width=120, file=io.StringIO())
    result = demo.run(settings, text)
    tuned = read_csv(tmp_path / "tuned.csv")
    printed = text.export_text()
    for row in tuned_table(result):
        draws = [r for r in tuned if (r["method"], r["severity"]) == (row["method"], 0)]
        for column, name in (("NLL", "nll"), ("ECE", "ece"), ("accuracy", "accuracy")):
            assert row[column] == pytest.approx(sum(r[name] for r in draws) / len(draws))
        assert f"{row['NLL']:.3f}" in printed
    for row in severity_table(result, "auroc"):
        draws = [r for r in tuned if (r["method"], r["severity"]) == (row["method"], 5)]
        assert row["5"] == pytest.approx(sum(r["auroc"] for r in draws) / len(draws))
    sweep = read_csv(tmp_path / "sweep.csv")
    nll = {(r["method"], r["draw"], r["prior_precision"]): r["nll"] for r in sweep}
    for row, delta in zip(distance_table(result), GRID, strict=False):
        for method in (MINI, DEBIASED):
            gaps = [abs(nll[method, draw, delta] - nll[FULL, 0, delta]) for draw in range(2)]
            assert row[method] == pytest.approx(sum(gaps) / 2)
    assert f"{result.distances[-1].ratio:.2f}" in findings(result)[0]
    assert findings(result)[0] in (tmp_path / "table.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_demo_with_clean_and_corrupted_images_differs(tmp_path):
    results = [
        demo.run(
            demo.Settings(
                train_examples=40,
                image_severity=severity,
                width=2,
                recipe=Recipe(batch_size=20, cycles=((1, 0.05),)),
                comparison=replace(SETTINGS, draws=1, severities=(), prior_precisions=(1.0,)),
                output=tmp_path,
                progress=False,
            ),
            Console(file=io.StringIO()),
        )
        for severity in (0, 5)
    ]
    assert results[0].sweep[0]["nll"] != results[1].sweep[0]["nll"]
    assert not (tmp_path / "severity.png").exists()


# --- the real run, on made-up images -------------------------------------------------------------


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory) -> Path:
    return write_image_folder(tmp_path_factory.mktemp("cifar"))


@pytest.fixture(scope="module")
def checkpoint(image_folder) -> Path:
    path = image_folder / "net.safetensors"
    assert main(train_arguments(image_folder, path)) == 0
    return path


def test_train_saves_a_checkpoint_with_its_split(image_folder, checkpoint):
    tensors = read_tensors(checkpoint)
    split = torch.cat([tensors["split.train"], tensors["split.val"]])
    assert len(tensors["split.val"]) == 10
    assert torch.equal(split.sort().values, torch.arange(40))


def test_train_keeps_an_existing_checkpoint(image_folder, checkpoint, capsys):
    before = checkpoint.read_bytes()
    assert main(train_arguments(image_folder, checkpoint)) == 2
    assert "exists" in capsys.readouterr().err
    assert checkpoint.read_bytes() == before


def test_validation_images_that_were_trained_on_are_refused():
    test = torch.tensor([1.0] * 85 + [0.0] * 15).double()
    check_held_out(test, test)
    with pytest.raises(ValueError, match="trained on"):
        check_held_out(test.repeat(5), torch.ones(500).double())


def test_random_split_leaves_nothing_out():
    kept, held_out = random_split(12, 5, seed=3)
    assert torch.cat([kept, held_out]).sort().values.tolist() == list(range(12))
    assert len(held_out) == 5
    with pytest.raises(ValueError, match="12 validation images out of 12"):
        random_split(12, 12, seed=3)


# --- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["demo", "--comparison.drwas=3"], "--comparison.draws?"),
        (["demo", "--comparison.draws=x"], "comparison.draws"),
        (["demo", "--comparison.draws=0"], "draws is 0"),
        (["demo", "--comparison.params=biases"], "comparison.params"),
        (["demo", "--image_severity=6"], "image_severity is 6"),
        (["demo", "--config=missing.yaml"], "missing.yaml"),
        (["fit"], "--output"),
        (["predict", "--posterior=p"], "--output"),
        (["train", "--data=nowhere", "--output=x.safetensors"], "nothing is at nowhere"),
        (["improve"], "improve"),
        ([], "command"),
    ],
)
def test_bad_arguments_end_with_one_line_that_names_them(
    arguments, named, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("laplace-debias: error: ")
    assert captured.err.count("\n") == 1
    assert named in captured.err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("comparison: {drwas: 3}", "drwas"),
        ("comparison: {draws: many}", "comparison.draws"),
        ("{", "config"),
        ("validation_examples: 5", "validation_examples"),
    ],
)
def test_bad_config_ends_with_one_line_that_names_it(text, named, capsys, tmp_path):
    (tmp_path / "bad.yaml").write_text(text)
    assert main(["demo", f"--config={tmp_path / 'bad.yaml'}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert named in error


def printed_config(arguments, capsys) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--print_config"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_demo_config_is_the_default(capsys):
    with_file = printed_config(["demo", f"--config={CONFIGS / 'demo.yaml'}"], capsys)
    assert with_file == printed_config(["demo"], capsys)
    assert "prior_precisions" in with_file


def test_printed_config_can_be_read_again(capsys, tmp_path):
    once = printed_config([*TINY_DEMO], capsys)
    (tmp_path / "again.yaml").write_text(once)
    assert printed_config(["demo", f"--config={tmp_path / 'again.yaml'}"], capsys) == once


def test_train_config_is_the_recipe():
    config = yaml.safe_load((CONFIGS / "train_allcnnc_cifar10.yaml").read_text(encoding="utf-8"))
    cycles = tuple(tuple(cycle) for cycle in config["recipe"].pop("cycles"))
    changes = RecipeChanges(cycles=cycles, **config["recipe"])
    # From a recipe that differs in all, so that what the config leaves out would show.
    other = Recipe(batch_size=1, epochs=1, learning_rate=1.0, optimizer="adam")
    assert changes.applied_to(other) == ALLCNNC_CIFAR10_RECIPE
    assert get_problem(config["problem"]).recipe == ALLCNNC_CIFAR10_RECIPE
    assert config["validation_examples"] == get_problem(config["problem"]).num_validation


def test_train_config_reaches_the_command_line(capsys):
    flags = ["--data=d", "--output=o", "--recipe.batch_size=64"]
    printed = printed_config(
        ["train", f"--config={CONFIGS / 'train_allcnnc_cifar10.yaml'}", *flags], capsys
    )
    assert "batch_size: 64" in printed
    assert "clip_norm: 5.0" in printed


def test_a_missing_extra_is_named_with_its_remedy(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    assert main(["demo"]) == 2
    error = capsys.readouterr().err
    assert "jsonargparse" in error
    assert "pip install 'laplace-debias[cli]'" in error


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("demo", "predict", "train"))


def test_help_imports_no_command():
    """Torch and the commands take seconds to import; what help prints is known without them."""
    code = """
import sys
from laplace_debias.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
imported = [name for name in sys.modules if name.startswith("laplace_debias.experiments")]
assert not imported, imported
assert "jsonargparse" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
