"""A fit in groups of blocks: the bits of one in one go, within the bound, or refused."""

from dataclasses import replace

import oracle
import pytest
import torch
from networks import Attention
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.curvature.fits import saved_passes, sweep
from laplace_debias.curvature.fits.tracked import TrackedMemory
from laplace_debias.laplace import grouping
from laplace_debias.laplace.schemes import Split

WIDTH, DEPTH = 24, 3


class Padded(nn.Module):
    """Tokens, of which some are padding; a convolution over positions; a group's own layers."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=0)
        self.conv = nn.Conv1d(8, 6, 3, padding=1, groups=2)
        self.norm = nn.LayerNorm(6)
        self.hidden = nn.Linear(6, 10)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        real = (x != 0).unsqueeze(-1)
        h = self.conv(self.table(x).mT).mT.tanh()
        h = self.hidden(self.norm(h)).relu() * real
        return self.head(h.sum(1) / real.sum(1).clamp_min(1))


def deep():
    layers = [m for _ in range(DEPTH) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4)).eval()


def wide():
    layers = [m for _ in range(6) for m in (nn.Linear(48, 48), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(48, 4)).eval()


def convolutions():
    layers = [nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(24, 5)).eval()


def of_vectors():
    return torch.randn(45, WIDTH), torch.randint(4, (45,))


def of_images():
    return torch.randn(45, 2, 5, 5), torch.randint(5, (45,))


def of_tokens():
    x = torch.randint(1, 11, (45, 7))
    for row, length in enumerate(torch.randint(3, 8, (45,))):
        x[row, length:] = 0
    return x, torch.randint(3, (45,))


CASES = {
    "deep": (deep, of_vectors),
    "wide": (wide, lambda: (torch.randn(45, 48), torch.randint(4, (45,)))),
    "convolutions": (convolutions, of_images),
    "tokens": (lambda: Padded().eval(), of_tokens),
    "attention": (
        lambda: Attention().eval(),
        lambda: (torch.randn(45, 5, 12), torch.randint(4, (45,))),
    ),
}


def case(name):
    torch.manual_seed(0)
    model, data = CASES[name]
    return model(), TensorDataset(*data())


def loader(data, **options):
    return DataLoader(data, batch_size=20, **{"shuffle": True, **options})


def seeded(seed=3):
    return torch.Generator().manual_seed(seed)


def assert_same(one, other):
    """The same bits in every block."""
    assert one.num_data == other.num_data
    assert one._fitted.nll == other._fitted.nll
    assert list(one.posterior.curvature.blocks) == list(other.posterior.curvature.blocks)
    for name, block in one.posterior.curvature.blocks.items():
        for part in ("U_G", "U_A", "magnitudes"):
            a, b = (getattr(of, part) for of in (block, other.posterior.curvature.blocks[name]))
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b), (name, part)


def in_groups(la, data, mode, sizes, monkeypatch, **options):
    """A fit in groups of these sizes, whatever the bound."""
    original = grouping._grouped

    def of_sizes(planned, most, is_stored):
        found = original(planned, most, is_stored)
        return grouping.Grouping(found.planned, sizes(planned.problem.blocks), found.stages)

    with monkeypatch.context() as patch:
        patch.setattr(grouping, "_grouped", of_sizes)
        return la.fit(data, mode, memory_bound=2**40, **options)


def one_each(blocks):
    return (1,) * len(blocks)


def uneven(blocks):
    return (2, 1, len(blocks) - 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "curvature", "mode", "fisher"),
    [
        *(("tokens", curvature, "full", "mc") for curvature in ("kfac", "ekfac", "diag")),
        *(("convolutions", curvature, "crossfit", "mc") for curvature in ("kfac", "ekfac")),
        *(("convolutions", curvature, "debiased", "exact") for curvature in ("kfac", "diag")),
        ("tokens", "ekfac", "mini", "empirical"),
        ("attention", "ekfac", "full", "exact"),
    ],
)
def test_groups_give_the_bits_of_a_fit_in_one_go(name, curvature, mode, fisher, monkeypatch):
    """With labels that are drawn, a loader that shuffles, and positions that take no part."""
    model, data = case(name)
    whole = Laplace(model, curvature=curvature, fisher=fisher)
    whole.fit(loader(data), mode, generator=seeded())
    la = Laplace(model, curvature=curvature, fisher=fisher)
    sizes = one_each if curvature == "ekfac" else uneven
    in_groups(la, loader(data), mode, sizes, monkeypatch, generator=seeded())
    assert_same(whole, la)


def test_groups_of_a_shuffling_loader_without_a_generator_read_the_same_batches(monkeypatch):
    model, data = case("deep")
    fits = []
    for sizes in (lambda blocks: (len(blocks),), uneven):
        la = Laplace(model, curvature="ekfac", fisher="mc")
        torch.manual_seed(5)
        fits.append(in_groups(la, loader(data), "full", sizes, monkeypatch))
    assert_same(*fits)


def test_a_scale_and_two_loaders_are_those_of_a_fit_in_one_go(monkeypatch):
    model, data = case("deep")
    fits = []
    for sizes in (lambda blocks: (len(blocks),), uneven):
        la = Laplace(model, fisher="mc")
        original = grouping._grouped

        def of_sizes(planned, most, is_stored, original=original, sizes=sizes):
            found = original(planned, most, is_stored)
            return grouping.Grouping(found.planned, sizes(planned.problem.blocks), found.stages)

        with monkeypatch.context() as patch:
            patch.setattr(grouping, "_grouped", of_sizes)
            la.fit_batches(
                *(loader(data), loader(data)),
                num_data=100,
                generator=seeded(),
                scale=loader(data),
                memory_bound=2**40,
            )
        fits.append(la)
    assert fits[0]._fitted.mode == "debiased, scaled"
    assert_same(*fits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("curvature", "mode"),
    [("kfac", "full"), ("ekfac", "crossfit"), ("kfac", "debiased")],
)
def test_the_peak_of_a_fit_falls_under_its_bound(curvature, mode):
    torch.manual_seed(0)
    layers = [m for _ in range(8) for m in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(64, 4)).eval()
    data = [(torch.randn(8, 64), torch.randint(4, (8,))) for _ in range(2)]

    def peak(**options):
        la = Laplace(model, curvature=curvature, memory_bound=2**16)
        la.fit(data, mode, 16, **options)
        with TrackedMemory() as memory:
            la = Laplace(model, curvature=curvature, memory_bound=2**16)
            la.fit(data, mode, 16, **options)
        return la, memory.peak

    whole, without = peak()
    # What is kept, and a share of what a fit in one go holds beyond it.
    plan = whole.plan(data, mode)
    kept = plan.posterior
    bound = kept + (min(without, plan.peak) - kept) * 6 // 10
    la, within = peak(memory_bound=bound)
    plan = la.plan(data, mode, memory_bound=bound)
    assert len(plan.groups) > 1
    assert within <= bound < without
    assert_same(whole, la)


def test_what_finished_groups_leave_in_memory_counts_in_those_that_follow(monkeypatch):
    caught, original = [], grouping._grouped

    def catching(planned, most, is_stored):
        caught.append(planned)
        return original(planned, most, is_stored)

    monkeypatch.setattr(grouping, "_grouped", catching)
    la = Laplace(wide(), params="weights", fisher="mc", memory_bound=2**14)
    la.plan([(torch.randn(8, 48), torch.randint(4, (8,)))], memory_bound=2**40)
    planned, low, high = caught[0], 0, 2**30
    while high - low > 1:
        middle = (low + high) // 2
        try:
            found, high = original(planned, middle, False), middle
        except ValueError:
            low = middle
    before = planned.problem.blocks[: -len(found.groups[-1])]
    assert before
    # Both eigenbases and the magnitudes, in single precision.
    kept = sum(4 * (o * o + i * i + o * i) for o, i in (block.shape for block in before))
    last = found.groups[-1]
    workings = tuple(working.of_group(last) for working in planned.workings())
    stages = planned.of_group(last).stages(workings)
    assert max(found.stages.values()) >= kept + max(stages.values())


@pytest.mark.slow
def test_a_posterior_that_is_larger_than_the_bound_is_stored(tmp_path):
    torch.manual_seed(0)
    layers = [m for _ in range(16) for m in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(64, 4)).eval()
    data = [(torch.randn(8, 64), torch.randint(4, (8,)))]
    la = Laplace(model, params="weights", fisher="mc", memory_bound=2**16)
    bound = la.plan(data).posterior * 8 // 10
    with pytest.raises(ValueError, match=r"fit\(store=folder\)"):
        la.fit(data, memory_bound=bound, generator=seeded())
    with TrackedMemory() as memory:
        la.fit(data, memory_bound=bound, generator=seeded(), store=tmp_path)
    assert memory.peak <= bound
    whole = Laplace(model, params="weights", fisher="mc", memory_bound=2**16)
    assert_same(whole.fit(data, generator=seeded()), la)


def test_groups_of_a_diagonal_are_that_of_the_dense_reference(monkeypatch):
    model, data = case("convolutions")
    model.double()
    x, y = data.tensors
    la = Laplace(model, curvature="diag")
    in_groups(la, [(x[:9].double(), y[:9]), (x[9:].double(), y[9:])], "full", uneven, monkeypatch)
    C = oracle.ggn(model, x.double(), "classification", la.param_names)
    torch.testing.assert_close(
        la.posterior.curvature.to_dense().diagonal(), C.diagonal(), rtol=1e-10, atol=1e-14
    )


def test_a_bound_below_the_chunks_makes_them_smaller_and_the_fit_the_same_to_rounding():
    model, data = case("deep")
    model.double()
    x, y = data.tensors
    batches = [(x.double(), y)]
    whole = Laplace(model, curvature="ekfac").fit(batches)
    plan = whole.plan(batches)
    bound = int(plan.working.chunk * 1.2)
    tight = Laplace(model, curvature="ekfac").fit(batches, memory_bound=bound)
    assert tight.plan(batches, memory_bound=bound).working.examples < plan.working.examples
    for name, block in whole.posterior.curvature.blocks.items():
        expected = block.to_dense()
        found = tight.posterior.curvature.blocks[name].to_dense()
        assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.slow
def test_a_bound_that_no_block_fits_into_is_refused_with_what_would_do(monkeypatch):
    model, data = case("deep")
    la = Laplace(model, curvature="ekfac", fisher="mc")
    monkeypatch.setattr(sweep, "sweep", None)
    with pytest.raises(ValueError, match=r"memory_bound: .* takes .* are available.*Nothing"):
        la.fit(loader(data), memory_bound=1000, generator=seeded())
    bound = la.plan(loader(data), memory_bound=2**40).posterior
    with pytest.raises(ValueError, match=r"These would fit: .*last_layer") as error:
        la.fit(loader(data), memory_bound=bound, generator=seeded())
    needed = int(str(error.value).split("(")[1].split(" bytes")[0].replace(",", ""))
    monkeypatch.undo()
    # What the message names is enough.
    la.fit(loader(data), memory_bound=needed, generator=seeded())
    assert len(la.plan(loader(data), memory_bound=needed).groups) > 1


def test_a_dense_curvature_is_one_group_or_refused():
    model, data = case("convolutions")
    la = Laplace(model, curvature="lowrank")
    la.fit(loader(data, shuffle=False), memory_bound=2**30)
    with pytest.raises(ValueError, match="one block of all parameters"):
        la.fit(loader(data), memory_bound=10_000)


@pytest.mark.slow
def test_a_plan_names_the_groups_their_passes_and_the_way_out(monkeypatch):
    model, data = case("wide")
    la = Laplace(model, curvature="ekfac", memory_bound=2**14)
    whole = la.plan(loader(data))
    assert whole.groups == (tuple(la.block_names),)
    bound = whole.posterior + (whole.peak - whole.posterior) * 8 // 10
    plan = la.plan(loader(data), memory_bound=bound)
    assert sum(plan.groups, ()) == tuple(la.block_names)
    assert len(plan.passes) == 2 * len(plan.groups) >= 4
    assert plan.peak <= bound
    assert plan.summary()["groups"] == [list(group) for group in plan.groups]
    assert f"{len(plan.groups)}: " in str(plan)
    assert plan.groups[-1][-1] in str(plan)
    counted = []
    original = sweep.sweep

    def count(problem, *rest, **options):
        counted.append(tuple(block.name for block in problem.blocks))
        return original(problem, *rest, **options)

    for module in ("sums", "kfac"):
        monkeypatch.setattr(f"laplace_debias.curvature.fits.{module}.sweep", count)
    la.fit(loader(data), memory_bound=bound)
    assert counted == [group for group in plan.groups for _ in range(2)]
    # Where one go does not fit, the groups are named.
    small = la.plan(loader(data), available=bound)
    with pytest.raises(ValueError, match=rf"fit\(memory_bound={bound}\)"):
        small.check()
    # On disk the blocks before take nothing: less will do.
    stored = la.plan(loader(data), memory_bound=bound, store=True)
    assert len(stored.groups) <= len(plan.groups)


def test_a_later_group_is_pushed_back_no_further_than_its_layers(monkeypatch):
    model, data = case("deep")
    reached = []
    original = torch.autograd.grad

    def grad(outputs, inputs, *rest, **options):
        reached.append(len(inputs))
        return original(outputs, inputs, *rest, **options)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    la = Laplace(model, fisher="mc", params="weights", backend="hooks")
    in_groups(la, [data.tensors], "mini", lambda b: (2, 2), monkeypatch, num_data=45)
    assert reached[-1] == 2 < max(reached)


def test_the_operations_of_a_group_are_those_of_its_layers(monkeypatch):
    model, data = case("deep")
    la = Laplace(model, fisher="mc", params="weights")
    original = grouping._grouped

    def of_pairs(planned, most, is_stored):
        return replace(original(planned, most, is_stored), sizes=(2, 2))

    monkeypatch.setattr(grouping, "_grouped", of_pairs)
    plan = la.plan(loader(data), memory_bound=2**40)
    layers = [2 * WIDTH * WIDTH] * DEPTH + [2 * WIDTH * 4]
    of_factors = [block.factor_flops for block in plan.blocks]
    first, second = (of.flops for of in plan.passes)
    assert first == 2 * sum(layers) + sum(of_factors[:2])
    # One cotangent goes back to the third layer.
    assert second == sum(layers) + sum(layers[2:]) + sum(of_factors[2:])


def test_an_input_of_several_layers_is_counted_in_each_group():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.a, self.b = (nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, x):
            h = self.first(x).tanh()
            return self.a(h) + self.b(h)

    x, y = torch.randn(20, 8), torch.randint(8, (20,))
    working = Laplace(Branches().eval()).plan([(x, y)]).working
    first, a, b = working.positions
    of_h = 8 * x.element_size()
    # The input of the first layer is the batch itself.
    assert [working.inputs[block] for block in (first, a, b)] == [0, 0, of_h]
    for block in (a, b):
        alone = working.of_group([block])
        assert alone.inputs == {block: of_h}
        assert alone.kept == 20 * of_h == working.kept
        assert set(alone.measured) == set(alone.input_factors) == {block}
    assert working.of_group([first]).kept == 0


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda la, d: la.fit(d, memory_bound=0), ValueError, "positive number of bytes"),
        (lambda la, d: la.plan(d, memory_bound=-1), ValueError, "positive number of bytes"),
        (lambda la, d: la.fit(d, memory_bound=1e9), TypeError, "whole number of bytes, such as"),
        (lambda la, d: la.fit(iter(d), memory_bound=2**30), TypeError, "read only once"),
        (
            lambda la, d: la.fit(Split(d, iter(d)), memory_bound=2**30, num_data=9),
            TypeError,
            "read only once",
        ),
    ],
)
def test_wrong_arguments_are_refused(unchecked, call, error, match):
    model, data = case("convolutions")
    with pytest.raises(error, match=match):
        call(Laplace(model), loader(data, shuffle=False))


def test_data_of_another_length_in_a_later_pass_is_refused(monkeypatch):
    model, data = case("convolutions")

    class Growing:
        passes = 0

        def __iter__(self):
            self.passes += 1
            x, y = data.tensors
            return iter([(x[: 10 + self.passes], y[: 10 + self.passes])])

    with pytest.raises(ValueError, match="12 examples, that for the first one 11"):
        in_groups(Laplace(model), Growing(), "full", uneven, monkeypatch, num_data=11)


def test_a_fit_in_groups_that_was_broken_off_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_passes, "EVERY", 0.0)
    model, data = case("wide")
    options = {"curvature": "ekfac", "memory_bound": 2**14}
    expected = Laplace(model, **options).fit(loader(data), generator=seeded())
    bound = Laplace(model, **options).plan(loader(data)).peak
    folder = tmp_path / "state"

    class Breaking:
        """Fails in the second pass of the second group."""

        left = 11

        def __init__(self, batches):
            self.batches = batches

        def __len__(self):
            return len(self.batches)

        @property
        def dataset(self):
            return self.batches.dataset

        def __iter__(self):
            for batch in self.batches:
                self.left -= 1
                if self.left == 0:
                    raise KeyError
                yield batch

    first = Laplace(model, **options)
    with pytest.raises(KeyError):
        first.fit(
            Breaking(loader(data)),
            num_data=45,
            generator=seeded(),
            resume=folder,
            memory_bound=bound,
        )
    assert len(list(folder.iterdir())) == 4
    second = Laplace(model, **options)
    with pytest.raises(ValueError, match="groups"):
        second.fit(
            loader(data), num_data=45, generator=seeded(), resume=folder, memory_bound=2 * bound
        )
    second.fit(loader(data), num_data=45, generator=seeded(), resume=folder, memory_bound=bound)
    assert_same(expected, second)
