"""Models that `fully_shard` (FSDP2) has split: adapters and a head on a frozen, sharded base."""

import re

import pytest
import sharded_tasks as tasks
import torch

# Importing FSDP takes long in each process.
pytestmark = pytest.mark.slow


def assert_equal(actual, expected, tolerance=1e-10):
    for name, value in expected.items():
        if name == "fingerprint":
            assert actual[name] == value
            continue
        difference = torch.as_tensor(actual[name] - value).abs().max()
        assert difference <= tolerance * torch.as_tensor(value).abs().max(), name


@pytest.mark.parametrize(
    ("num_ranks", "curvature", "mode"),
    [
        (2, "kfac", "full"),
        (3, "ekfac", "debiased"),
        (4, "kfac", "crossfit"),
        (2, "diag", "mini"),
        (2, "full", "full"),
        (3, "lowrank", "full"),
    ],
)
def test_every_verb_is_that_of_the_whole_model(processes, tmp_path, num_ranks, curvature, mode):
    results = processes.run(num_ranks, tasks.verbs, num_ranks, curvature, mode, tmp_path)
    for rank, result in enumerate(results):
        expected = tasks.verbs(rank, 0, curvature, mode, tmp_path)
        assert isinstance(result, dict), result
        assert_equal(result, expected)


def test_processes_with_batches_of_other_sizes_and_numbers(processes):
    expected = tasks.unequal_parts(0, 0)
    for precision in processes.run(3, tasks.unequal_parts, 3):
        torch.testing.assert_close(precision, expected, rtol=1e-10, atol=1e-12)


def test_the_graph_holds_no_whole_weight_of_the_base(processes):
    for count, gradients, expected in processes.run(2, tasks.whole_weights_in_graph, 2):
        assert count == 0
        assert gradients.keys() == expected.keys()
        assert_equal(gradients, expected)


def test_a_base_in_half_precision(processes, tmp_path):
    arguments = ("kfac", "full", tmp_path, torch.bfloat16)
    for rank, result in enumerate(processes.run(2, tasks.verbs, 2, *arguments)):
        assert isinstance(result, dict), result
        assert_equal(result, tasks.verbs(rank, 0, *arguments), tolerance=1e-4)


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("bayesian", "ValueError", "frozen"),
        ("trainable", "NotImplementedError", "0.weight is a distributed tensor.*ignored_params="),
        ("operator", "NotImplementedError", "Curvature operators do not"),
        ("differentiable", "NotImplementedError", "`differentiable=True` does not support models"),
        ("alone", "RuntimeError", r"sharded.*outside of alone\(\)"),
    ],
)
def test_refusals(processes, case, kind, message):
    for name, text in processes.run(2, tasks.refused, 2, case):
        assert name == kind
        assert re.search(message, text), text


def test_a_process_that_is_killed_ends_all(processes):
    try:
        processes.start(3, tasks.be_killed, 3, 2)
        for rank in (0, 1):
            kind, message = processes.result(rank)
            assert kind == "RankError", message
            assert "was killed, has failed or is in a different call" in message, message
    finally:
        processes.close()
