"""The frame of the paper's experiments: their list, their configs, their folders, resumed runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from laplace_debias.cli import main
from laplace_debias.experiments import cuts
from laplace_debias.experiments.contours import ContoursSettings, run_contours
from laplace_debias.experiments.directional_curvature import (
    DirectionalCurvatureSettings,
    run_directional_curvature,
)
from laplace_debias.experiments.registry import experiments
from laplace_debias.experiments.storage import Store
from laplace_debias.experiments.training import RecipeChanges

CONFIGS = Path(__file__).parent.parent / "configs" / "experiments"
NAMES = [entry.name for entry in experiments()]
TINY = {
    "problem": "allcnn-digits",
    "recipe": RecipeChanges(cycles=((1, 0.1),)),
    "full_examples": 60,
    "num_directions": 3,
    "progress": False,
}


def tiny(output: Path, **changes) -> DirectionalCurvatureSettings:
    return DirectionalCurvatureSettings(
        **(TINY | {"output": output, "batch_sizes": (20,), "draws": 2} | changes)
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "out"
    run_directional_curvature(tiny(folder))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def without_dates(folder: Path) -> dict[str, bytes]:
    # A PDF holds the time at which it was made.
    return {name: data for name, data in contents(folder).items() if not name.endswith(".pdf")}


def test_names_are_unique():
    assert len(set(NAMES)) == len(NAMES)


def test_list_gives_each_experiment_a_line_with_its_figure(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["experiment", "--list"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(NAMES)
    for line, entry in zip(lines, experiments(), strict=True):
        assert line.split()[0] == entry.name
        assert entry.figure in line
        assert entry.help in line


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_a_reduced_and_a_full_config(name):
    assert (CONFIGS / f"{name}.yaml").is_file()
    assert (CONFIGS / "full" / f"{name}.yaml").is_file()


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_configs_are_valid(path, capsys):
    name = max((n for n in NAMES if path.stem.startswith(n)), key=len)
    with pytest.raises(SystemExit) as stop:
        main(["experiment", name, f"--config={path}", "--print_config"])
    assert stop.value.code == 0
    assert f"output: results/{'full/' * (path.parent.name == 'full')}{path.stem}" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["contuors"], "did you mean contours?"),
        (["contours", "--batch_sise=3"], "did you mean --batch_size?"),
        (["directional_curvature", "--curvature=gnn"], "ggn"),
        (["directional_curvature", "--problem=allcnn-digit"], "did you mean 'allcnn-digits'"),
        (["directional_curvature", "--batch_sizes=[100]"], "full_examples=2048"),
        (["directional_curvature", "--batch_sizes=[]"], "batch_sizes"),
        (["directional_curvature", "--draws=0"], "draws is 0"),
        (["directional_curvature", "--tol=0"], "tol is 0"),
        (["directional_curvature", "--weight_decay=-1"], "weight_decay is -1"),
        (["contours", "--num_directions=3"], "expected 2"),
        (["overlaps", "--draws=1"], "draws=1"),
        (["kfac_batch_size", "--batch_sizes=[1024]"], "1024"),
        (["over_training", "--checkpoint=x.safetensors"], "--checkpoints"),
        (["model_size", "--models=[[1, 0]]"], "widths"),
        ([], "contours"),
    ],
)
def test_bad_arguments_end_with_one_line_that_names_them(
    arguments, named, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["experiment", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("laplace-debias: error: ")
    assert captured.err.count("\n") == 1
    assert named in captured.err
    assert not list(tmp_path.iterdir())


def test_unknown_command_gives_the_nearest(capsys):
    assert main(["experimnt"]) == 2
    assert "did you mean experiment?" in capsys.readouterr().err


def test_results_are_a_table_and_pictures(finished):
    names = set(contents(finished))
    assert {"results.csv", "summary.csv", "settings.json"} <= names
    assert {"directional_curvature_20.png", "directional_curvature_20.pdf"} <= names


def test_a_run_that_was_broken_off_and_resumed_equals_an_unbroken_one(
    finished, tmp_path, monkeypatch
):
    calls = []
    cut_along = cuts.cut_along

    def broken(*arguments):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(arguments)
        return cut_along(*arguments)

    monkeypatch.setattr(cuts, "cut_along", broken)
    with pytest.raises(KeyboardInterrupt):
        run_directional_curvature(tiny(tmp_path / "out"))
    kept = contents(tmp_path / "out")
    assert "results.csv" not in kept

    calls.clear()
    monkeypatch.setattr(cuts, "find_directions", None)  # not called: they are stored
    run_directional_curvature(tiny(tmp_path / "out", resume=True))
    assert len(calls) == 1  # of three batches two were measured before
    assert without_dates(tmp_path / "out") == without_dates(finished)


def test_resuming_what_is_finished_computes_nothing(finished, monkeypatch):
    before = without_dates(finished)
    for name in ("cut_along", "find_directions"):
        monkeypatch.setattr(cuts, name, None)
    run_directional_curvature(tiny(finished, resume=True))
    assert without_dates(finished) == before


@pytest.mark.parametrize("resume", [True, False])
def test_results_of_other_settings_are_refused_and_kept(finished, resume):
    before = contents(finished)
    with pytest.raises(ValueError, match=r"other settings \(draws was 2, is 1\)"):
        run_directional_curvature(tiny(finished, draws=1, resume=resume))
    assert contents(finished) == before


def test_results_of_another_experiment_are_refused_and_kept(finished):
    before = contents(finished)
    settings = ContoursSettings(**TINY | {"num_directions": 2, "batch_size": 20, "draws": 1})
    with pytest.raises(ValueError, match="'directional_curvature', not of 'contours'"):
        run_contours(replace(settings, output=finished, resume=True))
    assert contents(finished) == before


def test_results_are_not_overwritten_without_being_asked(finished):
    before = contents(finished)
    with pytest.raises(FileExistsError, match="--resume"):
        run_directional_curvature(tiny(finished))
    assert contents(finished) == before


def test_a_folder_of_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(FileExistsError, match=r"thesis\.tex"):
        run_directional_curvature(tiny(tmp_path, resume=True))
    assert contents(tmp_path) == {"thesis.tex": b"all of it"}


def test_another_checkpoint_is_refused(finished, tmp_path):
    network = (finished / "parts" / "network.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(network)
    settings = tiny(tmp_path / "out", checkpoint=tmp_path / "a.safetensors", draws=1)
    run_directional_curvature(settings)
    (tmp_path / "a.safetensors").rename(tmp_path / "b.safetensors")
    again = replace(settings, checkpoint=tmp_path / "b.safetensors", resume=True)
    run_directional_curvature(again)  # the same content at another place

    (tmp_path / "b.safetensors").write_bytes(network[:-1] + b"\x01")
    with pytest.raises(ValueError, match="checkpoint was sha256"):
        run_directional_curvature(again)


def test_other_data_is_refused(finished, monkeypatch):
    rows = [{"first_images": "sha256:of other images"}]
    stored = Store.rows
    monkeypatch.setattr(
        Store,
        "rows",
        lambda self, name, compute: rows if name == "data" else stored(self, name, compute),
    )
    with pytest.raises(ValueError, match="other data"):
        run_directional_curvature(tiny(finished, resume=True))


def test_a_missing_checkpoint_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.safetensors"):
        run_directional_curvature(
            tiny(tmp_path / "out", checkpoint=tmp_path / "nowhere.safetensors")
        )
    assert not (tmp_path / "out").exists()


def test_a_damaged_settings_file_is_refused(tmp_path):
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        run_directional_curvature(tiny(tmp_path, resume=True))
