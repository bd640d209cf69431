"""Training tools in a process group: each process by itself, or an error."""

import pytest
import torch
import training_tasks as tasks


@pytest.mark.parametrize("fisher", ["exact", "signs"])
def test_each_process_collects_the_curvature_of_its_own_batches(processes, tmp_path, fisher):
    for rank, precisions in enumerate(processes.run(2, tasks.online, str(tmp_path), fisher)):
        expected, _ = tasks.online(rank, str(tmp_path), fisher)
        for precision in precisions:
            torch.testing.assert_close(precision, expected, rtol=1e-10, atol=1e-12)


def test_training_by_the_marginal_likelihood_is_refused(processes):
    for name, message in processes.run(2, tasks.marginal_likelihood):
        assert name == "NotImplementedError", message
        assert "not supported for data that is divided among several processes" in message
