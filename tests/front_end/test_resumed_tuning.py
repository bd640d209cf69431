"""A search for the prior precision that was broken off goes on to the same bits; or is refused."""

import re
import signal

import kill_fits
import pytest
import torch
from breaking import Breaking, BrokenError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.curvature.fits import saved_passes

SIZE, BATCH = 50, 7
NUM_BATCHES = 8
FEW = torch.logspace(-1, 2, 4)


@pytest.fixture(autouse=True)
def _after_every_batch(monkeypatch):
    monkeypatch.setattr(saved_passes, "EVERY", 0.0)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state"


def data(seed, kind="classification"):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SIZE, 5, generator=generator)
    if kind == "regression":
        return TensorDataset(x, x[:, :2].sin() + 0.3 * torch.randn(SIZE, 2, generator=generator))
    return TensorDataset(x, torch.randint(3, (SIZE,), generator=generator))


def loader(seed=7, kind="classification", shuffle=True):
    return DataLoader(data(seed, kind), batch_size=BATCH, shuffle=shuffle)


def fitted(kind="classification", seed=1, **options):
    torch.manual_seed(0)
    outputs = 2 if kind == "regression" else 3
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, outputs)).eval()
    options = {"likelihood": kind, **options}
    return Laplace(model, **options).fit(loader(seed, kind, shuffle=False))


def tune(la, batches, folder=None, **options):
    return la.tune(batches, generator=torch.Generator().manual_seed(5), resume=folder, **options)


def broken_off(folder, before=5, la=None, kind="classification", **options):
    with pytest.raises(BrokenError):
        tune(la or fitted(kind), Breaking(loader(kind=kind), before), folder, **options)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "before", "options"),
    [
        ("classification", 5, {}),
        ("classification", 1, {"metric": "ece"}),
        ("classification", 6, {"metric": "brier", "grid": FEW}),
        # In the second pass, which refines the grid.
        ("classification", NUM_BATCHES + 3, {"grid": FEW, "extend": True}),
        ("regression", 5, {}),
        ("regression", 3, {"sigma": False, "grid": FEW}),
    ],
)
def test_a_search_goes_on_to_the_same_bits(folder, kind, before, options, monkeypatch):
    calls = []
    plain = Laplace.predict_grid

    def counting(self, x, grid, **how):
        calls.append(len(x))
        return plain(self, x, grid, **how)

    monkeypatch.setattr(Laplace, "predict_grid", counting)
    expected = fitted(kind)
    wanted = tune(expected, loader(kind=kind), **options)
    alone = len(calls)
    calls.clear()
    broken_off(folder, before, kind=kind, **options)
    assert len(calls) == before
    la = fitted(kind)
    assert tune(la, loader(kind=kind), folder, **options) == wanted
    assert torch.equal(la.prior_precision, expected.prior_precision)
    # No example was predicted twice.
    assert len(calls) == alone
    assert not folder.exists()


def test_it_can_be_broken_off_again_and_again(folder):
    wanted = tune(fitted(), loader())
    for before in (2, 5, 7):
        broken_off(folder, before)
    assert tune(fitted(), loader(), folder) == wanted


def test_ctrl_c_saves_and_says_how_to_go_on(folder, monkeypatch):
    monkeypatch.setattr(saved_passes, "EVERY", 1e9)
    wanted = tune(fitted(), loader())
    batches = Breaking(loader(), 4, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match=r"4 batches of pass 1 .*the same call.*goes on"):
        tune(fitted(), batches, folder)
    assert tune(fitted(), loader(), folder) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        ({"seed": 2}, {}, r"posterior \("),
        ({"curvature": "diag"}, {}, r'curvature \("kfac" there, "diag" now\)'),
        ({}, {"grid": FEW}, "grid"),
        ({}, {"metric": "ece"}, r'metric \("nll" there, "ece" now\)'),
        ({}, {"link": "bridge"}, "link"),
        ({}, {"extend": False}, "extend"),
    ],
)
def test_another_search_is_refused_with_what_differs(folder, change, options, says):
    broken_off(folder)
    with pytest.raises(ValueError, match=f"another tuning, which differs in .*{says}"):
        tune(fitted(**change), loader(), folder, **options)
    assert tune(fitted(), loader(), folder) == tune(fitted(), loader())


def test_other_data_are_refused(folder):
    broken_off(folder)
    with pytest.raises(ValueError, match="a tuning of other data: in pass 1, its first batch diff"):
        tune(fitted(), loader(seed=8), folder)
    batches = list(loader(shuffle=False))
    with pytest.raises(BrokenError):
        tune(fitted(), Breaking(batches, 4), folder.with_name("other"))
    fewer = [*batches[:2], *batches[4:]]
    with pytest.raises(ValueError, match="in pass 1, its batch 3 differs"):
        tune(fitted(), fewer, folder.with_name("other"))


def test_the_folder_of_a_fit_is_refused(folder):
    la = Laplace(fitted().model)
    with pytest.raises(BrokenError):
        la.fit(Breaking(list(loader(shuffle=False)), 3), num_data=SIZE, resume=folder)
    with pytest.raises(ValueError, match="the state of another tuning, which differs in"):
        tune(fitted(), loader(), folder)


def test_what_cannot_be_repeated_is_refused_before_work(folder):
    with pytest.raises(ValueError, match=re.escape("shuffles with no seed: pass generator=")):
        fitted().tune(loader(), resume=folder)
    with pytest.raises(ValueError, match=r"uses neither .* resume"):
        fitted().tune(method="marglik", resume=folder)
    assert not folder.exists()


@pytest.mark.slow
def test_killed_searches_end_bit_for_bit_as_others(tmp_path):
    found = kill_fits.kill_tunings(3, seed=1, folder=tmp_path)
    assert not found.failures
    assert found.steps.total() == 4
