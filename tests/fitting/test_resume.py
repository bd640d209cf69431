"""An interrupted fit continues where it stopped, to the same bits, or it is refused."""

import json
import os
import threading
from pathlib import Path

import kill_fits
import pytest
import torch
from failing_loader import FailingLoader, LoaderError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, posterior_as_prior
from laplace_debias.curvature.fits import checkpoint, dense
from laplace_debias.curvature.fits.checkpoint import SavedPass
from laplace_debias.system.files import bytes_of

SIZE, BATCH = 50, 7
NUM_BATCHES = 8

pytestmark = pytest.mark.usefixtures("batches_apart")


@pytest.fixture(autouse=True)
def _after_every_batch(monkeypatch):
    monkeypatch.setattr(checkpoint, "EVERY", 0.0)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state"


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4)]
    return nn.Sequential(*layers).eval()


def data(seed=1, size=SIZE):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 2, 4, 4, generator=generator)
    return TensorDataset(x, torch.randint(4, (size,), generator=generator))


def loader(*, shuffle=True, **options):
    return DataLoader(data(**options), batch_size=BATCH, shuffle=shuffle)


def generator(seed=3):
    return torch.Generator().manual_seed(seed)


def fit(batches, folder=None, seed=3, model=None, **options):
    la = Laplace(model or network(), **options)
    return la.fit(batches, num_data=SIZE, generator=generator(seed), resume=folder)


def broken_off(folder, num_read=5, **options):
    """Save the state of a fit whose loader failed after `num_read` batches; return its folder."""
    with pytest.raises(LoaderError):
        fit(FailingLoader(loader(), num_read), folder, **options)
    return folder


def assert_same(la, expected):
    assert torch.equal(la.sample(3, generator()), expected.sample(3, generator()))
    for ours, theirs in zip(la.functional(X), expected.functional(X), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(la.log_marginal_likelihood(), expected.log_marginal_likelihood())


X = data()[:5][0]


@pytest.fixture
def skipped(monkeypatch):
    """List the batches that a resumed fit did not compute with again."""
    skipped_batches = []
    remaining = SavedPass.remaining

    def counting(self, batches):
        remaining_batches = list(remaining(self, batches))
        skipped_batches.extend(batches[: len(batches) - len(remaining_batches)])
        return remaining_batches

    monkeypatch.setattr(SavedPass, "remaining", counting)
    return skipped_batches


@pytest.mark.parametrize(
    ("options", "num_read"),
    [
        ({"curvature": "kfac"}, 1),
        ({"curvature": "kfac", "factor_dtype": torch.float32}, 6),
        ({"curvature": "kfac", "rank": 1}, 4),
        ({"curvature": "ekfac"}, 3),
        # In the second pass.
        ({"curvature": "ekfac"}, NUM_BATCHES + 2),
        ({"curvature": "ekfac", "fisher": "mc", "mc_samples": 2}, NUM_BATCHES + 2),
        ({"curvature": "ekfac", "fisher": "signs", "mc_samples": 2}, NUM_BATCHES + 2),
        ({"curvature": "diag", "fisher": "empirical"}, 4),
        ({"curvature": "full"}, 4),
        ({"curvature": "lowrank", "rank": 7}, 4),
        ({"curvature": "kfac", "joint": True, "memory_bound": 2000}, 4),
    ],
)
def test_a_fit_goes_on_to_the_same_bits(folder, skipped, options, num_read):
    expected = fit(loader(), **options)
    broken_off(folder, num_read, **options)
    assert folder.exists()
    assert_same(fit(loader(), folder, **options), expected)
    assert len(skipped) == num_read
    assert not folder.exists()


def test_a_fit_goes_on_behind_the_draw_of_inducing_inputs(folder, skipped):
    options = {"curvature": "gp", "inducing": 3}
    expected = fit(loader(), **options)
    broken_off(folder, NUM_BATCHES + 4, **options)
    la = fit(loader(), folder, **options)
    x, _ = next(iter(loader()))
    assert torch.equal(la.functional(x)[1], expected.functional(x)[1])
    assert len(skipped) == 4


def updated(la, batches, folder=None, seed=5):
    return la.update(batches, SIZE, generator=generator(seed), resume=folder)


@pytest.mark.parametrize(
    ("options", "num_read"),
    [
        ({"curvature": "kfac"}, 4),
        ({"curvature": "ekfac", "fisher": "mc"}, 4),
        ({"curvature": "lowrank", "rank": 7}, 4),
        ({"curvature": "gp", "inducing": 3}, 4),
        *(
            pytest.param({"curvature": name}, 4, marks=pytest.mark.slow)
            for name in ("diag", "full")
        ),
    ],
)
def test_an_update_goes_on_to_the_same_bits(folder, skipped, options, num_read):
    first, second = loader(), loader(seed=2)
    expected = updated(fit(first, **options), second)
    la = fit(first, **options)
    fitted = la.posterior
    with pytest.raises(LoaderError):
        updated(la, FailingLoader(second, num_read), folder)
    assert la.posterior is fitted
    assert_same(updated(la, second, folder), expected)
    assert la.num_data == 2 * SIZE
    assert len(skipped) == num_read
    assert not folder.exists()


def test_an_update_of_other_earlier_data_is_refused(folder):
    second = loader(seed=2)
    la = fit(loader())
    with pytest.raises(LoaderError):
        updated(la, FailingLoader(second, 4), folder)
    with pytest.raises(ValueError, match=r"the state of a different fit: .*earlier data"):
        updated(fit(loader(seed=3)), second, folder)
    with pytest.raises(ValueError, match=r"the state of a different fit: .*earlier data"):
        Laplace(network()).fit(second, generator=generator(5), resume=folder)
    assert_same(updated(la, second, folder), updated(fit(loader()), second))


def test_an_update_that_cannot_be_repeated_is_refused_before_work(folder):
    la = fit(loader())
    with pytest.raises(ValueError, match="shuffles with its own generator"):
        la.update(loader(seed=2), resume=folder)
    assert la.num_data == SIZE
    assert not folder.exists()


def test_a_fit_with_an_earlier_posterior_as_prior_goes_on_to_the_same_bits(folder, skipped):
    prior = posterior_as_prior(fit(loader()))
    batches = loader(seed=2)
    expected = fit(batches, prior=prior)
    with pytest.raises(LoaderError):
        fit(FailingLoader(batches, 4), folder, prior=prior)
    assert_same(fit(batches, folder, prior=prior), expected)
    assert len(skipped) == 4


def test_it_can_be_broken_off_again_and_again(folder, skipped):
    expected = fit(loader(), curvature="ekfac")
    for num_read in (2, 5, NUM_BATCHES + 1, NUM_BATCHES + 4):
        broken_off(folder, num_read, curvature="ekfac")
    assert_same(fit(loader(), folder, curvature="ekfac"), expected)
    assert len(skipped) > NUM_BATCHES


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "full", "lowrank"])
def test_second_batches_of_a_debiased_fit(folder, skipped, curvature):
    first, second = data(seed=1), data(seed=2)
    loaders = [DataLoader(dataset, batch_size=BATCH) for dataset in (first, second)]
    expected = Laplace(network(), curvature=curvature).fit_batches(*loaders, num_data=SIZE)
    la = Laplace(network(), curvature=curvature)
    with pytest.raises(LoaderError):
        la.fit_batches(loaders[0], FailingLoader(loaders[1], 5), num_data=SIZE, resume=folder)
    la.fit_batches(*loaders, num_data=SIZE, resume=folder)
    assert_same(la, expected)
    # The diagonal has no directions to find.
    assert len(skipped) == 5 + (curvature != "diag") * NUM_BATCHES


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "full", "lowrank"])
def test_folds(folder, skipped, curvature, monkeypatch):
    def fitted(folder=None):
        la = Laplace(network(), curvature=curvature)
        return la.fit(loader(), "crossfit", SIZE, generator(), folds=3, resume=folder)

    expected = fitted()
    save = SavedPass.save
    calls = []

    def failing(self, *arguments):
        save(self, *arguments)
        calls.append(1)
        if len(calls) == 2:
            raise LoaderError

    with monkeypatch.context() as patch:
        patch.setattr(SavedPass, "save", failing)
        with pytest.raises(LoaderError):
            fitted(folder)
    assert_same(fitted(folder), expected)
    assert len(skipped) == 2


def test_rows_that_are_too_many_to_keep(folder, skipped, monkeypatch):
    monkeypatch.setattr(dense, "KEPT_ROWS", 20_000)
    batches = loader(shuffle=False, size=15)
    options = {"curvature": "lowrank", "rank": 2}
    expected = fit(batches, **options)
    with pytest.raises(LoaderError):
        fit(FailingLoader(batches, 2), folder, **options)
    assert_same(fit(batches, folder, **options), expected)
    assert len(skipped) == 2


# ----------------------------------------------------------------------------- when it is saved


def test_a_fit_in_another_thread(folder):
    expected = fit(loader())
    fits = []
    broken_off(folder)
    thread = threading.Thread(target=lambda: fits.append(fit(loader(), folder)))
    thread.start()
    thread.join()
    assert_same(fits[0], expected)


def test_a_disk_that_is_full_does_not_end_a_fit(folder, monkeypatch):
    def full(*_):
        raise OSError("There is no space left")

    expected = fit(loader())
    monkeypatch.setattr(checkpoint, "write_sealed", full)
    with pytest.warns(UserWarning, match=r"not saved .*There is no space left"):
        la = fit(loader(), folder)
    assert_same(la, expected)


def test_it_saves_once_a_minute(folder, monkeypatch):
    clock = [0.0]
    saved_after = []
    write = checkpoint.write_sealed

    def timed(path, texts, tensors):
        saved_after.append(json.loads(texts["progress"])["num_batches"])
        write(path, texts, tensors)
        clock[0] += 8.0

    class Clocked(FailingLoader):
        def __iter__(self):
            for batch in self.batches:
                clock[0] += 25.0
                yield batch

    monkeypatch.setattr(checkpoint, "EVERY", 60.0)
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(checkpoint, "write_sealed", timed)
    fit(Clocked(loader(shuffle=False), 0), folder)
    # The first batch is read before the pass.
    assert saved_after == [4, 7]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(loader())
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"curvature": "ekfac"}, "curvature was kfac, is now ekfac"),
        ({"fisher": "empirical"}, "fisher"),
        ({"factor_dtype": torch.float32}, "factor_dtype"),
        ({"joint": True}, "joint"),
        ({"sharing": "reduce"}, "sharing"),
        ({"memory_bound": 5000}, "memory_bound"),
        ({"backend": "backpack"}, "backend"),
        ({"params": "last_layer"}, "blocks"),
        ({"likelihood": "multilabel"}, "likelihood"),
    ],
)
def test_another_fit_is_refused_with_what_differs(folder, change, message):
    broken_off(folder)
    if "likelihood" in change:
        x, y = data()[:]
        batches = [(x, nn.functional.one_hot(y, 4).float())]
    else:
        batches = loader()
    with pytest.raises(ValueError, match=f"the state of a different fit: .*{message}"):
        fit(batches, folder, **change)
    assert_same(fit(loader(), folder), fit(loader()))


def test_another_model_is_refused(folder):
    broken_off(folder)
    for change, message in (
        (lambda m: m[3].bias.data.add_(1e-3), r"parameters and buffers\.3\.bias was"),
        (lambda m: m.__setitem__(1, nn.Sigmoid()), "model"),
    ):
        model = network()
        change(model)
        with pytest.raises(ValueError, match=f"different fit: {message}"):
            fit(loader(), folder, model=model)


def test_other_data_are_refused(folder):
    broken_off(folder)
    with pytest.raises(ValueError, match=r"different fit: generator was .*, is now "):
        fit(loader(), folder, seed=4)
    with pytest.raises(
        ValueError,
        match=r"different batches .in pass 1 over the data, the saved sums contain different",
    ):
        fit(loader(seed=2), folder)


def mirrored(x, y):
    return x.flip(3), y


def with_exchanged_columns(x, y):
    return x[:, [1, 0]], y


def with_permuted_labels(x, y):
    return x, y.flip(0)


def reshaped(x, y):
    return x.reshape(-1, 2, 2, 8).contiguous(), y


@pytest.mark.parametrize(
    "exchange", [mirrored, with_exchanged_columns, with_permuted_labels, reshaped]
)
def test_batches_whose_entries_were_exchanged_are_refused(folder, exchange):
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.AdaptiveAvgPool2d(2), *network()[1:])
    batches = list(loader(shuffle=False))
    with pytest.raises(LoaderError):
        fit(FailingLoader(batches, 5), folder, model=model)
    exchanged = [exchange(x, y) for x, y in batches]
    with pytest.raises(ValueError, match="the saved sums contain different batches"):
        fit(FailingLoader(exchanged, -1), folder, model=model)


def test_weights_whose_entries_were_exchanged_are_refused(folder):
    batches = [(x, y, torch.linspace(0.5, 1.5, len(x))) for x, y in loader(shuffle=False)]
    with pytest.raises(LoaderError):
        fit(FailingLoader(batches, 5), folder)
    exchanged = [(x, y, weights.flip(0)) for x, y, weights in batches]
    with pytest.raises(ValueError, match="the saved sums contain different batches"):
        fit(FailingLoader(exchanged, -1), folder)


def test_a_model_whose_entries_were_exchanged_is_refused(folder):
    broken_off(folder)
    model = network()
    with torch.no_grad():
        model[3].weight.copy_(model[3].weight.flip(1))
    with pytest.raises(ValueError, match=r"different fit: parameters and buffers\.3\.weight was"):
        fit(loader(), folder, model=model)


def test_a_state_of_another_version_is_refused(folder):
    broken_off(folder)
    path = folder / "fit.json"
    identity = json.loads(path.read_text())
    del identity["format"]
    path.write_text(json.dumps(identity))
    with pytest.raises(ValueError, match=r"by another version .* start the fit again"):
        fit(loader(), folder)


def test_another_number_of_threads_is_refused(folder):
    broken_off(folder)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    try:
        with pytest.raises(
            ValueError, match=f"threads was {num_threads}, is now {num_threads + 1}"
        ):
            fit(loader(), folder)
    finally:
        torch.set_num_threads(num_threads)


def test_other_batches_behind_the_first_are_refused(folder):
    batches = list(loader(shuffle=False))
    with pytest.raises(LoaderError):
        fit(FailingLoader(batches, 5), folder)
    exchanged = [batches[0], batches[2], batches[1], *batches[3:]]
    with pytest.raises(
        ValueError,
        match=r"different batches .in pass 1 over the data, the saved sums contain different",
    ):
        fit(FailingLoader(exchanged, -1), folder)
    with pytest.raises(ValueError, match="the data has 3 batches, but the saved sums contain 5"):
        fit(FailingLoader(batches[:3], -1), folder)


@pytest.mark.parametrize(
    ("options", "batches", "message"),
    [
        ({}, loader(), "shuffles with its own generator. Remove .* same generator="),
        (
            {"fisher": "mc"},
            loader(shuffle=False),
            "the same random labels as .* To draw the same labels, pass the same generator=",
        ),
    ],
)
def test_what_cannot_be_repeated_is_refused_before_work(folder, options, batches, message):
    with pytest.raises(ValueError, match=message):
        Laplace(network(), **options).fit(batches, resume=folder)
    with pytest.raises(ValueError, match=message):
        Laplace(network(), **options).fit_batches(batches, resume=folder)


def test_a_loader_that_shuffles_by_a_generator_of_its_own_is_refused(folder):
    shuffled = DataLoader(data(), batch_size=BATCH, shuffle=True, generator=generator())
    with pytest.raises(
        ValueError, match=r"shuffles with its own generator\. Remove `generator=` from the loader"
    ):
        fit(shuffled, folder)
    assert not folder.exists()


def test_a_folder_that_is_none(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NotADirectoryError, match=r"is a file\. Pass the path of a folder"):
        fit(loader(), file)


def test_what_else_is_in_the_folder_stays(folder):
    folder.mkdir()
    (folder / "notes").touch()
    broken_off(folder)
    fit(loader(), folder)
    assert os.listdir(folder) == ["notes"]


@pytest.mark.parametrize("damage", ["cut", "byte", "empty"])
def test_a_damaged_state_is_never_used(folder, damage):
    path = broken_off(folder) / "pass-1.rank-0.safetensors"
    intact = path.read_bytes()
    damaged = {"cut": intact[:-9], "byte": intact[:-5] + b"\1" + intact[-4:], "empty": b""}[damage]
    assert damaged != intact
    path.write_bytes(damaged)
    with pytest.raises(
        ValueError, match=r"is damaged .*. Delete the folder, and start the fit again"
    ):
        fit(loader(), folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_damaged_description_of_the_fit_is_named(folder, content):
    path = broken_off(folder) / "fit.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"fit\.json is damaged .*\. Delete the folder, and start"):
        fit(loader(), folder)


def test_a_fit_that_is_killed_while_it_removes_its_state_leaves_nothing_to_another(
    folder, monkeypatch
):
    """Another model on the same data must not continue from the sums of the first one."""
    removed = []
    unlink = Path.unlink

    def unlink_one(path, **options):
        if path.parent == folder and path.suffix != ".partial":
            if removed:
                raise KeyboardInterrupt
            removed.append(path.name)
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink_one)
        with pytest.raises(KeyboardInterrupt):
            fit(loader(), folder, curvature="ekfac")
    assert len(removed) == 1
    other_model = network()
    other_model[0].weight.data *= 2
    with pytest.raises(ValueError, match="contains the state of a different fit"):
        fit(loader(), folder, model=other_model, curvature="ekfac")


# -------------------------------------------------------------------------------------- kills


@pytest.mark.slow
def test_killed_fits_end_bit_for_bit_as_others(tmp_path):
    kill_fits.kill_fits(5, seed=1, folder=tmp_path)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(4)[::2][:1],
        torch.zeros(3, 2)[:1, 0],
        torch.zeros(4)[::2][:0],
        torch.tensor(3.0),
        torch.arange(6).view(2, 3).T,
        torch.ones(1, dtype=torch.bfloat16).expand(3),
    ],
)
def test_tensors_of_any_stride_have_bytes(tensor):
    assert bytes(bytes_of(tensor)) == bytes(bytes_of(torch.clone(tensor.contiguous())))
    assert len(bytes_of(tensor)) == tensor.numel() * tensor.itemsize
