"""The debiasing study: its posteriors are the front-end's, and it goes on where it stopped."""

import dataclasses

import pytest
import torch
from rich.console import Console
from torch.func import hessian
from torch.nn.functional import cross_entropy

from laplace_debias import Laplace, metrics
from laplace_debias.experiments.debiasing import study as debiasing_study
from laplace_debias.experiments.debiasing.schemes import Factors, magnitudes_of
from laplace_debias.experiments.debiasing.study import run_debiasing, study
from laplace_debias.experiments.debiasing.study_report import report, summarise_study
from laplace_debias.experiments.debiasing.study_settings import DebiasingSettings
from laplace_debias.experiments.shared.setup import Trained
from laplace_debias.experiments.shared.store import Store
from laplace_debias.problems import ProblemData, digits, get_problem
from laplace_debias.report.interval_plot import interval_figure
from laplace_debias.report.tables import read_csv

GRID = (0.1, 1.0, 10.0)
FULL_EXAMPLES = 40


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny study on an untrained network, and all that it was made from."""
    torch.manual_seed(0)
    split = digits(0)
    settings = DebiasingSettings(
        problem="allcnn-digits",
        output=tmp_path_factory.mktemp("study"),
        batch_size=16,
        groups=16,
        folds=(2, 4, 8),
        draws=2,
        ekfac_draws=1,
        average_batch_size=8,
        further_batches=1,
        full_examples=FULL_EXAMPLES,
        ekfac_full_examples=FULL_EXAMPLES,
        test_examples=10,
        prior_precisions=GRID,
        progress=False,
    )
    # Many positions and few inputs: no factor lacks a direction that other data have.
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3, stride=2, padding=1),
        torch.nn.Tanh(),
        torch.nn.Conv2d(3, 4, 2),
        torch.nn.Tanh(),
        torch.nn.Conv2d(4, 10, 1),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
    )
    model = model.double().eval()
    rows = study(model, split.train, split.test, settings, Store(settings.output))
    return settings, model, split, rows


def posterior(made, method):
    """What the front-end makes of the same examples, in the first draw."""
    _, model, split, _ = made
    order = torch.randperm(len(split.train), generator=torch.Generator().manual_seed(0))
    full_indices, hand = order[:FULL_EXAMPLES], order[FULL_EXAMPLES : FULL_EXAMPLES + 32]
    further = order[FULL_EXAMPLES + 32 : FULL_EXAMPLES + 48]

    def batch(indices):
        x, y = split.train.batch(indices)
        return [(x.double(), y)]

    of_four = torch.arange(32) % 4 == 3
    fits = {
        "full-batch": ([full_indices], {}),
        "mini-batch": ([hand], {}),
        "debiased, 16 + 16": ([hand[::2], hand[1::2]], {}),
        "debiased, 24 + 8": ([hand[~of_four], hand[of_four]], {}),
        "debiased, 8 + 24": ([hand[of_four], hand[~of_four]], {}),
        "debiased, 16 + 32": ([hand[::2], torch.cat([hand[1::2], further])], {}),
        "debiased, 16 + all": ([hand[::2], full_indices], {}),
        "oracle magnitudes": ([hand, full_indices], {}),
        "crossfit, 4 folds": ([hand], {"folds": 4}),
        "crossfit, 8 folds": ([hand], {"folds": 8}),
    }
    name = method.removeprefix("EKFAC, ")
    curvature = "kfac" if name == method else "ekfac"
    name = name.removesuffix(", full-batch trace").removesuffix(", scaled by the outputs")

    def fitted(name):
        data, options = fits[name]
        la = Laplace(model, curvature=curvature, params="weights")
        return la.fit_batches(*map(batch, data), num_data=len(split.train), **options)

    la = fitted(name)
    if method.endswith("full-batch trace"):
        blocks = la.posterior.curvature.blocks
        full = fitted("full-batch").posterior.curvature.blocks
        for key, block in blocks.items():
            block.magnitudes.mul_(full[key].to_dense().trace() / block.to_dense().trace())
    if method.endswith("scaled by the outputs"):

        def loss_curvature(indices):
            """Mean trace of the dense Hessian of the cross-entropy in the logits."""
            logits = model(split.train.batch(indices)[0].double())
            label = torch.tensor([0])
            return sum(
                hessian(lambda f: cross_entropy(f[None], label))(f).trace() for f in logits
            ) / len(logits)

        seen = hand[1::2] if name.startswith("debiased") else hand
        for block in la.posterior.curvature.blocks.values():
            block.magnitudes.mul_(loss_curvature(full_indices) / loss_curvature(seen))
    return la


@pytest.mark.parametrize(
    "method",
    [
        *("full-batch", "mini-batch", "debiased, 16 + 16", "debiased, 24 + 8"),
        *("debiased, 8 + 24", "debiased, 16 + 32", "debiased, 16 + all", "oracle magnitudes"),
        *("crossfit, 4 folds", "crossfit, 8 folds", "EKFAC, full-batch"),
        *("mini-batch, full-batch trace", "debiased, 16 + 16, full-batch trace"),
        *("crossfit, 8 folds, full-batch trace", "mini-batch, scaled by the outputs"),
        "debiased, 16 + 16, scaled by the outputs",
        *("EKFAC, mini-batch", "EKFAC, debiased, 16 + 16", "EKFAC, crossfit, 8 folds"),
    ],
)
def test_each_method_predicts_what_the_front_end_does(made, method):
    _, _, split, rows = made
    generator = torch.Generator().manual_seed(0)
    torch.randperm(len(split.train), generator=generator)
    x, y = split.test.batch(torch.randperm(len(split.test), generator=generator)[:10])
    la = posterior(made, method)
    draw = None if method.endswith("full-batch") else 0
    found = {
        row["prior_precision"]: row
        for row in rows
        if row["method"] == method and row["draw"] == draw
    }
    assert sorted(found) == list(GRID)
    for delta in GRID:
        la.prior_precision = delta
        _, variance = la.functional(x.double(), diagonal=True)
        nll = metrics.nll(la.predict(x.double()).probs, y).item()
        assert found[delta]["nll"] == pytest.approx(nll, rel=1e-8)
        assert found[delta]["log_variance"] == pytest.approx(variance.log().mean().item(), rel=1e-8)


def test_stratified_folds_hold_as_many_hard_examples(made, tmp_path):
    settings, model, split, _ = made
    options = {"output": tmp_path, "stratified": True, "draws": 1, "ekfac_draws": 0}
    settings = dataclasses.replace(settings, **options)
    rows = study(model, split.train, split.test, settings, Store(tmp_path))
    order = torch.randperm(len(split.train), generator=torch.Generator().manual_seed(0))
    hand = order[FULL_EXAMPLES : FULL_EXAMPLES + 32].tolist()

    def loss(index):
        x, y = split.train.batch([index])
        return -model(x.double()).log_softmax(1)[0, y].item()

    x, y = split.train.batch(sorted(hand, key=loss, reverse=True))
    x = x.double()
    generator = torch.Generator().manual_seed(0)
    torch.randperm(len(split.train), generator=generator)
    test, _ = split.test.batch(torch.randperm(len(split.test), generator=generator)[:10])
    for method, data, folds in (
        ("debiased, 16 + 16", ([(x[::2], y[::2])], [(x[1::2], y[1::2])]), None),
        ("crossfit, 4 folds", ([(x, y)],), 4),
    ):
        la = Laplace(model, params="weights", prior_precision=1.0)
        la.fit_batches(*data, num_data=len(split.train), folds=folds)
        (found,) = (r for r in rows if r["method"] == method and r["prior_precision"] == 1.0)
        _, variance = la.functional(test.double(), diagonal=True)
        assert found["log_variance"] == pytest.approx(variance.log().mean().item(), rel=1e-8)


def test_running_averages_follow_their_recursion(made):
    """Weights halve from the newest batch to the oldest; magnitudes come from the batch ahead."""
    plan = dataclasses.replace(made[0].plan, average_decays=(0.5,))
    rows = torch.randn(16 + 2, 2, 6).double()
    groups, further = rows[:16].mT @ rows[:16], rows[16:].mT @ rows[16:] * 4
    factors = Factors(
        groups=groups,
        further=further,
        full=torch.eye(6).double(),
        precision=torch.float64,
    )
    bases, values = magnitudes_of(factors, plan)
    batches = [groups[i : i + 4].sum(0) / 8 for i in range(0, 16, 4)] + list(further / 8)

    def average(parts):
        weights = [0.5**age for age in range(len(parts))][::-1]
        return sum(w * part for w, part in zip(weights, parts, strict=True)) / sum(weights)

    whole = average(batches)
    expected = torch.linalg.eigvalsh(whole).flip(0)
    torch.testing.assert_close(values["average, decay 0.5"], expected)
    U = bases["average 0.5"]
    torch.testing.assert_close(U @ torch.diag(expected) @ U.T, whole)
    ahead = []
    for number in range(1, len(batches)):
        V = torch.linalg.eigh(average(batches[:number]))[1].flip(1)
        ahead.append((V.T @ batches[number] @ V).diagonal())
    found = values["average, decay 0.5, measured on the next batch"]
    torch.testing.assert_close(found, average(ahead))
    V = torch.linalg.eigh(average(batches[::2]))[1].flip(1)
    torch.testing.assert_close(bases["stream 0.5"].abs(), V.abs())
    torch.testing.assert_close(
        values["average, decay 0.5, directions and magnitudes of two streams"],
        (V.T @ average(batches[1::2]) @ V).diagonal(),
    )


def test_a_run_goes_on_where_it_stopped_to_the_same_result(made, monkeypatch):
    settings, model, split, rows = made
    (settings.output / "parts" / "draw_1.csv").unlink()
    fits = debiasing_study.StudyFits
    fitted = []
    draw_rows = fits.draw_rows
    monkeypatch.setattr(
        fits, "draw_rows", lambda self, draw: fitted.append(draw) or draw_rows(self, draw)
    )

    def never(*_):
        raise AssertionError("a part that is stored was made again")

    monkeypatch.setattr(fits, "full_rows", never)
    monkeypatch.setattr(fits, "ekfac_full_rows", never)
    monkeypatch.setattr(fits, "ekfac_draw_rows", never)
    assert study(model, split.train, split.test, settings, Store(settings.output)) == rows
    assert fitted == [1]


@pytest.mark.slow
def test_a_run_takes_further_draws_but_no_other_settings(made, tmp_path, monkeypatch):
    settings, model, split, _ = made
    where = torch.arange(len(split.train)), torch.arange(len(split.val))
    data = ProblemData(split.train, split.val, split.test, *where)
    trained = Trained(get_problem(settings.problem), model, data, 0.0)
    monkeypatch.setattr(debiasing_study, "load_trained", lambda *_: trained)
    settings = dataclasses.replace(settings, output=tmp_path, resume=True, ekfac_draws=0)
    first = run_debiasing(dataclasses.replace(settings, draws=1)).rows
    kept = {path: path.read_bytes() for path in (tmp_path / "parts").iterdir()}
    both = run_debiasing(settings).rows
    assert [row for row in both if row["draw"] in (None, 0)] == first
    assert {row["draw"] for row in both} == {None, 0, 1}
    assert all(path.read_bytes() == data for path, data in kept.items())
    with pytest.raises(ValueError, match="seed was 0, is 1"):
        run_debiasing(dataclasses.replace(settings, seed=1))
    with pytest.raises(FileExistsError, match="resume"):
        run_debiasing(dataclasses.replace(settings, resume=False))


def test_too_little_data_is_told_before_any_work(made):
    settings, model, split, _ = made
    with pytest.raises(ValueError, match="takes 2440 training"):
        study(
            *(model, split.train, split.test, dataclasses.replace(settings, draws=50)),
            Store(settings.output),
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draws": 0}, "draws is 0"),
        ({"groups": 6}, "groups is 6"),
        ({"folds": (3, 8)}, "folds is"),
        ({"folds": (2, 4)}, "8 among them"),
        ({"average_batch_size": 3}, "average_batch_size is 3"),
        ({"average_decays": (0.5, 1.0)}, "average_decays is"),
        ({"ekfac_draws": 99}, "ekfac_draws is 99"),
        ({"prior_precisions": (1.0, 0.1)}, "ascending"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DebiasingSettings(**changes)


def measured(method, draw, delta, nll, log_variance):
    return {
        "method": method,
        "draw": draw,
        "prior_precision": delta,
        "nll": nll,
        "log_variance": log_variance,
    }


def test_the_summary_is_that_of_the_rows_by_hand():
    rows = [
        measured("full-batch", None, 0.1, 1.0, 0.0),
        measured("full-batch", None, 1.0, 2.0, 0.0),
        measured("mini-batch", 0, 0.1, 1.4, 0.5),
        measured("mini-batch", 0, 1.0, 2.2, 0.1),
        measured("mini-batch", 1, 0.1, 1.2, 0.3),
        measured("mini-batch", 1, 1.0, 1.8, 0.1),
        measured("crossfit", 0, 0.1, 1.1, -0.2),
        measured("crossfit", 0, 1.0, 2.3, 0.0),
        measured("crossfit", 1, 0.1, 1.0, 0.0),
        measured("crossfit", 1, 1.0, 2.0, 0.0),
    ]
    mini, cross = summarise_study(rows)
    # |0.4|, |0.2| in one draw, |0.2|, |−0.2| in the other.
    assert mini.nll == pytest.approx(0.25)
    assert mini.signed_nll == pytest.approx(0.15)
    assert mini.ratio == 1
    # Half the range of two means times Student's quantile for one degree of freedom.
    assert mini.nll_error == pytest.approx(0.05 * 12.7062, rel=1e-4)
    assert cross.nll == pytest.approx(0.1)
    assert cross.ratio == pytest.approx(0.4)
    assert cross.worst_ratio == pytest.approx(0.3 / 0.4)
    assert cross.log_variance == pytest.approx((0.1, 0.0, 0.0))
    with pytest.raises(ValueError, match="no full-batch"):
        summarise_study(rows[2:])


def test_the_report_writes_what_it_says(made, tmp_path):
    with (tmp_path / "console.txt").open("w", encoding="utf-8") as file:
        result = report(made[3], tmp_path, Console(file=file, width=200))
    assert read_csv(tmp_path / "results.csv") == made[3]
    by_method = {row["method"]: row for row in read_csv(tmp_path / "summary.csv")}
    assert by_method["mini-batch"]["nll"] == next(
        summary.nll for summary in result.summaries if summary.method == "mini-batch"
    )
    assert "crossfit, 8 folds" in (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "crossfit, 8 folds" in (tmp_path / "console.txt").read_text(encoding="utf-8")
    assert result.picture.read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_the_methods_from_top_to_bottom(tmp_path):
    rows = [
        {"method": "mini-batch", "nll": 0.3, "nll_error": 0.1},
        {"method": "crossfit", "nll": 0.1, "nll_error": None},
    ]
    figure = interval_figure(rows, tmp_path / "a.pdf", {"nll": "NLL"}, highlight="mini-batch")
    (ax,) = figure.axes
    ticks = zip(ax.get_yticklabels(), ax.get_yticks(), strict=True)
    heights = {label.get_text(): height for label, height in ticks}
    assert heights["mini-batch"] > heights["crossfit"]
    dots = {
        container.lines[0].get_ydata()[0]: container.lines[0].get_xdata()[0]
        for container in ax.containers
    }
    assert dots == {heights["mini-batch"]: 0.3, heights["crossfit"]: 0.1}
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(ValueError, match="no rows or columns"):
        interval_figure([], tmp_path / "b.png", {"nll": "NLL"})
    with pytest.raises(ValueError, match="suffix"):
        interval_figure(rows, tmp_path / "b.gif", {"nll": "NLL"})
