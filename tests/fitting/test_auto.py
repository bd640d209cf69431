"""A fit in growing rounds: its posterior, the error that it reports, and where it ends."""

import itertools
import math
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from laplace_debias import Auto, Laplace
from laplace_debias.laplace.fitting.auto import FORWARD_RATIO
from laplace_debias.laplace.fitting.importance_sampler import inclusion_probabilities
from laplace_debias.laplace.fitting.rounds import NUM_ERRORS, jackknife
from laplace_debias.laplace.functional.linearised import moments

SIZE = 3000


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*layers).to(dtype).eval()


def data(size: int = SIZE, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.randn(size, 6, generator=generator, dtype=dtype)
    return x, torch.randint(3, (size,), generator=generator)


def loader(seed: int = 0, batch_size: int = 100) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(*data()), batch_size, shuffle=True, generator=generator)


def magnitudes(la: Laplace) -> list[Tensor]:
    return [block.magnitudes for block in la.posterior.curvature.blocks.values()]


@pytest.mark.parametrize("batch_size", [25, 100, SIZE])
def test_a_tolerance_that_takes_all_the_data_gives_the_fit_of_all(batch_size: int):
    shuffled = loader(batch_size=batch_size)
    la = Laplace(network()).fit(Auto(shuffled, tolerance=1e-9))
    full = Laplace(network()).fit([data()])
    x = data()[0][:5]
    torch.testing.assert_close(la.predict(x).probs, full.predict(x).probs, rtol=1e-10, atol=1e-12)
    assert la.fit_report.ended_by == "data"
    assert la.fit_report.error == 0
    assert la.posterior.num_data == SIZE


def test_batches_of_one_example():
    x, y = (tensor[:200] for tensor in data())
    examples = TensorDataset(x, y)
    seeded = torch.Generator().manual_seed
    single = DataLoader(examples, 1, shuffle=True, generator=seeded(0))
    la = Laplace(network()).fit(Auto(single, tolerance=1e-9))
    assert la.fit_report.ended_by == "data"
    full = Laplace(network()).fit([(x, y)])
    torch.testing.assert_close(la.predict(x).probs, full.predict(x).probs, rtol=1e-10, atol=1e-12)
    single = DataLoader(TensorDataset(*data()), 1, shuffle=True, generator=seeded(0))
    partial = Laplace(network()).fit(Auto(single, tolerance=0.2))
    assert partial.fit_report.ended_by == "tolerance"
    assert partial.fit_report.num_examples < SIZE
    full_batch = Laplace(network()).fit([data()])
    ratio = partial.functional(x, diagonal=True)[1] / full_batch.functional(x, diagonal=True)[1]
    assert 0.8 < ratio.sqrt().mean() < 1.2


@pytest.mark.parametrize("form", [tuple, lambda halves: dict(zip("ab", halves, strict=True))])
def test_several_inputs_are_fitted_as_one(form):
    class Joining(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.inner(torch.cat([a, b], 1))

    batches = list(zip(*(tensor.split(100) for tensor in data(800)), strict=True))
    in_parts = [(form(x.split(3, 1)), y) for x, y in batches]
    alone = Laplace(network()).fit(Auto(batches, tolerance=0.5), num_data=800)
    several = Laplace(Joining().eval()).fit(Auto(in_parts, tolerance=0.5), num_data=800)
    # Joined inputs have another memory layout, in which vectorised sums round differently.
    assert several.fit_report.curve == pytest.approx(alone.fit_report.curve, rel=1e-10)
    assert alone.fit_report.ended_by == "tolerance"


class TwoConvolutions(nn.Module):
    """A convolution with two groups as two convolutions, each of half of the channels."""

    def __init__(self, grouped: nn.Conv2d):
        super().__init__()
        groups = [nn.Conv2d(2, 32, 3), nn.Conv2d(2, 32, 3)]
        for group, weight, bias in zip(
            groups, grouped.weight.chunk(2), grouped.bias.chunk(2), strict=True
        ):
            group.load_state_dict({"weight": weight, "bias": bias})
        self.groups = nn.ModuleList(groups)

    def forward(self, x: Tensor) -> Tensor:
        halves = x.chunk(2, dim=1)
        outputs = [group(half) for group, half in zip(self.groups, halves, strict=True)]
        return torch.cat(outputs, dim=1)


def test_groups_of_a_convolution_are_fitted_in_rounds_as_convolutions_of_their_own():
    torch.manual_seed(0)
    grouped = nn.Conv2d(4, 64, 3, groups=2)
    head = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(256, 3))
    x = torch.randn(4000, 4, 4, 4).double()
    y = torch.randint(3, (4000,))
    batches = list(zip(x.split(100), y.split(100), strict=True))
    variances = []
    for first_layer in (grouped, TwoConvolutions(grouped)):
        model = nn.Sequential(first_layer, head).double().eval()
        la = Laplace(model, params="weights", fisher="empirical", sharing="reduce")
        la.fit(Auto(batches, tolerance=1e-9, examples=256), num_data=4000)
        assert len(la.fit_report.rounds) > 1
        variances.append(la.functional(x[:5], diagonal=True)[1])
    torch.testing.assert_close(*variances, rtol=1e-9, atol=0)


def test_inverse_probabilities_are_unbiased_and_bounded():
    curvatures = torch.rand(500, generator=torch.Generator().manual_seed(0)).double() ** 6
    chances = inclusion_probabilities(curvatures, float(curvatures.mean()), FORWARD_RATIO)
    assert chances.reciprocal().max() <= 2 * FORWARD_RATIO
    assert float(chances.sum()) == pytest.approx(500 / FORWARD_RATIO, rel=0.05)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.rand(4000, 500, generator=generator, dtype=torch.float64) < chances
    means = (drawn / chances * curvatures).mean(1)
    assert float(means.mean()) == pytest.approx(float(curvatures.mean()), rel=4e-3)
    # If all are drawn with the same probability, they vary far more.
    drawn_uniformly = (
        torch.rand(4000, 500, generator=generator, dtype=torch.float64) < 1 / FORWARD_RATIO
    )
    assert means.std() < 0.6 * (drawn_uniformly * FORWARD_RATIO * curvatures).mean(1).std()


def factors_by_fold(model: nn.Module, x: Tensor) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """Sum G and A of a linear classifier over the examples of each of four folds, by hand.

    Also returns the relative standard error of the mean curvature in the outputs.
    """
    with torch.no_grad():
        p = model(x).softmax(1)
    hessians = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    traces = 1 - p.square().sum(1)
    # The data comes in one batch, behind the probes.
    chances = ((1 + traces / traces.mean()) / 16).clamp_max(1)
    uniforms = torch.rand(len(x), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.where(uniforms < chances, 1 / chances, 0)
    folds = []
    for k in range(4):
        fold_traces = traces[k::4]
        fold_weights = weights[k::4]
        scale = traces.mean() * len(fold_traces) / (fold_weights * fold_traces).sum()
        G = scale * (fold_weights[:, None, None] * hessians[k::4]).sum(0)
        folds.append((G, x[k::4].mT @ x[k::4]))
    return folds, float(traces.std() / traces.mean() / len(traces) ** 0.5)


@pytest.mark.filterwarnings("ignore:The tolerance")
def test_posterior_and_error_are_those_of_dense_matrices():
    torch.manual_seed(0)
    model = nn.Linear(6, 3, bias=False).double().eval()
    x, y = data(SIZE - 2)  # folds of two sizes
    la = Laplace(model, prior_precision=0.5)
    la.fit(Auto([(x, y)], tolerance=1e-9, examples=64), num_data=SIZE)
    probes = x[:16]
    folds, spread = factors_by_fold(model, x[16:])
    sizes = [len(x[16 + k :: 4]) for k in range(4)]
    num_examples = sum(sizes)
    bases = []
    in_fold = []
    leave_one_out = []
    for side in (0, 1):
        total = sum(fold[side] for fold in folds)
        factors = [fold[side] for fold in folds]
        pairs = [
            torch.linalg.eigh((total - factor) / (num_examples - size))
            for factor, size in zip(factors, sizes, strict=True)
        ]
        along = sum(
            (V.T @ factor @ V).diag() / num_examples
            for factor, (_, V) in zip(factors, pairs, strict=True)
        )
        eigenvalues, U = torch.linalg.eigh(total / num_examples)
        bases.append((along, U))
        in_fold.append((eigenvalues, U))
        mean = torch.stack([values for values, _ in pairs]).mean(0)
        # Probabilities sum to one: one direction of G has no curvature, and no ratio.
        ratios = [torch.where(mean > 1e-9, L / mean, 1) for L, _ in pairs]
        leave_one_out.append([(along * r, V) for r, (_, V) in zip(ratios, pairs, strict=True)])

    def variances(pair_G: tuple[Tensor, Tensor], pair_A: tuple[Tensor, Tensor]) -> Tensor:
        along_G, U_G = pair_G
        along_A, U_A = pair_A
        precision = SIZE * torch.outer(along_G, along_A) + 0.5
        J = torch.einsum("cg,ba->bcga", U_G, probes @ U_A)
        return (J.square() / precision).sum((2, 3))

    actual = la.functional(probes, diagonal=True)[1]
    torch.testing.assert_close(actual, variances(*bases), rtol=1e-9, atol=0)
    replicates = torch.stack(
        [variances(pair_G, pair_A) for pair_G, pair_A in zip(*leave_one_out, strict=True)]
    )
    jackknifed = 3 / 4 * (replicates - replicates.mean(0)).square().sum(0)
    bias = (variances(*in_fold) / variances(*bases)).log() / 8
    (along_G, U_G), pair_A = bases
    change_with_mean = variances(((1 + spread) * along_G, U_G), pair_A) - actual
    chance = NUM_ERRORS**2 / 4 * (jackknifed + change_with_mean.square()) / actual.square()
    error = (chance + bias.square()).mean().sqrt()
    assert la.fit_report.curve[1.0] == pytest.approx(float(error), rel=1e-6)
    assert la.fit_report.num_read == SIZE - 18


def test_jackknife_of_means_is_their_standard_error():
    values = torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    means_without_one = (values.sum(0) - values) / 11
    torch.testing.assert_close(jackknife(means_without_one), values.std(0) / 12**0.5)


def true_errors(la: Laplace, full: Laplace, x: Tensor) -> Tensor:
    """Root mean square errors of log standard deviations at x, one for each point of the curve."""
    grid = torch.tensor(list(la.fit_report.curve), dtype=x.dtype)
    actual, exact = (
        moments(posterior.fitted, x, grid, "variances")[1].log() / 2 for posterior in (la, full)
    )
    return (actual - exact).square().mean((1, 2)).sqrt()


@pytest.mark.slow
def test_the_estimated_error_covers_the_difference_from_a_full_fit():
    model = network()
    full = Laplace(network()).fit([data()])
    fresh = 2 * torch.randn(100, 6, generator=torch.Generator().manual_seed(7)).double()
    ratios = []
    for seed in range(20):
        la = Laplace(model).fit(Auto(loader(seed), tolerance=0.02))
        report = la.fit_report
        assert report.ended_by in ("tolerance", "data")
        if report.ended_by == "tolerance":
            assert report.error <= 0.02
            ratios.append(report.error / float(true_errors(la, full, fresh).max()))
    assert len(ratios) >= 10
    ratios = torch.tensor(ratios)
    assert (ratios >= 1).double().mean() >= 0.85
    assert ratios.median() <= 2


@pytest.mark.filterwarnings("ignore:The tolerance")
def test_blocks_tell_their_part():
    la = Laplace(network()).fit(Auto(loader(), tolerance=1e-9, examples=128))
    report = la.fit_report
    assert list(report.error_by_block) == la.block_names
    # The blocks' errors add up to at least the error of the sum over blocks.
    assert sum(report.error_by_block.values()) >= 0.9 * report.curve[1.0]
    assert max(report.error_by_block, key=report.error_by_block.get) in str(report)


def interrupted(batches: Iterable, after: int) -> Iterator:
    for number, batch in enumerate(batches):
        if number == after:
            raise KeyboardInterrupt
        yield batch


def test_an_interrupt_leaves_the_last_round():
    torch.manual_seed(0)
    stream = interrupted(loader(), after=16)
    with pytest.warns(UserWarning, match="Interrupted before"):
        la = Laplace(network()).fit(Auto(stream, tolerance=1e-9), num_data=SIZE)
    assert la.fit_report.ended_by == "interrupt"
    assert la.posterior.num_data == SIZE


@pytest.mark.filterwarnings("ignore:The tolerance")
@pytest.mark.parametrize("fisher", [pytest.param("exact", marks=pytest.mark.slow), "mc"])
def test_a_later_fit_goes_on_where_an_interrupt_ended_one(fisher: str):
    """The result has the bits of a fit that was never interrupted."""
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(0))
    x, y = data()
    batches = [(x[indices], y[indices]) for indices in order.split(100)]

    def fitted(source: Iterable, tolerance: float = 1e-9, **options: object) -> Laplace:
        la = Laplace(network(), fisher=fisher)
        scheme = Auto(source, tolerance, examples=256, **options)
        return la.fit(scheme, num_data=SIZE, generator=torch.Generator().manual_seed(3))

    uninterrupted, first = fitted(batches), fitted(interrupted(batches, after=16))
    later = fitted(batches, after=first.fit_report)
    assert later.fit_report.rounds == uninterrupted.fit_report.rounds
    assert len(first.fit_report.rounds) < len(later.fit_report.rounds)
    assert later.fit_report.seconds > first.fit_report.seconds
    for actual, expected in zip(magnitudes(later), magnitudes(uninterrupted), strict=True):
        assert torch.equal(actual, expected)
    assert first.fit_report.ended_by == "interrupt"
    with pytest.raises(ValueError, match="reached its tolerance"):
        Auto(batches, after=fitted(batches, 10.0).fit_report)
    with pytest.raises(ValueError, match="a different network"):
        Laplace(network(), params="weights").fit(
            Auto(batches, after=first.fit_report), num_data=SIZE
        )


def test_an_interrupt_of_the_first_round_leaves_what_was():
    la = Laplace(network()).fit([data()])
    posterior = la.posterior
    with pytest.raises(KeyboardInterrupt):
        la.fit(Auto(interrupted(loader(), after=1)), num_data=SIZE)
    assert la.posterior is posterior


def test_a_budget_of_seconds_ends_it():
    with pytest.warns(UserWarning, match="Stopped by the time budget"):
        la = Laplace(network()).fit(Auto(loader(), tolerance=1e-9, seconds=1e-6))
    assert la.fit_report.ended_by == "seconds"


@pytest.mark.parametrize("source", ["budget", "iterator"])
def test_data_that_ends_within_a_budget_or_an_iterator_is_not_all_fitted(source: str):
    """The report does not say that all data was used."""
    if source == "budget":
        budget = {"seconds": 1e6}
        batches = loader()
    else:
        budget = {}
        batches = iter(list(loader()))
    with pytest.warns(UserWarning, match="The data ended before"):
        la = Laplace(network()).fit(Auto(batches, tolerance=1e-9, **budget), num_data=SIZE)
    assert 0 < la.fit_report.error < 1
    assert la.fit_report.num_examples < SIZE / 2
    assert "used all" not in str(la.fit_report)
    few = iter([(data()[0][:100], data()[1][:100])])
    with pytest.raises(ValueError, match="ended before the first round"):
        Laplace(network()).fit(Auto(few), num_data=SIZE)


def test_data_of_fewer_examples_than_n_are_not_all_the_data():
    x, y = data(1000)
    with pytest.warns(UserWarning, match=r"The data ended before .* After 1,000 examples"):
        la = Laplace(network()).fit(Auto([(x, y)], tolerance=1e-9), num_data=SIZE)
    report = la.fit_report
    assert report.num_examples == report.num_read == 1000
    assert report.rounds[-1] == (1000, report.error)
    assert 0 < report.error < 1
    assert min(report.error_by_block.values()) >= 0
    assert max(report.error_by_block.values()) > 0
    assert report.ended_by == "the end of the data"
    assert "used all" not in str(report)
    assert la.num_data == SIZE
    full = Laplace(network()).fit([(x, y)], num_data=SIZE)
    for actual, expected in zip(magnitudes(la), magnitudes(full), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-14)
    with pytest.raises(ValueError, match="or used all the data"):
        Auto([(x, y)], after=report)


def test_the_error_is_unknown_if_the_data_end_before_the_first_round():
    x, y = data(100)
    with pytest.warns(UserWarning, match=r"It used all 100 examples .* Check `num_data=`"):
        la = Laplace(network()).fit(Auto([(x, y)]), num_data=SIZE)
    report = la.fit_report
    assert report.num_examples == report.num_read == 100
    assert math.isnan(report.error)
    assert "the error of the standard deviations of the outputs is unknown" in str(report).lower()


def test_a_loader_that_drops_its_last_batch_has_not_all_the_data():
    x, y = data(1010)
    shuffled = DataLoader(TensorDataset(x, y), 100, shuffle=True, drop_last=True)
    with pytest.warns(UserWarning, match="The data ended before"):
        la = Laplace(network()).fit(Auto(shuffled, tolerance=1e-9))
    assert la.fit_report.num_read == 1000
    assert la.fit_report.error > 0
    assert la.num_data == 1010


def test_a_generator_decides_what_is_read():
    fits = []
    for _ in range(2):
        shuffled = DataLoader(TensorDataset(*data()), batch_size=100, shuffle=True)
        generator = torch.Generator().manual_seed(3)
        fits.append(Laplace(network()).fit(shuffled, mode="auto", generator=generator))
    for first, second in itertools.pairwise(map(magnitudes, fits)):
        for expected, actual in zip(first, second, strict=True):
            assert torch.equal(actual, expected)


def test_a_saved_posterior_has_no_report(tmp_path):
    la = Laplace(network()).fit(loader(), mode="auto")
    la.save(tmp_path / "a.safetensors")
    with pytest.raises(RuntimeError, match=r'Only a fit with `mode="auto"` creates'):
        _ = Laplace.load(tmp_path / "a.safetensors", network()).fit_report


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0}, "`tolerance` must be positive"),
        ({"tolerance": float("nan")}, "`tolerance` must be positive"),
        ({"seconds": -1.0}, "`seconds` must be positive"),
        ({"examples": 15}, "examples must be at least 16"),
    ],
)
def test_wrong_numbers_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Auto(loader(), **options)


def test_a_random_subset_is_in_random_order():
    """The training examples of a report are such a subset.

    A subset whose indices increase is in the order of the data.
    """
    dataset = TensorDataset(*data())
    subset, _ = random_split(dataset, [1000, 2000], generator=torch.Generator().manual_seed(0))
    la = Laplace(network()).fit(Auto(DataLoader(subset, batch_size=40), tolerance=10.0))
    assert la.fit_report.ended_by == "tolerance"
    with pytest.raises(ValueError, match="shuffle=True"):
        la.fit(DataLoader(Subset(dataset, range(1000)), batch_size=40), mode="auto")


def test_what_it_cannot_do_is_refused(tmp_path):
    x, y = data()
    in_order = DataLoader(TensorDataset(x, y), batch_size=40)
    la = Laplace(network())
    with pytest.raises(ValueError, match="shuffle=True"):
        la.fit(in_order, mode="auto")
    with pytest.raises(ValueError, match="Remove `resume="):
        la.fit(loader(), mode="auto", resume=tmp_path)
    single = DataLoader(TensorDataset(x[:1], y[:1]), shuffle=True)
    with pytest.raises(ValueError, match="needs at least two examples"):
        la.fit(single, mode="auto")
    with pytest.raises(ValueError, match="Pass `num_data="):
        la.fit([(x, y)], mode="auto")
    with pytest.raises(ValueError, match='Call `plan` with `mode="crossfit"'):
        la.plan(loader(), mode="auto")
    with pytest.raises(ValueError, match=r"got .ekfac."):
        Laplace(network(), curvature="ekfac").fit(loader(), mode="auto")
