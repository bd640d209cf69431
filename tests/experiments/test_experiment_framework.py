"""The frame of the paper's experiments: their list, their configs, their folders, resumed runs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from laplace_debias import cli
from laplace_debias.cli import main
from laplace_debias.experiments.bias import cuts
from laplace_debias.experiments.bias.contours import ContoursSettings, run_contours
from laplace_debias.experiments.bias.directional_curvature import (
    DirectionalCurvatureSettings,
    run_directional_curvature,
)
from laplace_debias.experiments.bias.over_training import OverTrainingSettings, run_over_training
from laplace_debias.experiments.registry import EXPERIMENTS
from laplace_debias.experiments.shared import setup
from laplace_debias.experiments.shared.recipe import RecipeChanges
from laplace_debias.experiments.shared.setup import ExperimentSettings, check_data
from laplace_debias.experiments.shared.store import Store, open_store
from laplace_debias.problems import ImageDataset, ProblemData, get_problem
from laplace_debias.report.tables import read_csv, write_csv

CONFIGS = Path(__file__).parents[2] / "configs" / "experiments"
NAMES = [entry.name for entry in EXPERIMENTS]
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
    for line, entry in zip(lines, EXPERIMENTS, strict=True):
        assert line.split()[0] == entry.name
        assert entry.figure in line
        assert entry.help in line


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_a_reduced_and_a_full_config(name):
    assert (CONFIGS / f"{name}.yaml").is_file()
    assert (CONFIGS / "full" / f"{name}.yaml").is_file()


def settings_of(monkeypatch, name: str, *arguments: str):
    """What an experiment is run with: its dataclass, which has checked itself."""
    seen = []
    (entry,) = (entry for entry in EXPERIMENTS if entry.name == name)
    monkeypatch.setattr(cli, "_experiments", lambda: {name: replace(entry, run=seen.append)})
    assert main(["experiment", name, *arguments]) == 0
    (settings,) = seen
    return settings


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_configs_are_valid(path, monkeypatch):
    name = max((n for n in NAMES if path.stem.startswith(n)), key=len)
    needed = ["--data=d", "--checkpoint=c"] if name == "comparison" else []
    settings = settings_of(monkeypatch, name, f"--config={path}", *needed)
    folder = "results/full" if path.parent.name == "full" else "results"
    assert settings.output == Path(folder) / path.stem


def test_a_config_that_makes_no_sense_is_seen(tmp_path, monkeypatch, capsys):
    config = tmp_path / "config.yaml"
    config.write_text("full_examples: 1000\nbatch_size: 333\ndraws: -4\n", encoding="utf-8")
    assert main(["experiment", "contours", f"--config={config}"]) == 2
    assert "draws is -4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["contuors"], "did you mean contours?"),
        (["contours", "--batch_sise=3"], "did you mean --batch_size?"),
        (["contours", "--batch_sizes=3"], "did you mean --batch_size?"),
        (["overlaps", "--batch_size=3"], "did you mean --batch_sizes?"),
        (["contours", "--batch_siz=100"], "did you mean --batch_size?"),
        (["contours", "--recipe.weight_deca=1"], "did you mean --recipe.weight_decay?"),
        (["directional_curvature", "--curvature=gnn"], "ggn"),
        (["directional_curvature", "--problem=allcnn-digit"], "did you mean 'allcnn-digits'"),
        (["directional_curvature", "--batch_sizes=[100]"], "full_examples is 2048"),
        (["directional_curvature", "--batch_sizes=[]"], "batch_sizes"),
        (["directional_curvature", "--draws=0"], "draws is 0"),
        (["directional_curvature", "--tol=0"], "tol is 0"),
        (["directional_curvature", "--weight_decay=-1"], "weight_decay is -1"),
        (["contours", "--num_directions=3"], "expected 2"),
        (["overlaps", "--draws=1"], "draws is 1"),
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


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        ("batchsize: 3", "batch_size"),
        ("batch_sizes: [3]", "batch_size"),
        ("recipe:\n  weight_deca: 3", "recipe.weight_decay"),
    ],
)
def test_unknown_keys_of_a_config_get_the_nearest(line, nearest, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(f"problem: allcnn-digits\n{line}\n", encoding="utf-8")
    arguments = ["contours", f"--config={config}", f"--output={tmp_path / 'out'}"]
    assert main(["experiment", *arguments]) == 2
    assert f"did you mean {nearest}?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_unknown_command_gives_the_nearest(capsys):
    assert main(["experimnt"]) == 2
    assert "did you mean experiment?" in capsys.readouterr().err


@pytest.mark.slow
def test_results_are_a_table_and_pictures(finished):
    names = set(contents(finished))
    assert {"results.csv", "summary.csv", "settings.json"} <= names
    assert {"directional_curvature_20.png", "directional_curvature_20.pdf"} <= names


@pytest.mark.slow
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


@pytest.mark.slow
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


def small_data(number: int = 200) -> ProblemData:
    generator = torch.Generator().manual_seed(0)
    parts = [
        ImageDataset(
            torch.randint(256, (number, 1, 4, 4), generator=generator, dtype=torch.uint8),
            torch.arange(number) % 2,
            *((0.5,), (0.5,), ("a", "b")),
        )
        for _ in range(2)
    ]
    return ProblemData(parts[0], parts[1], parts[1], torch.arange(number), torch.arange(0))


def changed(data: ProblemData, what: str) -> ProblemData:
    part = what.split()[0]
    images = getattr(data, part)
    if what.endswith("labels"):
        images = replace(images, labels=torch.cat([images.labels[:-1], 1 - images.labels[-1:]]))
    elif what.endswith("images"):
        pixels = images.images.clone()
        pixels[len(pixels) // 3 :] = 255 - pixels[len(pixels) // 3 :]
        images = replace(images, images=pixels)
    else:
        images = images.subset(torch.arange(len(images) - 1))
    return replace(data, **{part: images})


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("what", ["labels", "images", "length"])
def test_other_data_is_refused(tmp_path, part, what):
    store, settings = Store(tmp_path), ExperimentSettings(output=tmp_path)
    check_data(small_data(), settings, store)
    check_data(small_data(), settings, store)
    with pytest.raises(ValueError, match="other data"):
        check_data(changed(small_data(), f"{part} {what}"), settings, store)
    check_data(small_data(), settings, store)


@pytest.mark.slow
def test_a_resumed_run_on_other_data_is_refused_before_any_training(tmp_path, monkeypatch):
    run_directional_curvature(tiny(tmp_path / "out"))
    (tmp_path / "out" / "parts" / "network.safetensors").unlink()
    problem = get_problem("allcnn-digits")
    read = problem.read

    def other(source):
        training, test = read(source)
        return training, test.subset(torch.arange(10, len(test)))

    monkeypatch.setattr(setup, "get_problem", lambda name: replace(problem, read=other))
    monkeypatch.setattr(setup, "train", None)  # not called
    with pytest.raises(ValueError, match="other data"):
        run_directional_curvature(tiny(tmp_path / "out", resume=True))


@pytest.mark.slow
def test_other_data_is_refused_before_the_training_that_is_followed(tmp_path, monkeypatch):
    options = {**TINY, "output": tmp_path / "out", "batch_size": 20, "num_checkpoints": 1}
    settings = OverTrainingSettings(**options, draws=1, resume=True)
    run_over_training(settings)
    (tmp_path / "out" / "parts" / "network.safetensors").unlink()
    rows = read_csv(tmp_path / "out" / "parts" / "data.csv")
    write_csv([{**rows[0], "images": 7}, rows[1]], tmp_path / "out" / "parts" / "data.csv")
    monkeypatch.setattr(setup, "train", None)  # not called
    with pytest.raises(ValueError, match="other data"):
        run_over_training(settings)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("contours", {"full_examples": 40_000, "batch_size": 100}, "full_examples is 40000"),
        ("kfac_batch_size", {"full_examples": 2**20, "batch_sizes": (4,)}, "full_examples is"),
        ("kfac_error", {"num_batches": 100}, "num_batches=100 of 128"),
        ("laplace", {"test_examples": 10_000}, "test_examples is 10000"),
        ("conjugate_gradients", {"batch_size": 5000}, "batch_size is 5000"),
        ("runtime", {"full_examples": 10_000}, "full_examples is 10000"),
        ("hessian_free", {"batch_size": 5000}, "batch_size is 5000"),
        ("debiasing", {"full_examples": 5000}, "takes"),
        ("model_size", {"full_examples": 4096, "models": ((0, 1),)}, "full_examples is 4096"),
        ("over_training", {"full_examples": 4096}, "full_examples is 4096"),
    ],
)
def test_too_few_images_are_told_before_training_and_claim_no_folder(
    name, changes, says, tmp_path, monkeypatch
):
    entry = next(entry for entry in EXPERIMENTS if entry.name == name)
    problem = "convnet-digits" if name == "model_size" else "allcnn-digits"
    common = {"problem": problem, "progress": False, "output": tmp_path / "out", "device": "cpu"}
    monkeypatch.setattr(setup, "train", None)  # not called
    with pytest.raises(ValueError, match=says):
        entry.run(entry.settings(**common | changes))
    # Neither these settings nor this experiment has the folder for itself.
    store = open_store("another", entry.settings(**common, seed=3))
    assert set(contents(store.folder)) == {"settings.json"}


@pytest.mark.slow
def test_a_device_that_is_not_there_claims_no_folder(tmp_path):
    for draws in (1, 2):
        with pytest.raises(ValueError, match="no device 'cudaa'"):
            run_directional_curvature(tiny(tmp_path / "out", draws=draws, device="cudaa"))
    run_directional_curvature(tiny(tmp_path / "out", draws=1))


def test_a_training_that_has_begun_claims_its_folder(tmp_path):
    store = open_store("contours", tiny(tmp_path))
    store.matches("data", [{"part": "train", "images": 3}])
    state = store.part("network.state.safetensors")
    state.write_bytes(b"half a training")
    with pytest.raises(ValueError, match="seed was 0, is 1"):
        open_store("contours", tiny(tmp_path, seed=1))
    assert state.exists()


def test_only_what_differs_is_told(finished):
    recipe = RecipeChanges(cycles=((1, 0.1),), weight_decay=0.5)
    with pytest.raises(ValueError, match=r"\(recipe\.weight_decay was None, is 0\.5\)"):
        run_directional_curvature(tiny(finished, recipe=recipe, resume=True))


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
