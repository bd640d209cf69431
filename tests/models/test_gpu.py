"""A posterior on a GPU is that on the CPU. Most tests are skipped without a GPU."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.curvature.fits import chunks
from laplace_debias.curvature.layer_rules.convolution import ConvolutionRule
from laplace_debias.curvature.layers import tap
from laplace_debias.laplace.functional import blocks

DEVICE = "cuda"
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def fitted(device, curvature="kfac", mode="full", dtype=torch.float64):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    model = nn.Sequential(*layers).to(device, dtype).eval()
    x = torch.randn(64, 3, 4, 4).to(dtype)
    y = torch.randint(4, (64,))
    la = Laplace(model, curvature=curvature)
    return la.fit(DataLoader(TensorDataset(x, y), batch_size=16), mode), x.to(device), y


def test_slices_and_columns_of_a_gpu_give_the_same(monkeypatch):
    """The CPU runs a convolution in the way of a GPU."""
    results = []
    for is_way_of_gpu in (False, True):
        if is_way_of_gpu:
            monkeypatch.setattr(chunks, "_BOUND_OVER_CHUNK", {"cpu": 1})
            monkeypatch.setattr(ConvolutionRule, "differentiates_one_by_one", lambda *_: False)
            monkeypatch.setattr(blocks, "_SPLIT", {"cpu": 16})
        la, x, y = fitted("cpu")
        assert tap.Tap(la.model).differentiates_one_by_one != is_way_of_gpu
        results.append([*la.functional(x), la.tune([(x, y)]).value])
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-12)


@on_a_gpu
@pytest.mark.parametrize("mode", ["full", "debiased", "crossfit"])
@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "lowrank", "full"])
def test_everything_is_as_on_the_cpu(curvature, mode, tmp_path):
    results = []
    for device in ("cpu", DEVICE):
        la, x, y = fitted(device, curvature, mode)
        evidence = la.log_marginal_likelihood()
        tuning = la.tune([(x, y)])
        la.save(tmp_path / "posterior.safetensors")
        again = Laplace.load(tmp_path / "posterior.safetensors", la.model)
        draws = la.sample(2, torch.Generator().manual_seed(0))
        assert {x.device.type for x in (evidence, draws, *again.functional(x))} == {device}
        values = evidence, *again.functional(x), la.predict(x).probs, tuning.value
        results.append([torch.as_tensor(value).cpu().double() for value in values])
    torch.testing.assert_close(results[1], results[0], rtol=1e-7, atol=1e-9)


@on_a_gpu
def test_a_plan_leaves_the_random_numbers_of_the_gpu():
    la, x, y = fitted(DEVICE)
    rng_state = torch.cuda.get_rng_state()
    assert la.plan([(x, y)]).decomposition_seconds > 0
    assert torch.equal(torch.cuda.get_rng_state(), rng_state)


@on_a_gpu
def test_weights_on_the_cpu_are_those_of_examples_on_the_gpu():
    weights = torch.arange(64.0) % 3
    results = []
    for device in ("cpu", DEVICE):
        la, x, y = fitted(device)
        report = la.evaluate([(x, y, weights)])
        la.fit([(x, y, weights)], num_data=int(weights.sum()))
        results.append([report["nll"].value, float(la.log_marginal_likelihood())])
    assert results[1] == pytest.approx(results[0], rel=1e-7)


@on_a_gpu
def test_products_in_tf32_are_refused(request):
    request.addfinalizer(lambda: torch.set_float32_matmul_precision("highest"))
    torch.set_float32_matmul_precision("high")
    with pytest.raises(RuntimeError, match="set_float32_matmul_precision"):
        fitted(DEVICE, dtype=torch.float32)
