"""A posterior in parts on disk: the same bits, in little memory, and never a wrong one."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.curvature.fits import groups
from laplace_debias.curvature.losses.likelihoods import Categorical
from laplace_debias.laplace import grouping
from laplace_debias.laplace.files import folder_reader, parts
from laplace_debias.laplace.files.folder import FolderWriter
from laplace_debias.laplace.files.sealed import write_sealed
from laplace_debias.system import atomic


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5)]
    return nn.Sequential(*layers).eval()


def batches(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 2, 5, 5, generator=generator)
    data = TensorDataset(x, torch.randint(5, (24,), generator=generator))
    return DataLoader(data, batch_size=8)


def fitted(curvature="ekfac", **options):
    return Laplace(network(), curvature=curvature, **options).fit(batches())


def seeded():
    return torch.Generator().manual_seed(1)


def blocks_of(la):
    """All tensors of the curvature."""
    parts = ("U_G", "U_A", "U", "magnitudes")
    blocks = la.posterior.curvature.blocks.values()
    found = [getattr(block, part, None) for block in blocks for part in parts]
    return [tensor for tensor in found if tensor is not None]


def assert_same(one, other, x):
    """The same bits of all that is asked of a posterior."""
    assert torch.equal(one.mean, other.mean)
    for a, b in zip(one.functional(x), other.functional(x), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(one.predict(x).probs, other.predict(x).probs)
    assert torch.equal(one.sample(3, seeded()), other.sample(3, seeded()))
    assert one.log_marginal_likelihood() == other.log_marginal_likelihood()
    results = [la.tune(batches(2), grid=torch.logspace(-2, 4, 5)) for la in (one, other)]
    assert results[0] == results[1]
    assert torch.equal(one.prior_precision, other.prior_precision)
    nn_probs = [la.predict(x, "nn", 4, seeded()).probs for la in (one, other)]
    assert torch.equal(*nn_probs)


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "lowrank", "full"])
@pytest.mark.parametrize("mmap", [False, True])
def test_parts_give_the_bits_that_were_saved(curvature, mmap, tmp_path):
    la = fitted(curvature, prior_mean=0.1, temperature=0.5)
    la.save(tmp_path / "one.safetensors")
    la.save(tmp_path / "new" / "posterior", parts=True)
    loaded = Laplace.load(tmp_path / "new" / "posterior", la.model, mmap=mmap)
    assert (loaded._fitted.mapped is not None) == mmap
    # In memory eigenvectors lie in another order than in files, which rounds in another way.
    whole = Laplace.load(tmp_path / "one.safetensors", la.model)
    assert_same(whole, loaded, torch.randn(3, 2, 5, 5))
    for one, other in zip(blocks_of(la), blocks_of(loaded), strict=True):
        assert torch.equal(one, other)


def test_a_single_file_is_mapped_too(tmp_path):
    la = fitted()
    la.save(tmp_path / "posterior.safetensors")
    whole, loaded = (
        Laplace.load(tmp_path / "posterior.safetensors", la.model, mmap=mmap)
        for mmap in (False, True)
    )
    assert_same(whole, loaded, torch.randn(3, 2, 5, 5))


@pytest.mark.parametrize("curvature", ["kfac", "diag", "lowrank"])
def test_a_fit_that_stores_its_posterior_gives_the_same_bits(curvature, tmp_path):
    la = fitted(curvature)
    stored = Laplace(la.model, curvature=curvature)
    stored.fit(batches(), store=tmp_path / "p")
    assert stored._fitted.mapped is not None
    for one, other in zip(blocks_of(la), blocks_of(stored), strict=True):
        assert torch.equal(one, other)
    loaded = Laplace.load(tmp_path / "p", la.model)
    assert_same(stored, loaded, torch.randn(3, 2, 5, 5))


def test_groups_are_stored_one_after_the_other(tmp_path, monkeypatch):
    la = fitted("ekfac")
    stored = Laplace(la.model, curvature="ekfac")
    there = []

    def fit_one(*arguments):
        there.append(len(list(tmp_path.glob("blocks-*"))))
        return original(*arguments)

    original = groups._fit_one
    monkeypatch.setattr(groups, "_fit_one", fit_one)
    monkeypatch.setattr(
        grouping, "_grouped", lambda planned, *_: grouping.Grouping(planned, (1, 2, 1), {})
    )
    stored.fit(batches(), memory_bound=2**30, store=tmp_path)
    assert there == [0, 1, 2]
    for one, other in zip(blocks_of(la), blocks_of(stored), strict=True):
        assert torch.equal(one, other)


def test_a_tuned_posterior_is_saved_without_its_blocks_once_more(tmp_path):
    la = fitted()
    la.save(tmp_path, parts=True)
    before = {p.name: p.stat().st_ino for p in tmp_path.glob("blocks-*")}
    loaded = Laplace.load(tmp_path, la.model, mmap=True)
    loaded.prior_precision = 7.0
    loaded.save(tmp_path, parts=True)
    assert {p.name: p.stat().st_ino for p in tmp_path.glob("blocks-*")} == before
    assert len(list(tmp_path.iterdir())) == len(before) + 2
    again = Laplace.load(tmp_path, la.model)
    assert float(again.prior_precision) == 7.0
    # What is not from there is written, and the old parts are removed.
    la.save(tmp_path, parts=True)
    names = {p.name for p in tmp_path.glob("blocks-*")}
    assert len(names) == len(before)
    assert not names & set(before)
    # The mapping stays what it was.
    assert torch.equal(loaded.sample(1, seeded()), again.sample(1, seeded()))


def test_a_folder_that_was_moved_or_removed_since_it_was_mapped(tmp_path):
    old, new, other = (tmp_path / name for name in ("old", "new", "other"))
    la = fitted()
    la.save(old, parts=True)
    loaded = Laplace.load(old, la.model, mmap=True)
    old.rename(new)
    before = {p.name: p.stat().st_ino for p in new.glob("block-*")}
    loaded.save(new, parts=True)
    assert {p.name: p.stat().st_ino for p in new.glob("block-*")} == before
    shutil.rmtree(new)
    loaded.save(other, parts=True)
    again = Laplace.load(other, la.model)
    assert torch.equal(again.sample(1, seeded()), loaded.sample(1, seeded()))


def test_a_rescaled_posterior_is_written_anew(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).eval()
    data = [(torch.randn(20, 3), torch.randn(20, 1))]
    la = Laplace(model, "regression", sigma=1.0).fit(data, store=tmp_path)
    la.tune(method="marglik", sigma=True)
    x = torch.randn(4, 3)
    la.save(tmp_path, parts=True)
    assert torch.equal(Laplace.load(tmp_path, model).predict(x).variance, la.predict(x).variance)


def damage(path, rng):
    raw = bytearray(path.read_bytes())
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(raw))


@pytest.mark.parametrize("mmap", [False, True])
def test_any_damage_of_any_file_is_refused(mmap, tmp_path):
    la = fitted("kfac")
    la.save(tmp_path / "p", parts=True)
    rng = random.Random(0)
    names = sorted(p.name for p in (tmp_path / "p").iterdir())
    for number in range(60):
        shutil.rmtree(tmp_path / "q", ignore_errors=True)
        shutil.copytree(tmp_path / "p", tmp_path / "q")
        path = tmp_path / "q" / names[number % len(names)]
        if number % 3:
            damage(path, rng)
        else:
            path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
        with pytest.raises(ValueError, match=r"save (the posterior|it) again"):
            Laplace.load(tmp_path / "q", la.model, mmap=mmap)


def parts_of(folder):
    return [
        folder / part["file"] for part in json.loads((folder / "index.json").read_text())["parts"]
    ]


def as_format_1(la, folder):
    """The folder that was written before: a sealed file for each block."""
    la.save(folder, parts=True)
    told = json.loads((folder / "index.json").read_text())
    tensors, parts = {}, []
    for part in told["parts"]:
        tensors |= load_file(folder / part["file"])
        (folder / part["file"]).unlink()
    of_block = {}
    for name in tensors:
        block, dot, _ = name.partition(".")
        of_block.setdefault(f"block-{int(block):05d}" if dot else "mean", []).append(name)
    for number, (what, names) in enumerate(sorted(of_block.items(), reverse=True)):
        path = folder / f"{what}-{number:016x}.safetensors"
        kept = {name: tensors[name] for name in names}
        checksum = write_sealed(path, {"format": "laplace-debias part/1"}, kept)
        parts.append({"file": path.name, "checksum": checksum, "bytes": path.stat().st_size})
    told = {"format": "laplace-debias folder/1", "header": told["header"], "parts": parts}
    text = json.dumps({**told, "checksum": "0" * 64}).encode()
    digest = hashlib.blake2b(text, digest_size=32).hexdigest().encode()
    (folder / "index.json").write_bytes(text[:-66] + digest + b'"}')


@pytest.mark.parametrize("mmap", [False, True])
def test_folders_with_a_file_for_each_block_are_read(mmap, tmp_path):
    la = fitted("ekfac")
    as_format_1(la, tmp_path / "old")
    la.save(tmp_path / "new", parts=True)
    assert len(list((tmp_path / "old").iterdir())) == 6
    old, new = (Laplace.load(tmp_path / name, la.model, mmap=mmap) for name in ("old", "new"))
    assert_same(old, new, torch.randn(3, 2, 5, 5))
    old.save(tmp_path / "old", parts=True)
    assert len(list((tmp_path / "old").iterdir())) == 3
    assert_same(Laplace.load(tmp_path / "old", la.model), new, torch.randn(3, 2, 5, 5))
    as_format_1(la, tmp_path / "old")
    parts = parts_of(tmp_path / "old")
    parts[2].write_bytes(parts[2].read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{parts[2].name} is damaged"):
        Laplace.load(tmp_path / "old", la.model, mmap=mmap)


def exchange(a, b):
    shutil.copy(a, "swap")
    shutil.copy(b, a)
    shutil.copy("swap", b)


def test_missing_swapped_and_foreign_parts_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    la = fitted("kfac")
    la.save(tmp_path / "p", parts=True)
    other = fitted("kfac", fisher="empirical")
    other.save(tmp_path / "other", parts=True)

    def refused(match):
        with pytest.raises(ValueError, match=match):
            Laplace.load(tmp_path / "q", la.model)
        shutil.rmtree(tmp_path / "q")
        shutil.copytree(tmp_path / "p", tmp_path / "q")

    shutil.copytree(tmp_path / "p", tmp_path / "q")
    parts = parts_of(tmp_path / "q")
    parts[1].unlink()
    refused("names is missing .*save the posterior again")
    exchange(parts[0], parts[1])
    refused("the file of another save")
    # The same shapes, and so the same header: the numbers tell.
    shutil.copy(parts_of(tmp_path / "other")[1], parts[1])
    refused("the checksum of .* is not that of its content")
    shutil.copy(tmp_path / "other" / "index.json", tmp_path / "q" / "index.json")
    refused("names is missing")
    shutil.copy(tmp_path / "p" / "index.json", parts[1])
    refused("is damaged|no part")
    la.save(tmp_path / "one.safetensors")
    shutil.copy(tmp_path / "one.safetensors", parts[1])
    refused("no part of a posterior")
    model = network()
    nn.init.normal_(model[0].weight)
    with pytest.raises(ValueError, match="model's parameters are not those of the fit"):
        Laplace.load(tmp_path / "q", model)


def test_a_folder_without_an_index_is_not_read(tmp_path):
    la = fitted("kfac")
    with pytest.raises(IsADirectoryError, match="name the file in it"):
        Laplace.load(tmp_path, la.model)


@pytest.mark.parametrize("at", range(3))
def test_a_save_that_fails_leaves_the_old_posterior(at, tmp_path, monkeypatch):
    la = fitted("kfac")
    la.save(tmp_path, parts=True)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    other = fitted("kfac", fisher="empirical")
    original, calls = os.replace, []

    def replace(source, target):
        calls.append(target)
        if len(calls) > at:
            raise OSError(28, "No space left on device")
        original(source, target)

    monkeypatch.setattr(atomic.os, "replace", replace)
    # The mean, the blocks, and the index.
    with pytest.raises(OSError, match="no space left"):
        other.save(tmp_path, parts=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_fit_that_fails_leaves_the_old_posterior_and_the_last_fit(tmp_path, monkeypatch):
    la = fitted("kfac")
    la.save(tmp_path, parts=True)
    before = sorted(p.name for p in tmp_path.iterdir())
    stored = Laplace(la.model).fit(batches(1))
    fit = stored._fitted
    original, calls = parts.names_in_order, []

    def write(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return original(*arguments)

    # Within the second file.
    monkeypatch.setattr(parts, "names_in_order", write)
    with pytest.raises(OSError, match="no space left"):
        stored.fit(batches(), store=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert stored._fitted is fit


def test_what_a_killed_writer_left_is_removed_and_other_files_stay(tmp_path):
    la = fitted("kfac")
    left = [
        tmp_path / name
        for what in ("block-00000", "blocks-00001")
        for name in (
            f"{what}-0123456789abcdef.safetensors",
            f".{what}-0123456789abcdef.safetensors.0123456789abcdef.partial",
        )
    ]
    own = tmp_path / "notes.safetensors"
    for path in (*left, own):
        path.write_text("x")
    la.save(tmp_path, parts=True)
    assert not any(path.exists() for path in left)
    assert own.exists()


def test_one_writer_at_a_time(tmp_path):
    la = fitted("kfac")
    with FolderWriter(tmp_path), pytest.raises(BlockingIOError, match="Somebody else"):
        la.save(tmp_path, parts=True)
    la.save(tmp_path, parts=True)


def test_a_reader_that_a_save_overtakes_reads_the_new_posterior(tmp_path, monkeypatch):
    la, other = fitted("kfac"), fitted("kfac", fisher="empirical")
    la.save(tmp_path, parts=True)
    original, calls = folder_reader.read_checked, []

    def read(*arguments):
        calls.append(1)
        if len(calls) == 2:
            other.save(tmp_path, parts=True)
        return original(*arguments)

    monkeypatch.setattr(folder_reader, "read_checked", read)
    loaded = Laplace.load(tmp_path, la.model)
    # Not samples: eigenvectors of a fit lie column by column in memory, those of a file row by row,
    # and some processors round products of the two in another way.
    for one, new in zip(blocks_of(loaded), blocks_of(other), strict=True):
        assert torch.equal(one, new)


def test_files_that_are_written_to_are_noticed_before_a_prediction(tmp_path):
    la = fitted("kfac")
    la.save(tmp_path, parts=True)
    loaded = Laplace.load(tmp_path, la.model, mmap=True)
    x = torch.randn(2, 2, 5, 5)
    loaded.predict(x)
    path = parts_of(tmp_path)[1]
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\1" * 8)
    os.utime(path, ns=(0, 0))
    with pytest.raises(RuntimeError, match="was written to since"):
        loaded.predict(x)


def test_writing_to_mapped_tensors_does_not_change_the_file(tmp_path):
    la = fitted("kfac")
    la.save(tmp_path, parts=True)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    loaded = Laplace.load(tmp_path, la.model, mmap=True)
    for block in loaded.posterior.curvature.blocks.values():
        block.magnitudes.zero_()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


class Own(Categorical):
    """A likelihood whose options are no plain data."""

    def options(self):
        return {"what": object()}


def test_what_cannot_be_stored_is_refused_before_work(tmp_path, monkeypatch):
    la = fitted("kfac")
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match="is a file: name a folder"):
        la.save(tmp_path / "file", parts=True)
    with pytest.raises(NotADirectoryError, match="is a file: name a folder"):
        la.fit(batches(), store=tmp_path / "file")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 9))
    with pytest.raises(ValueError, match="and 9 are free where"):
        la.fit(batches(), store=tmp_path / "p")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="options"):
        Laplace(network(), Own()).fit(batches(), store=tmp_path / "p")
    assert not (tmp_path / "p").exists()
    with pytest.raises(ValueError, match="move it to the CPU"):
        Laplace.load(tmp_path / "p", network().to("meta"), mmap=True)


_MEASURE = """
import ctypes, sys
import torch
from torch import nn
from laplace_debias import Laplace

torch.manual_seed(0)
layers = [m for _ in range(16) for m in (nn.Linear(400, 400), nn.Tanh())]
model = nn.Sequential(*layers, nn.Linear(400, 3)).eval()
data = [(torch.randn(4, 400), torch.tensor([0, 1, 2, 0]))]

def anonymous():
    ctypes.CDLL(None).malloc_trim(0)
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

if __name__ == "__main__":
    model(data[0][0])
    before = anonymous()
    la = Laplace.load(sys.argv[1], model, mmap=sys.argv[2] == "mmap")
    loaded = anonymous() - before
    la.predict(data[0][0])
    la.tune(data, grid=torch.tensor([1.0, 10.0]))
    la.sample(1)
    print(loaded, anonymous() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_mapped_posterior_takes_little_memory_of_its_own(tmp_path):
    """Anonymous memory: pages of mapped files are the system's, shared by all processes."""
    names = {"__name__": "here"}
    exec(_MEASURE, names)
    la = Laplace(names["model"], params="weights", fisher="mc", factor_dtype=torch.float32)
    la.fit(names["data"]).save(tmp_path / "p", parts=True)
    size = sum(path.stat().st_size for path in (tmp_path / "p").glob("blocks-*"))

    def run(what):
        command = [sys.executable, "-c", _MEASURE, str(tmp_path / "p"), what]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        return [int(word) for word in found.stdout.split()]

    whole, mapped = run("whole"), run("mmap")
    assert mapped[0] < 0.1 * size < 0.9 * size < whole[0]
    # A first prediction imports what it needs, whichever it is.
    assert whole[1] - mapped[1] > 0.9 * size
