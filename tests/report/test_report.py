import io
import math

import matplotlib
import numpy as np
import pytest
import torch
from rich.console import Console

from laplace_debias import metrics
from laplace_debias.report.figures import (
    prior_precision_figure,
    reliability_figure,
    severity_figure,
)
from laplace_debias.report.style import method_colours, metric_label
from laplace_debias.report.tables import markdown_table, print_table, read_csv, write_csv

GRID = [0.1, 1.0, 10.0]
DRAWS = [0.9, 1.0, 1.4]
ROWS = [
    {"method": "MAP", "nll": 0.61803, "images": 1000, "prior_precision": None},
    {"method": "a|b", "nll": 12.5, "images": 20, "prior_precision": 1e-4, "tuned": True},
]


def nll_of(draw, precision):
    return draw * (0.5 + 1 / precision)


@pytest.fixture
def sweep():
    """MAP without prior precision, full-batch with one draw, two methods with three."""
    rows = [{"method": "MAP", "draw": 0, "prior_precision": None, "nll": 0.6, "ece": 0.1}]
    for method, draws in (("mini-batch", DRAWS), ("debiased", DRAWS), ("full-batch", [1.0])):
        rows += [
            {
                "method": method,
                "draw": draw,
                "prior_precision": precision,
                "nll": nll_of(value, precision),
                "ece": 0.1 * value,
            }
            for draw, value in enumerate(draws)
            for precision in reversed(GRID)
        ]
    return rows


@pytest.fixture
def panels():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(300, 4, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return {"MAP": ((2 * logits).softmax(1), labels), "debiased": (logits.softmax(1), labels)}


def line_of(ax, method):
    """Data line and ends of the bars of a method's error bars."""
    [container] = [item for item in ax.containers if item.get_label() == method]
    data, _, (bars,) = container
    return data, np.array([segment[:, 1] for segment in bars.get_segments()])


def bars_of(ax, label):
    [container] = [item for item in ax.containers if item.get_label() == label]
    return container.patches


def test_markdown_table_is_aligned_escaped_and_rounded():
    assert markdown_table(ROWS, digits=2) == "\n".join(
        [
            "| method |   nll | images | prior_precision | tuned |",
            "| :----- | ----: | -----: | --------------: | ----: |",
            "| MAP    |  0.62 |   1000 |               – |     – |",
            r"| a\|b   | 12.50 |     20 |         1.0e-04 |  True |",
        ]
    )


def test_markdown_table_shows_the_columns_asked_for_in_their_order():
    table = markdown_table(ROWS, columns=["nll", "method"], digits=0)
    assert table.splitlines()[0] == "| nll | method |"
    assert table.splitlines()[2] == "|   1 | MAP    |"


def test_tables_take_scalars_of_torch_and_numpy(tmp_path):
    row = {"a": torch.tensor(0.5), "b": np.float32(0.25), "c": np.int64(3)}
    assert markdown_table([row]).splitlines()[2] == "| 0.500 | 0.250 |   3 |"
    write_csv([row], tmp_path / "table.csv")
    assert read_csv(tmp_path / "table.csv") == [{"a": 0.5, "b": 0.25, "c": 3}]


def test_printed_table_holds_title_header_and_literal_cells():
    stream = io.StringIO()
    rows = [*ROWS, {"method": "[red]x", "nll": math.inf}]
    print_table(rows, "[b]Results", digits=2, console=Console(file=stream, width=100))
    text = stream.getvalue()
    for piece in ("[b]Results", "prior_precision", "0.62", "1.0e-04", "[red]x", "inf"):
        assert piece in text


def test_printed_table_goes_to_standard_output_by_default(capsys):
    print_table(ROWS, "Results", columns=["nll"])
    assert "0.618" in capsys.readouterr().out


def test_csv_round_trip_is_exact(tmp_path):
    path = tmp_path / "new" / "folder" / "table.csv"
    rows = [
        {"name": 'comma, "quote"\nline', "x": 1 / 3, "n": -7, "flag": True, "none": None},
        {"name": "1.2.3", "x": 1e-300, "n": 10**20, "flag": False, "none": None},
        {"name": "é", "x": -math.inf, "n": 0, "flag": True, "none": None},
    ]
    write_csv(rows, path)
    assert read_csv(path) == rows
    assert [type(value) for value in read_csv(path)[0].values()] == [
        str,
        float,
        int,
        bool,
        type(None),
    ]


def test_csv_has_the_columns_of_all_rows(tmp_path):
    write_csv([{"a": 1}, {"b": 2.0}], tmp_path / "table.csv")
    assert read_csv(tmp_path / "table.csv") == [{"a": 1, "b": None}, {"a": None, "b": 2.0}]


def test_failed_writing_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    write_csv([{"a": 1}], path)

    def fail(source, target):
        raise OSError("no space")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_csv([{"a": 2}], path)
    assert read_csv(path) == [{"a": 1}]
    assert list(tmp_path.iterdir()) == [path]


def test_bad_tables_are_refused(tmp_path):
    path = tmp_path / "table.csv"
    for function in (markdown_table, lambda rows: write_csv(rows, path)):
        with pytest.raises(ValueError, match="no rows"):
            function([])
        with pytest.raises(ValueError, match="column 'a' holds a list"):
            function([{"a": [1]}])
    with pytest.raises(ValueError, match=r"`columns` has \['mll'\]"):
        markdown_table(ROWS, columns=["mll"])
    with pytest.raises(ValueError, match="`digits` is -1"):
        markdown_table(ROWS, digits=-1)
    assert not path.exists()
    path.write_text("a,b\n1\n")
    with pytest.raises(ValueError, match=r"row 1 .* has 1 values; expected 2"):
        read_csv(path)
    path.write_text("")
    with pytest.raises(ValueError, match="is empty"):
        read_csv(path)


def test_lines_go_through_means_and_bars_from_least_to_greatest(tmp_path, sweep):
    figure = prior_precision_figure(sweep, tmp_path / "f.png", ("nll", "ece"))
    ax = figure.axes[0]
    for method in ("mini-batch", "debiased"):
        data, bars = line_of(ax, method)
        np.testing.assert_allclose(data.get_ydata(), [nll_of(np.mean(DRAWS), x) for x in GRID])
        np.testing.assert_allclose(bars[:, 0], [nll_of(0.9, x) for x in GRID])
        np.testing.assert_allclose(bars[:, 1], [nll_of(1.4, x) for x in GRID])
    data, bars = line_of(figure.axes[1], "debiased")
    np.testing.assert_allclose(data.get_ydata(), 0.11)
    np.testing.assert_allclose(bars, [[0.09, 0.14]] * 3)


def test_only_methods_with_bars_are_shifted_and_by_the_same_factor(tmp_path, sweep):
    ax = prior_precision_figure(sweep, tmp_path / "f.png", ("nll",)).axes[0]
    np.testing.assert_array_equal(line_of(ax, "full-batch")[0].get_xdata(), GRID)
    left = line_of(ax, "mini-batch")[0].get_xdata() / GRID
    right = line_of(ax, "debiased")[0].get_xdata() / GRID
    np.testing.assert_allclose(left * right, 1)
    np.testing.assert_allclose(left, left[0])
    assert 0.8 < left[0] < 1


def test_method_without_prior_precision_is_a_dashed_horizontal_line(tmp_path, sweep):
    figure = prior_precision_figure(sweep, tmp_path / "f.png", ("nll", "ece"))
    for ax, value in zip(figure.axes, (0.6, 0.1), strict=True):
        [line] = [line for line in ax.get_lines() if line.get_label() == "MAP"]
        assert list(line.get_ydata()) == [value, value]
        assert list(line.get_xdata()) == [0, 1]
        assert line.is_dashed()


def test_axes_are_labelled_logarithmic_where_due_and_share_one_legend(tmp_path, sweep):
    figure = prior_precision_figure(sweep, tmp_path / "f.png", ("nll", "ece"))
    assert [ax.get_xscale() for ax in figure.axes] == ["log", "log"]
    assert [ax.get_yscale() for ax in figure.axes] == ["log", "linear"]
    assert [ax.get_ylabel() for ax in figure.axes] == ["NLL (nats) ↓", "ECE ↓"]
    assert [ax.get_legend() for ax in figure.axes] == [None, None]
    [legend] = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["MAP", "mini-batch", "debiased", "full-batch"]
    narrow = [row for row in sweep if row["prior_precision"] != 0.1]
    figure = prior_precision_figure(narrow, tmp_path / "f.png", ("nll",))
    assert figure.axes[0].get_yscale() == "linear"


def test_a_method_has_one_colour_in_every_picture(tmp_path, sweep, panels):
    expected = method_colours(["MAP", "mini-batch", "debiased", "full-batch"])
    ax = prior_precision_figure(sweep, tmp_path / "f.png", ("nll",)).axes[0]
    for method in ("mini-batch", "debiased", "full-batch"):
        assert line_of(ax, method)[0].get_color() == expected[method]
    figure = reliability_figure(panels, tmp_path / "r.png")
    for ax, method in zip(figure.axes, panels, strict=False):
        face = bars_of(ax, "accuracy")[0].get_facecolor()
        assert face == matplotlib.colors.to_rgba(expected[method])


def test_colours_of_known_and_other_methods_differ():
    methods = ["crossfit", "MAP", "mini-batch", "debiased", "full-batch", "other", "third"]
    colours = method_colours(methods)
    assert list(colours) == methods
    assert len(set(colours.values())) == len(methods)
    assert method_colours(["debiased"])["debiased"] == colours["debiased"]


def test_labels_of_metrics_tell_where_better_is():
    assert metric_label("accuracy") == "Accuracy ↑"
    assert metric_label("auroc_svhn") == "AUROC (svhn) ↑"
    assert metric_label("fpr95_svhn") == "FPR95 (svhn) ↓"
    assert metric_label("something") == "something"


def test_severity_figure_is_linear_in_severity(tmp_path):
    rows = [
        {"method": method, "draw": draw, "severity": severity, "accuracy": 0.9 - 0.1 * severity}
        for method in ("MAP", "debiased")
        for draw in range(1 if method == "MAP" else 3)
        for severity in range(6)
    ]
    for row in rows:
        row["accuracy"] -= 0.01 * row["draw"]
    ax = severity_figure(rows, tmp_path / "s.png", ("accuracy",)).axes[0]
    assert ax.get_xscale() == "linear"
    data, _ = line_of(ax, "MAP")
    np.testing.assert_allclose(data.get_xdata(), range(6))
    np.testing.assert_allclose(data.get_ydata(), 0.9 - 0.1 * np.arange(6))
    data, bars = line_of(ax, "debiased")
    np.testing.assert_allclose(data.get_ydata(), 0.89 - 0.1 * np.arange(6))
    np.testing.assert_allclose(bars[:, 1] - bars[:, 0], 0.02)


def test_reliability_bars_are_accuracies_and_gaps_reach_the_confidence(tmp_path, panels):
    figure = reliability_figure(panels, tmp_path / "r.png", num_bins=10)
    for column, panel in enumerate(panels.values()):
        curve = metrics.reliability_curve(*panel, 10)
        filled = curve.fraction > 0
        top, bottom = figure.axes[column], figure.axes[len(panels) + column]
        accuracies = bars_of(top, "accuracy")
        gaps = bars_of(top, "gap to confidence")
        np.testing.assert_allclose(
            [bar.get_height() for bar in accuracies], curve.accuracy[filled], rtol=1e-6
        )
        np.testing.assert_allclose(
            [bar.get_y() + bar.get_height() for bar in gaps], curve.confidence[filled], rtol=1e-6
        )
        np.testing.assert_allclose(
            [bar.get_x() for bar in accuracies], curve.edges[:-1][filled], atol=1e-6
        )
        np.testing.assert_allclose(
            [bar.get_height() for bar in bottom.patches], curve.fraction, rtol=1e-6
        )


def test_reliability_figure_states_ece_and_accuracy_and_the_identity(tmp_path, panels):
    figure = reliability_figure(panels, tmp_path / "r.png", num_bins=10)
    for ax, (method, panel) in zip(figure.axes, panels.items(), strict=False):
        assert ax.get_title() == method
        [text] = [text.get_text() for text in ax.texts]
        assert f"{metrics.ece(*panel, 10).item():.3f}" in text
        assert f"{metrics.accuracy(*panel).item():.3f}" in text
        [identity] = ax.get_lines()
        np.testing.assert_array_equal(identity.get_xydata(), [[0, 0], [1, 1]])


def test_reliability_figure_takes_binary_predictions_that_need_a_gradient(tmp_path):
    probs = torch.tensor([0.2, 0.9, 1.0], requires_grad=True)
    figure = reliability_figure({"MAP": (probs, torch.tensor([0, 1, 1]))}, tmp_path / "r.png", 5)
    heights = [bar.get_height() for bar in figure.axes[1].patches]
    np.testing.assert_allclose(heights, [0, 0, 0, 0, 1])


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_suffix_chooses_the_format_and_folders_are_made(tmp_path, sweep, suffix, magic):
    path = tmp_path / "new" / "folder" / f"figure{suffix}"
    prior_precision_figure(sweep, path, ("nll",))
    assert path.read_bytes().startswith(magic)
    assert list(path.parent.iterdir()) == [path]


def test_figures_leave_the_settings_of_matplotlib_alone(tmp_path, sweep, panels):
    before = dict(matplotlib.rcParams)
    prior_precision_figure(sweep, tmp_path / "f.png", ("nll",))
    reliability_figure(panels, tmp_path / "r.png")
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prior_precision": 0.0}, "prior precision 0.0"),
        ({"prior_precision": -1}, "prior precision -1"),
        ({"nll": None}, "nll = None"),
        ({"nll": math.nan}, "finite"),
        ({"nll": "low"}, "nll = 'low'"),
        ({"prior_precision": None}, "with and without prior_precision"),
        ({"draw": 1}, "appears twice"),
    ],
)
def test_bad_rows_are_refused_before_anything_is_written(tmp_path, sweep, change, message):
    sweep[1] |= change
    with pytest.raises(ValueError, match=message):
        prior_precision_figure(sweep, tmp_path / "new" / "f.png", ("nll",))
    assert list(tmp_path.iterdir()) == []


def test_bad_figures_are_refused_before_anything_is_written(tmp_path, sweep, panels):
    with pytest.raises(ValueError, match="no rows"):
        prior_precision_figure([], tmp_path / "f.png")
    with pytest.raises(ValueError, match=r"lacks \['accuracy'\]"):
        prior_precision_figure(sweep, tmp_path / "f.png", ("accuracy",))
    with pytest.raises(ValueError, match=r"lacks \['severity'\]"):
        severity_figure(sweep, tmp_path / "f.png", ("nll",))
    with pytest.raises(ValueError, match="`metrics` is empty"):
        prior_precision_figure(sweep, tmp_path / "f.png", ())
    with pytest.raises(ValueError, match="`panels` is empty"):
        reliability_figure({}, tmp_path / "f.png")
    with pytest.raises(ValueError, match="`num_bins` is 0"):
        reliability_figure(panels, tmp_path / "f.png", 0)
    for draw in (
        lambda path: prior_precision_figure(sweep, path),
        lambda path: reliability_figure(panels, path),
    ):
        with pytest.raises(ValueError, match=r"\.png or \.pdf"):
            draw(tmp_path / "f.jpeg")
    assert list(tmp_path.iterdir()) == []
