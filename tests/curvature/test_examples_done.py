"""Which examples are in saved sums: their marks, their places, and who saved them."""

import pytest
import torch

from laplace_debias.curvature.fits.examples_done import chosen, joined_spans, runs_of
from laplace_debias.curvature.fits.pass_state import PassState, mark_of_all, marks_of_examples
from laplace_debias.curvature.network.same_vectors import digest
from laplace_debias.system.ranks import ALONE

CPU = torch.device("cpu")


def generator(seed=3):
    return torch.Generator().manual_seed(seed)


def test_the_mark_of_an_example_changes_with_each_of_its_entries_alone():
    x = torch.randn(7, 2, 4, generator=generator())
    y = torch.randint(4, (7,), generator=generator())
    mask = torch.ones(7, 3, dtype=torch.bool)
    marks = marks_of_examples((x, mask), y)
    assert marks.equal(marks_of_examples((x.clone(), mask), y))
    for index in range(x.numel()):
        changed = x.clone()
        changed.view(-1)[index] = torch.nextafter(changed.view(-1)[index], torch.tensor(9.0))
        differ = marks_of_examples((changed, mask), y) != marks
        assert differ.nonzero().tolist() == [[index // 8]]
    changed = mask.clone()
    changed[2, 1] = False
    assert (marks_of_examples((x, changed), y) != marks).nonzero().tolist() == [[2]]
    assert (marks_of_examples((x, mask), (y + 1) % 4) != marks).all()
    order = torch.tensor([1, 0, *range(2, 7)])
    assert marks_of_examples((x[order], mask), y[order]).equal(marks[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mark_of_directions_changes_with_their_entries_signs_and_order(dtype):
    U, V = torch.randn(2, 4, 4, generator=generator(), dtype=dtype)
    mark = mark_of_all([U, None, V])
    assert mark == mark_of_all([U.clone(), None, V])
    swapped = [1, 0, 2, 3]
    one_sign = U * torch.tensor([1, -1, 1, 1])
    for other in (V, U + 1, -U, one_sign, U[:, swapped], U[swapped], U.T):
        assert mark != mark_of_all([other, None, V])
    assert mark not in (mark_of_all([U, V]), mark_of_all([V, None, U]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_of_signs_and_their_blocks_all_have_digests_of_their_own(dtype):
    signs = torch.tensor([1, -1], dtype=dtype)
    vectors = torch.cartesian_prod(*[signs] * 8)
    assert len({digest(vector) for vector in vectors}) == len(vectors)
    assert len({digest(vector.view(4, 2)) for vector in vectors}) == len(vectors)
    assert digest(vectors[:0]) == 0


def state(places):
    spans = joined_spans([torch.tensor([[place, 1]]) for place in places])
    return PassState(1, spans, torch.tensor(places) * 7, 0, len(places), 0.0, 0, [])


@pytest.mark.parametrize("seed", range(5))
def test_of_states_that_share_examples_the_larger_one_is_taken(seed):
    """No example is in two of those that are taken, and none is lost."""
    owner = torch.randint(4, (30,), generator=generator(seed))
    places = [(owner == saver).nonzero().flatten().tolist() for saver in range(3)]
    apart = {saver: state(of) for saver, of in enumerate(places)}
    # A process has saved what two had, and one example more, and was killed before it removed
    # theirs.
    both = {**apart, 3: state([*sorted(places[0] + places[1]), 100])}
    marks = torch.arange(30) * 7
    for states, savers, num_more in ((apart, [0, 1, 2], 0), (both, [2, 3], 1)):
        taken, done = chosen(ALONE, states, CPU)
        assert sorted(taken) == savers
        assert len(done) == int((owner < 3).sum()) + num_more
        among = done.among(0, marks)
        assert among.equal(owner < 3)
        assert done.among(4, marks[4:9]).equal(among[4:9])
        by_runs = torch.zeros(30, dtype=torch.bool)
        for run in runs_of(among):
            by_runs[run] = True
        assert by_runs.equal(among)
        # Another example at a place that is in the sums; and at one that is not.
        assert done.among(0, marks + (torch.arange(30) == owner.argmin())) is None
        assert done.among(0, marks + (owner == 3)).equal(among)


def test_without_states_nothing_is_done():
    taken, done = chosen(ALONE, {}, CPU)
    assert not taken
    assert not len(done)


def test_neighbouring_spans_become_one():
    spans = [torch.tensor([[0, 3]]), torch.tensor([[3, 2], [9, 1]]), torch.tensor([[10, 5]])]
    assert joined_spans(spans).tolist() == [[0, 5], [9, 6]]
    assert joined_spans([]).tolist() == []
