"""An interrupted fit of several processes continues with the same number of processes."""

import pytest
import rank_tasks as tasks
import torch

from laplace_debias import ShardedBatches

CASES = [
    ("kfac", {}),
    ("kfac", {"fisher": "signs"}),
    ("ekfac", {"fisher": "mc"}),
    ("ekfac", {"fisher": "signs"}),
    ("full", {}),
    ("lowrank", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("curvature", "options"), CASES)
def test_a_fit_goes_on_to_the_same_bits(processes, tmp_path, curvature, options, size):
    folder = tmp_path / "state"
    # EKFAC stops in its second pass. The processes save at different times, so they stop at
    # different batches.
    two_passes = curvature == "ekfac"
    stops = [2 + rank % 2 for rank in range(size)]
    shards = [
        ShardedBatches(range(tasks.SIZE), 6, rank=rank, num_ranks=size) for rank in range(size)
    ]
    num_batches = [
        stop + two_passes * len(shard) for stop, shard in zip(stops, shards, strict=True)
    ]
    errors = processes.run(size, tasks.break_off, curvature, options, folder, num_batches)
    assert {error[0] for error in errors} <= {"Broken", "RankError"}, errors
    uninterrupted = processes.run(size, tasks.resumed, curvature, options, None)
    resumed = processes.run(size, tasks.resumed, curvature, options, folder)
    for (C, _), (expected, _) in zip(resumed, uninterrupted, strict=True):
        assert torch.equal(C, expected)
    assert [num_skipped for _, num_skipped in resumed] == stops
    assert not folder.exists()


def test_another_number_and_other_data_are_refused_by_all(processes, tmp_path):
    folder = tmp_path / "state"
    processes.run(3, tasks.break_off, "kfac", {}, folder, [2, 3, 2])
    for error in processes.run(2, tasks.resumed, "kfac", {}, folder):
        assert error[0] == "ValueError"
        assert "number of processes was 3, is now 2" in error[1]
    for error in processes.run(3, tasks.resumed, "kfac", {}, folder, 4):
        assert error[0] == "ValueError"
        assert "the state of an earlier fit, which read different batches" in error[1]
    # The refused calls leave the saved state as it was.
    expected = processes.run(3, tasks.resumed, "kfac", {}, None)
    resumed = processes.run(3, tasks.resumed, "kfac", {}, folder)
    for (C, _), (expected_C, _) in zip(resumed, expected, strict=True):
        assert torch.equal(C, expected_C)
