"""A fit that was broken off goes on where it stopped, to the same bits; or it is refused."""

import os
import re
import signal
import threading

import kill_fits
import oracle
import pytest
import torch
from breaking import Breaking, BrokenError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.curvature.fits import dense, kfac, saved_passes
from laplace_debias.laplace.files.fit_state import FitStates

SIZE, BATCH = 50, 7
NUM_BATCHES = 8


class Interrupting(nn.Module):
    """Ctrl-C comes in the middle of a forward pass."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.calls, self.at = layer, 0, -1

    def forward(self, x):
        Interrupting.calls += 1
        if Interrupting.calls == Interrupting.at:
            signal.raise_signal(signal.SIGINT)
        return self.layer(x)


@pytest.fixture(autouse=True)
def _after_every_batch(monkeypatch):
    monkeypatch.setattr(saved_passes, "EVERY", 0.0)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state"


MC = {"curvature": "ekfac", "fisher": "mc"}


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


def broken_off(folder, before=5, **options):
    """The state of a fit that failed before a batch."""
    with pytest.raises(BrokenError):
        fit(Breaking(loader(), before), folder, **options)
    return folder


def assert_same(la, expected):
    assert torch.equal(la.sample(3, generator()), expected.sample(3, generator()))
    for ours, theirs in zip(la.functional(X), expected.functional(X), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(la.log_marginal_likelihood(), expected.log_marginal_likelihood())


X = data()[:5][0]


@pytest.fixture
def skipped(monkeypatch):
    """Counts the batches that were not computed with again."""
    counted = []
    left = saved_passes._SavedPass.left

    def counting(self, x, y, place):
        found = left(self, x, y, place)
        if not found:
            counted.append(place)
        return found

    monkeypatch.setattr(saved_passes._SavedPass, "left", counting)
    return counted


@pytest.mark.parametrize(
    ("options", "before"),
    [
        ({"curvature": "kfac"}, 1),
        ({"curvature": "kfac", "factor_dtype": torch.float32}, 6),
        ({"curvature": "ekfac"}, 3),
        # In the second pass.
        ({"curvature": "ekfac"}, NUM_BATCHES + 2),
        ({"curvature": "ekfac", "fisher": "mc", "mc_samples": 2}, NUM_BATCHES + 2),
        ({"curvature": "diag", "fisher": "empirical"}, 4),
        ({"curvature": "full"}, 4),
        ({"curvature": "lowrank", "rank": 7}, 4),
        ({"curvature": "kfac", "joint": True, "memory_bound": 2000}, 4),
    ],
)
def test_a_fit_goes_on_to_the_same_bits(folder, skipped, options, before):
    expected = fit(loader(), **options)
    broken_off(folder, before, **options)
    assert folder.exists()
    assert_same(fit(loader(), folder, **options), expected)
    assert len(skipped) == before
    assert not folder.exists()


def test_a_full_matrix_that_was_gone_on_with_is_the_oracles(folder):
    model = network().double()
    x, y = data()[:]
    batches = [(a, b) for a, b in zip(x.double().split(BATCH), y.split(BATCH), strict=True)]
    with pytest.raises(BrokenError):
        fit(Breaking(batches, 5), folder, model=model, curvature="full")
    la = fit(batches, folder, model=model, curvature="full")
    names = [name for name, _ in model.named_parameters()]
    expected = oracle.ggn(model, x.double(), "classification", names)
    found = la.posterior.curvature.to_dense()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))


def test_it_can_be_broken_off_again_and_again(folder, skipped):
    expected = fit(loader(), curvature="ekfac")
    for before in (2, 5, NUM_BATCHES + 1, NUM_BATCHES + 4):
        broken_off(folder, before, curvature="ekfac")
    assert_same(fit(loader(), folder, curvature="ekfac"), expected)
    assert len(skipped) > NUM_BATCHES


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "full", "lowrank"])
def test_second_batches_of_a_debiased_fit(folder, skipped, curvature):
    first, second = data(seed=1), data(seed=2)
    batches = [DataLoader(one, batch_size=BATCH) for one in (first, second)]
    expected = Laplace(network(), curvature=curvature).fit_batches(*batches, num_data=SIZE)
    la = Laplace(network(), curvature=curvature)
    with pytest.raises(BrokenError):
        la.fit_batches(batches[0], Breaking(batches[1], 5), num_data=SIZE, resume=folder)
    la.fit_batches(*batches, num_data=SIZE, resume=folder)
    assert_same(la, expected)
    # The diagonal has no directions to find.
    assert len(skipped) == 5 + (curvature != "diag") * NUM_BATCHES


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "full", "lowrank"])
def test_folds(folder, skipped, curvature, monkeypatch):
    def fitted(folder=None):
        la = Laplace(network(), curvature=curvature)
        return la.fit(loader(), "crossfit", SIZE, generator(), folds=3, resume=folder)

    expected = fitted()
    save = FitStates.save

    def failing(self, number, state):
        if number == 3:
            raise BrokenError
        save(self, number, state)

    with monkeypatch.context() as patch:
        patch.setattr(FitStates, "save", failing)
        with pytest.raises(BrokenError):
            fitted(folder)
    assert_same(fitted(folder), expected)
    assert len(skipped) == 2


def test_rows_that_are_too_many_to_keep(folder, skipped, monkeypatch):
    monkeypatch.setattr(dense, "KEPT_ROWS", 20_000)
    batches, options = loader(shuffle=False, size=15), {"curvature": "lowrank", "rank": 2}
    # The eigenvectors begin at random.
    torch.manual_seed(5)
    expected = fit(batches, **options)
    with pytest.raises(BrokenError):
        fit(Breaking(batches, 2), folder, **options)
    torch.manual_seed(5)
    assert_same(fit(batches, folder, **options), expected)
    assert len(skipped) == 2


# ----------------------------------------------------------------------------- Ctrl-C, failures


@pytest.mark.parametrize("reads", [True, False])
def test_ctrl_c_saves_and_says_how_to_go_on(folder, skipped, reads, monkeypatch):
    monkeypatch.setattr(saved_passes, "EVERY", 1e9)
    expected = fit(loader())
    handler = signal.getsignal(signal.SIGINT)
    batches, model = loader(), network()
    if reads:
        batches = Breaking(loader(), 4, lambda: signal.raise_signal(signal.SIGINT))
    else:
        model[0] = Interrupting(model[0])
        expected = fit(loader(), model=model)
        # Where in a fit it comes: halfway through the forward passes of one without Ctrl-C.
        Interrupting.at, Interrupting.calls = Interrupting.calls * 2 // 3, 0
    with pytest.raises(KeyboardInterrupt, match=r"(\d) batches of pass 1 .*goes on") as caught:
        fit(batches, folder, model=model)
    assert signal.getsignal(signal.SIGINT) is handler
    Interrupting.at = -1
    saved = int(re.search(r"\d", str(caught.value))[0])
    assert saved == 4 if reads else saved > 0
    assert_same(fit(loader(), folder, model=model), expected)
    assert len(skipped) == saved


Interrupting.calls, Interrupting.at = 0, -1


def test_a_handler_of_the_users_own_stays(folder):
    called = []
    before = signal.signal(signal.SIGINT, lambda *_: called.append(1))
    try:
        interrupt = Breaking(loader(), 4, lambda: signal.raise_signal(signal.SIGINT))
        fit(interrupt, folder)
    finally:
        signal.signal(signal.SIGINT, before)
    assert called


def test_a_fit_in_another_thread(folder):
    expected, found = fit(loader()), []
    broken_off(folder)
    thread = threading.Thread(target=lambda: found.append(fit(loader(), folder)))
    thread.start()
    thread.join()
    assert_same(found[0], expected)


def test_a_disk_that_is_full_does_not_end_a_fit(folder, monkeypatch):
    def full(*_):
        raise OSError("There is no space left")

    expected = fit(loader())
    monkeypatch.setattr(FitStates, "save", full)
    with pytest.warns(UserWarning, match="not saved, and the fit goes on: There is no space left"):
        la = fit(loader(), folder)
    assert_same(la, expected)


def test_it_saves_every_so_often_and_seldom_if_that_takes_long(folder, monkeypatch):
    clock, at = [0.0], []

    def save(self, number, state):
        at.append(state.num_batches)
        clock[0] += 8.0

    class Clocked(Breaking):
        def __iter__(self):
            for batch in self.batches:
                clock[0] += 25.0
                yield batch

    monkeypatch.setattr(saved_passes, "EVERY", 60.0)
    monkeypatch.setattr(saved_passes.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(FitStates, "save", save)
    fit(Clocked(loader(shuffle=False), 0), folder)
    # The first batch is read before the pass. Then after 60 seconds; saving took 8 seconds, so that
    # the next is 160 later, and at the end.
    assert at == [4, NUM_BATCHES]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(loader())
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"curvature": "ekfac"}, r'curvature \("kfac" there, "ekfac" now\)'),
        ({"fisher": "empirical"}, "fisher"),
        ({"factor_dtype": torch.float32}, "factor_dtype"),
        ({"joint": True}, "joint"),
        ({"sharing": "reduce"}, "sharing"),
        ({"memory_bound": 5000}, "memory_bound"),
        ({"backend": "hooks"}, "backend"),
        ({"params": "last_layer"}, "blocks"),
        ({"likelihood": "multilabel"}, "likelihood"),
    ],
)
def test_another_fit_is_refused_with_what_differs(folder, change, says):
    broken_off(folder)
    if "likelihood" in change:
        x, y = data()[:]
        batches = [(x, nn.functional.one_hot(y, 4).float())]
    else:
        batches = loader()
    with pytest.raises(ValueError, match=f"another fit, which differs in .*{says}"):
        fit(batches, folder, **change)
    assert_same(fit(loader(), folder), fit(loader()))


def test_another_model_is_refused(folder):
    broken_off(folder)
    for change, says in (
        (lambda m: m[3].bias.data.add_(1e-3), r"parameters and buffers \(3\.bias\)"),
        (lambda m: m.__setitem__(1, nn.Sigmoid()), "model"),
    ):
        model = network()
        change(model)
        with pytest.raises(ValueError, match=f"differs in {says}"):
            fit(loader(), folder, model=model)


def test_other_data_are_refused(folder):
    broken_off(folder)
    with pytest.raises(ValueError, match="other data: in pass 1, its first batch differs"):
        fit(loader(), folder, seed=4)
    with pytest.raises(ValueError, match="other data: in pass 1, its first batch differs"):
        fit(loader(seed=2), folder)


def test_other_batches_behind_the_first_are_refused(folder):
    batches = list(loader(shuffle=False))
    with pytest.raises(BrokenError):
        fit(Breaking(batches, 5), folder)
    exchanged = [batches[0], batches[2], batches[1], *batches[3:]]
    with pytest.raises(ValueError, match="other data: in pass 1, its batch 2 differs"):
        fit(Breaking(exchanged, -1), folder)
    with pytest.raises(ValueError, match="it ends after 3 batches, without 14 of the"):
        fit(Breaking(batches[:3], -1), folder)


@pytest.mark.parametrize(
    ("options", "batches", "says"),
    [
        ({}, loader(), "shuffles with no seed: pass generator="),
        ({"fisher": "mc"}, loader(shuffle=False), "needs the same labels again: pass generator="),
    ],
)
def test_what_cannot_be_repeated_is_refused_before_work(folder, options, batches, says):
    with pytest.raises(ValueError, match=says):
        Laplace(network(), **options).fit(batches, resume=folder)
    with pytest.raises(ValueError, match=says):
        Laplace(network(), **options).fit_batches(batches, resume=folder)
    own = DataLoader(data(), batch_size=BATCH, shuffle=True, generator=generator())
    if not options:
        Laplace(network()).fit(own, resume=folder)


def test_a_folder_that_is_none(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NotADirectoryError, match="is a file: name a folder"):
        fit(loader(), file)
    other = tmp_path / "pass-1.safetensors"
    fit(loader()).save(other)
    with pytest.raises(ValueError, match="no state of a fit: give resume= a folder of its own"):
        fit(loader(), tmp_path)
    assert other.exists()


def test_what_else_is_in_the_folder_stays(folder):
    folder.mkdir()
    (folder / "notes").touch()
    broken_off(folder)
    fit(loader(), folder)
    assert os.listdir(folder) == ["notes"]


@pytest.mark.parametrize("how", ["cut", "byte", "empty"])
def test_a_damaged_state_is_never_used(folder, skipped, how):
    path = broken_off(folder) / "pass-1.safetensors"
    whole = path.read_bytes()
    damaged = {"cut": whole[:-9], "byte": whole[:-5] + b"\1" + whole[-4:], "empty": b""}[how]
    assert damaged != whole
    path.write_bytes(damaged)
    with pytest.warns(UserWarning, match=r"is damaged .* this pass begins anew"):
        la = fit(loader(), folder)
    assert_same(la, fit(loader()))
    assert not skipped


# --------------------------------------------------------------------------- other batches


@pytest.mark.parametrize("options", [{"curvature": "kfac"}, {"curvature": "full"}, MC])
def test_smaller_batches_go_on_to_the_same_up_to_rounding(folder, options):
    model = network().double()
    x, y = (part.double() if part.is_floating_point() else part for part in data()[:])
    whole = [(x, y)]
    expected = fit(whole, model=model, **options).posterior.curvature.to_dense()
    large, small = ([*zip(x.split(n), y.split(n), strict=True)] for n in (BATCH, 5))
    with pytest.raises(BrokenError):
        fit(Breaking(large, 3), folder, model=model, **options)
    # The fifth small batch is partly in the sums.
    found = fit(small, folder, model=model, **options).posterior.curvature.to_dense()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))


def test_sums_along_other_directions_are_not_gone_on_with(folder, monkeypatch):
    expected = fit(loader(), curvature="ekfac")
    broken_off(folder, NUM_BATCHES + 3, curvature="ekfac")
    plain = kfac.eigenbases

    def turned(*arguments):
        bases = plain(*arguments)
        for basis in bases.values():
            if basis.U_G is not None:
                basis.U_G.neg_()
        return bases

    monkeypatch.setattr(kfac, "eigenbases", turned)
    with pytest.warns(UserWarning, match="along other directions .* begins anew"):
        la = fit(loader(), folder, curvature="ekfac")
    # A direction's sign is nobody's choice.
    found, wanted = (one.posterior.curvature.to_dense() for one in (la, expected))
    torch.testing.assert_close(found, wanted)


# -------------------------------------------------------------------------------------- kills


@pytest.mark.slow
def test_killed_fits_end_bit_for_bit_as_others(tmp_path):
    found = kill_fits.kill_fits(5, seed=1, folder=tmp_path)
    assert not found.failures
    assert found.steps.total() == 5


@pytest.mark.slow
def test_killed_savings_leave_the_old_posterior_or_the_new_one(tmp_path):
    found = kill_fits.kill_savings(4, seed=1, folder=tmp_path)
    assert not found.failures
    assert found.steps.total() == 4
