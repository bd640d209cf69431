"""Runs that are interrupted, resumed, or started in a folder with other files."""

import errno
import json
import os
import shutil
from dataclasses import replace

import a_run
import kill_fits
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset
from user_files import every

from laplace_debias import Laplace
from laplace_debias.assessment import assess, assessing
from laplace_debias.assessment.methods import LAST_LAYER, NETWORK, TEMPERATURE, posterior_method
from laplace_debias.curvature.fits import checkpoint, chunks
from laplace_debias.curvature.fits.checkpoint import SavedPass
from laplace_debias.runs import folder as run_folder
from laplace_debias.runs.folder import RunFolder, read_json
from laplace_debias.sources import SourceSettings, image_files
from laplace_debias.sources.changed import Changed
from laplace_debias.sources.image_files import ImageFiles, View, unchanged
from laplace_debias.sources.pixels import Pixels
from laplace_debias.sources.splits import batches_of

METHODS = (NETWORK, TEMPERATURE, LAST_LAYER)


@pytest.fixture(scope="module", autouse=True)
def batches_apart():
    """Fits of all runs of this file save after every batch, even if it is small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_JOINED_BYTES", 0)
        yield


@pytest.fixture(scope="module")
def loaded():
    return a_run.loaded_images(num_test=40, num_ood=20, severities=(3,))


def run(loaded, folder, **options):
    methods = options.pop("methods", METHODS)
    return assess(loaded, folder, methods, **{"config": "a: 1", **options})


@pytest.fixture(scope="module")
def parameters(loaded):
    """The parameters of the network before any run, by name."""
    return {name: value.clone() for name, value in loaded.model.state_dict().items()}


@pytest.fixture(scope="module")
def unbroken(loaded, parameters, tmp_path_factory):
    return run(loaded, tmp_path_factory.mktemp("unbroken") / "run")


def contents(folder):
    """The contents of a run's files by name, without times."""
    contents_by_name = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".parquet":
            columns = RunFolder(folder).read_predictions(path.parent.name, path.stem)
            contents_by_name[name] = {key: value.tolist() for key, value in columns.items()}
        elif path.is_file() and name != "run.json":
            contents_by_name[name] = path.read_bytes()
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    for key in ("created", "seconds", "title"):
        record.pop(key)
    for method in record["methods"]:
        for key in ("seconds", "seconds_per_example"):
            method.pop(key)
    return json.loads(json.dumps({**contents_by_name, "run.json": record}, default=str))


class Broken(Exception):  # noqa: N818
    pass


def break_after(num_writes, error, monkeypatch):
    """Let a number of files be written, and then raise an error; `run.json` does not count."""
    write_bytes = run_folder.write_bytes
    num_remaining = num_writes

    def write(path, data):
        nonlocal num_remaining
        if path.name != "run.json":
            if num_remaining == 0:
                raise error
            num_remaining -= 1
        write_bytes(path, data)

    monkeypatch.setattr(run_folder, "write_bytes", write)


@pytest.mark.slow
def test_a_run_that_is_broken_off_again_and_again_ends_with_the_same(
    loaded, unbroken, tmp_path, monkeypatch
):
    calls = 0
    folder = None
    while folder is None:
        calls += 1
        assert calls < 60
        with monkeypatch.context() as patch:
            break_after(calls, Broken(), patch)
            try:
                folder = run(loaded, tmp_path / "run")
            except Broken:
                path = tmp_path / "run/run.json"
                assert not path.exists() or read_json(path)["status"] == "running"
    assert calls > 5
    expected = contents(unbroken)
    actual = contents(folder)
    assert actual.keys() == expected.keys()
    assert json.dumps(actual) == json.dumps(expected)


def test_a_run_goes_on_within_a_fit(loaded, unbroken, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "EVERY", 0.0)
    save = SavedPass.save
    saved_fits = []

    def save_twice(self, *arguments):
        save(self, *arguments)
        saved_fits.append(self._path.parent.name)
        if len(saved_fits) == 2:
            raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(SavedPass, "save", save_twice)
        with pytest.raises(Broken):
            run(loaded, tmp_path / "run")
        assert set(saved_fits) == {"last-layer.fit"}
        assert (tmp_path / "run" / "state" / "last-layer.fit").exists()
        folder = run(loaded, tmp_path / "run")
    assert json.dumps(contents(folder)) == json.dumps(contents(unbroken))
    assert not (folder / "state").exists()


def test_a_run_that_could_not_tune_or_save_a_posterior_keeps_its_fit(
    loaded, unbroken, tmp_path, monkeypatch
):
    def fail(*_, **__):
        raise Broken

    monkeypatch.setattr(checkpoint, "EVERY", 0.0)
    state = tmp_path / "run" / "state" / "last-layer.fit"
    for function in ("assessment.stages.tune_posterior", "Laplace.save"):
        with monkeypatch.context() as patch:
            patch.setattr(f"laplace_debias.{function}", fail)
            with pytest.raises(Broken):
                run(loaded, tmp_path / "run")
        assert list(state.glob("pass-*"))
    folder = run(loaded, tmp_path / "run")
    assert json.dumps(contents(folder)) == json.dumps(contents(unbroken))
    assert not (folder / "state").exists()


def test_a_complete_run_predicts_nothing_again(loaded, unbroken, monkeypatch):
    def refuse(*_):
        raise AssertionError("predicted again")

    expected = contents(unbroken)
    monkeypatch.setattr("laplace_debias.assessment.stages.predict_set", refuse)
    monkeypatch.setattr("laplace_debias.assessment.stages.fitted_posterior", refuse)
    folder = run(loaded, unbroken, title="Another title")
    assert json.dumps(contents(folder)) == json.dumps(expected)
    assert read_json(folder / "run.json")["title"] == "Another title"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "seed was 0, is now 1"),
        ({"settings": {"data": "x"}}, "settings.data was None, is now x"),
        ({"methods": (NETWORK, TEMPERATURE)}, "methods.last-layer.key was last-layer, is now None"),
    ],
)
def test_other_settings_are_refused_and_named(loaded, unbroken, options, message):
    expected = contents(unbroken)
    with pytest.raises(FileExistsError, match=message) as refused:
        run(loaded, unbroken, **options)
    assert "different --output, or add --overwrite" in str(refused.value)
    assert json.dumps(contents(unbroken)) == json.dumps(expected)


def test_another_network_or_other_data_are_refused(loaded, unbroken):
    other_seed = a_run.loaded_images(num_test=40, num_ood=20, severities=(3,), seed=1)
    with pytest.raises(FileExistsError, match=r"model was .*; data.test was "):
        run(other_seed, unbroken)


def with_a_changed_label(batches):
    """Copy batches, with another last label in the last batch."""
    *first, (x, y) = batches
    y = y.clone()
    y[-1] = (y[-1] + 1) % 3
    return [*first, (x, y)]


@pytest.fixture(scope="module")
def several_batches():
    return a_run.loaded_images(num_test=80, num_ood=60, severities=(3,))


@pytest.fixture(scope="module")
def run_of_several_batches(several_batches, tmp_path_factory):
    return run(several_batches, tmp_path_factory.mktemp("several") / "run", methods=(NETWORK,))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("train", "training data was"),
        ("validation", "validation data was"),
        ("test", r"data\.test was"),
        ("ood", r"data\.static was"),
        ("shifts", r"data\.shift-3 was"),
    ],
)
def test_data_that_differ_after_the_first_batch_are_refused(
    several_batches, run_of_several_batches, field, message
):
    data = getattr(several_batches, field)
    if field == "ood":
        changed = {**data, "static": with_a_changed_label(data["static"])}
    elif field == "shifts":
        changed = {3: with_a_changed_label(data[3])}
    else:
        changed = with_a_changed_label(data)
    changed_data = replace(several_batches, **{field: changed})
    with pytest.raises(FileExistsError, match=f"different settings .{message}"):
        run(changed_data, run_of_several_batches, methods=(NETWORK,))


def test_corrupted_images_are_compared_by_what_they_are_made_of(several_batches, tmp_path):
    def shift(x, offset):
        return x + 1

    def with_test(batches):
        return replace(several_batches, test=batches, shifts={3: Changed(batches, shift)})

    test = several_batches.test
    folder = run(with_test(test), tmp_path / "run", methods=(NETWORK,))
    run(with_test(test), folder, methods=(NETWORK,))
    with pytest.raises(FileExistsError, match=r"data\.test was .*; data\.shift-3 was"):
        run(with_test(with_a_changed_label(test)), folder, methods=(NETWORK,))


def test_training_examples_that_a_run_does_not_read_are_not_compared(several_batches, tmp_path):
    """The network is evaluated on the first 1,000 of them, and no posterior is fitted."""
    train = several_batches.train * 6
    assert sum(len(y) for _, y in train) == 1200
    folder = run(replace(several_batches, train=train), tmp_path / "run", methods=(NETWORK,))
    changed = replace(several_batches, train=with_a_changed_label(train))
    run(changed, folder, methods=(NETWORK,))
    fitted = run(several_batches, tmp_path / "fitted", methods=(NETWORK, LAST_LAYER))
    with pytest.raises(FileExistsError, match="training data was"):
        run(changed, fitted, methods=(NETWORK, LAST_LAYER))


def test_a_loader_that_shuffles_does_not_keep_a_run_from_going_on(several_batches, tmp_path):
    x, y = every(several_batches.train)
    train = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
    shuffled = replace(several_batches, train=train)
    folder = run(shuffled, tmp_path / "run", methods=(NETWORK,))
    run(shuffled, folder, methods=(NETWORK,))


def test_images_of_a_folder_are_compared_by_their_files(several_batches, tmp_path, monkeypatch):
    files = []
    for index in range(100):
        path = tmp_path / f"{index}.png"
        Image.fromarray(np.full((8, 8, 3), index, np.uint8)).save(path)
        files.append((path, index % 3))
    images = ImageFiles(tuple(files), View(unchanged, Pixels()))
    decoded = []
    decode_picture = image_files.decode_picture

    def counted(file, is_grey=False):
        decoded.append(file)
        return decode_picture(file, is_grey)

    monkeypatch.setattr(image_files, "decode_picture", counted)
    loader, _ = batches_of(images, SourceSettings(model="a:b"), None)
    loaded = replace(several_batches, test=loader, ood={}, shifts={})
    folder = run(loaded, tmp_path / "run", methods=(NETWORK,))
    decoded.clear()
    assessing._data_checksum(loader, loaded.model)
    assert len(decoded) == 64  # the first batch
    run(loaded, folder, methods=(NETWORK,))
    os.utime(files[-1][0], ns=(0, 0))
    with pytest.raises(FileExistsError, match=r"data\.test was"):
        run(loaded, folder, methods=(NETWORK,))


def test_a_posterior_in_a_file_is_compared_by_its_content(loaded, tmp_path):
    path = tmp_path / "posterior.safetensors"
    la = Laplace(loaded.model, params="last_layer").fit(loaded.train)
    la.save(path)
    methods = (NETWORK, posterior_method("saved", "Saved", path, None))
    folder = run(loaded, tmp_path / "run", methods=methods)
    la.prior_precision = 7.0
    la.save(path)
    with pytest.raises(FileExistsError, match=r"methods\.saved\.posterior checksum was"):
        run(loaded, folder, methods=methods)


def test_a_run_of_an_earlier_version_that_cannot_be_compared_is_refused(loaded, tmp_path):
    folder = run(loaded, tmp_path / "run", methods=(NETWORK,))
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    for name in ("likelihood", "training data", "validation data"):
        del record["identity"][name]
    record["identity"]["data"] = {name: [123, 456] for name in record["identity"]["data"]}
    a_run.write_json(folder / "run.json", record)
    message = "earlier version, whose likelihood and training data and validation data cannot be"
    with pytest.raises(FileExistsError, match=message):
        run(loaded, folder, methods=(NETWORK,))
    run(loaded, folder, methods=(NETWORK,), overwrite=True)


def test_an_earlier_run_is_replaced_if_that_is_asked_for(loaded, tmp_path):
    folder = run(loaded, tmp_path / "run", methods=(NETWORK, LAST_LAYER))
    note = folder / "mine.txt"
    note.write_text("a note")
    run(loaded, folder, methods=(NETWORK,), overwrite=True)
    assert note.read_text() == "a note"
    assert not (folder / "posteriors/last-layer.safetensors").exists()
    assert [method["key"] for method in read_json(folder / "run.json")["methods"]] == ["network"]


def test_a_replacement_that_is_broken_off_begins_again(loaded, tmp_path, monkeypatch):
    folder = run(loaded, tmp_path / "run", methods=(NETWORK,))

    def fail(*_):
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(run_folder.shutil, "rmtree", fail)
        with pytest.raises(Broken):
            run(loaded, folder, methods=(NETWORK, LAST_LAYER), overwrite=True)
    run(loaded, folder, methods=(NETWORK, LAST_LAYER), overwrite=True)
    assert (folder / "posteriors/last-layer.safetensors").exists()


def test_a_folder_with_other_files_is_left_alone(loaded, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(FileExistsError, match=r"contains other files \(thesis.tex\)"):
        run(loaded, tmp_path)
    with pytest.raises(FileExistsError, match=r"is a file\. Pass the path of a folder"):
        run(loaded, tmp_path / "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("text", ["{", '{"format": 99}'])
def test_a_damaged_run_is_not_gone_on_with(loaded, tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run.json is damaged|run.json has format 99"):
        run(loaded, tmp_path)


def test_a_damaged_table_is_made_again(loaded, unbroken, tmp_path):
    folder = shutil.copytree(unbroken, tmp_path / "run")
    path = folder / "predictions/network/test.parquet"
    path.write_bytes(path.read_bytes()[:100])
    run(loaded, folder)
    assert json.dumps(contents(folder)) == json.dumps(contents(unbroken))


def test_a_full_disk_is_told_in_one_line_and_gone_on_from(loaded, unbroken, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        break_after(5, full, patch)
        with pytest.raises(OSError, match="No space left"):
            run(loaded, tmp_path / "run")
    folder = run(loaded, tmp_path / "run")
    assert json.dumps(contents(folder)) == json.dumps(contents(unbroken))


@pytest.mark.usefixtures("unbroken")
def test_the_model_is_left_as_it_was(loaded, parameters):
    state = loaded.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in parameters.items())


@pytest.mark.slow
def test_killed_runs_end_with_the_same_metrics(tmp_path):
    kill_fits.kill_reports(2, seed=1, folder=tmp_path)
