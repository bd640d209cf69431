"""A fit holds the second factors of one block at a time, and no Jacobian."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature.fits import factor_sums
from laplace_debias.curvature.fits import factors as measured


@pytest.mark.slow
def test_a_debiased_fit_holds_one_blocks_factors_beside_the_posterior(monkeypatch):
    """First factors go into the sums that become the eigenbases, second ones are projected."""
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)), nn.Linear(5, 3)).eval()
    factors = []
    alive = []

    def watched(original):
        def compute(*arguments, **options):
            gc.collect()
            alive.append(sum(factor() is not None for factor in factors))
            result = original(*arguments, **options)
            factors.append(weakref.ref(result[0] if isinstance(result, list) else result))
            return result

        return compute

    monkeypatch.setattr(factor_sums, "gradient_factor", watched(measured.gradient_factor))
    monkeypatch.setattr(factor_sums, "input_factors", watched(measured.input_factors))
    batches = [[(torch.randn(8, 5), torch.randint(3, (8,)))] for _ in range(2)]
    Laplace(model, params="weights").fit_batches(*batches)
    assert len(factors) == 2 * 2 * 5
    assert max(alive) <= 1


_PREDICT = """
import ctypes
import torch
from laplace_debias import Laplace
from examples.paper.networks import all_cnn_c

torch.manual_seed(0)
model = all_cnn_c().eval()
x = torch.randn(8, 3, 32, 32)
la = Laplace(model, params="weights", fisher="mc", factor_dtype=torch.float32)
la.fit_batches([(x, torch.zeros(8).long())], num_data=45000)

def peak_above_now(call):
    if hasattr(ctypes.CDLL(None), "malloc_trim"):  # what was freed is not ours any more
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far
    status = lambda key: next(
        int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)
    )
    before = status("VmRSS")
    call()
    return (status("VmHWM") - before) / 1024

print(peak_above_now(lambda: la.functional(x)))
print(peak_above_now(lambda: la.predict(x)))
print(peak_above_now(lambda: la.sample(8)))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="measures memory through Linux's /proc"
)
def test_predictions_at_all_cnn_c_size_add_little_memory():
    """A `[8, 10, 1.37 M]` Jacobian alone would take 438 MB in float32."""
    run = subprocess.run(
        [sys.executable, "-c", _PREDICT], capture_output=True, text=True, check=True
    )
    functional, predict, sample = (float(line) for line in run.stdout.split())
    assert functional < 150
    assert predict < 150
    assert sample < 300  # 44 MB of it are the samples


def num_tensors():
    gc.collect()
    return sum(issubclass(type(instance), torch.Tensor) for instance in gc.get_objects())


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "lowrank"])
def test_fits_and_predictions_leave_no_tensor_behind(curvature):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))
    x = torch.randn(16, 1, 8, 8)
    y = torch.randint(3, (16,))

    def work():
        Laplace(model.eval(), curvature=curvature).fit_batches([(x, y)]).predict(x)

    work()
    gc.collect()
    gc.freeze()  # The collector ignores the objects that exist already.
    work()
    num_before = num_tensors()
    for _ in range(3):
        work()
    assert num_tensors() == num_before
