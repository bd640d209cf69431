"""A plan: bytes and seconds against what a fit holds and takes, and what is refused."""

import json
import re
from dataclasses import replace

import pytest
import torch
from networks import Attention
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.curvature.fits import data_pass, factor_sums
from laplace_debias.curvature.fits.gram_factor import GramFactor
from laplace_debias.laplace.fitting import fit as fits
from laplace_debias.laplace.fitting import plan as plans
from laplace_debias.laplace.fitting.prepared import examine
from laplace_debias.laplace.state.fitted import FitSetup
from laplace_debias.system import memory as system_memory
from laplace_debias.system.memory import MemoryCounter


class Tokens(nn.Module):
    """An embedding, a normalisation, two linear layers over positions."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 12)
        self.norm = nn.LayerNorm(12)
        self.hidden = nn.Linear(12, 20)
        self.head = nn.Linear(20, 4)

    def forward(self, x):
        return self.head(self.hidden(self.norm(self.table(x))).tanh().mean(1))


def convolutions():
    layers = [nn.Conv2d(2, 6, 3, stride=2, groups=2), nn.Tanh(), nn.Conv2d(6, 8, 2, stride=2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 4, 5)).eval()


def images(n=24, batch=8):
    data = TensorDataset(torch.randn(n, 2, 9, 9), torch.randint(5, (n,)))
    return DataLoader(data, batch_size=batch)


def tokens(n=24, batch=8):
    data = TensorDataset(torch.randint(30, (n, 7)), torch.randint(4, (n,)))
    return DataLoader(data, batch_size=batch)


def sequences(n=24, batch=8):
    data = TensorDataset(torch.randn(n, 7, 12), torch.randint(4, (n,)))
    return DataLoader(data, batch_size=batch)


CASES = {
    "images": (convolutions, images),
    "tokens": (lambda: Tokens().eval(), tokens),
    "attention": (lambda: Attention().eval(), sequences),
}


@pytest.fixture(params=CASES)
def case(request):
    torch.manual_seed(0)
    model, data = CASES[request.param]
    return model(), data()


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "full", "lowrank", "gp"])
def test_bytes_of_the_posterior_are_those_of_the_fitted_tensors(case, curvature):
    model, data = case
    la = Laplace(model, curvature=curvature)
    planned = la.plan(data).posterior
    la.fit(data)
    num_bytes = {la.mean.untyped_storage().data_ptr(): la.mean.nbytes}
    for block in la.posterior.curvature.blocks.values():
        tensors = [value for value in vars(block).values() if isinstance(value, torch.Tensor)]
        if curvature == "gp":
            tensors += [block.U.coefficients, block.U.inducing.inputs]
        # An exact block has a 1 for A, and a low rank one number for the remaining directions.
        for tensor in tensors:
            if tensor.numel() > 1:
                num_bytes[id(tensor)] = tensor.nbytes
    small = 64 * len(la.param_names)
    assert abs(planned - sum(num_bytes.values())) <= small


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
def test_bytes_of_the_factors_are_those_of_the_sums(case, curvature, monkeypatch):
    model, data = case
    la = Laplace(model, curvature=curvature)
    planned = la.plan(data).blocks
    num_bytes = {}
    original = factor_sums.check_finite

    def count_bytes(factors):
        for block, factor in factors.items():
            entries = factor.rows if isinstance(factor, GramFactor) else factor
            num_bytes[block.name] = num_bytes.get(block.name, 0) + entries.nbytes
        original(factors)

    monkeypatch.setattr(factor_sums, "check_finite", count_bytes)
    la.fit(data)
    assert {b.name: b.factors for b in planned} == num_bytes


def wide_convolutions():
    layers = [nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 48, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(48 * 64, 10)).eval()


def wide_images():
    data = TensorDataset(torch.randn(24, 3, 12, 12), torch.randint(10, (24,)))
    return DataLoader(data, batch_size=12)


def check_memory(model, data, curvature, mode):
    la = Laplace(model, curvature=curvature)
    la.fit(data, mode)
    with MemoryCounter() as memory:
        la.fit(data, mode)
    assert 1 / 1.5 <= la.plan(data, mode).peak / memory.peak <= 1.5


MODES = ("full", "mini", "debiased", "crossfit")


@pytest.mark.parametrize(
    ("name", "curvature", "mode"),
    [  # All pairs; the tests that are not slow have each curvature and each mode once.
        pytest.param(
            list(CASES)[(i + j) % 3],
            curvature,
            mode,
            marks=() if mode == "full" or curvature == "kfac" else pytest.mark.slow,
        )
        for i, curvature in enumerate(("kfac", "ekfac", "diag", "lowrank", "full", "gp"))
        for j, mode in enumerate(MODES)
    ],
)
def test_memory_is_near_what_a_fit_holds(name, curvature, mode):
    torch.manual_seed(0)
    model, data = CASES[name]
    check_memory(model(), data(), curvature, mode)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("curvature", "mode"), list(zip(("kfac", "ekfac", "diag", "lowrank"), MODES, strict=True))
)
def test_memory_is_near_what_a_fit_of_large_blocks_holds(curvature, mode):
    torch.manual_seed(0)
    check_memory(wide_convolutions(), wide_images(), curvature, mode)


def test_memory_counts_no_more_low_rank_directions_than_rows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 200), nn.Tanh(), nn.Linear(200, 200), nn.Linear(200, 3))
    la = Laplace(model.eval(), curvature="lowrank", fisher="mc")
    data = [(torch.randn(4, 60), torch.randint(3, (4,)))] * 2
    la.fit(data)
    with MemoryCounter() as memory:
        la.fit(data)
    assert 1 / 1.5 <= la.plan(data).peak / memory.peak <= 1.5


def test_what_does_not_fit_is_refused_with_what_does(case):
    model, data = case
    plan = Laplace(model, curvature="full").plan(data)
    plan.check()
    small = replace(plan, available=plan.peak - 1)
    with pytest.raises(ValueError, match=r"takes .* are available.*diag"):
        small.check()


def test_a_plan_advises_what_takes_less_memory_with_its_curvature(case):
    model, data = case
    plan = Laplace(model, curvature="gp").plan(data)
    with pytest.raises(ValueError, match=r"use fewer inducing inputs \(inducing=\)\."):
        replace(plan, available=plan.peak - 1).check()


def test_a_fit_whose_posterior_does_not_fit_is_refused_before_work(case, monkeypatch):
    model, data = case
    la = Laplace(model, curvature="full")
    needed = la.plan(data).posterior
    monkeypatch.setattr(fits, "available_memory", lambda device: needed - 1)
    monkeypatch.setattr(data_pass, "ChunkRunner", None)
    with pytest.raises(
        ValueError, match=r"Nothing was fitted, because the posterior of curvature='full' .*diag"
    ):
        la.fit(data)
    assert isinstance(la._state, FitSetup)


def test_blocks_that_do_not_fit_are_counted_and_nothing_is_run(case, monkeypatch):
    model, data = case
    la = Laplace(model)
    unlimited = la.plan(data)
    monkeypatch.setattr(plans, "available_memory", lambda device: unlimited.posterior)
    monkeypatch.setattr(data_pass, "ChunkRunner", None)
    counted = la.plan(data)
    assert counted.blocks == unlimited.blocks
    assert counted.seconds is None
    with pytest.raises(ValueError, match="are available"):
        counted.check()


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
def test_a_plan_leaves_the_generator_and_the_model(case, curvature):
    model, data = case
    rng_state = torch.get_rng_state()
    model_state = {key: value.clone() for key, value in model.state_dict().items()}
    la = Laplace(model, curvature=curvature, fisher="mc")
    la.plan(data)
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert all(torch.equal(value, model_state[key]) for key, value in model.state_dict().items())
    assert isinstance(la._state, FitSetup)


@pytest.mark.usefixtures("batches_apart")
@pytest.mark.parametrize(("mode", "batches"), [("full", 3), ("mini", 1), ("debiased", 2)])
def test_seconds_are_those_of_one_batch_times_their_number(mode, batches, monkeypatch):
    torch.manual_seed(0)
    clock = iter(range(100))
    monkeypatch.setattr(plans, "perf_counter", lambda: next(clock))
    assert Laplace(convolutions()).plan(images(), mode).seconds == batches
    assert Laplace(convolutions()).plan(list(images())).seconds == 3
    assert Laplace(convolutions()).plan(Unsized()).seconds is None


class Unsized:
    def __iter__(self):
        return iter(images())


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [({"mode": "half"}, ValueError, "Unknown mode"), ({"folds": 2}, ValueError, "crossfit")],
)
def test_wrong_arguments_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        Laplace(convolutions()).plan(images(), **arguments)


def test_an_iterator_is_refused():
    with pytest.raises(TypeError, match="would then miss that batch"):
        Laplace(convolutions()).plan(iter(images()))


def test_a_printed_plan_is_aligned_and_complete(case):
    model, data = case
    plan = Laplace(model).plan(data)
    lines = str(plan).splitlines()
    table = lines[2 : lines.index("", 2)]
    assert len({len(line) for line in table}) == 1
    assert [line.split()[0] for line in table[1:]] == Laplace(model).block_names
    assert json.loads(json.dumps(plan.summary()))["peak"] == plan.peak


def test_available_memory_is_no_more_than_a_container_has(tmp_path, monkeypatch):
    machine_memory = system_memory.available_memory()
    monkeypatch.setattr(system_memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 200\n")
    assert system_memory.available_memory() == 500 < machine_memory
    (tmp_path / "memory.max").write_text("max\n")
    assert system_memory.available_memory() > 500


def test_a_wide_layer_has_no_factor_on_that_side():
    torch.manual_seed(0)
    la = Laplace(nn.Sequential(nn.Linear(9000, 3)).eval(), params="weights")
    data = [(torch.randn(2, 9000), torch.tensor([0, 1]))]
    (block,) = la.plan(data).blocks
    assert block.factors == 8 * (9 + 9000)


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
def test_the_sizes_of_decompositions_are_those_of_the_matrices_that_a_fit_decomposes(
    case, curvature, monkeypatch
):
    model, data = case
    planned = []
    decomposed = []

    def seconds_of_eigh(_, sizes):
        planned.extend(sizes)
        return 7.0

    monkeypatch.setattr(plans, "_seconds_of_eigh", seconds_of_eigh)
    la = Laplace(model, curvature=curvature)
    plan = la.plan(data)
    assert plan.decomposition_seconds == 7
    assert re.search("eigendecompositions +7 s$", repr(plan), re.MULTILINE)
    assert la.plan(data, "crossfit").decomposition_seconds == 3 * 7
    planned = planned[: len(planned) // 2]
    original = torch.linalg.eigh

    def eigh(matrices):
        decomposed.extend([matrices.shape[-1]] * matrices.shape[:-2].numel())
        return original(matrices)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    la.fit(data)
    # Matrices of one number are not decomposed, and shared ones once.
    matrices = [size for size in planned if size > 1]
    assert set(decomposed) == set(matrices)
    assert 0.5 * len(matrices) < len(decomposed) <= len(matrices)


@pytest.mark.usefixtures("batches_apart")
@pytest.mark.parametrize("num_batches", [1, 3, 30])
def test_decompositions_have_the_sizes_of_factors_of_all_batches(num_batches, monkeypatch):
    planned = []
    decomposed = []
    monkeypatch.setattr(plans, "_seconds_of_eigh", lambda _, sizes: planned.extend(sizes) or 1.0)
    la = Laplace(nn.Sequential(nn.Linear(400, 5)).eval(), params="weights", fisher="mc")
    data = [(torch.randn(16, 400), torch.randint(5, (16,))) for _ in range(num_batches)]
    la.plan(data)
    original = torch.linalg.eigh
    monkeypatch.setattr(
        torch.linalg, "eigh", lambda A: decomposed.append(A.shape[-1]) or original(A)
    )
    la.fit(data)
    assert planned == decomposed == [5, min(16 * num_batches, 400)]


@pytest.mark.parametrize("curvature", ["diag", "full", "lowrank"])
def test_no_time_of_decompositions_is_told_without_factors(case, curvature):
    model, data = case
    plan = Laplace(model, curvature=curvature).plan(data)
    assert plan.decomposition_seconds is None
    assert "eigendecompositions " not in repr(plan)


def test_the_time_of_decompositions_grows_with_the_cube_of_their_size(monkeypatch):
    monkeypatch.setattr(plans, "_measure", lambda run, _: plans._Cost(0, 2.0, run()))
    setup = Laplace(convolutions())._setup
    stream = setup.spec.training_stream(images(), setup.device)
    _, context = examine(setup, [stream], reads_all=False, fisher=setup.config.fisher)
    assert plans._seconds_of_eigh(context, []) == 0
    assert plans._seconds_of_eigh(context, [512]) == 2
    assert plans._seconds_of_eigh(context, [1024, 256, 512]) == pytest.approx(2 * (8 + 1 / 8 + 1))
