"""The paper's experiments: each runs at a tiny size, and what they measure is what they say."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from csv_table import read_csv
from torch import nn
from torch.func import functional_call, jacrev

from examples.paper import conjugate_gradients, hessian_free, kfac_error, laplace, runtime
from examples.paper.__main__ import EXPERIMENTS, main
from examples.paper.common import (
    CROSSFIT,
    FULL,
    MINI,
    ExperimentSettings,
    Trained,
    distances,
    loss_and_accuracy,
)
from examples.paper.data import digits, digits_parts
from examples.paper.plots import method_colours
from examples.paper.problems import Recipe, decay_groups, get_problem, train
from examples.paper.quadratics import OTHER, SAME, BiasSettings, bias_rows, bias_summary
from laplace_debias.optim import DebiasedHessianFree

TINY = ["--recipe.cycles=[[1,0.05]]", "--progress=false", "--device=cpu"]
BIAS = ["--full_examples=60", "--num_directions=2", "--draws=2"]
OPTIONS = {
    "contours": [*BIAS, "--batch_size=20"],
    "directional_curvature": [*BIAS, "--batch_sizes=[20]", "--curvature=hessian"],
    "overlaps": [*BIAS, "--batch_sizes=[20]", "--cg_steps=2"],
    "conjugate_gradients": [
        *("--batch_size=20", "--iterations=2", "--full_examples=20"),
        *("--train_examples=20", "--test_examples=20"),
    ],
    "laplace": [
        *("--batch_size=8", "--draws=1", "--folds=2", "--prior_precisions=[1,10]"),
        *("--full_examples=20", "--test_examples=10", "--validation_examples=10"),
        *("--train_examples=10", "--severities=[5]"),
    ],
    "runtime": ["--batch_size=8", "--folds=2", "--repeats=1", "--full_examples=16"],
    "hessian_free": ["--steps=2", "--draws=1", "--max_iter=3"],
    "kfac_batch_size": ["--full_examples=40", "--batch_sizes=[10]", "--num_directions=9"],
    "over_training": [*BIAS, "--batch_size=20", "--num_checkpoints=1"],
    "model_size": [
        *(*BIAS, "--batch_size=20", "--models=[[0,2],[1,2]]", "--problem=convnet-digits"),
        "--recipe.epochs=1",
    ],
    "debiasing": [
        *("--batch_size=4", "--draws=1", "--ekfac_draws=1", "--folds=[2]", "--further_batches=1"),
        *("--full_examples=20", "--test_examples=10", "--prior_precisions=[1]"),
    ],
    "frontier": [
        *("--sizes=[8,16]", "--monte_carlo_sizes=[24]", "--tolerances=[0.5]", "--budgets=[16]"),
        *("--draws=2", "--population=200", "--test_examples=10", "--prior_precisions=[1]"),
    ],
    "kfac_error": ["--batch_size=4", "--draws=1", "--num_batches=2", "--folds=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_every_experiment_runs_and_writes_its_tables_and_pictures(name, tmp_path, capsys):
    assert main([name, *TINY, *OPTIONS[name], f"--output={tmp_path}"])
    assert f"Tables and pictures: {tmp_path}" in capsys.readouterr().out.replace("\n", "")
    assert list(tmp_path.glob("*.png"))
    for path in tmp_path.glob("*.csv"):
        assert read_csv(path)


COSTLY = {
    "laplace": ["--draws=1", "--prior_precisions=[1]", "--test_examples=50", "--severities=[5]"],
    "frontier": ["--draws=2", "--prior_precisions=[1]", "--tolerances=[0.2]"],
    "hessian_free": ["--steps=3"],
    "debiasing": ["--draws=1", "--ekfac_draws=1", "--prior_precisions=[1]"],
    "model_size": ["--models=[[1,16],[2,16]]"],
}
"""Options of experiments that take long with their defaults; the sizes of data are the defaults."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_every_experiment_runs_with_its_defaults(name, tmp_path, capsys):
    """Its sizes of batches and of the full set fit the problem that it takes by default."""
    assert main([name, *TINY, *COSTLY.get(name, ()), f"--output={tmp_path}"])
    assert f"Tables and pictures: {tmp_path}" in capsys.readouterr().out.replace("\n", "")


def test_a_full_set_of_too_few_batches_is_refused(tmp_path):
    options = ["--full_examples=400", "--batch_sizes=[200]", f"--output={tmp_path}"]
    with pytest.raises(ValueError, match="expected at least 3 batches of 200 examples"):
        main(["kfac_batch_size", *TINY, *options])


@pytest.mark.parametrize("name", ["hessian_free", "model_size", "over_training"])
def test_a_checkpoint_is_refused_where_the_networks_are_trained(name, tmp_path):
    with pytest.raises(ValueError, match=r"leave (it|checkpoint) out"):
        main([name, "--checkpoint=net.safetensors", f"--output={tmp_path}"])


def test_without_a_name_the_experiments_are_listed(capsys):
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in EXPERIMENTS)
    assert {*OPTIONS, "train"} == set(EXPERIMENTS)


CONFIGS = Path(__file__).parents[2] / "configs" / "paper"
CALLED_OTHERWISE = {
    "comparison": "laplace",
    "directional_curvature_digits": "directional_curvature",
    "overlaps_digits": "overlaps",
    "wide_resnet": "directional_curvature",
}


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_configs_are_those_of_their_experiment(path, capsys):
    name = "laplace" if path.stem.startswith("laplace") else path.stem
    main([CALLED_OTHERWISE.get(name, name), f"--config={path}", "--print_config"])
    assert "output: results/" in capsys.readouterr().out


def test_a_trained_network_is_saved_with_its_split(tmp_path):
    path = tmp_path / "net.safetensors"
    main(["train", *TINY, f"--output={path}", "--seed=3"])
    options = ["--batch_size=8", "--folds=2", "--repeats=1", f"--output={tmp_path / 'out'}"]
    main(["runtime", "--progress=false", f"--checkpoint={path}", *options])
    assert read_csv(tmp_path / "out" / "summary.csv")[0]["method"] == MINI


# --- what is measured ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> Trained:
    """A network that is sure of the digits, after a few epochs."""
    splits = digits_parts()
    problem = get_problem("allcnn-digits")
    recipe = replace(problem.recipe, cycles=((8, 0.1),), weight_decay=1e-3)
    model = train(problem.initial_model(0), splits["train"], recipe)
    return Trained(problem, recipe, model, *splits.values(), split={})


def matching(rows, **values):
    """The rows that have these values."""
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


@pytest.mark.slow
def test_a_batch_curves_more_along_its_own_directions_than_others_do(trained, tmp_path):
    settings = BiasSettings(output=tmp_path, full_examples=200, num_directions=2, progress=False)
    rows = bias_rows(trained, 20, settings)
    for quantity in ("slope", "curvature"):
        batches = [
            [row[quantity] for row in matching(rows, index=1, measured_on=name)]
            for name in (SAME, OTHER)
        ]
        mean = sum(map(sum, batches)) / 10
        assert matching(rows, index=1, measured_on=FULL)[0][quantity] == pytest.approx(
            mean, rel=1e-4
        )
    (curvature,) = matching(bias_summary(rows), quantity="curvature")
    assert curvature["same/full, first"] > 1.3
    assert curvature["others/full, first"] < 1


def dense_block(model, x):
    """The GGN of the first weight, from the whole Jacobian."""
    logits = jacrev(lambda W: functional_call(model, {"0.weight": W}, (x,)))
    J = logits(model[0].weight.detach()).flatten(2)
    p = model(x).detach().softmax(1)
    S = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return torch.einsum("nci,ncd,ndj->ij", J, S, J) / len(x)


def test_errors_of_blocks_are_those_of_dense_matrices(trained):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    batches = [(torch.randn(6, 4).double(), torch.randint(3, (6,))) for _ in range(3)]
    trained_small = replace(trained, model=model)
    in_basis = kfac_error.references(trained_small, batches[0], batches[1:])["0.weight"]
    x = torch.cat([x for x, _ in batches[1:]])
    exact = dense_block(model, x)
    assert in_basis.squared_norm == pytest.approx(float(exact.square().sum()), rel=1e-3)
    settings = kfac_error.Settings(batch_size=6, folds=2)
    rows = kfac_error.errors(trained_small, batches[0], batches[1:], settings)
    la = kfac_error.Laplace(model, curvature="ekfac", params="weights").fit_batches([batches[0]])
    C = la.posterior.curvature.blocks["0.weight"].to_dense()
    error = float((C - exact).norm() / exact.norm())
    assert matching(rows, fit="EKFAC", block="0.weight")[0]["error"] == pytest.approx(
        error, rel=1e-3
    )


def test_errors_count_all_directions_that_share_a_magnitude(trained):
    """Few examples of many inputs have thin directions: all others share a magnitude."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(260, 3)).double().eval()
    first, *full = [(torch.randn(n, 260).double(), torch.randint(3, (n,))) for n in (6, 20, 20)]
    exact = dense_block(model, torch.cat([x for x, _ in full]))
    la = kfac_error.Laplace(model, curvature="ekfac", params="weights")
    on_batch = la.fit_batches([first]).posterior.curvature.blocks["0.weight"]
    on_full = la.fit_batches([first], full).posterior.curvature.blocks["0.weight"]
    assert on_batch.magnitudes.shape == (3, 7)
    in_basis = kfac_error.references(replace(trained, model=model), first, full)["0.weight"]
    in_basis = replace(in_basis, remainder=float((exact - on_full.to_dense()).square().sum()))
    assert in_basis.squared_norm == pytest.approx(float(exact.square().sum()), rel=1e-9)
    squared_error = float((exact - on_batch.to_dense()).square().sum())
    assert in_basis.squared_error(on_batch.magnitudes) == pytest.approx(squared_error, rel=1e-9)


def test_the_regularised_loss_adds_the_penalty_and_leaves_the_network(trained):
    theta_before = nn.utils.parameters_to_vector(trained.model.parameters()).detach().clone()
    few = trained.test.subset(torch.arange(50))
    step = torch.full_like(theta_before, 1e-3)
    plain = loss_and_accuracy(trained, step, {"test": few}, 0.0)
    decayed = loss_and_accuracy(trained, step, {"test": few}, 0.3)
    assert torch.equal(nn.utils.parameters_to_vector(trained.model.parameters()), theta_before)
    weights = sum((p + 1e-3).square().sum() for p in trained.model.parameters() if p.ndim > 1)
    penalty = decayed["test_loss"] - plain["test_loss"]
    assert penalty == pytest.approx(0.15 * float(weights.detach()), rel=1e-4)
    assert 0.5 < plain["test_accuracy"] <= 1


# The training set has 30 images, so the last size is larger than the training set.
@pytest.mark.parametrize("size", [15, 60])
def test_debiased_cg_halves_the_images_of_the_single_batch(trained, size, tmp_path, monkeypatch):
    few = replace(trained, train=trained.train.subset(torch.arange(30)))
    monkeypatch.setattr(conjugate_gradients, "load", lambda settings: few)
    settings = conjugate_gradients.Settings(
        batch_size=size, iterations=2, test_examples=20, output=tmp_path, progress=False
    )
    generator = torch.Generator().manual_seed(settings.seed)
    train_order = torch.randperm(len(few.train), generator=generator)
    test_order = torch.randperm(len(few.test), generator=generator)
    order = torch.randperm(len(few.train), generator=generator)
    subsets = {"train": few.train.subset(train_order), "test": few.test.subset(test_order[:20])}
    rows = matching(conjugate_gradients.run(settings), method="debiased")
    halves = [*order[:size].chunk(2)]
    expected = conjugate_gradients.trajectory(few, halves, subsets, settings)
    assert [row["test_loss"] for row in rows] == [row["test_loss"] for row in expected]


@pytest.mark.parametrize("size", [15, 60])
def test_debiased_hessian_free_steps_halve_the_images_of_a_step(trained, size, tmp_path):
    train = trained.train.subset(torch.arange(30))
    test = trained.test.subset(torch.arange(30))
    few = replace(trained, train=train, test=test, model=trained.problem.initial_model(0))
    settings = hessian_free.Settings(batch_size=size, steps=1, max_iter=3, output=tmp_path)
    _, row = hessian_free.train_run(few, settings, True, "debiased", 0)

    model = trained.problem.initial_model(0)
    decay = trained.recipe.penalty
    groups = decay_groups(model.parameters(), decay)
    optimizer = DebiasedHessianFree(groups, damping=settings.damping, max_iter=3)

    def closure(indices):
        x, y = train.batch(indices)

        def evaluate():
            outputs = model(x)
            return nn.functional.cross_entropy(outputs, y), outputs

        return evaluate

    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    optimizer.step(*map(closure, order[:size].chunk(2)))
    expected = loss_and_accuracy(
        replace(few, model=model), 0.0, {"train": train, "test": test}, decay
    )
    ratio = optimizer.last_step.reduction_ratio
    assert row == {"step": 1, **expected, "reduction_ratio": ratio}


def test_hessian_free_training_measures_batch_norms_by_their_running_statistics(trained, tmp_path):
    train = trained.train.subset(torch.arange(30))
    test = trained.test.subset(torch.arange(30))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))
    few = replace(trained, train=train, test=test, model=model.train())
    settings = hessian_free.Settings(batch_size=20, steps=3, max_iter=3, output=tmp_path)
    *_, row = hessian_free.train_run(few, settings, True, "single-batch", 0)
    x, y = test.batch(range(30))
    accuracy = (model.eval()(x).argmax(1) == y).double().mean()
    assert row["test_accuracy"] == float(accuracy)
    penalty = trained.recipe.penalty / 2 * sum(model[i].weight.square().sum() for i in (1, 3))
    loss = nn.functional.cross_entropy(model(x), y) + penalty
    assert row["test_loss"] == pytest.approx(float(loss.detach()), rel=1e-6)


# The training set has 40 images: the last number is all of them, not without the mini-batch.
@pytest.mark.parametrize("number", [0, 5, 20, 40])
def test_the_full_batch_fit_that_is_timed_has_all_its_examples(trained, number, tmp_path):
    few = replace(trained, train=trained.train.subset(torch.arange(40)))
    settings = runtime.Settings(batch_size=16, full_examples=number, output=tmp_path)
    fits = runtime.timed_fits(few, settings)
    assert (FULL in fits) == (number > 0)
    if number:
        assert fits[FULL]().num_data == number


def test_distances_are_means_over_draws_and_relative_to_the_mini_batch():
    nll = {(FULL, 0): (1.0, 2.0), (MINI, 0): (1.4, 2.0), (MINI, 1): (1.0, 2.4)}
    nll |= {(CROSSFIT, 0): (1.1, 2.0), (CROSSFIT, 1): (0.9, 2.0)}
    rows = [
        {"data": "test", "method": method, "draw": draw, "prior_precision": delta, "nll": value}
        for (method, draw), values in nll.items()
        for delta, value in zip((0.1, 1.0), values, strict=True)
    ]
    rows = [{**row, "ece": 0.0, "accuracy": 1.0} for row in rows]
    mini, crossfit = laplace.distances(rows)
    assert (mini["nll"], mini["ratio"]) == pytest.approx((0.2, 1.0))
    assert (crossfit["nll"], crossfit["ratio"]) == pytest.approx((0.05, 0.25))
    validation = [{**row, "data": "validation", "nll": row["prior_precision"]} for row in rows]
    by_method = {
        row["method"]: row for row in matching(laplace.tuned(rows + validation), data="test")
    }
    assert by_method[MINI]["nll"] == pytest.approx(1.2)
    assert list(by_method) == [MINI, CROSSFIT, FULL]


def test_the_ratio_to_a_mini_batch_without_a_distance_is_one_or_infinite():
    """A network that is certain of each example has an NLL of 0 with each posterior."""
    nll = {FULL: 0.0, MINI: 0.0, CROSSFIT: 0.5}
    values = {"data": "test", "prior_precision": 1.0, "ece": 0.0, "accuracy": 1.0}
    rows = [{**values, "method": method, "draw": 0, "nll": nll[method]} for method in nll]
    mini, crossfit = laplace.distances(rows)
    assert (mini["ratio"], crossfit["ratio"]) == (1.0, math.inf)
    rows[0]["draw"] = None
    mini, crossfit = distances(rows)
    assert (mini["ratio"], mini["worst"]) == (1.0, 1.0)
    assert (crossfit["ratio"], crossfit["worst"]) == (math.inf, math.inf)


def test_the_study_compares_each_kind_with_its_own_full_batch():
    nll = {"full-batch": [1.0], "EKFAC, full-batch": [2.0], "mini-batch": [1.2, 1.4]}
    nll |= {"x": [1.1, 1.1], "EKFAC, mini-batch": [2.4, 2.4], "EKFAC, x": [2.1, 2.2]}
    rows = [
        {
            "method": method,
            "draw": draw if len(values) > 1 else None,
            "prior_precision": 1.0,
            "nll": value,
        }
        for method, values in nll.items()
        for draw, value in enumerate(values)
    ]
    distances_by_method = {row["method"]: row for row in distances(rows)}
    assert distances_by_method["x"]["ratio"] == pytest.approx(0.2 / 0.6)
    assert distances_by_method["EKFAC, x"]["NLL distance"] == pytest.approx(0.15)
    assert distances_by_method["EKFAC, x"]["ratio"] == pytest.approx(0.3 / 0.8)


# --- networks, data, training --------------------------------------------------------------------


def test_the_digits_are_normalised_and_parted():
    pool, test = digits()
    assert (len(pool), len(test)) == (1297, 500)
    x, _ = pool.batch(torch.arange(1297))
    assert (x.mean().item(), x.std().item()) == pytest.approx((0, 1), abs=0.02)
    image, label = pool[3]
    assert torch.equal(image, x[3])
    assert label == pool.labels[3]


def test_training_repeats_with_the_seed():
    pool, _ = digits()
    recipe = Recipe(batch_size=50, cycles=((1, 0.1),), augmented=True)
    problem = get_problem("allcnn-digits")
    images = pool.subset(torch.arange(200))
    first = train(problem.initial_model(0), images, recipe, 0)
    repeated = train(problem.initial_model(0), images, recipe, 0)
    different = train(problem.initial_model(0), images, recipe, 1)
    assert torch.equal(first[0].weight, repeated[0].weight)
    assert not torch.equal(first[0].weight, different[0].weight)


def test_an_unknown_problem_is_named(tmp_path):
    with pytest.raises(ValueError, match="unknown problem 'digit'"):
        main(["contours", "--problem=digit", f"--output={tmp_path}"])
    assert ExperimentSettings(output=tmp_path).problem == "allcnn-digits"


def test_colours_of_known_and_other_methods_differ():
    methods = ["crossfit", "MAP", "mini-batch", "debiased", "full-batch", "other", "third"]
    colours = method_colours(methods)
    assert list(colours) == methods
    assert len(set(colours.values())) == len(methods)
    assert method_colours(["debiased"])["debiased"] == colours["debiased"]
