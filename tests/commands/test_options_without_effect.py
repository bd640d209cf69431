"""Options that a command does not use: an error on its line, a note if a file contains them."""

import pytest
import same_numbers
import torch
import user_files
import yaml
from torch import nn

from laplace_debias import Laplace
from laplace_debias.cli import main
from laplace_debias.sources import SourceSettings, load

SOURCE = ["--model=nets:rows", "--data=d.npz", "--device=cpu", "--progress=false"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    user_files.networks(tmp_path, monkeypatch)
    user_files.archive(tmp_path / "d.npz")
    return tmp_path


REFUSED = {
    "fit": [
        *("--ood=x=nowhere", "--ood_examples=3", "--corruptions=[1]", "--test_examples=3"),
        *("--validation_examples=3", "--plan --overwrite"),
    ],
    "tune": [
        *("--corruptions=[1]", "--train_examples=3", "--ood.x=builtin:digits"),
        "--method=marglik --test_examples=3",
    ],
    "predict": ["--corruptions=[1]", "--train_examples=3", "--inputs=d.npz --test_examples=3"],
    "spectrum": ["--corruptions=[1]"],
    "evaluate": ["--examples=3"],
    "report": ["--examples=9", "--methods=[temperature] --examples=9", "--from=x"],
}
NEEDED = {
    "fit": ["--output=p.safetensors"],
    "tune": ["--posterior=p.safetensors"],
    "predict": ["--posterior=p.safetensors", "--output=o.csv"],
}


@pytest.mark.parametrize(
    ("command", "options"),
    [(command, options) for command, refused in REFUSED.items() for options in refused],
)
def test_on_the_line_of_a_command_they_are_refused(folder, command, options, capsys):
    assert main([command, *SOURCE, *NEEDED.get(command, []), *options.split()]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "has no effect here (" in line
    assert line.endswith("). Remove it.")
    assert sorted(path.name for path in folder.iterdir()) == ["d.npz", "nets.py"]


def test_values_that_are_called_like_options_are_none(folder, capsys):
    (folder / "d.npz").rename(folder / "ood.npz")
    source = ["--model=nets:rows", "--data", "ood.npz", "--device=cpu", "--progress=false"]
    assert main(["fit", *source, "--output=p.safetensors"]) == 0, capsys.readouterr().err


def test_in_a_file_for_several_commands_they_are_told(folder, capsys):
    settings = {
        "ood": {"x": "nowhere"},
        "corruptions": [1, 2],
        "validation_examples": 5,
        "held_out": 0.3,
    }
    (folder / "all.yaml").write_text(yaml.safe_dump(settings))
    common = [*SOURCE, "--config=all.yaml"]
    assert main(["fit", *common, "--output=p.safetensors"]) == 0
    printed = capsys.readouterr().out
    assert "Not used: ood, corruptions (for `report` and `evaluate`).\n" in printed
    assert "Not used: validation_examples (`fit` does not use these examples).\n" in printed
    assert "held_out is not used, because the data is already split.\n" in printed
    assert main(["tune", *common, "--posterior=p.safetensors", "--json"]) == 0
    captured = capsys.readouterr()
    assert "Not used: ood, corruptions" in captured.err
    assert captured.out.startswith("{")
    # The same settings without them give the same posterior.
    assert main(["fit", *SOURCE, "--output=q.safetensors"]) == 0
    assert "Not used" not in capsys.readouterr().out
    assert main(["report", *common, "--output=run"]) == 2
    assert "ood x: the path nowhere does not exist" in capsys.readouterr().err


def test_held_out_is_told_of_where_data_has_parts_alone(folder):
    content = user_files.arrays()
    user_files.archive(folder / "whole.npz", x=content["x_train"], y=content["y_train"])

    def notes(data, held_out):
        options = {"model": "nets:rows", "device": "cpu", "held_out": held_out}
        return " ".join(load(SourceSettings(data=data, **options)).notes)

    assert "held_out is not used" in notes("d.npz", 0.3)
    assert "held_out" not in notes("d.npz", 0.2)
    assert "held_out is not used" not in notes("whole.npz", 0.3)


def test_workers_of_batches_that_are_taken_as_they_are_are_refused(folder, capsys):
    with open("nets.py", "a") as file:
        file.write(
            "\n\ndef batches():\n    part = [(torch.randn(9, 4), torch.arange(9) % 3)]\n"
            "    return {'train': part, 'validation': part, 'test': part}\n"
        )
    source = ["--model=nets:rows", "--data=nets:batches", "--device=cpu", "--workers=2"]
    assert main(["fit", *source, "--output=p.safetensors"]) == 2
    error = capsys.readouterr().err
    assert "workers cannot be used with the train data, because your function returns" in error
    assert "as a list" in error


@pytest.mark.parametrize("curvature", ["diag", "lowrank", "full"])
def test_sharing_without_kronecker_factors_is_refused(curvature):
    model = nn.Linear(4, 3).eval()
    with pytest.raises(ValueError, match="`sharing='reduce'` applies only to Kronecker factors"):
        Laplace(model, curvature=curvature, sharing="reduce")


@pytest.mark.parametrize("curvature", ["lowrank", "full"])
def test_joint_blocks_of_one_block_are_refused(curvature):
    model = nn.Linear(4, 3).eval()
    with pytest.raises(
        ValueError, match=r"`joint=True` .* already puts all parameters in one block"
    ):
        Laplace(model, curvature=curvature, joint=True)


@pytest.mark.parametrize("curvature", ["lowrank", "full"])
def test_a_file_that_names_joint_blocks_is_read_as_it_was_written(curvature, tmp_path):
    """Earlier versions allowed `joint=True`, which ordered the entries of the single block."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).eval()
    x = torch.randn(9, 4)
    y = torch.arange(9) % 3
    la = same_numbers.make_laplace(model, curvature, joint=True)
    la.fit([(x, y)]).save(tmp_path / "file")
    assert la.posterior.order is not None
    loaded = Laplace.load(tmp_path / "file", model)
    for moment, expected in zip(loaded.functional(x), la.functional(x), strict=True):
        assert torch.equal(moment, expected)
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "file").read_bytes()
    # A later fit orders the entries in the same way, and is the same fit.
    assert torch.equal(loaded.fit([(x, y)]).posterior.order, la.posterior.order)
    torch.testing.assert_close(loaded.functional(x)[1], la.functional(x)[1])
