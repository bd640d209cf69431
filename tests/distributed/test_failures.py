"""If one process fails, all of them stop with an error that names the process and the reason."""

import pytest
import rank_tasks as tasks
import torch


def other_ranks(num_ranks, rank):
    return [other_rank for other_rank in range(num_ranks) if other_rank != rank]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("label", "ValueError", "labels"),
        ("nan", "ValueError", "NaN"),
        ("loader", "RankError", "the file is missing"),
        ("memory", "RankError", "out of memory"),
    ],
)
def test_an_error_reaches_all_with_its_message_and_rank(processes, fault, kind, message):
    errors = processes.run(3, tasks.fail, fault, 1)
    _, original_message = errors[1]
    assert message in original_message
    for rank in other_ranks(3, 1):
        assert errors[rank][0] == kind, errors[rank]
        assert errors[rank][1].startswith("Rank 1 failed with ")
        assert original_message in errors[rank][1]
    # The processes are in step again.
    expected = tasks.fit(0, "kfac", "full", {}, {})
    fits = processes.run(3, tasks.fail_then_fit)
    assert [fit["N"] for fit in fits] == 3 * [expected["N"]]


@pytest.mark.slow
def test_an_error_is_told_at_the_end_of_a_pass(processes):
    errors = processes.run(2, tasks.fail_while_the_other_reads)
    assert "no disk" in errors[1][1]
    assert errors[0][0] == "ValueError"
    assert errors[0][1].startswith("Rank 1 failed with ValueError: no disk")


def test_a_process_that_is_killed_ends_all(processes):
    try:
        processes.start(3, tasks.be_killed, 2)
        for rank in (0, 1):
            kind, message = processes.result(rank)
            assert kind == "RankError"
            assert "was killed, has failed or is in a different call" in message, message
            assert "start all of them again" in message
    finally:
        processes.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "kind", "phrases"),
    [
        (tasks.the_same_loader, "ValueError", ["ShardedBatches", "alone()", "Rank 1"]),
        (tasks.the_same_loader_shuffled, "ValueError", ["ShardedBatches", "data set", "Rank 1"]),
        (tasks.the_same_loader_as_a_scheme, "ValueError", ["ShardedBatches", "end to end"]),
        (tasks.the_same_batches, "ValueError", ["same batch", "ShardedBatches"]),
        (tasks.padded, "ValueError", ["DistributedSampler", "ShardedBatches(data, batch_size)"]),
        (tasks.fit_prepared, "ValueError", ["BatchSamplerShard", "would count twice"]),
        (tasks.evaluate_prepared, "ValueError", ["BatchSamplerShard", "would count twice"]),
        (tasks.fit_prepared_without_the_rest, "ValueError", ["BatchSamplerShard leaves out"]),
        (tasks.fit_prepared_stream, "ValueError", ["would count twice", "drop_last=True"]),
        (tasks.evaluate_prepared_stream, "ValueError", ["would count twice", "drop_last=True"]),
        (tasks.check_prepared_stream_before_training, "ValueError", ["would count twice"]),
        (tasks.fit_dispatched, "ValueError", ["dispatch_batches=True", "ShardedBatches"]),
        (tasks.fit_prepared_draws, "ValueError", ["draws 40 of 37 examples with replacement"]),
        (
            tasks.sharded_on_one,
            "ValueError",
            ["ShardedBatches differs between the ranks", "rank 1 none"],
        ),
        (tasks.another_model, "ValueError", ["model differs between the ranks"]),
        (
            tasks.other_sets,
            "ValueError",
            ["ood differs", "['shifted'] on rank 0, but [] on rank 1"],
        ),
        (
            tasks.another_num_data,
            "ValueError",
            ["num_data differs", "37 on rank 0, but 38 on rank 1"],
        ),
        (tasks.different_calls, "RankError", ["rank 0 fit", "rank 1 save"]),
        (tasks.a_shard_alone, "ValueError", ["ShardedBatches is for", "2 processes, but 1"]),
    ],
)
def test_what_would_be_wrong_is_refused_on_all(processes, task, kind, phrases):
    for error in processes.run(2, task):
        assert error[0] == kind, error
        for phrase in phrases:
            assert phrase in error[1]


@pytest.mark.parametrize(
    ("call", "option", "values"),
    [
        ("fit", "mode", ("full", "mini")),
        ("fit", "folds", (2, 3)),
        ("fit_batches", "folds", (None, 2)),
        ("tune", "grid", ([0.1, 1.0], [0.1, 2.0])),
        ("tune", "method", ("grid", "marglik")),
        ("evaluate", "samples", (None, 3)),
    ],
)
def test_arguments_are_the_same_on_all(processes, call, option, values):
    for kind, message in processes.run(2, tasks.another_argument, call, option, values):
        assert kind == "ValueError", message
        shown = f"it is {values[0]} on rank 0, but {values[1]} on rank 1"
        assert f"{option} differs between the ranks: {shown}" in message


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("curvature", ("kfac", "ekfac")),
        ("fisher", ("exact", "mc")),
        ("params", ("all", ["head.weight"])),
        ("prior_precision", (1.0, 2.0)),
        ("factor_dtype", (torch.float64, torch.float32)),
    ],
)
def test_objects_are_made_in_the_same_way_on_all(processes, option, values):
    for kind, message in processes.run(2, tasks.another_laplace, option, values):
        assert kind == "ValueError", message
        assert "differs between the ranks: " in message


@pytest.mark.parametrize("call", ["update", "tune", "evaluate"])
def test_the_posterior_is_the_same_on_all(processes, call):
    for kind, message in processes.run(2, tasks.another_posterior, call):
        assert kind == "ValueError", message
        assert "The posterior differs between the ranks: the loss of its data is" in message


def test_the_generator_of_rank_0_counts(processes):
    alone = tasks.fit_with_own_generator(0)
    for numbers in processes.run(2, tasks.fit_with_own_generator):
        torch.testing.assert_close(numbers["C v"], alone["C v"], rtol=1e-11, atol=1e-13)
