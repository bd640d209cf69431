"""What travels between processes: sums at the end of a pass, and no more bytes than they have."""

import pytest
import rank_tasks as tasks
import torch
from torch import nn

from laplace_debias.curvature.fits.costs import message_bytes

NUMBER = 8  # bytes
SIZE = tasks.SIZE
RANKS = 3


def triangle(d):
    return d * (d + 1) // 2


def sizes():
    """Of each block the groups, d_out, d_in, and whether it is exact; by hand from the network."""
    found = []
    for name, layer in tasks.network().named_modules():
        if isinstance(layer, nn.LayerNorm):
            found += [(1, 4, 1, True)] * 2
        elif isinstance(layer, (nn.Linear, nn.Conv2d)):
            groups = getattr(layer, "groups", 1)
            d_out, d_in = layer.weight.shape[0] // groups, layer.weight[0].numel()
            is_depthwise = name == "depthwise"
            found += [(groups, d_in, 1, True)] if is_depthwise else [(groups, d_out, d_in, False)]
            found += [(1, layer.weight.shape[0], 1, True)]
    return found


def factors():
    """Upper triangles, to their owners."""
    return sum(g * (triangle(o) + (0 if e else triangle(i))) for g, o, i, e in sizes())


def bases():
    """Eigenvectors and eigenvalues of both sides, from their owners."""
    return sum(g * (o * o + o + i * i + i) for g, o, i, _ in sizes())


def along():
    return sum(g * (o + (0 if e else i)) for g, o, i, e in sizes())


def table():
    return sum(g * o * i for g, o, i, _ in sizes())


# The largest curvature of each block goes to all, wherever the blocks stay.
LARGEST = len(sizes())
SHARDED = {
    ("kfac", "full"): {"reduce": factors(), "all_reduce": LARGEST},
    ("kfac", "debiased"): {"reduce": 2 * factors(), "all_reduce": LARGEST},
    ("ekfac", "full"): {
        "reduce": factors() + table(),
        "broadcast": bases(),
        "all_reduce": LARGEST,
    },
    ("diag", "full"): {"reduce": table(), "all_reduce": LARGEST},
}
REPLICATED = {
    ("kfac", "full"): {"reduce": factors(), "broadcast": bases()},
    ("kfac", "debiased"): {"reduce": factors(), "broadcast": bases(), "all_reduce": along()},
    ("ekfac", "full"): {"reduce": factors(), "broadcast": bases(), "all_reduce": table()},
    ("diag", "full"): {"all_reduce": table()},
}
WAYS = {False: SHARDED, True: REPLICATED}


@pytest.mark.parametrize(("curvature", "mode"), SHARDED)
@pytest.mark.parametrize("replicate", WAYS)
def test_as_many_bytes_as_the_sums_have(processes, curvature, mode, replicate):
    options = {"replicate": replicate}
    called, *others = processes.run(
        RANKS, tasks.count_messages, curvature, mode, 16, "exact", options
    )
    assert all(other == called for other in others)
    expected = WAYS[replicate][curvature, mode]
    assert {name for name, _ in called} == set(expected)
    for collective, numbers in expected.items():
        assert sum(size for name, size in called if name == collective) == NUMBER * numbers


@pytest.mark.parametrize(
    ("curvature", "mode", "folds"),
    [
        *((curvature, mode, None) for curvature, mode in SHARDED),
        *((curvature, "crossfit", folds) for curvature in ("kfac", "ekfac") for folds in (2, 3)),
    ],
)
@pytest.mark.parametrize("replicate", WAYS)
def test_a_plan_counts_the_bytes_that_are_sent(processes, curvature, mode, folds, replicate):
    options = {"folds": folds, "replicate": replicate}
    called = processes.run(RANKS, tasks.count_messages, curvature, mode, 16, "exact", options)[0]
    la = tasks.laplace(curvature).fit_batches([tasks.a_batch()], num_data=SIZE)
    blocks = la._state.parameters.blocks
    planned = message_bytes(blocks, curvature, mode, folds or 2, torch.float64, replicate)
    sent = {name: sum(size for of, size in called if of == name) for name, _ in called}
    assert sent == planned


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "full", "lowrank"])
@pytest.mark.parametrize("fisher", ["exact", "mc"])
def test_no_message_for_a_batch(processes, curvature, fisher):
    many, few = (
        processes.run(RANKS, tasks.count_messages, curvature, "full", batch, fisher)[0]
        for batch in (6, 37)
    )
    assert many == few
    # Of EKFAC a message to each owner for both factors and the magnitudes, and one from it.
    assert 0 < len(many) <= 4 * RANKS + 1


def test_what_one_process_has_arrives_on_the_same_kind_of_device(processes):
    # On a machine with GPUs a command on the CPU has a group with collectives for both.
    for found in processes.run(2, tasks.shared_by_the_first):
        assert found[0].equal(torch.arange(3)), found
        assert found[1] is None
