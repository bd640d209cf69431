"""Processes exchange the sums at the end of a pass, and no more bytes than these have."""

import pytest
import rank_tasks as tasks
from torch import nn

NUMBER = 8  # bytes
RANKS = 3


def block_sizes():
    """List each block's groups, d_out, d_in, and whether it is exact; by hand from the network."""
    sizes = []
    for name, layer in tasks.network().named_modules():
        if isinstance(layer, nn.LayerNorm):
            sizes += [(1, 4, 1, True)] * 2
        elif isinstance(layer, (nn.Linear, nn.Conv2d)):
            groups = getattr(layer, "groups", 1)
            d_out = layer.weight.shape[0] // groups
            d_in = layer.weight[0].numel()
            is_depthwise = name == "depthwise"
            if is_depthwise:
                sizes.append((groups, d_in, 1, True))
            else:
                sizes.append((groups, d_out, d_in, False))
            sizes.append((1, layer.weight.shape[0], 1, True))
    return sizes


def num_factor_entries():
    """Number of entries of both factors of all blocks, which are sent to the blocks' owners."""
    total = 0
    for groups, d_out, d_in, is_exact in block_sizes():
        total += groups * d_out * d_out
        if not is_exact:
            total += groups * d_in * d_in
    return total


def num_basis_entries():
    """Number of entries of all eigenvectors and eigenvalues, which the blocks' owners send."""
    return sum(
        groups * (d_out * d_out + d_out + d_in * d_in + d_in)
        for groups, d_out, d_in, _ in block_sizes()
    )


def num_curvatures():
    """Number of curvatures along the directions of both factors of all blocks."""
    total = 0
    for groups, d_out, d_in, is_exact in block_sizes():
        total += groups * d_out
        if not is_exact:
            total += groups * d_in
    return total


def num_magnitudes():
    """Number of magnitudes of all blocks."""
    return sum(groups * d_out * d_in for groups, d_out, d_in, _ in block_sizes())


SENT = {
    ("kfac", "full"): {"reduce": num_factor_entries(), "broadcast": num_basis_entries()},
    ("kfac", "debiased"): {
        "reduce": num_factor_entries(),
        "broadcast": num_basis_entries(),
        "all_reduce": num_curvatures(),
    },
    ("ekfac", "full"): {
        "reduce": num_factor_entries(),
        "broadcast": num_basis_entries(),
        "all_reduce": num_magnitudes(),
    },
    ("diag", "full"): {"all_reduce": num_magnitudes()},
}


@pytest.mark.parametrize(("curvature", "mode"), SENT)
def test_as_many_bytes_as_the_sums_have(processes, curvature, mode):
    called, *called_by_others = processes.run(RANKS, tasks.count_messages, curvature, mode, 16)
    assert all(calls == called for calls in called_by_others)
    expected = SENT[curvature, mode]
    assert {name for name, _ in called} == set(expected)
    for collective, numbers in expected.items():
        assert sum(size for name, size in called if name == collective) == NUMBER * numbers


@pytest.mark.parametrize("fisher", ["exact", "mc"])
def test_no_message_for_a_batch(processes, fisher):
    curvatures = ("kfac", "ekfac", "diag", "full", "lowrank")
    cases = [(curvature, "full", batch, fisher) for curvature in curvatures for batch in (12, 37)]
    messages = processes.run(2, tasks.messages_of_each, cases)[0]
    for curvature, small_batches, large_batches in zip(
        curvatures, messages[::2], messages[1::2], strict=True
    ):
        assert small_batches == large_batches, curvature
        # EKFAC sends both factors and the magnitudes of a block, and gets four tensors back.
        assert 0 < len(small_batches) <= 7 * len(block_sizes())
