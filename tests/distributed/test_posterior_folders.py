"""A posterior in parts that several processes write and read: each its own blocks, and no other."""

import json
import shutil
import warnings

import pytest
import rank_folders as tasks
import rank_tasks
import torch
from rank_posteriors import bytes_of_blocks, check

from laplace_debias import Laplace


def check_readers(processes, folder, expected):
    """Any number of processes reads it, and answers as one process that fitted."""
    for number, mmap in ((1, False), (2, True), (3, False)):
        if number == 1:
            found = [tasks.read(0, folder, mmap)]
        else:
            found = processes.run(number, tasks.read, folder, mmap)
        for of_rank in found:
            assert isinstance(of_rank, dict), of_rank
            check(of_rank, {**expected, "sharded": number})


@pytest.mark.parametrize("num_writers", [1, 2, 3])
@pytest.mark.parametrize(
    ("curvature", "mode", "sizes"),
    [("kfac", "full", None), ("ekfac", "debiased", (4, 1, 5)), ("diag", "full", (2, 8))],
)
def test_what_a_fit_stored_any_number_of_processes_reads(
    processes, tmp_path, num_writers, curvature, mode, sizes
):
    folder = str(tmp_path / "p")
    expected = tasks.saved(0, str(tmp_path / "one"), curvature, mode)
    arguments = (folder, curvature, mode, sizes)
    if num_writers == 1:
        found = [tasks.stored(0, *arguments)]
    else:
        found = processes.run(num_writers, tasks.stored, *arguments)
    for of_rank in found:
        check(of_rank, expected)
    check_readers(processes, folder, expected)


@pytest.mark.parametrize("num_writers", [2, 3])
def test_what_was_saved_in_parts_any_number_of_processes_reads(processes, tmp_path, num_writers):
    folder = str(tmp_path / "p")
    expected = tasks.saved(0, str(tmp_path / "one"), "ekfac")
    for of_rank in processes.run(num_writers, tasks.saved, folder, "ekfac"):
        check(of_rank, expected)
    names = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "p").glob("*.safetensors"))
    assert names == [*(f"blocks-{rank:05d}" for rank in range(num_writers)), "mean"]
    check_readers(processes, folder, expected)
    for of_rank in processes.run(2, tasks.read, folder, False, True):
        check(of_rank, {**expected, "sharded": 1})


@pytest.mark.parametrize(("curvature", "options"), [("lowrank", {}), ("kfac", {"replicate": True})])
def test_whole_posteriors_are_written_by_the_first_process(processes, tmp_path, curvature, options):
    folder = str(tmp_path / "p")
    expected = tasks.saved(0, str(tmp_path / "one"), curvature)
    for of_rank in processes.run(2, tasks.stored, folder, curvature, "full", None, options):
        check(of_rank, expected)
    assert len(list((tmp_path / "p").glob("blocks-*"))) == 1
    sharded = 1 if curvature == "lowrank" else 3
    for of_rank in processes.run(3, tasks.read, folder, True):
        check(of_rank, {**expected, "sharded": sharded})


def test_a_single_file_is_shared_out_where_that_is_asked_for(processes, tmp_path):
    path = str(tmp_path / "posterior.safetensors")
    expected = tasks.saved(0, str(tmp_path / "one"))
    rank_tasks.laplace().fit(rank_tasks.loader(), generator=rank_tasks.generator(5)).save(path)
    for replicate, num_ranks in ((False, 2), (None, 1)):
        for of_rank in processes.run(2, tasks.read, path, False, replicate):
            check(of_rank, {**expected, "sharded": num_ranks})


@pytest.mark.parametrize("mmap", [False, True])
def test_each_process_reads_the_bytes_of_its_blocks(processes, tmp_path, mmap):
    processes.run(2, tasks.saved, str(tmp_path / "p"))
    sizes = bytes_of_blocks("kfac")
    num_parameters = sum(p.numel() for p in rank_tasks.network().parameters())
    found = processes.run(3, tasks.bytes_read, str(tmp_path / "p"), mmap)
    owners = processes.run(3, tasks.owners_after_a_fit)[0]
    for rank, of_rank in enumerate(found):
        own = sum(sizes[name] for name, owner in owners.items() if owner == rank)
        assert of_rank["held"] == own
        # The mean, one prior precision, and the headers of three files.
        headers = of_rank["read"] - own - 8 * num_parameters - 8
        assert 0 < headers < 3 * 3000
        assert of_rank["owners"] == owners
        # The index, and the largest curvature of each block.
        assert [name for name, _ in of_rank["sent"]] == ["broadcast_object_list", "all_reduce"]
    assert sum(of_rank["held"] for of_rank in found) == sum(sizes.values())


def test_no_process_sends_its_blocks(processes, tmp_path):
    for of_rank in processes.run(3, tasks.messages, str(tmp_path / "p")):
        assert of_rank["save"] == []
        without, with_store = of_rank["fits"]
        assert with_store == without
        # The names and checksums of the files, once at each end.
        assert len(of_rank["pickled"]) == 2
        assert max(of_rank["pickled"]) < 100 * 3 * len(bytes_of_blocks("kfac"))


def test_a_tuned_posterior_is_saved_without_its_blocks_once_more(processes, tmp_path):
    folder = str(tmp_path / "p")
    expected = processes.run(3, tasks.saved, folder)[0]["functional"]
    for before, after, functional in processes.run(3, tasks.save_again, folder):
        assert len(before) == 3
        assert before == after
        torch.testing.assert_close(functional, expected, rtol=1e-12, atol=0)
    la = Laplace.load(folder, rank_tasks.network())
    assert float(la.prior_precision) == 7.0


def test_a_damaged_or_missing_part_is_named_on_all_processes(processes, tmp_path):
    processes.run(2, tasks.saved, str(tmp_path / "p"))
    index = json.loads((tmp_path / "p" / "index.json").read_text())
    part = next(of["file"] for of in index["parts"] if of["file"].startswith("blocks-00001"))
    copy = tmp_path / "q"

    def refused(change, *told):
        shutil.copytree(tmp_path / "p", copy)
        change(copy / part)
        for kind, message in processes.run(2, tasks.read, str(copy)):
            assert kind == "ValueError"
            for text in (part, *told):
                assert text in message
        shutil.rmtree(copy)

    def damage(path):
        raw = bytearray(path.read_bytes())
        raw[-3] ^= 1
        path.write_bytes(bytes(raw))

    refused(damage, "checksum of", "save the posterior again")
    refused(lambda path: path.unlink(), "names is missing for rank 1", "all processes share")
    refused(lambda path: path.write_bytes(path.read_bytes()[:-1]), "damaged")
    # The others read no byte of that file: they can go on without it.
    shutil.copytree(tmp_path / "p", copy)
    (copy / part).unlink()
    with pytest.raises(ValueError, match=f"names is missing .*{part}"):
        Laplace.load(copy, rank_tasks.network())


@pytest.mark.parametrize("call", ["stored", "saved", "read"])
def test_a_process_that_does_not_see_the_folder_says_so(processes, tmp_path, call):
    folders = [tmp_path / f"{rank}" for rank in range(2)]
    for folder in folders:
        folder.mkdir()
    tasks.saved(0, str(folders[0] / "posterior"))
    before = {path.name for path in (folders[0] / "posterior").iterdir()}
    arguments = (getattr(tasks, call), [str(folder) for folder in folders])
    for kind, message in processes.run(2, tasks.apart, *arguments):
        assert kind == "ValueError"
        assert "on a file system that all processes share" in message
        assert "Rank 1 sees nothing" in message or "Rank 1 does not see" in message
    # What was there before is still there, and nothing else.
    assert {path.name for path in (folders[0] / "posterior").iterdir()} == before
    assert not list(folders[1].rglob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize(("which", "when"), [(1, "a part"), (0, "the index")])
def test_a_process_that_is_killed_leaves_what_was_there(processes, tmp_path, which, when):
    folder = tmp_path / "p"
    expected = tasks.saved(0, str(folder), "ekfac")
    other = tmp_path / "new"
    for path in (folder, other):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            processes.start(2, tasks.be_killed, str(path), which, when)
            kind, message = processes.result(1 - which)
        assert kind == "RankError"
        assert f"Rank {which} is gone" in message or "process group's store" in message
        processes.close()
    with pytest.raises(IsADirectoryError):
        Laplace.load(other, rank_tasks.network())
    check(tasks.read(0, folder), {**expected, "sharded": 1})
    # The next one to write removes what was left.
    tasks.saved(0, str(other))
    assert len(list(other.iterdir())) == 3


def test_a_fit_that_fails_on_one_process_leaves_what_was_there(processes, tmp_path):
    folder = tmp_path / "p"
    tasks.saved(0, str(folder))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for _, message in processes.run(2, tasks.fit_that_fails, str(folder)):
        assert "no space left" in message
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_all_processes_must_store(processes, tmp_path):
    for kind, message in processes.run(2, tasks.store_on_one, str(tmp_path / "p")):
        assert kind == "ValueError"
        assert "store differs between the ranks" in message
    assert not (tmp_path / "p").exists()
