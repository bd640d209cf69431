"""A vocabulary of 50,257 in megabytes: a `[V, V]` factor alone would be 10 GB."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

_MEASURE = """
import ctypes
import torch
import transformers
from laplace_debias import Laplace

V, T, B = 50_257, 16, 4
torch.manual_seed(0)
config = transformers.GPT2Config(
    vocab_size=V, n_embd=32, n_layer=2, n_head=2, n_positions=64, tie_word_embeddings=False
)
model = transformers.GPT2LMHeadModel(config).eval()
ids, mask = torch.randint(V, (B, T)), torch.ones(B, T).long()
mask[1, :3] = 0
x = {"input_ids": ids, "attention_mask": mask}
model(**x)  # what torch loads with a first pass
la = Laplace(model, fisher="mc", factor_dtype=torch.float32)

def peak_above_now(call):
    if hasattr(ctypes.CDLL(None), "malloc_trim"):  # what was freed is not ours any more
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far
    status = lambda key: next(
        int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)
    )
    before = status("VmRSS")
    found = call()
    print((status("VmHWM") - before) / 1024)
    return found

batch = {**x, "labels": ids.masked_fill(mask == 0, -100)}
peak_above_now(lambda: la.fit([batch]))
probs = peak_above_now(lambda: la.predict(x, positions=-1)).probs
mean, covariance = peak_above_now(lambda: la.functional(x, positions=-1, outputs=10))
peak_above_now(lambda: la.functional(x, positions=[-1, -3], outputs=10))
assert probs.shape == (B, V) and mean.shape == (B, 10) and covariance.shape == (B, 10, 10)
variances = la.functional(x, positions=-1, diagonal=True)[1]
at = model(**x).logits[:, -1].topk(10).indices
torch.testing.assert_close(
    covariance.diagonal(dim1=1, dim2=2), variances.gather(1, at), rtol=1e-4, atol=1e-8
)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="measures memory through Linux's /proc"
)
def test_a_vocabulary_of_50_257():
    """Logits of all positions are 13 MB, the head is 6 MB, its posterior another 6 MB."""
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True
    )
    fit, predict, largest, two_positions = (float(line) for line in run.stdout.split())
    assert fit < 500
    assert predict < 120
    assert largest < 100
    assert two_positions < 100
