"""Properties of the applied experiments: conjugate gradients, Laplace, run time, Hessian-free."""

import io
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn.functional import cross_entropy

from laplace_debias import Laplace, metrics
from laplace_debias.cli import main
from laplace_debias.experiments.cost import runtime
from laplace_debias.experiments.optimisation import conjugate_gradients as cgs
from laplace_debias.experiments.optimisation import hessian_free as hf
from laplace_debias.experiments.posteriors import laplace_experiment as lap
from laplace_debias.experiments.posteriors.distances import distances_by_data
from laplace_debias.experiments.posteriors.fitting import chosen_parameters
from laplace_debias.experiments.registry import EXPERIMENTS
from laplace_debias.experiments.shared.judge import METRICS, Judge
from laplace_debias.experiments.shared.methods import CROSSFIT, DEBIASED, FULL, MAP, MINI
from laplace_debias.experiments.shared.recipe import RecipeChanges
from laplace_debias.experiments.shared.setup import ExperimentSettings, Trained
from laplace_debias.optim import DebiasedHessianFree
from laplace_debias.problems import (
    ImageDataset,
    Recipe,
    get_problem,
    load_checkpoint,
    random_corruption,
    save_checkpoint,
    train,
    vit_little,
)
from laplace_debias.problems.problem import ProblemData
from laplace_debias.report.costs import costs_figure
from laplace_debias.report.figures import prior_precision_grid
from laplace_debias.report.summary import summarise
from laplace_debias.report.tables import read_csv
from laplace_debias.report.trajectories import trajectory_figure

CONFIGS = Path(__file__).parents[2] / "configs" / "experiments"
APPLIED = {
    "conjugate_gradients": cgs.CONJUGATE_GRADIENTS,
    "laplace": lap.LAPLACE,
    "runtime": runtime.RUNTIME,
    "hessian_free": hf.HESSIAN_FREE,
}
DIGITS = get_problem("allcnn-digits")
SILENT = {"problem": "allcnn-digits", "progress": False, "device": "cpu"}


def silent() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    data = DIGITS.data()
    torch.manual_seed(0)
    model = DIGITS.model()
    recipe = Recipe(batch_size=50, cycles=((2, 0.1),))
    train(model, data.train, recipe, generator=torch.Generator().manual_seed(0))
    path = tmp_path_factory.mktemp("network") / "digits.safetensors"
    save_checkpoint(model, path, {"split.train": data.train_indices, "split.val": data.val_indices})
    return path


@pytest.fixture(scope="module")
def trained(checkpoint) -> Trained:
    model = DIGITS.model()
    load_checkpoint(model, checkpoint)
    return Trained(DIGITS, model.eval(), DIGITS.data(), 0.0)


def tiny(number: int = 24) -> tuple[Trained, ImageDataset]:
    """A float64 network small enough for dense algebra, on random images."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(256, (number, 1, 2, 2), generator=generator, dtype=torch.uint8)
    labels = torch.arange(number) % 3
    data = ImageDataset(images, labels, (0.5,), (0.3,), ("a", "b", "c"))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    every = torch.arange(number)
    parts = ProblemData(data, data, data, every, every)
    return Trained(DIGITS, model.eval(), parts, 0.0), data


# --- every experiment ----------------------------------------------------------------------------


def test_the_applied_experiments_are_registered():
    by_name = {entry.name: entry for entry in EXPERIMENTS}
    for name, experiment in APPLIED.items():
        assert by_name[name] is experiment
        assert issubclass(experiment.settings, ExperimentSettings)


@pytest.mark.slow
def test_the_command_line_runs_an_experiment_from_its_config(checkpoint, tmp_path, capsys):
    arguments = [
        *("experiment", "conjugate_gradients"),
        f"--config={CONFIGS / 'conjugate_gradients.yaml'}",
        *("--problem=allcnn-digits", f"--checkpoint={checkpoint}", f"--output={tmp_path / 'cg'}"),
        *("--batch_size=8", "--draws=1", "--iterations=2", "--progress=false", "--device=cpu"),
        *("--train_examples=20", "--test_examples=20"),
    ]
    assert main(arguments) == 0
    assert "debiased" in capsys.readouterr().out
    assert (tmp_path / "cg" / "conjugate_gradients.pdf").exists()
    assert main(arguments) == 2
    assert "resume" in capsys.readouterr().err


# --- conjugate gradients -------------------------------------------------------------------------

CG = {**SILENT, "batch_size": 12, "draws": 2, "iterations": 4}


def test_debiased_sees_the_examples_of_single_batch_in_two_halves(tmp_path):
    settings = cgs.ConjugateGradientsSettings(**CG, full_examples=None, train_examples=7)
    plan = cgs.plan(settings, num_train=31, num_test=9)
    assert [(run.method, run.draw) for run in plan.runs] == [
        (cgs.SINGLE, 0),
        (cgs.DEBIASED, 0),
        (cgs.SINGLE, 1),
        (cgs.DEBIASED, 1),
        (cgs.FULL, 0),
        (cgs.FULL_DEBIASED, 0),
    ]
    for single, debiased in zip(plan.runs[::2], plan.runs[1::2], strict=True):
        assert single.second is None
        assert len(debiased.first) == len(debiased.second) == len(single.first) // 2
        assert torch.equal(torch.cat([debiased.first, debiased.second]), single.first)
    assert not torch.equal(plan.runs[0].first, plan.runs[2].first)
    assert len(plan.runs[4].first) == 30
    assert len(plan.train) == 7
    assert plan.test.sort().values.tolist() == list(range(9))


@pytest.mark.slow
def test_draws_may_be_added_to_a_run(checkpoint, tmp_path, monkeypatch):
    options = CG | {"output": tmp_path, "checkpoint": checkpoint, "full_examples": 14}
    options |= {"train_examples": 20, "test_examples": 20, "iterations": 2, "resume": True}
    first = cgs.run_conjugate_gradients(cgs.ConjugateGradientsSettings(**options | {"draws": 1}))
    computed = []
    trajectory = cgs.trajectory

    def watched(trained, run, *rest):
        computed.append((run.method, run.draw))
        return trajectory(trained, run, *rest)

    monkeypatch.setattr(cgs, "trajectory", watched)
    both = cgs.run_conjugate_gradients(cgs.ConjugateGradientsSettings(**options))
    assert computed == [(cgs.SINGLE, 1), (cgs.DEBIASED, 1)]
    assert [row for row in both if row["draw"] == 0] == first
    # What is there is what a run of both draws makes.
    monkeypatch.undo()
    fresh = cgs.ConjugateGradientsSettings(**options | {"output": tmp_path / "fresh"})
    assert cgs.run_conjugate_gradients(fresh) == both


def test_loss_is_the_regularised_one_of_all_images_whatever_the_chunk():
    trained, data = tiny()
    step = 0.3 * torch.randn(27, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x, y = data.batch(torch.arange(len(data)))
    theta = nn.utils.parameters_to_vector(trained.model.parameters()).detach() + step
    W1, b1, W2, b2 = theta.split([12, 3, 9, 3])
    hidden = torch.tanh(x.flatten(1).double() @ W1.view(3, 4).T + b1)
    logits = hidden @ W2.view(3, 3).T + b2
    expected = cross_entropy(logits, y) + 0.05 * (W1.square().sum() + W2.square().sum())
    hits = (logits.argmax(1) == y).double().mean()
    for chunk_size in (5, 100):
        found = Judge(trained.model, data, data, 0.1, chunk_size)(step)
        assert found["train_loss"] == pytest.approx(float(expected), abs=1e-6)
        assert found["test_accuracy"] == pytest.approx(float(hits))


def test_the_judge_moves_only_its_copy():
    trained, data = tiny()
    before = nn.utils.parameters_to_vector(trained.model.parameters()).clone()
    Judge(trained.model, data, data, 0.1, 5)(torch.ones(27, dtype=torch.float64))
    assert torch.equal(nn.utils.parameters_to_vector(trained.model.parameters()), before)


def dense_quadratic(trained: Trained, data: ImageDataset, indices, decay: float):
    """Gradient and GGN of the regularised loss, from per-example Jacobians."""
    x, y = data.batch(indices)
    named = {name: p.detach() for name, p in trained.model.named_parameters()}

    def outputs(values, x):
        return torch.func.functional_call(trained.model, values, (x[None].double(),))[0]

    jacobians = torch.func.vmap(torch.func.jacrev(outputs), (None, 0))(named, x)
    J = torch.cat([part.flatten(2) for part in jacobians.values()], 2)
    p = trained.model(x.double()).softmax(1).detach()
    H = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    residual = p - nn.functional.one_hot(y, 3)
    weights = torch.cat(
        [torch.full((v.numel(),), float(not k.endswith("bias"))) for k, v in named.items()]
    ).double()
    theta = torch.cat([value.flatten() for value in named.values()])
    gradient = torch.einsum("ncd,nc->d", J, residual) / len(x) + decay * weights * theta
    ggn = torch.einsum("ncd,nce,nef->df", J, H, J) / len(x) + decay * weights.diag()
    return gradient, ggn


def test_debiased_trajectory_follows_dense_line_searches_on_the_second_half():
    trained, data = tiny()
    settings = cgs.ConjugateGradientsSettings(**CG | {"iterations": 3})
    first, second = torch.arange(12), torch.arange(12, 24)
    judge = Judge(trained.model, data, data, 0.1, 100)
    run = cgs.Run(cgs.DEBIASED, 0, first, second)
    rows = cgs.trajectory(trained, run, judge, 0.1, settings)

    g, H = dense_quadratic(trained, data, first, 0.1)
    g2, H2 = dense_quadratic(trained, data, second, 0.1)
    x, x2, directions = torch.zeros_like(g), torch.zeros_like(g), []
    expected = [0.0]
    for _ in range(3):
        residual = -(g + H @ x)
        # Conjugate by Gram and Schmidt, not by CG's short recursion.
        d = residual - sum(e * (e @ H @ residual) / (e @ H @ e) for e in directions)
        directions.append(d)
        x = x + d * (d @ residual) / (d @ H @ d)
        x2 = x2 - d * (d @ (g2 + H2 @ x2)) / (d @ H2 @ d)
        expected.append(float(g2 @ x2 + x2 @ H2 @ x2 / 2))
    assert [row["quadratic"] for row in rows] == pytest.approx(expected, rel=1e-6)
    assert rows[-1]["distance"] == pytest.approx(float(x2.norm()), rel=1e-6)
    assert rows[-1]["train_loss"] == pytest.approx(judge(x2)["train_loss"], rel=1e-6)


def test_measuring_less_often_keeps_start_and_end():
    trained, data = tiny()
    judge = Judge(trained.model, data, data, 0.1, 100)
    run = cgs.Run(cgs.SINGLE, 0, torch.arange(12), None)
    rows = {
        every: cgs.trajectory(
            trained,
            run,
            judge,
            0.1,
            cgs.ConjugateGradientsSettings(**CG | {"iterations": 5}, evaluate_every=every),
        )
        for every in (1, 2)
    }
    assert [row["iteration"] for row in rows[2]] == [0, 2, 4, 5]
    assert rows[2] == [rows[1][i] for i in (0, 2, 4, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("method", [cgs.SINGLE, cgs.DEBIASED])
def test_the_end_of_a_run_that_ends_early_is_measured(method):
    trained, data = tiny()
    judge = Judge(trained.model, data, data, 0.0, 100)
    second = torch.arange(12, 24) if method == cgs.DEBIASED else None
    run = cgs.Run(method, 0, torch.arange(12), second)
    options = CG | {"iterations": 30, "curvature": "hessian"}
    every, some = (
        cgs.trajectory(
            trained, run, judge, 0.0, cgs.ConjugateGradientsSettings(**options, evaluate_every=n)
        )
        for n in (1, 25)
    )
    assert 0 < every[-1]["iteration"] < 25  # the Hessian is indefinite
    assert some == [every[0], every[-1]]


def test_stability_tells_start_best_and_end():
    losses = [1.0, 0.5, math.nan]
    rows = [
        {"method": "a", "draw": 0, "iteration": 3 * i, "train_loss": v, "test_loss": -v}
        for i, v in enumerate(losses)
    ]
    (row,) = cgs.stability(rows)
    assert (row["train start"], row["train best"], row["train best at"]) == (1.0, 0.5, 3)
    assert row["train end"] == math.inf
    assert (row["test best"], row["test best at"]) == (-1.0, 0)


@pytest.mark.slow
def test_conjugate_gradients_resume_to_the_same_table(checkpoint, tmp_path):
    options = {**CG, "checkpoint": checkpoint, "train_examples": 20, "test_examples": 20}
    output = tmp_path / "cg"
    settings = cgs.ConjugateGradientsSettings(**options, output=output)
    cgs.run_conjugate_gradients(settings, silent())
    whole = (output / "results.csv").read_bytes()
    (output / "parts" / "debiased-1.csv").unlink()
    again = cgs.ConjugateGradientsSettings(**options, output=output, resume=True)
    cgs.run_conjugate_gradients(again, silent())
    assert (output / "results.csv").read_bytes() == whole
    other = cgs.ConjugateGradientsSettings(
        **options | {"iterations": 5}, output=output, resume=True
    )
    with pytest.raises(ValueError, match="iterations was 4, is 5"):
        cgs.run_conjugate_gradients(other, silent())


# --- Laplace -------------------------------------------------------------------------------------

LAPLACE = {
    **SILENT,
    "batch_size": 8,
    "draws": 2,
    "folds": 4,
    "prior_precisions": (0.1, 10.0),
    "full_examples": 20,
    "test_examples": 12,
    "train_examples": 4,
    "severities": (5,),
    "chunk_size": 8,
}


@pytest.fixture(scope="module")
def laplace_run(checkpoint, tmp_path_factory):
    output = tmp_path_factory.mktemp("laplace") / "run"
    settings = lap.LaplaceSettings(**LAPLACE, checkpoint=checkpoint, output=output)
    return settings, lap.run_laplace(settings, silent())


@pytest.mark.slow
def test_every_data_set_method_draw_and_prior_precision_has_one_row(laplace_run):
    _, rows = laplace_run
    points = [(MAP, 0, None)]
    for method, draws in (
        (MINI, 2),
        (DEBIASED, 2),
        (CROSSFIT, 2),
        (FULL, 1),
    ):
        points += [(method, draw, delta) for draw in range(draws) for delta in (0.1, 10.0)]
    found = [(r["data"], r["method"], r["draw"], r["prior_precision"]) for r in rows]
    parts = ("test", "train", "severity 5")
    assert found == [(part, *point) for part in parts for point in points]


def test_rows_are_those_of_posteriors_fitted_one_by_one(laplace_run, trained):
    settings, rows = laplace_run
    data = trained.data
    chosen = lap.choose(settings, len(data.train), len(data.test))
    x, y = data.train.batch(chosen.batches[1])
    fits = {
        MINI: ([(x, y)],),
        DEBIASED: ([(x[:4], y[:4])], [(x[4:], y[4:])]),
        FULL: ([data.train.batch(chosen.full)],),
    }
    test = data.test.subset(chosen.test)
    shifted = test.with_images(random_corruption(test.images, 5, 0))
    for method, batches in fits.items():
        la = Laplace(trained.model, params="weights", prior_precision=10.0)
        la.fit_batches(*batches, num_data=len(data.train))
        clean, corrupted = (
            la.predict(part.batch(torch.arange(12))[0]).probs.double() for part in (test, shifted)
        )
        draw = 0 if method == FULL else 1
        by_part = {
            row["data"]: row
            for row in rows
            if (row["method"], row["draw"], row["prior_precision"]) == (method, draw, 10.0)
        }
        assert by_part["test"]["nll"] == pytest.approx(
            metrics.nll(clean, test.labels).item(), rel=1e-4
        )
        assert by_part["test"]["auroc"] is None
        assert by_part["severity 5"]["ece"] == pytest.approx(
            metrics.ece(corrupted, test.labels).item(), rel=1e-4
        )
        scores = metrics.entropy(clean), metrics.entropy(corrupted)
        assert by_part["severity 5"]["auroc"] == pytest.approx(
            metrics.auroc(*scores).item(), abs=2e-3
        )


@pytest.mark.slow
def test_laplace_resumes_to_the_same_table(laplace_run):
    settings, _ = laplace_run
    output = settings.output
    whole = (output / "results.csv").read_bytes()
    (output / "parts" / "severity-5-0001.safetensors").unlink()
    again = lap.LaplaceSettings(
        **LAPLACE, checkpoint=settings.checkpoint, output=output, resume=True
    )
    lap.run_laplace(again, silent())
    assert (output / "results.csv").read_bytes() == whole
    for name in ("laplace.png", "laplace.pdf", "laplace_test.png", "distances.csv"):
        assert (output / name).exists()


def test_distances_are_means_over_draws_and_prior_precisions():
    def row(method, draw, delta, nll):
        values = {"nll": nll, "ece": 0.5 * nll, "accuracy": 0.0}
        return {"data": "x", "method": method, "draw": draw, "prior_precision": delta, **values}

    rows = [
        *(row(MINI, draw, delta, 3.0 + draw) for draw in (0, 1) for delta in (1.0, 2.0)),
        *(row(DEBIASED, 0, delta, 0.5) for delta in (1.0, 2.0)),
        *(row(FULL, 0, delta, delta) for delta in (1.0, 2.0)),
    ]
    mini, debiased = distances_by_data(rows)
    assert mini["nll"] == pytest.approx((2 + 1 + 3 + 2) / 4)
    assert mini["greatest nll"] == 3.0
    assert debiased["nll"] == pytest.approx((0.5 + 1.5) / 2)
    assert debiased["nll ratio"] == pytest.approx(0.5)
    assert debiased["ece"] == pytest.approx(0.5)
    (sentence,) = lap.findings([mini, debiased])
    assert "0.50 (x)" in sentence


# --- run time ------------------------------------------------------------------------------------

RUNTIME = {**SILENT, "batch_size": 12, "folds": 3, "repeats": 2, "fisher": "exact"}


def test_the_naive_way_comes_to_the_same_posterior(trained):
    double = Trained(DIGITS, DIGITS.model().double().eval(), trained.data, 0.0)
    fits = runtime.timed_fits(double, runtime.RuntimeSettings(**RUNTIME))
    naive, debiased = fits[runtime.NAIVE](), fits[runtime.DEBIASED]()
    mini = fits[runtime.MINI]()
    for name, block in debiased.blocks.items():
        largest = block.magnitudes.max()
        close = {"rtol": 1e-9, "atol": 1e-12 * float(largest)}
        torch.testing.assert_close(naive.blocks[name].magnitudes, block.magnitudes, **close)
        assert not torch.allclose(mini.blocks[name].magnitudes, block.magnitudes, rtol=1e-2)


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="measures memory through Linux's /proc"
)
def test_cost_sees_memory_that_is_freed_again():
    def fit():
        torch.ones(2**24)  # 64 MB
        return torch.ones(2**22)

    found = runtime.cost(fit, torch.device("cpu"))
    assert 60 < found["peak"] < 120
    assert found["seconds"] > 0


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="measures memory through Linux's /proc"
)
def test_cost_sees_memory_that_the_heap_would_have_kept():
    def fit():
        # Many small pieces, which the C library keeps when they are freed below one that is held.
        return [torch.ones(300_000) for _ in range(60)][-1]  # 69 MB

    held = [fit()]
    for _ in range(3):
        assert 60 < runtime.cost(fit, torch.device("cpu"))["peak"] < 90
    del held


@pytest.mark.slow
@pytest.mark.parametrize("changed", [{"threads": 3}, {"device": "cpu: an abacus"}])
def test_times_of_two_machines_are_never_mixed(checkpoint, tmp_path, monkeypatch, changed):
    output = tmp_path / "runtime"
    options = {**RUNTIME, "repeats": 1, "checkpoint": checkpoint, "output": output}
    runtime.run_runtime(runtime.RuntimeSettings(**options), silent())
    before = (output / "results.csv").read_bytes()
    here = runtime.machine_of(torch.device("cpu"))
    assert here["threads"] == torch.get_num_threads()
    monkeypatch.setattr(runtime, "machine_of", lambda device: here | changed)
    with pytest.raises(ValueError, match="another machine"):
        runtime.run_runtime(runtime.RuntimeSettings(**options, resume=True), silent())
    assert (output / "results.csv").read_bytes() == before


@pytest.mark.slow
def test_a_resumed_timing_is_warmed_up_too(checkpoint, tmp_path, monkeypatch):
    fitted = []
    of_settings = runtime.timed_fits

    def counted(*arguments):
        fits = of_settings(*arguments)
        return {name: lambda n=name, f=fit: fitted.append(n) or f() for name, fit in fits.items()}

    monkeypatch.setattr(runtime, "timed_fits", counted)
    options = {**RUNTIME, "folds": 0, "checkpoint": checkpoint, "output": tmp_path / "runtime"}
    runtime.run_runtime(runtime.RuntimeSettings(**options), silent())
    once = [MINI, DEBIASED, runtime.NAIVE]
    assert fitted[:7] == [MINI, *once, *once]
    fitted.clear()
    (tmp_path / "runtime" / "parts" / "repeat-1.csv").unlink()
    runtime.run_runtime(runtime.RuntimeSettings(**options, resume=True), silent())
    assert fitted == [MINI, *once]


def test_sizes_of_factors_are_those_of_the_layers(trained):
    fits = runtime.timed_fits(trained, runtime.RuntimeSettings(**RUNTIME))
    sizes = runtime.factor_sizes(fits[runtime.MINI]())
    weights = [p for name, p in trained.model.named_parameters() if name.endswith("weight")]
    numbers = [p.shape[0] ** 2 + p[0].numel() ** 2 for p in weights]
    assert sizes["parameters"] == sum(p.numel() for p in weights)
    assert (sizes["all factors"], sizes["largest block"]) == (sum(numbers), max(numbers))


def test_summary_relates_medians_to_the_mini_batch():
    rows = [
        {"method": method, "repeat": i, "seconds": seconds, "peak": 10 * seconds}
        for method, times in ((runtime.MINI, (1.0, 2.0, 9.0)), (runtime.NAIVE, (3.0, 4.0, 5.0)))
        for i, seconds in enumerate(times)
    ]
    mini, naive = runtime.summary(rows)
    assert (mini["least s"], mini["median s"], mini["greatest s"]) == (1.0, 2.0, 9.0)
    assert (naive["time ratio"], naive["memory ratio"], naive["peak MB"]) == (2.0, 2.0, 40.0)
    unknown = runtime.summary([{**row, "peak": None} for row in rows])
    assert unknown[1]["peak MB"] is None


@pytest.mark.slow
def test_runtime_times_every_fit_as_often_as_asked(checkpoint, tmp_path):
    output = tmp_path / "runtime"
    settings = runtime.RuntimeSettings(
        **RUNTIME, full_examples=24, checkpoint=checkpoint, output=output
    )
    rows = runtime.run_runtime(settings, silent())
    methods = [MINI, DEBIASED, runtime.NAIVE, CROSSFIT, FULL]
    assert [(row["method"], row["repeat"]) for row in rows] == [
        (method, repeat) for repeat in range(2) for method in methods
    ]
    assert len(read_csv(output / "summary.csv")) == 5
    assert (output / "runtime.png").exists()


# --- Hessian-free --------------------------------------------------------------------------------

HESSIAN_FREE = {**SILENT, "batch_size": 60, "steps": 4, "draws": 1, "max_iter": 5}


@pytest.fixture(scope="module")
def hessian_free_run(tmp_path_factory):
    output = tmp_path_factory.mktemp("hessian_free") / "run"
    settings = hf.HessianFreeSettings(**HESSIAN_FREE, output=output)
    return settings, hf.run_hessian_free(settings, silent())


@pytest.mark.slow
def test_runs_of_a_draw_start_alike_and_damped_ones_learn(hessian_free_run):
    settings, rows = hessian_free_run
    starts = {row["train_loss"] for row in rows if row["step"] == 0}
    assert len(starts) == 1
    ends = {(row["variant"], row["method"]): row["train_loss"] for row in rows if row["step"] == 4}
    for method in (hf.SINGLE, hf.DEBIASED):
        assert ends[hf.DAMPED, method] < 0.9 * min(starts)
    for name in ("hessian_free_damped.pdf", "hessian_free_bare.png", "ends.csv"):
        assert (settings.output / name).exists()


def test_a_debiased_step_is_the_optimizers_on_two_halves(hessian_free_run):
    _, rows = hessian_free_run
    data = DIGITS.data()
    torch.manual_seed(0)
    model = DIGITS.model()
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))

    def closure(indices):
        x, y = data.train.batch(indices)

        def evaluate():
            outputs = model(x)
            return cross_entropy(outputs, y), outputs

        return evaluate

    optimizer = DebiasedHessianFree(model.parameters(), damping=1.0, max_iter=5)
    optimizer.step(closure(order[:30]), closure(order[30:60]))
    x, y = data.test.batch(torch.arange(len(data.test)))
    with torch.no_grad():
        expected = cross_entropy(model(x), y)
    (row,) = [
        r for r in rows if (r["variant"], r["method"], r["step"]) == (hf.DAMPED, hf.DEBIASED, 1)
    ]
    assert row["test_loss"] == pytest.approx(float(expected), rel=1e-4)
    assert row["examples"] == 30


def test_training_from_a_checkpoint_goes_on_in_its_split(tmp_path, monkeypatch):
    data = DIGITS.data(seed=5)
    split = {"split.train": data.train_indices, "split.val": data.val_indices}
    save_checkpoint(DIGITS.model(), tmp_path / "a.safetensors", split)
    seen = []

    def run(problem, data, *_):
        seen.append(data.train_indices)
        raise KeyboardInterrupt

    monkeypatch.setattr(hf, "train_run", run)
    options = {**HESSIAN_FREE, "checkpoint": tmp_path / "a.safetensors", "output": tmp_path / "out"}
    with pytest.raises(KeyboardInterrupt):
        hf.run_hessian_free(hf.HessianFreeSettings(**options), silent())
    assert torch.equal(seen[0], data.train_indices)
    assert not torch.equal(seen[0], DIGITS.data(seed=0).train_indices)


def test_ends_average_over_runs():
    def row(draw, step, loss, size):
        common = {"variant": "bare", "method": "m", "draw": draw, "step": step}
        losses = dict.fromkeys(METRICS, loss)
        return {**common, **losses, "step_size": size, "reduction_ratio": size}

    rows = [row(0, 0, 2.0, None), row(0, 1, 8.0, 1.0), row(1, 0, 2.0, None), row(1, 1, 1.0, 0.0)]
    (end,) = hf.ends(rows)
    assert (end["runs"], end["train_loss"], end["greatest loss"]) == (2, 4.5, 4.0)
    assert (end["refused"], end["reduction ratio"]) == (0.5, 0.5)


def test_a_loss_that_is_no_number_counts_as_infinite():
    def row(step, loss):
        common = {"variant": "bare", "method": "m", "draw": 0, "step": step}
        return {**common, **dict.fromkeys(METRICS, loss), "step_size": 1.0, "reduction_ratio": 0.5}

    # Python's max depends on where NaN stands.
    for losses in ((2.0, 5.0, math.nan), (2.0, math.nan, 5.0)):
        (end,) = hf.ends([row(step, loss) for step, loss in enumerate(losses)])
        assert end["greatest loss"] == math.inf
        assert end["train_loss"] == (math.inf if math.isnan(losses[-1]) else 5.0)
    assert "inf times" in hf.findings([end])[0]


def test_a_run_that_breaks_ends_with_infinite_losses(monkeypatch):
    step = DebiasedHessianFree.step

    def overflowing(self, *closures):
        if self.last_step is not None:
            raise ValueError("The loss is NaN or Inf before the step")
        return step(self, *closures)

    monkeypatch.setattr(DebiasedHessianFree, "step", overflowing)
    settings = hf.HessianFreeSettings(**HESSIAN_FREE, evaluate_every=4)
    rows = hf.train_run(DIGITS, DIGITS.data(), settings, hf.BARE, hf.SINGLE, 0)
    assert [row["step"] for row in rows] == [0, 2]
    assert rows[-1]["train_loss"] == rows[-1]["test_loss"] == math.inf
    (end,) = hf.ends(rows)
    assert end["train_loss"] == end["greatest loss"] == math.inf


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (cgs.ConjugateGradientsSettings, {"batch_size": 5}, "batch_size is 5"),
        (cgs.ConjugateGradientsSettings, {"iterations": 0}, "iterations is 0"),
        (cgs.ConjugateGradientsSettings, {"weight_decay": -1.0}, "weight_decay is -1"),
        (lap.LaplaceSettings, {"batch_size": 7}, "batch_size is 7"),
        (lap.LaplaceSettings, {"folds": 1}, "folds is 1"),
        (lap.LaplaceSettings, {"prior_precisions": (1.0, 0.1)}, "ascend"),
        (lap.LaplaceSettings, {"prior_precisions": (0.0,)}, "positive"),
        (lap.LaplaceSettings, {"severities": (6,)}, "severities"),
        (lap.LaplaceSettings, {"problem": "allcnn-digit"}, "did you mean 'allcnn-digits'"),
        (runtime.RuntimeSettings, {"repeats": 0}, "repeats is 0"),
        (runtime.RuntimeSettings, {"batch_size": 1}, "batch_size is 1"),
        (hf.HessianFreeSettings, {"damping": 0.0}, "damping is 0"),
        (hf.HessianFreeSettings, {"recipe": RecipeChanges(clip_norm=1.0)}, "weight_decay alone"),
    ],
)
def test_settings_out_of_range_are_refused(settings, options, message):
    with pytest.raises(ValueError, match=message):
        settings(**SILENT | options)


def test_more_examples_than_there_are_is_refused(trained):
    few = {"num_train": 20, "num_test": 5}
    settings = cgs.ConjugateGradientsSettings(**CG | {"batch_size": 22})
    with pytest.raises(ValueError, match="batch_size is 22; there are 20"):
        cgs.plan(settings, **few)
    with pytest.raises(ValueError, match="test_examples is 12; there are 5"):
        lap.choose(lap.LaplaceSettings(**LAPLACE | {"full_examples": 9}), **few)
    with pytest.raises(ValueError, match="batch_size is 10000; there are"):
        runtime.timed_fits(trained, runtime.RuntimeSettings(**RUNTIME | {"batch_size": 10**4}))


# --- pictures ------------------------------------------------------------------------------------


def test_trajectories_have_a_panel_a_metric_and_cut_off_what_diverges():
    rows = [
        {"method": method, "draw": 0, "iteration": i, "train_loss": v, "train_accuracy": 0.1 * i}
        for method, values in (("a", (1.0, 0.5, 0.5)), ("b", (1.0, 4000.0, math.nan)))
        for i, v in enumerate(values)
    ]
    figure = trajectory_figure(rows, ("train_loss", "train_accuracy"))
    loss, accuracy = figure.axes
    assert loss.get_yscale() == "log"
    assert loss.get_ylim()[1] <= 100
    assert accuracy.get_ylim()[1] >= 0.2
    with pytest.raises(ValueError, match="no rows or metrics"):
        trajectory_figure([], ("train_loss",))


def test_a_metric_that_a_data_set_lacks_has_no_panel():
    def row(delta, auroc):
        return {"method": "m", "draw": 0, "prior_precision": delta, "nll": 1.0, "auroc": auroc}

    parts = {"clean": [row(1.0, None), row(2.0, None)], "shifted": [row(1.0, 0.5), row(2.0, 0.6)]}
    figure = prior_precision_grid(parts, ("nll", "auroc"))
    assert [ax.axison for ax in figure.axes] == [True, False, True, True]
    with pytest.raises(ValueError, match="empty"):
        prior_precision_grid({}, ("nll",))


def test_the_mean_of_equal_draws_is_no_less_than_the_least():
    for value in torch.rand(200, dtype=torch.float64).tolist():
        rows = [
            {"method": "m", "draw": draw, "prior_precision": 1.0, "nll": value}
            for draw in range(49)
        ]
        curve = summarise(rows, "prior_precision", "nll")["m"]
        assert curve.low == curve.mean == curve.high


def test_costs_that_are_not_known_have_no_panel():
    rows = [
        {"method": m, "repeat": i, "seconds": 1.0 + i, "peak": None} for m in "ab" for i in (0, 1)
    ]
    (ax,) = costs_figure(rows, ("seconds", "peak")).axes
    assert [bar.get_width() for bar in ax.patches] == [1.5, 1.5]
    with pytest.raises(ValueError, match="at least one cost"):
        costs_figure(rows, ("peak",))


def test_costs_of_any_size_can_be_read():
    rows = [{"method": str(peak), "repeat": 0, "peak": peak} for peak in (0.01234, 431.8, 1399.6)]
    (ax,) = costs_figure(rows, ("peak",)).axes
    assert [label.get_text() for label in ax.texts] == ["0.0123", "432", "1,400"]


def test_weights_of_a_network_with_tokens_are_those_of_its_layers():
    model = vit_little(10, image_size=16, patch_size=4, depth=1, embed_dim=12, num_heads=3).eval()
    names = chosen_parameters(model, "weights")
    assert "blocks.0.attn.qkv.weight" in names
    assert not {"pos_embed", "reg_token"} & set(names)
    assert not any(name.endswith("bias") for name in names)
    x, y = torch.randn(4, 3, 16, 16), torch.arange(4)
    la = Laplace(model, params=names, fisher="mc").fit_batches([(x, y)])
    assert la.predict(x).probs.shape == (4, 10)
    assert chosen_parameters(model, "all") == "all"
