"""What travels between processes: sums at the end of a pass, and no more bytes than they have."""

import pytest
import rank_tasks as tasks
from torch import nn

NUMBER = 8  # bytes
RANKS = 3


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
    """Both sides, to their owners."""
    return sum(g * (o * o + (0 if e else i * i)) for g, o, i, e in sizes())


def bases():
    """Eigenvectors and eigenvalues of both sides, from their owners."""
    return sum(g * (o * o + o + i * i + i) for g, o, i, _ in sizes())


def along():
    return sum(g * (o + (0 if e else i)) for g, o, i, e in sizes())


def table():
    return sum(g * o * i for g, o, i, _ in sizes())


SENT = {
    ("kfac", "full"): {"reduce": factors(), "broadcast": bases()},
    ("kfac", "debiased"): {"reduce": factors(), "broadcast": bases(), "all_reduce": along()},
    ("ekfac", "full"): {"reduce": factors(), "broadcast": bases(), "all_reduce": table()},
    ("diag", "full"): {"all_reduce": table()},
}


@pytest.mark.parametrize(("curvature", "mode"), SENT)
def test_as_many_bytes_as_the_sums_have(processes, curvature, mode):
    called, *others = processes.run(RANKS, tasks.count_messages, curvature, mode, 16)
    assert all(other == called for other in others)
    expected = SENT[curvature, mode]
    assert {name for name, _ in called} == set(expected)
    for collective, numbers in expected.items():
        assert sum(size for name, size in called if name == collective) == NUMBER * numbers


@pytest.mark.parametrize("fisher", ["exact", "mc"])
def test_no_message_for_a_batch(processes, fisher):
    curvatures = ("kfac", "ekfac", "diag", "full", "lowrank")
    cases = [(curvature, "full", batch, fisher) for curvature in curvatures for batch in (12, 37)]
    counts = iter(processes.run(2, tasks.messages_of_each, cases)[0])
    for curvature, many, few in zip(curvatures, counts, counts, strict=True):
        assert many == few, curvature
        # Of EKFAC both factors and the table go out, an eigenbasis of four tensors comes back.
        assert 0 < len(many) <= 7 * len(sizes())
