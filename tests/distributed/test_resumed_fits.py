"""A fit of several processes that was broken off goes on, with as many."""

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
    # EKFAC in its second pass. Each process saves whenever it likes: they stop at other batches.
    two_passes = curvature == "ekfac"
    stops = [2 + rank % 2 for rank in range(size)]
    parts = [
        ShardedBatches(range(tasks.SIZE), 6, rank=rank, num_ranks=size) for rank in range(size)
    ]
    after = [stop + two_passes * len(part) for stop, part in zip(stops, parts, strict=True)]
    broken = processes.run(size, tasks.break_off, curvature, options, folder, after)
    assert {found[0] for found in broken} <= {"Broken", "RankError"}, broken
    alone = processes.run(size, tasks.resumed, curvature, options, None)
    found = processes.run(size, tasks.resumed, curvature, options, folder)
    for (C, _), (uninterrupted, _) in zip(found, alone, strict=True):
        assert torch.equal(C, uninterrupted)
    assert [number for _, number in found] == stops
    assert not folder.exists()


def test_another_number_and_other_data_are_refused_by_all(processes, tmp_path):
    folder = tmp_path / "state"
    processes.run(3, tasks.break_off, "kfac", {}, folder, [2, 3, 2])
    for found in processes.run(2, tasks.resumed, "kfac", {}, folder):
        assert found[0] == "ValueError"
        assert "number of processes was 3, is now 2" in found[1]
    for found in processes.run(3, tasks.resumed, "kfac", {}, folder, 4):
        assert found[0] == "ValueError"
        assert "the state of an earlier fit, which read different batches" in found[1]
    # It is left as it was.
    expected = processes.run(3, tasks.resumed, "kfac", {}, None)
    found = processes.run(3, tasks.resumed, "kfac", {}, folder)
    assert all(torch.equal(C, of) for (C, _), (of, _) in zip(found, expected, strict=True))
