"""`laplace-debias report` and `evaluate`, on a network and data of a user."""

import json

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from laplace_debias import Laplace
from laplace_debias.cli import main

MODULE = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a network's module, its weights, an archive of data and a saved posterior."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_network_of_rows.py").write_text(MODULE)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(260, 4, generator=generator)
    noise = torch.randn(260, 3, generator=generator)
    y = (x[:, :3] + noise).argmax(1)
    splits = {"train": slice(120), "val": slice(120, 200), "test": slice(200, 260)}
    arrays = {f"x_{name}": x[rows].numpy() for name, rows in splits.items()}
    arrays |= {f"y_{name}": y[rows].numpy() for name, rows in splits.items()}
    np.savez(tmp_path / "data.npz", **arrays)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:120]), y[:120]).backward()
        optimizer.step()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    la = Laplace(model.eval(), prior_precision=2.0)
    la.fit([(x[:120], y[:120])], num_data=120).save(tmp_path / "mine.safetensors")
    return tmp_path


SOURCE = [
    *("--model=my_network_of_rows:build", "--checkpoint=weights.pt", "--data=data.npz"),
    *("--progress=false", "--device=cpu"),
]
FAST = "--methods=[temperature,last-layer]"


def test_a_report_is_written_printed_drawn_again_and_repeated(folder, capsys):
    assert main(["report", *SOURCE, FAST, "--output=run", "--title=Mine"]) == 0
    printed = capsys.readouterr().out
    assert "Temperature scaling" in printed
    assert "On 60 " in printed
    assert "Page: run/report.html" in printed
    page = (folder / "run" / "report.html").read_bytes()
    metrics = (folder / "run" / "metrics.json").read_bytes()

    (folder / "run" / "report.html").unlink()
    (folder / "data.npz").rename(folder / "moved.npz")  # The page needs no data.
    assert main(["report", "--from=run"]) == 0
    assert (folder / "run" / "report.html").read_bytes() == page
    capsys.readouterr()

    (folder / "moved.npz").rename(folder / "data.npz")
    repeat = ["report", "--config=run/config.yaml", "--output=other", "--json"]
    assert main(repeat) == 0
    repeated = json.loads(capsys.readouterr().out)
    assert repeated["page"] == "other/report.html"
    assert [method["key"] for method in repeated["methods"]] == [
        *("network", "temperature", "last-layer"),
    ]
    assert (folder / "other" / "metrics.json").read_bytes() == metrics


def test_several_checkpoints_give_an_ensemble_and_a_mixture(folder, capsys):
    weights = torch.load(folder / "weights.pt", weights_only=True)
    torch.save({name: 0.8 * value for name, value in weights.items()}, folder / "second.pt")
    further_checkpoints = ["--checkpoint", "second.pt", "--checkpoint=weights.pt"]
    methods = "--methods=[last-layer]"
    assert main(["report", *SOURCE, *further_checkpoints, methods, "--output=run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [method["key"] for method in report["methods"]][-2:] == ["ensemble", "mixture"]
    config = yaml.safe_load((folder / "run" / "config.yaml").read_text())
    assert config["checkpoint"] == "weights.pt"
    assert config["more_checkpoints"] == ["second.pt", "weights.pt"]
    torch.save({"0.weight": torch.zeros(1)}, folder / "bad.pt")
    assert main(["report", *SOURCE, "--checkpoint=bad.pt", "--output=bad"]) == 2
    assert "bad.pt" in capsys.readouterr().err


def test_posteriors_can_be_described_in_a_file(folder, capsys):
    described = {"posteriors": {"head": {"params": "last_layer", "curvature": "full"}}}
    (folder / "mine.yaml").write_text(yaml.safe_dump({**described, "methods": []}))
    assert main(["report", *SOURCE, "--config=mine.yaml", "--output=run"]) == 0
    assert "Laplace, head" in capsys.readouterr().out
    config = yaml.safe_load((folder / "run" / "config.yaml").read_text())
    assert config["posteriors"]["head"]["curvature"] == "full"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods=[magic]"], "There is no method magic. Use network"),
        (["--from=nowhere"], "--model has no effect here"),
        (["--output=data.npz"], "data.npz"),
        (["--examples=1"], "examples is 1. Pass at least 2"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(folder, options, message, capsys):
    names = sorted(path.name for path in folder.iterdir())
    assert main(["report", *SOURCE, *options]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == names


def test_a_page_of_no_run_cannot_be_drawn(folder, capsys):
    assert main(["report", "--from=nowhere"]) == 2
    assert "The path nowhere of --from does not exist" in capsys.readouterr().err
    (folder / "report.html").touch()
    assert main(["report", "--from=report.html"]) == 2
    assert "report.html is a file, not a run folder. Pass a folder" in capsys.readouterr().err


def test_saved_posteriors_are_evaluated_and_nothing_is_written(folder, capsys):
    names_before = sorted(path.name for path in folder.iterdir())
    (folder / "second.safetensors").write_bytes((folder / "mine.safetensors").read_bytes())
    files = ["--posterior=mine.safetensors", "--posterior", "second.safetensors"]
    arguments = ["evaluate", *SOURCE, *files, "--json"]
    assert main(arguments) == 0
    evaluated = json.loads(capsys.readouterr().out)
    keys = [method["key"] for method in evaluated["methods"]]
    assert keys == ["network", "temperature", "posterior-mine", "posterior-second"]
    (row,) = (
        row
        for row in evaluated["rows"]
        if (row["method"], row["set"], row["metric"]) == ("posterior-mine", "test", "nll")
    )
    with np.load(folder / "data.npz") as data:
        x, y = (torch.tensor(data[f"{name}_test"]) for name in "xy")
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
    model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    la = Laplace.load(folder / "mine.safetensors", model)
    expected = -la.predict(x).log_prob(y).mean()
    assert row["value"] == pytest.approx(float(expected), rel=1e-5)
    names_after = sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")
    assert names_after == sorted([*names_before, "second.safetensors"])
