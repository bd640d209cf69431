"""A fit in growing rounds: its posterior, the error that it tells, and where it ends."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Auto, Laplace
from laplace_debias.laplace.anytime import NUM_ERRORS, jackknife
from laplace_debias.laplace.functional.linearised import moments

SIZE = 600


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*layers).to(dtype).eval()


def data(size: int = SIZE, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.randn(size, 6, generator=generator, dtype=dtype)
    return x, torch.randint(3, (size,), generator=generator)


def loader(seed: int = 0, batch_size: int = 40) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(*data()), batch_size, shuffle=True, generator=generator)


def magnitudes(la: Laplace) -> list[Tensor]:
    return [block.magnitudes for block in la.posterior.curvature.blocks.values()]


@pytest.mark.filterwarnings("ignore:The tolerance")
def test_posterior_is_the_crossfitted_one_of_the_examples_read():
    x, y = data()
    batches = [(x[a : a + 50], y[a : a + 50]) for a in range(0, SIZE, 50)]
    la = Laplace(network()).fit(Auto(batches, tolerance=1e-9, examples=100), num_data=SIZE)
    # Sixteen are set aside.
    same = Laplace(network()).fit_batches([(x[16:116], y[16:116])], folds=4, num_data=SIZE)
    for own, expected in zip(magnitudes(la), magnitudes(same), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=0)
    assert la.fit_report.num_examples == 100
    assert [n for n, _ in la.fit_report.rounds] == [64, 100]


@pytest.mark.parametrize("batch_size", [2, 40, SIZE])
def test_a_tolerance_that_takes_all_the_data_gives_the_fit_of_all(batch_size: int):
    shuffled = loader(batch_size=batch_size)
    la = Laplace(network()).fit(Auto(shuffled, tolerance=1e-9))
    full = Laplace(network()).fit([data()])
    x = data()[0][:5]
    torch.testing.assert_close(la.predict(x).probs, full.predict(x).probs, rtol=1e-10, atol=1e-12)
    assert la.fit_report.ended_by == "data"
    assert la.fit_report.error == 0
    assert la.posterior.num_data == SIZE


def factors(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the factors G and A of a linear classifier, by hand."""
    p = model(x).softmax(1).detach()
    return (torch.diag_embed(p) - p[:, :, None] * p[:, None]).sum(0), x.mT @ x


@pytest.mark.filterwarnings("ignore:The tolerance")
def test_error_is_the_jackknife_of_dense_replicates():
    torch.manual_seed(0)
    model = nn.Linear(6, 3, bias=False).double().eval()
    x, y = data()
    la = Laplace(model, prior_precision=0.5)
    la.fit(Auto([(x[:80], y[:80]), (x[80:], y[80:])], tolerance=1e-9, examples=64), num_data=SIZE)
    probes, seen = x[:16], x[16:80]
    folds = [factors(model, seen[k::4]) for k in range(4)]
    replicates = []
    for side in (0, 1):
        total = sum(fold[side] for fold in folds)
        pairs = [torch.linalg.eigh((total - fold[side]) / 48) for fold in folds]
        along = sum(
            (U.T @ fold[side] @ U).diag() / 64 for fold, (_, U) in zip(folds, pairs, strict=True)
        )
        mean = torch.stack([values for values, _ in pairs]).mean(0)
        # Probabilities sum to one: one direction of G has no curvature, and no ratio.
        replicates.append([(along * torch.where(mean > 1e-9, L / mean, 1), U) for L, U in pairs])
    logs = []
    for (of_G, U_G), (of_A, U_A) in zip(*replicates, strict=True):
        precision = SIZE * torch.outer(of_G, of_A) + 0.5
        J = torch.einsum("cg,ba->bcga", U_G, probes @ U_A)
        logs.append((J.square() / precision).sum((2, 3)).log() / 2)
    deviations = torch.stack(logs) - torch.stack(logs).mean(0)
    error = (3 / 4 * deviations.square().sum(0)).mean().sqrt()
    assert la.fit_report.curve[1.0] == pytest.approx(NUM_ERRORS * float(error), rel=1e-6)


def test_jackknife_of_means_is_their_standard_error():
    values = torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    without = (values.sum(0) - values) / 11
    torch.testing.assert_close(jackknife(without), values.std(0) / 12**0.5)


def true_errors(la: Laplace, full: Laplace, x: Tensor) -> Tensor:
    """The errors of standard deviations on fresh inputs, for every point of the curve."""
    grid = torch.tensor(list(la.fit_report.curve), dtype=x.dtype)
    found, exact = (moments(of._fitted, x, grid, True)[1].log() / 2 for of in (la, full))
    return (found - exact).square().mean((1, 2)).sqrt()


@pytest.mark.parametrize("tolerance", [0.15, 0.08])
def test_told_error_covers_the_true_one(tolerance: float):
    model, full = network(), Laplace(network()).fit([data()])
    fresh = 2 * torch.randn(100, 6, generator=torch.Generator().manual_seed(7)).double()
    ratios = []
    for seed in range(20):
        la = Laplace(model).fit(Auto(loader(seed), tolerance=tolerance))
        report = la.fit_report
        assert report.ended_by in ("tolerance", "data")
        if report.ended_by == "tolerance":
            assert report.error <= tolerance
            ratios.append(report.error / float(true_errors(la, full, fresh).max()))
    found = torch.tensor(ratios)
    assert len(found) >= 10
    assert (found >= 1).double().mean() >= 0.8
    assert found.median() <= 2.5


@pytest.mark.filterwarnings("ignore:The tolerance")
def test_blocks_tell_their_part():
    la = Laplace(network()).fit(Auto(loader(), tolerance=1e-9, examples=128))
    report = la.fit_report
    assert list(report.of_blocks) == la.block_names
    # Parts of one sum: their errors add up to no less than the whole one's.
    assert sum(report.of_blocks.values()) >= 0.9 * report.curve[1.0]
    assert report.of_blocks[report.worst_block] == max(report.of_blocks.values())
    assert report.worst_block in str(report)


def interrupted(batches: DataLoader, after: int) -> Iterator:
    for number, batch in enumerate(batches):
        if number == after:
            raise KeyboardInterrupt
        yield batch


def test_an_interrupt_leaves_the_last_round():
    torch.manual_seed(0)
    stream = interrupted(loader(), after=8)
    with pytest.warns(UserWarning, match="ended by interrupt: after 256 examples"):
        la = Laplace(network()).fit(Auto(stream, tolerance=1e-9), num_data=SIZE)
    assert la.fit_report.ended_by == "interrupt"
    assert la.posterior.num_data == SIZE


def test_an_interrupt_of_the_first_round_leaves_what_was():
    la = Laplace(network()).fit([data()])
    before = la.posterior
    with pytest.raises(KeyboardInterrupt):
        la.fit(Auto(interrupted(loader(), after=1)), num_data=SIZE)
    assert la.posterior is before


def test_a_budget_of_seconds_ends_it():
    with pytest.warns(UserWarning, match="ended by seconds: after 64 examples"):
        la = Laplace(network()).fit(Auto(loader(), tolerance=1e-9, seconds=1e-6))
    assert la.fit_report.ended_by == "seconds"


def test_a_generator_decides_what_is_read():
    fits = []
    for _ in range(2):
        shuffled = DataLoader(TensorDataset(*data()), batch_size=40, shuffle=True)
        generator = torch.Generator().manual_seed(3)
        fits.append(Laplace(network()).fit(shuffled, mode="auto", generator=generator))
    for first, second in itertools.pairwise(map(magnitudes, fits)):
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)


def test_a_saved_posterior_has_no_report(tmp_path):
    la = Laplace(network()).fit(loader(), mode="auto")
    la.save(tmp_path / "a.safetensors")
    with pytest.raises(RuntimeError, match=r'report of fit\(mode="auto"\) alone'):
        _ = Laplace.load(tmp_path / "a.safetensors", network()).fit_report


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0}, "tolerance must be positive"),
        ({"tolerance": float("nan")}, "tolerance must be positive"),
        ({"seconds": -1.0}, "seconds must be positive"),
        ({"examples": 63}, "examples must be at least 64"),
    ],
)
def test_wrong_numbers_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Auto(loader(), **options)


def test_what_it_cannot_do_is_refused(tmp_path):
    x, y = data()
    in_order = DataLoader(TensorDataset(x, y), batch_size=40)
    la = Laplace(network())
    with pytest.raises(ValueError, match="shuffle=True"):
        la.fit(in_order, mode="auto")
    with pytest.raises(ValueError, match="leave out resume"):
        la.fit(loader(), mode="auto", resume=tmp_path)
    with pytest.raises(ValueError, match="takes no scale"):
        la.fit(loader(), mode="auto", scale=True)
    with pytest.raises(ValueError, match="batches of two examples"):
        la.fit(loader(batch_size=1), mode="auto")
    with pytest.raises(ValueError, match="pass num_data="):
        la.fit([(x, y)], mode="auto")
    with pytest.raises(ValueError, match='plan mode="crossfit"'):
        la.plan(loader(), mode="auto")
    with pytest.raises(ValueError, match="not 'ekfac'"):
        Laplace(network(), curvature="ekfac").fit(loader(), mode="auto")
