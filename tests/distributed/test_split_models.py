"""Models that `fully_shard` (FSDP2) has split over the processes are fitted as the plain ones."""

import pytest
import rank_tasks as tasks
import split_tasks
import torch


def check(found, expected, rel=1e-12, but=()):
    """To rounding; what an iteration finds, to its tolerance."""
    assert isinstance(found, dict), found
    for key, value in expected.items():
        of_one = torch.as_tensor(value, dtype=torch.float64)
        error = (torch.as_tensor(found[key], dtype=torch.float64) - of_one).norm()
        assert error <= (1e-6 if key in but else rel) * of_one.norm(), key


def equal(found, expected):
    """To the last bit."""
    assert isinstance(found, dict), found
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


@pytest.mark.parametrize(
    ("num_ranks", "way", "curvatures"),
    [
        (2, "both", ["kfac"]),
        (3, "whole", ["ekfac"]),
        (2, "parts", ["full"]),
        (2, "compiled", ["diag"]),
        pytest.param(
            *(3, "both", ["kfac", "ekfac", "diag", "lowrank", "full"]), marks=pytest.mark.slow
        ),
    ],
)
def test_a_split_model_has_the_posterior_of_the_plain_one(processes, num_ranks, way, curvatures):
    of_ranks = processes.run(num_ranks, split_tasks.fits, way, curvatures)
    for curvature, *of_each in zip(curvatures, *of_ranks, strict=True):
        of_one = tasks.fit(0, curvature, "full", {}, {})
        for of_split, of_plain in of_each:
            # What the same processes find for the plain model; one process, to rounding.
            equal(of_split, of_plain)
            check(of_split, of_one)


@pytest.mark.slow
def test_a_split_model_is_tuned_and_evaluated(processes):
    expected = split_tasks.tune_and_evaluate(0, False)
    for found in processes.run(3, split_tasks.tune_and_evaluate, True):
        # torchmetrics has bins of the calibration error in single precision.
        check(found, expected, but=("kinds", "ece", "mce"))


def test_files_of_split_models_are_those_of_plain_ones(processes, tmp_path):
    expected = tasks.fit(0, "ekfac", "full", {}, {})
    for of_rank in processes.run(2, split_tasks.save_and_load, tmp_path):
        assert isinstance(of_rank, list), of_rank
        for found in of_rank:
            check(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("ggn", "kfac") else pytest.mark.slow)
        for name in tasks.OPERATORS
    ],
)
def test_operators_of_a_split_model(processes, name):
    A = tasks.operator(name, tasks.loader())
    V = torch.randn(A.shape[0], 3, generator=tasks.generator(4), dtype=torch.float64)
    expected = {"N": tasks.SIZE, "product": A @ V, "again": A @ V}
    for found in processes.run(3 if name == "ggn" else 2, split_tasks.products, name):
        check(found, expected)


@pytest.mark.slow
def test_the_quadratic_of_a_split_model(processes):
    expected = tasks.quadratic(0)
    for found in processes.run(2, split_tasks.quadratic):
        check(found, expected, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "says"), [("fit", None), ("label", "labels"), ("interrupt", "KeyboardInterrupt")]
)
def test_the_model_is_given_back_as_it_was(processes, how, says):
    of_ranks = processes.run(2, split_tasks.borrow, how)
    for found in of_ranks:
        assert isinstance(found, dict), found
        assert found["same"]
        assert found["trained"]
    if says is not None:
        assert says in of_ranks[0]["error"]
        assert of_ranks[0]["error"].startswith("Rank 1 failed with ")


def test_parameters_that_a_forward_pass_left_whole_are_split_again(processes):
    expected = tasks.fit(0, "kfac", "full", {}, {})
    with torch.no_grad():
        expected["outputs"] = tasks.network()(tasks.examples(5)[:][0])
    for found in processes.run(2, split_tasks.fit_after_a_forward_pass):
        check(found, expected)


@pytest.mark.slow
def test_training_on_is_noticed(processes):
    for found in processes.run(2, split_tasks.change):
        assert "have changed since the fit" in found["error"]
        assert not torch.allclose(found["before"], found["expected"])
        torch.testing.assert_close(found["after"], found["expected"], rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_every_split_parameter_is_gathered_once_a_call_and_never_for_a_batch(processes):
    few, many = (processes.run(2, split_tasks.count, batch) for batch in (37, 4))
    for found in (*few, *many):
        num_split = found.pop("split")
        assert num_split == 10
        of_calls = dict.fromkeys(("fit", "predict", "evaluate"), num_split)
        assert found == {**of_calls, "construction": 0, "names": 0}


def test_within_gathered_each_process_predicts_on_its_own(processes):
    for found in processes.run(2, split_tasks.predict_within):
        assert torch.equal(found["found"], found["expected"])
        assert "leave `gathered(model)` before you change them" in found["error"]


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_gathers_is_named(processes):
    try:
        processes.start(3, split_tasks.be_killed, 2)
        for rank in (0, 1):
            kind, message = processes.result(rank)
            assert kind == "RankError"
            assert message.startswith("Rank 2 is gone"), message
    finally:
        processes.close()


@pytest.mark.parametrize(
    ("task", "kind", "parts"),
    [
        ("in_half_precision", "NotImplementedError", ["torch.bfloat16", "mp_policy", "plain"]),
        ("with_half_outputs", "NotImplementedError", ["torch.float32", "mp_policy"]),
        ("offloaded", "NotImplementedError", ["CPUOffloadPolicy", "without offloading"]),
        ("replicated_too", "NotImplementedError", ["2 dimensions", "one mesh of all processes"]),
        ("over_some", "NotImplementedError", ["over 1 processes, and 2", "full_state_dict=True"]),
        ("of_integers", "NotImplementedError", ["codes is not", "torch.int64"]),
        ("on_one_rank", "RankError", ["rank 0 in fit", "rank 1 in the gathering of a model"]),
        ("in_other_ways", "ValueError", ["not the same on ranks", "split one model on all"]),
        ("alone_with_it", "NotImplementedError", ["over 2 processes, and 1 work", "alone()"]),
        ("without_fully_shard", "NotImplementedError", ["head.weight is split", "fully_shard"]),
        ("diverged", "ValueError", ["head.weight holds NaN"]),
        ("with_a_split_prior", "ValueError", ["split over processes", "full_state_dict=True"]),
        ("optimised", "NotImplementedError", ["split over processes", "plain model"]),
    ],
)
def test_what_cannot_be_gathered_is_refused_on_all(processes, task, kind, parts):
    for found in processes.run(2, getattr(split_tasks, task)):
        assert found[0] == kind, found
        for part in parts:
            assert part in found[1]


@pytest.mark.slow
def test_the_dtype_of_gradient_sums_does_not_matter(processes):
    expected = tasks.fit(0, "kfac", "full", {}, {})
    for found in processes.run(2, split_tasks.with_sums_in_half_precision):
        check(found, expected)
