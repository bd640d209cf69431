"""Properties of the comparison, of the demo and the real run, and of the command line."""

import io
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from rich.console import Console
from torch import nn

from laplace_debias import Laplace, metrics
from laplace_debias.cli import main
from laplace_debias.commands import demo
from laplace_debias.experiments.posteriors.comparison import METHODS, ComparisonSettings, compare
from laplace_debias.experiments.posteriors.comparison_report import (
    distance_table,
    findings,
    severity_table,
    tuned_table,
)
from laplace_debias.experiments.posteriors.distances import distances_by_precision
from laplace_debias.experiments.posteriors.fitting import DEBIASED, FULL, MAP, MINI
from laplace_debias.experiments.shared.held_out import check_held_out
from laplace_debias.experiments.shared.recipe import RecipeChanges
from laplace_debias.problems import (
    ALLCNNC_CIFAR10_RECIPE,
    Recipe,
    digits,
    get_problem,
    random_split,
    train,
)
from laplace_debias.problems.data import CIFAR10_CLASSES
from laplace_debias.problems.storage import read_tensors, write_tensors
from laplace_debias.report.tables import read_csv

CONFIGS = Path(__file__).parents[2] / "configs"
SPLIT = digits()
TRAIN = SPLIT.train.subset(range(80))
GRID = (0.1, 3.0, 1000.0)
SETTINGS = ComparisonSettings(
    batch_size=4,
    draws=2,
    prior_precisions=GRID,
    full_examples=40,
    validation_examples=30,
    test_examples=40,
    ood_examples=25,
    severities=(2, 5),
    eval_batch_size=16,
)


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 10)
    ).eval()


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    model = small_net()
    recipe = Recipe(batch_size=20, cycles=((8, 0.1),))
    train(model, TRAIN, recipe, generator=torch.Generator().manual_seed(0))
    return model


@pytest.fixture(scope="module")
def result(model):
    return compare(model, TRAIN, SPLIT.val, SPLIT.test, SETTINGS)


def rows_of(rows, method, draw=0):
    return [row for row in rows if (row["method"], row["draw"]) == (method, draw)]


# --- the comparison ------------------------------------------------------------------------------


def test_every_method_draw_and_prior_precision_has_one_row(result):
    expected = [(MAP, 0, None)]
    expected += [(MINI, draw, delta) for draw in range(2) for delta in GRID]
    expected += [(DEBIASED, draw, delta) for draw in range(2) for delta in GRID]
    expected += [(FULL, 0, delta) for delta in GRID]
    assert [(r["method"], r["draw"], r["prior_precision"]) for r in result.sweep] == expected


def test_tuned_rows_cover_every_severity_once(result):
    found = [(row["method"], row["draw"], row["severity"]) for row in result.tuned]
    draws = {MAP: 1, MINI: 2, DEBIASED: 2, FULL: 1}
    assert found == [(m, d, s) for m in METHODS for d in range(draws[m]) for s in (0, 2, 5)]
    assert all((row["auroc"] is None) == (row["severity"] == 0) for row in result.tuned)


def test_same_settings_give_the_same_result(model, result):
    again = compare(model, TRAIN, SPLIT.val, SPLIT.test, SETTINGS)
    assert again.sweep == result.sweep
    assert again.tuned == result.tuned
    assert again.distances == result.distances


def test_another_seed_draws_other_examples(model, result):
    other = compare(model, TRAIN, SPLIT.val, SPLIT.test, replace(SETTINGS, seed=1, draws=1))
    assert rows_of(other.sweep, MINI) != rows_of(result.sweep, MINI)


def test_results_do_not_depend_on_the_evaluation_batch_size(model, result):
    other = compare(
        model, TRAIN, SPLIT.val, SPLIT.test, replace(SETTINGS, eval_batch_size=7, draws=1)
    )
    for method in METHODS:
        for one, two in zip(
            rows_of(result.sweep, method), rows_of(other.sweep, method), strict=True
        ):
            assert one["nll"] == pytest.approx(two["nll"], rel=1e-4)


def test_mini_batch_and_debiased_see_the_same_examples(model, monkeypatch):
    calls = []
    fit_batches = Laplace.fit_batches

    def spy(self, directions, magnitudes=None, **options):
        directions = list(directions)
        calls.append((directions, magnitudes, options["num_data"]))
        return fit_batches(self, directions, magnitudes, **options)

    monkeypatch.setattr(Laplace, "fit_batches", spy)
    compare(model, TRAIN, SPLIT.val, SPLIT.test, SETTINGS)
    *pairs, full = calls
    assert len(pairs) == 2 * SETTINGS.draws
    for mini, debiased in zip(pairs[::2], pairs[1::2], strict=True):
        ((images, labels),), none, _ = mini
        assert none is None
        assert len(labels) == 2 * SETTINGS.batch_size
        ((first, first_labels),), ((second, second_labels),), _ = debiased
        assert len(first) == len(second) == SETTINGS.batch_size
        assert torch.equal(torch.cat([first, second]), images)
        assert torch.equal(torch.cat([first_labels, second_labels]), labels)
    assert not torch.equal(pairs[0][0][0][0], pairs[2][0][0][0])
    assert sum(len(labels) for _, labels in full[0]) == SETTINGS.full_examples
    assert full[1] is None
    assert {num_data for _, _, num_data in calls} == {len(TRAIN)}


def test_full_batch_rows_are_those_of_a_posterior_fitted_and_tuned_by_hand(model):
    settings = replace(SETTINGS, full_examples=None, validation_examples=None, test_examples=None)
    found = compare(model, TRAIN, SPLIT.val, SPLIT.test, replace(settings, draws=1, severities=()))
    la = Laplace(model, params="weights").fit_batches([TRAIN.tensors()], num_data=len(TRAIN))
    images, labels = SPLIT.test.tensors()
    for row in rows_of(found.sweep, FULL):
        la.prior_precision = row["prior_precision"]
        probs = la.predict(images).probs
        assert row["nll"] == pytest.approx(metrics.nll(probs, labels).item(), rel=1e-4)
        assert row["brier"] == pytest.approx(metrics.brier(probs, labels).item(), rel=1e-4)
        assert row["accuracy"] == pytest.approx(metrics.accuracy(probs, labels).item(), abs=0.003)
    tuning = la.tune([SPLIT.val.tensors()], grid=torch.tensor(GRID))
    (tuned,) = rows_of(found.tuned, FULL)
    assert tuned["prior_precision"] == pytest.approx(tuning.prior_precision)
    assert tuned["validation_nll"] == pytest.approx(tuning.value, rel=1e-4)
    assert found.num_full == found.num_data == len(TRAIN)


def test_tuned_prior_precision_has_the_least_validation_nll(result):
    for row in result.tuned:
        candidates = rows_of(result.sweep, row["method"], row["draw"])
        best = min(candidates, key=lambda candidate: candidate["validation_nll"])
        of_point = ["prior_precision", "validation_nll"]
        if row["severity"] == 0:
            of_point += ["nll", "ece", "accuracy", "brier"]
        assert [row[key] for key in of_point] == [best[key] for key in of_point]


def test_map_does_not_depend_on_prior_precisions_or_batches(model, result):
    settings = replace(SETTINGS, prior_precisions=(7.0,), batch_size=2, draws=1)
    other = compare(model, TRAIN, SPLIT.val, SPLIT.test, settings)
    assert rows_of(other.sweep, MAP) == rows_of(result.sweep, MAP)
    assert rows_of(other.tuned, MAP) == rows_of(result.tuned, MAP)


def test_a_large_prior_precision_gives_map_predictions(model):
    settings = replace(SETTINGS, prior_precisions=(1e9,), draws=1)
    found = compare(model, TRAIN, SPLIT.val, SPLIT.test, settings)
    (trained,) = rows_of(found.sweep, MAP)
    assert all(row["nll"] == pytest.approx(trained["nll"], rel=1e-4) for row in found.sweep)


def test_reliability_holds_the_tuned_predictions_of_the_first_draw(result):
    for method in METHODS:
        probs, labels = result.reliability[method]
        (clean, *_) = rows_of(result.tuned, method)
        assert metrics.nll(probs, labels).item() == clean["nll"]


def test_what_the_user_had_is_left_as_it_was(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    threads = torch.get_num_threads()
    random_state = torch.get_rng_state()
    during = []
    hook = model.register_forward_hook(lambda *_: during.append(torch.get_num_threads()))
    compare(
        model, TRAIN, SPLIT.val, SPLIT.test, replace(SETTINGS, num_threads=threads + 1, draws=1)
    )
    hook.remove()
    assert set(during) == {threads + 1}
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"draws": 0}, "draws is 0"),
        ({"test_examples": 0}, "test_examples is 0"),
        ({"prior_precisions": ()}, "prior_precisions"),
        ({"prior_precisions": (1.0, -1.0)}, "prior_precisions"),
        ({"prior_precisions": (1.0, math.inf)}, "prior_precisions"),
        ({"prior_precisions": (2.0, 1.0)}, "ascend"),
        ({"prior_precisions": (2.0, 2.0)}, "ascend"),
        ({"distance_range": (5.0, 6.0)}, "distance_range"),
        ({"severities": (0,)}, "severities"),
        ({"seed": -1}, "seed"),
    ],
)
def test_settings_out_of_range_are_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        replace(SETTINGS, **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"full_examples": 81}, "full_examples is 81; there are 80"),
        ({"test_examples": 501}, "test_examples is 501; there are 500"),
        ({"ood_examples": 41}, "ood_examples is 41; there are 40"),
        ({"batch_size": 41}, "asks for 82 training images"),
    ],
)
def test_more_examples_than_there_are_is_refused(model, changes, named):
    with pytest.raises(ValueError, match=named):
        compare(model, TRAIN, SPLIT.val, SPLIT.test, replace(SETTINGS, **changes))


# --- distances -----------------------------------------------------------------------------------


def measured(method, draw, delta, nll):
    return {"method": method, "draw": draw, "prior_precision": delta, "nll": nll}


SWEEP = [
    measured(MAP, 0, None, 9.0),
    *(measured(FULL, 0, delta, nll) for delta, nll in ((0.1, 1.0), (1.0, 2.0), (10.0, 4.0))),
    *(measured(MINI, 0, delta, nll) for delta, nll in ((0.1, 1.5), (1.0, 2.2), (10.0, 4.1))),
    *(measured(MINI, 1, delta, nll) for delta, nll in ((0.1, 0.9), (1.0, 2.4), (10.0, 9.0))),
    *(measured(DEBIASED, 0, delta, nll) for delta, nll in ((0.1, 1.2), (1.0, 1.9), (10.0, 4.0))),
    *(measured(DEBIASED, 1, delta, nll) for delta, nll in ((0.1, 0.9), (1.0, 2.0), (10.0, 4.0))),
]


def test_distances_equal_those_worked_out_by_hand():
    low, middle, overall = distances_by_precision(SWEEP, (0.1, 1.0))
    assert [row.prior_precision for row in (low, middle, overall)] == [0.1, 1.0, None]
    assert (low.mini, low.debiased) == pytest.approx((0.3, 0.15))
    assert (middle.mini, middle.debiased) == pytest.approx((0.3, 0.05))
    assert (overall.mini, overall.debiased) == pytest.approx((0.3, 0.1))
    assert [row.ratio for row in (low, middle, overall)] == pytest.approx([1 / 2, 1 / 6, 1 / 3])
    # Two draws: the standard error of a mean is half their difference, and by the jackknife that of
    # a ratio is half the difference of the two ratios.
    assert (low.mini_se, low.debiased_se) == pytest.approx((0.2, 0.05))
    assert low.ratio_se == pytest.approx(abs(0.2 / 0.5 - 0.1 / 0.1) / 2)
    assert overall.mini_se == pytest.approx(abs(0.35 - 0.25) / 2)


def test_distances_are_over_the_whole_grid_by_default():
    rows = distances_by_precision(SWEEP)
    assert [row.prior_precision for row in rows] == [0.1, 1.0, 10.0, None]
    assert rows[2].ratio == 0
    assert rows[3].mini == pytest.approx((0.5 + 0.2 + 0.1 + 0.1 + 0.4 + 5.0) / 6)


def test_a_single_draw_has_no_standard_error():
    (row, *_) = distances_by_precision([r for r in SWEEP if r["draw"] == 0])
    assert row.mini_se is row.debiased_se is row.ratio_se is None


def test_distances_of_the_comparison_are_those_of_its_sweep(result):
    rows = distances_by_precision(result.sweep)
    assert rows == result.distances
    nll = {(r["method"], r["draw"], r["prior_precision"]): r["nll"] for r in result.sweep}
    by_hand = [abs(nll[MINI, draw, GRID[1]] - nll[FULL, 0, GRID[1]]) for draw in range(2)]
    assert rows[1].mini == pytest.approx(sum(by_hand) / 2)


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


def test_findings_name_methods_tuned_to_the_edge_of_the_grid(result):
    edge = {r["method"] for r in result.tuned if r["prior_precision"] in (GRID[0], GRID[-1])}
    told = " ".join(findings(result)[2:])
    assert all((method in told) == (method in edge) for method in METHODS)


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
    root = tmp_path_factory.mktemp("cifar")
    generator = np.random.default_rng(0)
    for split, number in (("train", 4), ("test", 2)):
        for label, name in enumerate(CIFAR10_CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for n in range(number):
                pixels = generator.integers(20 * label + 40, size=(32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{n:04d}.png")
    return root


@pytest.fixture(scope="module")
def checkpoint(image_folder) -> Path:
    path = image_folder / "net.safetensors"
    assert main(train_arguments(image_folder, path)) == 0
    return path


def train_arguments(image_folder: Path, output: Path) -> list[str]:
    return [
        "train",
        f"--data={image_folder}",
        f"--output={output}",
        f"--cache={image_folder / 'cache'}",
        "--validation_examples=10",
        "--recipe.cycles=[[1, 0.01]]",
        "--device=cpu",
        "--progress=false",
    ]


def evaluate_arguments(image_folder: Path, checkpoint: Path, output: Path) -> list[str]:
    return [
        "evaluate",
        f"--config={CONFIGS / 'allcnnc_cifar10_smoke.yaml'}",
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


def test_evaluate_runs_from_a_config_with_flags_on_top(image_folder, checkpoint, tmp_path, capsys):
    assert main(evaluate_arguments(image_folder, checkpoint, tmp_path)) == 0
    rows = read_csv(tmp_path / "sweep.csv")
    assert {row["prior_precision"] for row in rows if row["method"] == FULL} == {0.1, 1.0, 10.0}
    printed = capsys.readouterr().out
    assert "20 of the 30 training images" in " ".join(printed.split())
    assert "Test accuracy of the trained network, 20 images" in printed
    assert "holds no split" not in printed
    assert "20 of the 30" in (tmp_path / "table.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_evaluate_says_where_a_checkpoint_has_no_split(
    image_folder, checkpoint, tmp_path, capsys, monkeypatch
):
    tensors = {k: v for k, v in read_tensors(checkpoint).items() if not k.startswith("split")}
    write_tensors(tmp_path / "bare.safetensors", tensors)
    monkeypatch.setattr("laplace_debias.commands.evaluate.NUM_VALIDATION", 10)
    arguments = evaluate_arguments(image_folder, tmp_path / "bare.safetensors", tmp_path / "out")
    assert main(arguments) == 0
    assert "holds no split" in capsys.readouterr().out


def test_evaluate_refuses_a_network_that_knows_nothing(image_folder, checkpoint, tmp_path, capsys):
    arguments = evaluate_arguments(image_folder, checkpoint, tmp_path)
    assert main([*arguments, "--min_accuracy=0.99"]) == 2
    assert "min_accuracy" in capsys.readouterr().err


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


REAL = {name: os.environ.get(f"LAPLACE_DEBIAS_{name}") for name in ("DATA", "CHECKPOINT")}


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.skipif(
    not all(REAL.values()),
    reason="set LAPLACE_DEBIAS_DATA and LAPLACE_DEBIAS_CHECKPOINT to run it",
)
def test_smoke_run_on_the_real_network(tmp_path):
    config = f"--config={CONFIGS / 'allcnnc_cifar10_smoke.yaml'}"
    flags = [f"--data={REAL['DATA']}", f"--checkpoint={REAL['CHECKPOINT']}"]
    assert main(["evaluate", config, *flags, f"--output={tmp_path}", "--progress=false"]) == 0
    rows = read_csv(tmp_path / "sweep.csv")
    assert {row["method"] for row in rows} == set(METHODS)
    assert len(rows) == 1 + 3 * (1 + 1 + 1)


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
        (["evaluate"], "--data, --checkpoint"),
        (["evaluate", "--data=nowhere", "--checkpoint=nowhere.safetensors"], "nowhere.safetensors"),
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


@pytest.mark.parametrize("name", ["allcnnc_cifar10", "allcnnc_cifar10_smoke"])
def test_evaluate_configs_are_valid(name, capsys):
    flags = [f"--config={CONFIGS / name}.yaml", "--data=d", "--checkpoint=c"]
    assert f"output: results/{name}\n" in printed_config(["evaluate", *flags], capsys)


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
    assert all(command in printed for command in ("demo", "evaluate", "train"))
