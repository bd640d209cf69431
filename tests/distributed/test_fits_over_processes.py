"""A fit of data that several processes share is the fit of one process, to rounding."""

from dataclasses import replace
from itertools import islice

import oracle
import pytest
import rank_tasks as tasks
import torch
from torch.utils.data import DataLoader, Subset

from laplace_debias import Full
from laplace_debias.curvature.data.batches import consecutive
from laplace_debias.curvature.data.shards import FAR

CURVATURES = ("kfac", "ekfac", "diag", "lowrank", "full")
MODES = ("full", "mini", "debiased", "crossfit")
FISHERS = ("exact", "mc", "empirical", "signs")
# Every pair of a curvature and a mode.
MATRIX = [
    (curvature, mode, {"fisher": FISHERS[(i + j) % 4]}, {})
    for i, curvature in enumerate(CURVATURES)
    for j, mode in enumerate(MODES)
]
# Each curvature and each mode once, and options that only some cases have.
DAILY = [
    *((curvature, "full", {}, {}) for curvature in CURVATURES),
    *(("kfac", mode, {"fisher": "mc"}, {}) for mode in MODES),
    *(
        (curvature, "crossfit", {"fisher": "mc"}, {"folds": 3})
        for curvature in ("ekfac", "lowrank")
    ),
    ("ekfac", "full", {"joint": True, "fisher": "mc", "mc_samples": 3}, {}),
]


def check(numbers, expected, rel=1e-12):
    """Compare the numbers that a process returned with the expected ones, key by key."""
    assert isinstance(numbers, dict), numbers
    for key, value in expected.items():
        expected_value = torch.as_tensor(value, dtype=torch.float64)
        error = (torch.as_tensor(numbers[key], dtype=torch.float64) - expected_value).norm()
        assert error <= rel * expected_value.norm(), key


def check_all(results, cases, size=tasks.SIZE, batch=tasks.BATCH):
    """Compare the fits of each rank with those of one process, case by case."""
    expected_fits = tasks.fits(0, cases, size, batch)
    for rank_fits in results:
        assert isinstance(rank_fits, list), rank_fits
        for case, numbers, expected in zip(cases, rank_fits, expected_fits, strict=True):
            check(numbers, expected)
            assert numbers["N"] == size, case


def test_three_processes_fit_as_one(processes):
    check_all(processes.run(3, tasks.fits, DAILY), DAILY)


def test_two_processes_update_as_one(processes):
    cases = [(curvature, {}) for curvature in CURVATURES]
    expected = tasks.updates(0, cases)
    for numbers_of_rank in processes.run(2, tasks.updates, cases):
        assert isinstance(numbers_of_rank, list), numbers_of_rank
        for numbers, alone in zip(numbers_of_rank, expected, strict=True):
            check(numbers, alone)
            assert numbers["N"] == tasks.SIZE + 7


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_curvature_and_mode_is_the_same_on_any_number_of_processes(processes, num_ranks):
    check_all(processes.run(num_ranks, tasks.fits, MATRIX), MATRIX)


@pytest.mark.filterwarnings("ignore:The tolerance")
@pytest.mark.parametrize(
    ("num_ranks", "fisher"),
    [
        (2, "exact"),
        (2, "mc"),
        pytest.param(3, "empirical", marks=pytest.mark.slow),
        pytest.param(3, "mc", marks=pytest.mark.slow),
        pytest.param(2, "signs", marks=pytest.mark.slow),
    ],
)
def test_fits_in_rounds_draw_the_same_examples_and_go_on(processes, num_ranks, fisher):
    expected = tasks.fit_auto(0, {"fisher": fisher})
    assert len(expected["rounds"]) >= 7
    for numbers in processes.run(num_ranks, tasks.fit_auto, {"fisher": fisher}):
        check(numbers, expected, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "batch"), [(2, 16), (7, 3)])
def test_processes_without_examples_take_part(processes, size, batch):
    cases = [c for c in DAILY[::2] if c[1] == "full" or size > 6]
    check_all(processes.run(4, tasks.fits, cases, size, batch), cases, size, batch)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_of_all_processes_make_one_basis(processes, num_ranks):
    cases = [(c, mode, {}, {}) for c in ("kfac", "ekfac") for mode in ("full", "debiased")]
    cases.append(("kfac", "crossfit", {}, {}))
    check_all(processes.run(num_ranks, tasks.fits_of_few_rows, cases, 4, 2), cases, 4, 2)


@pytest.mark.parametrize(
    ("num_ranks", "modes"),
    [(2, ["full"]), pytest.param(3, ["full", "debiased", "crossfit"], marks=pytest.mark.slow)],
)
def test_inducing_inputs_of_all_processes_are_those_of_one(processes, num_ranks, modes):
    inputs = tasks.examples(4).tensors[0]
    cases = [
        ("gp", mode, {"inducing": inducing}, {}) for mode in modes for inducing in (3, None, inputs)
    ]
    cases += [("gp", mode, {"inducing": 3, "independent_outputs": True}, {}) for mode in modes]
    check_all(processes.run(num_ranks, tasks.fits, cases, 9, 4), cases, 9, 4)


def test_all_processes_have_the_same_bits(processes):
    cases = [("kfac", "full", {}, {}), ("full", "debiased", {}, {})]
    first_fits, *fits_of_other_ranks = processes.run(4, tasks.fits, cases)
    for rank_fits in fits_of_other_ranks:
        for first, numbers in zip(first_fits, rank_fits, strict=True):
            assert torch.equal(first["C v"], numbers["C v"])


def test_the_curvature_is_that_of_the_dense_reference(processes):
    (numbers, *_) = processes.run(3, tasks.fit, "full", "full", {}, {})
    net = tasks.network()
    x, y = tasks.examples()[:]
    C = oracle.ggn(net, x, "classification", [name for name, _ in net.named_parameters()])
    V = torch.randn(len(C), 3, generator=tasks.generator(2), dtype=torch.float64)
    torch.testing.assert_close(numbers["C v"], C @ V, rtol=1e-10, atol=1e-12)
    assert y.shape == (numbers["N"],)


def test_a_loader_of_one_process_gives_the_same_fit(processes):
    """`ShardedBatches` has the batches of a loader in the order of the data."""
    plain = DataLoader(tasks.examples(), batch_size=tasks.BATCH)
    for mode in ("full", "debiased"):
        la = tasks.laplace("ekfac", fisher="mc")
        la.fit(plain, mode=mode, generator=tasks.generator(5))
        for numbers in processes.run(2, tasks.fit, "ekfac", mode, {"fisher": "mc"}, {}):
            check(numbers, tasks.numbers(la))


def test_loaders_of_accelerate_that_repeat_no_example(processes):
    pytest.importorskip("accelerate")
    sizes = [tasks.SIZE, tasks.SIZE, 40, 40, 40]
    expected = {size: tasks.numbers(tasks.laplace().fit(tasks.loader(size))) for size in set(sizes)}
    for rank_fits in processes.run(2, tasks.fits_prepared_without_repeats):
        assert isinstance(rank_fits, list), rank_fits
        for size, numbers in zip(sizes, rank_fits, strict=True):
            check(numbers, expected[size], 1e-10)


def test_the_callbacks_fit_to_a_stream_that_accelerate_splits(processes):
    pytest.importorskip("accelerate")
    read = Subset(tasks.examples(), range(32))  # 37 examples in batches of 4 on two processes
    expected = tasks.numbers(tasks.laplace().fit(DataLoader(read, 8)))
    for numbers in processes.run(2, tasks.fit_prepared_stream_at_end_of_training):
        check(numbers, expected, 1e-10)


@pytest.mark.parametrize("mode", ["full", "mini", "debiased", "crossfit"])
def test_loaders_of_data_that_was_split_before(processes, mode):
    """Each process has a loader of its own part, of another length and number of batches."""
    union = tasks.union_of_parts(3, mode)
    la = tasks.laplace().fit_batches(*union, folds=2 if mode == "crossfit" else None, num_data=37)
    for numbers in processes.run(3, tasks.fit_own_part, mode):
        check(numbers, tasks.numbers(la))


class AllParts(Full):
    """A full fit of the batches of three processes in turn, whose first indices are far apart."""

    def fit(self, prepared):
        (stream,) = prepared.streams
        batches = iter(stream)
        indexed = []
        for rank in range(3):
            rank_batches = consecutive(islice(batches, len(tasks.share_loader(rank))))
            indexed += [
                replace(batch, first_index=FAR * rank + batch.first_index) for batch in rank_batches
            ]
        return prepared.config.structure.fit(prepared.context, indexed)


def test_processes_with_data_of_their_own_draw_labels_of_their_own(processes):
    batches = [batch for rank in range(3) for batch in tasks.share_loader(rank)]
    la = tasks.laplace(fisher="mc").fit(
        AllParts(batches), num_data=37, generator=tasks.generator(5)
    )
    for numbers in processes.run(3, tasks.fit_own_part_with_drawn_labels):
        check(numbers, tasks.numbers(la))


@pytest.mark.slow
def test_a_process_all_of_whose_targets_are_ignored(processes):
    expected = tasks.fit_and_tune_ignored(0, 1)
    for numbers in processes.run(2, tasks.fit_and_tune_ignored, 2):
        check(numbers, expected)


@pytest.mark.parametrize("fisher", ["exact", "mc"])
def test_lists_of_batches(processes, fisher):
    la = tasks.laplace(fisher=fisher)
    la.fit_batches(*tasks.lists(0, 1), num_data=100, generator=tasks.generator(5))
    for numbers in processes.run(2, tasks.fit_lists, fisher):
        check(numbers, tasks.numbers(la))


def test_a_model_in_distributed_data_parallel(processes):
    expected = tasks.fit(0, "kfac", "full", {}, {})
    for numbers in processes.run(2, tasks.fit_ddp):
        check(numbers, expected)


def test_each_process_alone(processes):
    expected = tasks.fit(0, "kfac", "full", {}, {})
    for numbers in processes.run(2, tasks.fit_alone):
        check(numbers, expected, rel=0)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("metric", ["nll", "brier"])
def test_tuning_and_evaluation(processes, num_ranks, metric):
    expected = tasks.tune_and_evaluate(0, metric)
    for numbers in processes.run(num_ranks, tasks.tune_and_evaluate, metric):
        check(numbers, expected)


@pytest.mark.slow
def test_the_noise_of_each_output_is_tuned_on_the_examples_of_all_processes(processes):
    expected = tasks.noise_per_output(0)
    for numbers in processes.run(2, tasks.noise_per_output):
        check(numbers, expected, rel=1e-6)


@pytest.mark.slow
def test_evaluation_where_some_processes_have_no_example(processes):
    expected = tasks.tune_and_evaluate(0, "nll", 2)
    for numbers in processes.run(4, tasks.tune_and_evaluate, "nll", 2):
        check(numbers, expected)


@pytest.mark.slow
def test_conformal_sets_are_calibrated_on_the_examples_of_all_processes(processes):
    expected = tasks.conformal_sets(0)
    for sets in processes.run(2, tasks.conformal_sets):
        check(sets, expected)


def test_one_process_saves_and_the_others_wait(processes, tmp_path):
    expected = tasks.fit(0, "ekfac", "full", {}, {})
    for numbers in processes.run(3, tasks.save, str(tmp_path)):
        check(numbers, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["posterior.safetensors"]


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "full"])
def test_experts_that_only_one_process_sees_are_fitted_as_by_one(processes, curvature):
    names, trace, variances = tasks.experts_of_processes(0, 1, curvature)
    expected = {"trace": trace, "variances": variances}
    assert len(names) == 6
    for result in processes.run(2, tasks.experts_of_two_processes, curvature):
        rank_names, rank_trace, rank_variances = result
        assert rank_names == names
        check({"trace": rank_trace, "variances": rank_variances}, expected)
