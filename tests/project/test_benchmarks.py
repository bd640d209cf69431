"""The benchmarks' harness: turns, ratios, goals, and that every comparison runs."""

import importlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import marginal_likelihood, online, preconditioners, results, timing
from benchmarks.__main__ import COMPARISONS, main
from benchmarks.report import FASTEST_PEER, Goal, comparison_table, goals_table, ratio
from benchmarks.settings import Settings
from benchmarks.timing import Contender, Row, measure

ROOT = Path(__file__).parents[2]
# The peers take part in these where they can.
OF_TORCHVISION = ("mobilenet_v3_small", "efficientnet_b0", "convnext_tiny")
QUICK = Settings(quick=True, repetitions=1, threads=1)


def _contender(name, calls, **options):
    def build():
        calls.append(f"build {name}")
        return lambda size: calls.append(f"{name} {size}")

    return Contender(name, build, **options)


def _missing():
    raise ModuleNotFoundError("No module named 'peer'", name="peer")


def _broken():
    raise RuntimeError("no rule\nfor this layer")


def test_contenders_take_turns_in_alternating_order_after_a_warm_up():
    calls = []
    contenders = [
        _contender("a", calls),
        _contender("b", calls, size=3, most_rounds=1),
        _contender("c", calls),
    ]
    rows = measure(contenders, replace(QUICK, repetitions=2), size=8, warm_up=5)
    set_up = ["build a", "a 8", "build b", "b 3", "build c", "c 5"]
    assert calls == [*set_up, "a 8", "b 3", "c 8", "c 8", "a 8"]
    assert [len(row.seconds) for row in rows] == [2, 1, 2]


def test_seconds_are_those_of_the_call_and_per_example_where_asked(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def work(size):
        clock[0] += 2.0 * size

    for per_example, expected in ((False, 16.0), (True, 2.0)):
        contender = Contender("a", lambda: work)
        (row,) = measure([contender], QUICK, size=8, warm_up=1, per_example=per_example)
        assert row.seconds == (expected,)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak")
def test_added_memory_is_what_a_call_holds_at_its_peak():
    def work(size):
        return torch.ones(size * 2**18).sum()  # freed within the call

    (row,) = measure([Contender("a", lambda: work)], QUICK, size=64, warm_up=1)
    assert row.megabytes[0] == pytest.approx(64, abs=8)


def test_a_peer_that_is_missing_or_fails_is_reported_and_the_others_run():
    contenders = [
        Contender("missing", _missing, is_peer=True),
        Contender("broken", _broken, is_peer=True),
        _contender("ours", []),
    ]
    rows = measure(contenders, QUICK, size=2, warm_up=1)
    assert [row.note for row in rows] == [
        "not installed (peer)",
        "failed: RuntimeError: no rule",
        "",
    ]
    assert [len(row.seconds) for row in rows] == [0, 0, 1]


@pytest.mark.parametrize("build", [_missing, _broken])
def test_a_failure_of_our_own_is_raised(build):
    with pytest.raises((ModuleNotFoundError, RuntimeError)):
        measure([Contender("ours", build)], QUICK, size=2, warm_up=1)


ROWS = [
    Row("reference", False, (1.0, 4.0, 2.0), (10.0,)),
    Row("ours", False, (2.0, 4.0, 6.0), (7.0, 9.0, 8.0)),
    Row("slow", True, (50.0,)),
    Row("fast", True, (20.0, 40.0, 30.0)),
    Row("absent", True, note="not installed (absent)"),
]


def test_a_ratio_is_the_median_of_the_rounds_own():
    """The ratio of the medians would be 2 in both orders."""
    assert ratio(ROWS[1], ROWS[0]) == 2.0
    shuffled = replace(ROWS[1], seconds=(6.0, 4.0, 2.0))
    assert ratio(shuffled, ROWS[0]) == 1.0
    assert ratio(ROWS[4], ROWS[0]) is None


@pytest.mark.parametrize(
    ("goal", "measured", "is_met"),
    [
        (Goal("ours", "reference", at_most=2.0), 2.0, True),
        (Goal("ours", "reference", at_most=1.9), 2.0, False),
        (Goal(FASTEST_PEER, "ours", at_least=10.0), 10.0, True),
        (Goal(FASTEST_PEER, "ours", at_least=10.1), 10.0, False),
        (Goal("ours", at_most=8.0, quantity="megabytes"), 8.0, True),
        (Goal("absent", "ours", at_most=1.0), None, None),
    ],
)
def test_goals_compare_what_they_name(goal, measured, is_met):
    value = goal.measured(ROWS)
    assert value == measured
    assert value is None or goal.is_met(value) is is_met
    table = goals_table([("Title", [goal], ROWS)])
    spread = {2.0: "1.00 – 3.00", 10.0: "5.00 – 10.0", 8.0: "7.00 – 9.00", None: "–"}[measured]
    assert f"| {spread} " in table
    assert ("| no" in table) == (is_met is False)
    assert ("| yes" in table) == (is_met is True)


def test_the_table_shows_medians_ratios_and_notes():
    lines = comparison_table(ROWS, "s a batch", ["reference"]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["contender", "s a batch", "÷ reference", "added memory, MB", "note"]
    assert cells[3] == ["ours", "4.00", "2.00", "8", "–"]
    assert cells[6] == ["absent", "–", "–", "–", "not installed (absent)"]


def test_appended_rounds_join_those_of_the_same_set_up_alone(tmp_path):
    first = results.Result("net", "machine", {"torch": "2"}, ROWS)
    results.write(tmp_path / "a.json", first)
    assert results.read(tmp_path / "a.json") == first
    joined = results.join_rounds(first, first)
    assert joined.rows[1].seconds == ROWS[1].seconds * 2
    assert joined.rows[1].megabytes == ROWS[1].megabytes * 2
    for different in (replace(first, machine="another"), replace(first, rows=ROWS[:2])):
        with pytest.raises(ValueError, match="without --append"):
            results.join_rounds(first, different)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        if name in ("resnet50", *OF_TORCHVISION[1:])
        else name
        for name in COMPARISONS
    ],
)
def test_every_comparison_runs_and_measures_what_is_ours(name):
    module = importlib.import_module(f"benchmarks.{name}")
    rows = module.compare(QUICK)
    assert all(row.seconds and min(row.seconds) > 0 for row in rows if not row.is_peer)
    if name not in OF_TORCHVISION:
        assert not [row.note for row in rows if row.note.startswith("failed")]
    names = {row.contender for row in rows} | {FASTEST_PEER, None}
    assert set(module.REFERENCES) <= names
    assert all({goal.contender, goal.over} <= names for goal in module.GOALS)


@pytest.mark.slow
def test_the_command_writes_a_page_and_adds_rounds(tmp_path):
    options = ["--quick", "--repetitions", "1", "--threads", "1", "--only", "debiased_fit"]
    for extra in ([], ["--append"]):
        assert main([*options, "--results", str(tmp_path), *extra]) == 0
    page = tmp_path / "benchmarks.md"
    text = page.read_text()
    assert "2 rounds" in text
    page.unlink()
    assert main(["--render", "--results", str(tmp_path)]) == 0
    assert page.read_text() == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "saves"), [("linear, 64-10", True), ("two convolutions", False)]
)
def test_the_page_shows_when_a_preconditioner_saves_products(network, saves, capsys):
    preconditioners.main(["--networks", network, "--epochs", "0"])
    printed = capsys.readouterr().out.splitlines()[-1]
    page = (ROOT / "docs" / "linear-algebra-benchmarks.md").read_text(encoding="utf-8")
    shown = next(line for line in page.splitlines() if line.startswith(f"| {network} |"))
    counts = [_counts(line) for line in (printed, shown)]
    # Another CPU's arithmetic may take a product more or fewer.
    assert counts[0] == pytest.approx(counts[1], abs=2, rel=0.05)
    plain, preconditioned = counts[0][:2]
    assert (preconditioned < plain) == saves


def _counts(row):
    """The numbers of products in a row, without and with the preconditioner in turn."""
    return [int(number) for pair in re.findall(r"(\d+) → (\d+)", row) for number in pair]


@pytest.mark.slow
def test_the_curvature_of_a_training_run_is_compared_with_fits(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(online, "RUNS", online.RUNS[:1])
    monkeypatch.setattr(online, "PRIOR_PRECISIONS", (1.0,))
    problem = replace(online.PROBLEMS["table"], epochs=(1, 6))
    monkeypatch.setitem(online.PROBLEMS, "table", problem)
    picture = tmp_path / "online.png"
    folder = tmp_path / "distances"
    arguments = ["--problems", "table", "--seeds", "2", "--folder", str(folder)]
    online.main([*arguments, "--figure", str(picture)])
    output = capsys.readouterr().out
    rows = [line for line in output.splitlines() if line.startswith("| ")]
    names = [row.split(" | ")[0].removeprefix("| ") for row in rows[1:]]
    assert names == [*online.FITS, *map(str, online.RUNS)]
    assert picture.exists()
    # Both seeds are read from the files.
    monkeypatch.setattr(online, "training", None)
    online.main(arguments)
    assert capsys.readouterr().out == output


@pytest.mark.slow
def test_seconds_of_updates_are_measured(capsys):
    online.main(["--seconds", "--repetitions", "1", "--batch_size", "8"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 13
    for row in rows[1:]:
        every_4th, every_2nd, every_batch = map(float, row.split(" | ")[3:6])
        assert every_batch > every_2nd > every_4th > 1


@pytest.mark.slow
def test_marginal_likelihood_training_is_compared(capsys):
    marginal_likelihood.main(["--libraries", "laplace-debias", "--seeds", "1"])
    output = capsys.readouterr().out
    for problem in marginal_likelihood.PROBLEMS:
        assert f"{problem}, 1 seeds" in output
    sigma = float(output.split("| laplace-debias | ")[1].split(" | ")[3].split()[0])
    assert 0.2 < sigma < 0.4
