"""The error of K-FAC and EKFAC against dense GGN blocks."""

import oracle
import pytest
import torch

from laplace_debias import Laplace
from laplace_debias.experiments.bias import kfac_error
from laplace_debias.experiments.shared.setup import Trained
from laplace_debias.problems import ImageDataset, ProblemData, get_problem


@pytest.fixture
def trained():
    model, *_ = oracle.SMALL_MODELS["conv2d"]()
    pixels = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    images = ImageDataset(pixels, torch.zeros(1).long(), (0.5,), (0.5,), ("one",))
    nothing = torch.zeros(0).long()
    data = ProblemData(images, images, images, nothing, nothing)
    return Trained(get_problem("allcnn-digits"), model, data, 0.0)


@pytest.fixture
def batches():
    _, x, _, _, _ = oracle.SMALL_MODELS["conv2d"]()
    torch.manual_seed(0)
    images = torch.randn(12, *x.shape[1:]).double()
    labels = torch.randint(3, (12,))
    return [(images[:6], labels[:6]), (images[6:], labels[6:])]


def settings(tmp_path, **changes):
    return kfac_error.KfacErrorSettings(
        output=tmp_path, batch_size=6, num_batches=2, draws=2, folds=3, progress=False, **changes
    )


def dense_blocks(trained, batches):
    x = torch.cat([x for x, _ in batches])
    names = [block.name for block in kfac_error._problem(trained).blocks]
    return {name: oracle.ggn_block(trained.model, x, "classification", name) for name in names}


def test_norms_are_estimated_within_their_errors(trained, batches, tmp_path):
    norms = kfac_error._norms(trained, batches, settings(tmp_path, probes=400))
    for row, C in zip(norms, dense_blocks(trained, batches).values(), strict=True):
        error = abs(row["squared_norm"] - C.square().sum().item())
        assert 0 < error < 4 * row["standard_error"]
        assert row["standard_error"] < 0.3 * row["squared_norm"]


def test_errors_are_those_of_dense_blocks(trained, batches, tmp_path):
    chosen = settings(tmp_path)
    dense = dense_blocks(trained, batches)
    norms = [{"block": name, "squared_norm": C.square().sum()} for name, C in dense.items()]
    x, y = torch.randn_like(batches[0][0]), batches[0][1]
    rows = kfac_error._errors(trained, (x, y), batches, norms, chosen)
    for fit, (curvature, mode) in kfac_error._FITS.items():
        la = Laplace(trained.model, curvature=curvature, params="weights", backend="hooks")
        if mode == "debiased":
            la.fit_batches([(x[:3], y[:3])], [(x[3:], y[3:])])
        else:
            la.fit_batches([(x, y)], folds=3 if mode == "crossfit" else None)
        squares = {
            name: (block.to_dense() - dense[name]).square().sum()
            for name, block in la.posterior.curvature.blocks.items()
        }
        found = {row["block"]: row["relative_error"] for row in rows if row["fit"] == fit}
        for name, square in squares.items():
            expected = (square / dense[name].square().sum()).sqrt().item()
            assert found[name] == pytest.approx(expected, rel=1e-6)
        total = sum(squares.values()) / sum(C.square().sum() for C in dense.values())
        assert found["all blocks"] == pytest.approx(total.sqrt().item(), rel=1e-6)


def test_settings_out_of_range_are_refused(tmp_path):
    for changes, says in (
        ({"batch_size": 5}, "even"),
        ({"draws": 0}, "at least 1"),
        ({"num_batches": 0}, "at least 1"),
        ({"folds": 7}, "2 to 6"),
        ({"probes": 1}, "at least 2"),
    ):
        with pytest.raises(ValueError, match=says):
            kfac_error.KfacErrorSettings(
                **{"output": tmp_path, "batch_size": 6, "num_batches": 2, "draws": 2, "folds": 3}
                | changes
            )
