"""An addition is one file and at most a line: each is made here at run time, and then used.

Structures are in `tests/fitting/test_own_structure.py`, layers in `tests/curvature`, and
likelihoods by an import path in `tests/commands/test_counts.py`.
"""

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import a_run
import pytest
import torch
import user_files
from torch import nn

from laplace_debias import Laplace
from laplace_debias.cli import main
from laplace_debias.commands import COMMANDS
from laplace_debias.curvature.data.batches import consecutive
from laplace_debias.curvature.losses.likelihoods import LIKELIHOODS
from laplace_debias.curvature.losses.likelihoods.poisson import Poisson
from laplace_debias.laplace.fitting.modes import MODES, Mode
from laplace_debias.laplace.fitting.schemes import Scheme, Split
from laplace_debias.metrics import METRICS, Metric, evaluation
from laplace_debias.metrics.definitions import TARGET_UNIT
from laplace_debias.metrics.statistics import Mean, Statistic
from laplace_debias.report.page import write_page
from laplace_debias.runs.records import RunRecord, from_json, to_json
from laplace_debias.runs.relevance import matters
from laplace_debias.system.settings import CommandSettings

HOW_TO_ADD = Path(__file__).parents[2] / "docs" / "how-to-add.md"


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()


def batches(number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(9, 4, dtype=torch.float64, generator=generator),
            torch.randint(3, (9,), generator=generator),
        )
        for _ in range(number)
    ]


class Visits(Poisson):
    """Counts under another name."""

    name = "visits"


def test_a_likelihood_is_a_class_and_a_line(model, monkeypatch, tmp_path):
    monkeypatch.setitem(LIKELIHOODS, "visits", Visits)
    data = [(x, y[:, None].expand(9, 3).double()) for x, y in batches(2)]
    la = Laplace(model, "visits").fit(data)
    la.save(tmp_path / "p.safetensors")
    loaded = Laplace.load(tmp_path / "p.safetensors", model)
    assert type(loaded.likelihood) is Visits
    x, _ = data[0]
    expected = Laplace(model, "poisson").fit(data).predict(x).mean
    torch.testing.assert_close(loaded.predict(x).mean, expected)


def test_a_named_likelihood_is_a_task_of_the_command_line(monkeypatch, tmp_path):
    monkeypatch.setitem(LIKELIHOODS, "visits", Visits)
    user_files.networks(tmp_path, monkeypatch)
    content = user_files.arrays("classes")
    user_files.archive(tmp_path / "rows.npz", **content)
    options = ["--model=nets:rows", "--model_args.outputs=1", "--data=rows.npz", "--device=cpu"]
    command = ["fit", *options, "--task=visits", "--output=p.safetensors", "--progress=false"]
    assert main(command) == 0
    (tmp_path / "nets.py").write_text(user_files.NETWORKS)
    assert main([*command[:-2], "--output=q.safetensors", "--task=vists"]) == 2


@dataclass(frozen=True)
class FirstFour(Scheme):
    """Directions from the first and third of four batches, magnitudes from the others."""

    label = "first-four"
    data: list

    @property
    def sources(self):
        return {"data": self.data}

    def fit(self, prepared):
        (stream,) = prepared.streams
        batches = list(stream)
        even = consecutive(batches[::2])
        odd = consecutive(batches[1::2])
        return prepared.config.structure.fit(prepared.context, even, odd)


def test_a_way_to_fit_is_a_class_and_a_line(model, monkeypatch):
    mode = Mode(lambda batches, folds: FirstFour(batches), num_first_batches=4)
    monkeypatch.setitem(MODES, "first-four", mode)
    data = batches(6)
    la = Laplace(model).fit(data, "first-four", num_data=54)
    expected = Laplace(model).fit(Split(data[0:4:2], data[1:4:2]), num_data=54)
    assert la.num_data == 54
    torch.testing.assert_close(
        la.posterior.precision.to_dense(), expected.posterior.precision.to_dense()
    )
    with pytest.raises(
        ValueError, match=r'`folds=2` applies only to mode="crossfit", got `mode="fir'
    ):
        Laplace(model).fit(data, "first-four", num_data=54, folds=2)
    with pytest.raises(ValueError, match=r'mode="first-four"` needs 4 batch'):
        Laplace(model).fit(data[:3], "first-four", num_data=54)


def test_a_metric_is_one_entry(monkeypatch, tmp_path):
    metric = Metric(
        "sharpness",
        "Sharpness",
        lambda probs, labels: Mean(probs.amax(1).double().mean().item(), probs.amax(1).double()),
        "higher",
        meaning="Mean of the largest probability.",
        is_main=True,
    )
    with_metric = (*evaluation.CLASSIFICATION_METRICS, metric)
    monkeypatch.setattr(evaluation, "CLASSIFICATION_METRICS", with_metric)
    monkeypatch.setitem(METRICS, metric.name, metric)
    folder = a_run.make_run(tmp_path / "run", num_test=40, num_ood=0, severities=())
    page = write_page(folder).read_text(encoding="utf-8")
    assert page.count("Sharpness") >= 3
    assert "Mean of the largest probability." in page


def test_a_tiny_difference_of_a_new_metric_in_units_of_the_target_does_not_matter(monkeypatch):
    metric = Metric("spread", "Spread", lambda m, sd, y, level: Statistic(1.0, y), unit=TARGET_UNIT)
    monkeypatch.setitem(METRICS, metric.name, metric)
    assert not matters("spread", 0.004, {"spread": 5.0})
    assert matters("spread", 0.006, {"spread": 5.0})


def snippet(heading):
    """The first block of code under a heading of the page."""
    text = HOW_TO_ADD.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    return re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)[1]


def test_a_command_is_a_file_and_a_line(monkeypatch, tmp_path, capsys):
    user_files.networks(tmp_path, monkeypatch)
    user_files.archive(tmp_path / "rows.npz")
    source = "from dataclasses import dataclass\n" + snippet("Command")
    (tmp_path / "count_command.py").write_text(source)
    user_files.forget(monkeypatch, "count_command")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("count_command")
    monkeypatch.setitem(sys.modules, "laplace_debias.commands.count", module)
    monkeypatch.setitem(COMMANDS, "count", "Count the parameters of a network.")
    options = ["--model=nets:rows", "--data=rows.npz", "--device=cpu"]
    assert main(["count", *options]) == 0
    # 4 · 6 + 6 + 6 · 3 + 3
    assert "51 parameters" in capsys.readouterr().out
    assert main(["count", "--help"]) == 0
    assert "--frozen" in capsys.readouterr().out


@dataclass(frozen=True, kw_only=True)
class SizeSettings(CommandSettings):
    """Options of a command without a network.

    Attributes:
        file: The file.
    """

    file: Path


def test_a_command_needs_no_network(monkeypatch, tmp_path, capsys):
    module = ModuleType("laplace_debias.commands.size")
    module.Settings = SizeSettings
    sizes = []
    module.run = lambda settings: sizes.append(settings.file.stat().st_size)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(COMMANDS, "size", "Print the size of a file.")
    (tmp_path / "file").write_text("abc")
    assert main(["size", f"--file={tmp_path / 'file'}"]) == 0
    assert sizes == [3]
    assert main(["size", "--file=x", "--json"]) == 2
    assert "laplace-debias size has no option --json" in capsys.readouterr().err

    def stop(settings):
        raise KeyboardInterrupt

    module.run = stop
    assert main(["size", "--file=x"]) == 130
    assert "To start again, run the same command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("classification", "class"),
        ("binary", "class"),
        ("multilabel", "labels"),
        ("regression", "numbers"),
        ("heteroscedastic", "numbers"),
    ],
)
def test_runs_of_earlier_versions_do_not_state_what_targets_are(task, kind):
    record = RunRecord(format=1, task=task, sets=[], methods=[], targets=kind)
    content = to_json(record)
    assert content.pop("targets") == kind
    earlier = from_json(RunRecord, content)
    assert earlier.targets is None
    assert earlier.target_kind == kind
