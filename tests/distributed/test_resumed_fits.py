"""A fit of several processes that was broken off goes on, with as many or with another number."""

import kill_fits
import pytest
import rank_posteriors
import rank_tasks as tasks
import torch
from safetensors.torch import load_file

from laplace_debias import ShardedBatches

CASES = [("kfac", {}), ("ekfac", {"fisher": "mc"}), ("full", {}), ("lowrank", {})]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1), (1, 2), (3, 2), (3, 3), (2, 3)])
@pytest.mark.parametrize(("curvature", "options"), CASES)
def test_a_fit_goes_on_with_any_number_of_processes(processes, tmp_path, curvature, options, sizes):
    before, after = sizes
    folder = tmp_path / "state"
    # EKFAC in its second pass. Each process saves whenever it likes: they stop at other batches.
    two_passes = curvature == "ekfac"
    parts = [
        list(ShardedBatches(range(tasks.SIZE), 6, rank=rank, num_ranks=before))
        for rank in range(before)
    ]
    stops = [2 + rank % 2 for rank in range(before)]
    after_batches = [
        stop + two_passes * len(of_rank) for stop, of_rank in zip(stops, parts, strict=True)
    ]
    broken = processes.run(before, tasks.break_off, curvature, options, folder, after_batches)
    assert {found[0] for found in broken} <= {"Broken", "RankError"}, broken
    saved = len(list(folder.glob("pass-*.rank-*")))
    assert saved == (before - 1) * (1 + two_passes)
    # A process that hears of the other's end stops earlier.
    last = folder.glob(f"pass-{1 + two_passes}*")
    done = sum(len(load_file(path)["marks"]) for path in last)
    assert done >= 6

    expected, _ = tasks.resumed(0, curvature, options, None)
    alone = processes.run(after, tasks.resumed, curvature, options, None)
    found = processes.run(after, tasks.resumed, curvature, options, folder)
    for (C, _), (uninterrupted, _) in zip(found, alone, strict=True):
        bound = 1e-12 * float(expected.abs().max())
        torch.testing.assert_close(C, expected, rtol=0, atol=bound)
        assert before != after or torch.equal(C, uninterrupted)
    assert not folder.exists()

    # Nothing is computed with twice, also where three sums are added in another order.
    assert sum(number for _, number in found) == tasks.SIZE - done


def test_a_fit_in_groups_goes_on(processes, tmp_path):
    folder, sizes = tmp_path / "state", (4, 6)
    parts = [ShardedBatches(range(tasks.SIZE), 6, rank=rank, num_ranks=2) for rank in range(2)]
    # In the pass for the second group.
    stops = [len(list(of_rank)) + 2 for of_rank in parts]
    processes.run(2, rank_posteriors.break_off_in_groups, folder, stops, sizes)
    assert {path.name.split(".")[0] for path in folder.glob("pass-*")} == {"pass-1", "pass-2"}
    expected = processes.run(2, rank_posteriors.resumed_in_groups, None, sizes)
    found = processes.run(2, rank_posteriors.resumed_in_groups, folder, sizes)
    assert all(torch.equal(C, of_one) for C, of_one in zip(found, expected, strict=True))
    assert not folder.exists()


def test_other_data_are_refused_by_all(processes, tmp_path):
    folder = tmp_path / "state"
    processes.run(3, tasks.break_off, "kfac", {}, folder, [2, 3, 2])
    for found in processes.run(2, tasks.resumed, "kfac", {}, folder, 4):
        assert found[0] == "ValueError"
        assert "holds a fit of other data" in found[1]
    # It is left as it was.
    expected, _ = tasks.resumed(0, "kfac", {}, None)
    for C, _ in processes.run(2, tasks.resumed, "kfac", {}, folder):
        torch.testing.assert_close(C, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.slow
def test_a_search_goes_on_with_as_many_processes(processes, tmp_path):
    folder = tmp_path / "state"
    processes.run(2, tasks.break_off_tuning, folder, [2, 3])
    assert len(list(folder.iterdir())) == 2
    for found in processes.run(3, tasks.resumed_tuning, folder):
        assert found[0] in ("ValueError", "RankError")
        assert "number of processes (2 there, 3 now)" in found[1]
    expected = processes.run(2, tasks.resumed_tuning, None)
    assert processes.run(2, tasks.resumed_tuning, folder) == expected
    assert not folder.exists()


@pytest.mark.slow
def test_one_of_several_processes_is_killed(tmp_path):
    found = kill_fits.kill_ranks(3, seed=1, folder=tmp_path)
    assert not found.failures
    assert found.steps.total() == 3


def test_a_search_with_a_sharded_posterior_is_refused_before_it_begins(processes, tmp_path):
    folder = tmp_path / "state"
    for told, exists in processes.run(2, tasks.tune_sharded, folder):
        assert "fit with `replicate=True`, or call `la.gather()`" in told
        assert not exists


@pytest.mark.parametrize("positions", [None, torch.arange(1, tasks.SIZE, 2)])
def test_predictions_of_a_set_go_on_with_any_number_of_processes(processes, tmp_path, positions):
    expected, num_examples = tasks.set_of_predictions(0, tmp_path / "whole", None, positions)
    for after in (1, 2, 3):
        folder = tmp_path / f"state-{after}"
        broken = processes.run(2, tasks.set_of_predictions, folder, 7, positions)
        assert all(isinstance(found, tuple) and "Error" in found[0] for found in broken), broken
        done = sum(len(load_file(path)["marks"]) for path in folder.glob("pass-*"))
        assert 0 < done < num_examples
        of_ranks = processes.run(after, tasks.set_of_predictions, folder, None, positions)
        assert sum(number for _, number in of_ranks) == num_examples - done
        for found, _ in of_ranks:
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found)
