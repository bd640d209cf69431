"""A posterior whose blocks several processes share out is the posterior of one process."""

import oracle
import pytest
import rank_posteriors as tasks
import rank_tasks
import torch
from rank_posteriors import bytes_of_blocks, check

CURVATURES = ("kfac", "ekfac", "diag")
MODES = ("full", "mini", "debiased", "crossfit")


def check_all(processes, num_ranks, task, *args):
    expected = task(0, *args)
    for found in processes.run(num_ranks, task, *args):
        check(found, expected)


@pytest.mark.parametrize(
    ("num_ranks", "curvature", "mode"),
    [(2, "kfac", "full"), (3, "ekfac", "debiased"), (4, "diag", "full"), (3, "kfac", "crossfit")],
)
def test_every_call_gives_what_one_process_gives(processes, num_ranks, curvature, mode):
    check_all(processes, num_ranks, tasks.calls, curvature, mode)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("curvature", [*CURVATURES, "lowrank", "full"])
@pytest.mark.parametrize("mode", MODES)
def test_every_call_of_every_curvature_and_mode(processes, num_ranks, curvature, mode):
    expected = tasks.calls(0, curvature, mode)
    # Noise is drawn in the eigenbasis, and rounding chooses that of the whole matrix's null space:
    # on other processes the same posterior has other draws.
    draws = ("sample", "nn", "glm-mc") if curvature == "full" else ()
    expected = {name: value for name, value in expected.items() if name not in draws}
    for found in processes.run(num_ranks, tasks.calls, curvature, mode):
        check({name: found[name] for name in expected}, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "curvature", "mode", "sizes", "replicate"),
    [
        (2, "ekfac", "full", (1,) * 10, False),
        (3, "kfac", "debiased", (4, 1, 5), False),
        (2, "kfac", "crossfit", (7, 3), False),
        (3, "diag", "full", (2, 8), False),
        (2, "ekfac", "debiased", (3, 7), True),
    ],
)
def test_a_fit_in_groups_gives_what_one_process_gives_in_one_go(
    processes, num_ranks, curvature, mode, sizes, replicate
):
    expected = tasks.calls(0, curvature, mode)
    for found in processes.run(num_ranks, tasks.calls_in_groups, curvature, mode, sizes, replicate):
        check(found, expected)


@pytest.mark.slow
def test_groups_of_one_block_are_shared_out_as_evenly_as_all_together(processes):
    found = processes.run(3, tasks.held_in_groups, (1,) * 10)
    assert sum(of["bytes"] for of in found) == sum(bytes_of_blocks("kfac").values())
    assert max(of["bytes"] for of in found) == found[0]["planned"]


def test_processes_without_a_block_take_part(processes):
    check_all(processes, 4, tasks.calls_of_last_layer)


def test_a_whole_posterior_on_each_process(processes):
    check_all(processes, 2, tasks.calls, "kfac", "full", {"replicate": True})


def test_the_functional_covariance_is_that_of_the_dense_reference(processes):
    net, (x, _) = rank_tasks.network(), rank_tasks.examples()[:]
    names = [name for name, _ in net.named_parameters()]
    diagonal = oracle.ggn(net, x, "classification", names).diagonal()
    J = torch.cat(
        [of.flatten(2) for of in oracle.per_example_jacobians(net, x[:5], names).values()], dim=2
    )
    expected = torch.einsum("bci,i,bdi->bcd", J, 1 / (len(x) * diagonal + 1.0), J)
    for found in processes.run(3, tasks.functional_of_diagonal):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("replicated", [False, True])
def test_several_posteriors_in_one_call(processes, replicated):
    curvatures = ("kfac", "ekfac")
    expected = tasks.several(0, curvatures, replicated)
    for found in processes.run(3, tasks.several, curvatures, replicated):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model_at_chosen_positions(processes, tied):
    check_all(processes, 3, tasks.predict_tokens, tied)


@pytest.mark.slow
def test_a_regression_is_tuned_in_all_ways(processes):
    expected = tasks.regression(0)
    for found in processes.run(3, tasks.regression):
        # Searches end within their own tolerance: what they end at is compared more loosely.
        check(found, expected, rel=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_search_over_held_out_data(processes, num_ranks):
    check_all(processes, num_ranks, tasks.search)


def test_without_a_generator_samples_are_those_of_the_first_process(processes):
    expected = tasks.unseeded(0)
    found = processes.run(3, tasks.unseeded)
    for of_rank in found:
        check({**of_rank, "moved": 0}, {**expected, "moved": 0})
    # The others' generators are in another state, and stay in it.
    assert [of_rank["moved"] for of_rank in found] == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("curvature", CURVATURES)
def test_each_process_holds_the_bytes_of_its_blocks(processes, curvature):
    whole = tasks.held(0, curvature)
    assert "sharded" not in whole["repr"]
    found = processes.run(3, tasks.held, curvature)
    assert sorted(name for of in found for name in of["names"]) == sorted(whole["names"])
    assert sum(of["bytes"] for of in found) == whole["bytes"]
    sizes = bytes_of_blocks(curvature)
    for of_rank in found:
        assert of_rank["names"]
        assert of_rank["bytes"] == sum(sizes[name] for name in of_rank["names"])
        assert of_rank["planned"] == max(of["bytes"] for of in found)
        assert "N = 37, full, sharded over 3 processes" in of_rank["repr"]
    for of_rank in processes.run(2, tasks.held, curvature, True):
        assert of_rank["bytes"] == of_rank["planned"] == whole["bytes"]
        assert "sharded" not in of_rank["repr"]


def test_the_messages_of_each_call(processes):
    """As docs/scale.md says: one sum a call, of the result's size."""
    C, D, blocks = 3, sum(p.numel() for p in rank_tasks.network().parameters()), 10
    for num_examples in (5, 30):
        found, *others = processes.run(3, tasks.count_calls, num_examples)
        assert all(other == found for other in others)
        covariance = 8 * num_examples * C * C
        seed = ("broadcast_object_list", None)
        assert found["functional"] == [("all_reduce", covariance)]
        assert found["predict"] == [("all_reduce", covariance // C)]
        assert found["grid"] == [("all_reduce", 3 * covariance // C)]
        assert found["sample"] == [seed, ("all_reduce", 8 * 4 * D)]
        assert found["evidence"] == [("all_reduce", 8 * 2 * blocks)]
        assert found["product"] == [("all_reduce", 8 * D)]
        assert found["whole"] == []
        # Every process sends its part of every batch, and all predict for it.
        names = [name for name, _ in found["evaluate"]]
        parts = 3 * -(-num_examples // 6)
        assert names.count("broadcast_object_list") == names.count("all_reduce") == parts
        sizes = bytes_of_blocks("kfac")
        assert {name for name, _ in found["gather"]} == {"broadcast"}
        assert sum(size for _, size in found["gather"]) == sum(sizes.values())


def test_the_file_of_a_sharded_posterior_is_that_of_the_whole_one(processes, tmp_path):
    for of_rank in processes.run(3, tasks.save, str(tmp_path)):
        sharded, whole = of_rank["files"]
        assert sharded == whole
        assert torch.equal(of_rank["read"], of_rank["own"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sharded", "whole"]
    for read in processes.run(2, tasks.load, str(tmp_path / "sharded")):
        assert torch.equal(read, of_rank["own"])


def test_a_sharded_posterior_in_parts_is_read_by_any_number(processes, tmp_path):
    expected = processes.run(3, tasks.save_parts, str(tmp_path))[0]
    assert len(list(tmp_path.glob("blocks-*"))) == 3
    for num_ranks, mmap in ((1, False), (2, True)):
        for read in processes.run(num_ranks, tasks.load, str(tmp_path), mmap):
            torch.testing.assert_close(read, expected, rtol=1e-12, atol=1e-15)


def test_a_gathered_posterior_works_on_each_process_alone(processes):
    for rank, found in enumerate(processes.run(2, tasks.each_its_own)):
        la = tasks.fitted()
        la.prior_precision = 1.0 + rank
        expected = la.predict(tasks.inputs() + rank).probs
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind", "parts"),
    [
        ("alone", "RuntimeError", ["shared out by block over 2", "la.gather()", "replicate=True"]),
        ("other_inputs", "ValueError", ["Ranks [1] ask for other inputs", "la.gather()"]),
        ("other_request", "ValueError", ["diagonal differs", "False on rank 0, True on rank 1"]),
        ("other_prior", "ValueError", ["Rank 1 has another prior precision"]),
        ("other_vector", "ValueError", ["Ranks [1] multiply another vector"]),
        ("other_call", "RankError", ["rank 0 in predict", "rank 1 in sample"]),
        ("export", "NotImplementedError", ["la.gather()"]),
        ("changed", "RuntimeError", ["changed since the fit"]),
        ("no_folder", "", ["/nowhere"]),
        ("one_block", "RuntimeError", ["This block lies on rank", "la.gather()"]),
    ],
)
def test_what_is_not_one_call_of_all_is_refused(processes, fault, kind, parts):
    for of_rank in processes.run(2, tasks.fault, fault):
        assert kind in of_rank[0], of_rank
        for part in parts:
            assert part in of_rank[1]


@pytest.mark.parametrize(("option", "value"), [("replicate", True), ("memory_bound", 2**40)])
def test_all_processes_must_fit_in_the_same_way(processes, option, value):
    for kind, message in processes.run(2, tasks.option_on_one, option, value):
        assert kind == "ValueError"
        assert f"{option} differs between the ranks" in message
