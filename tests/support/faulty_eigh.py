"""A seam that makes one eigendecomposition in ten of the package fail, as LAPACK does at times.

`LAPLACE_DEBIAS_FAULTY_EIGH=nan pytest` returns eigenvectors that are not a number, without an
error; `raise` raises. Both were seen with well-scaled matrices in float32 (MKL, AVX2). Which matrix
fails depends on its entries alone, as it does there, so the same fit fails twice in the same way.
Only calls from the package are hit: the tests' oracle and other libraries get the true
`torch.linalg.eigh`.
"""

import hashlib
import sys

import torch

FAULTS = ("nan", "raise")
ONE_IN = 10
PACKAGE = "laplace_debias"


class FaultyEigh:
    """In the place of `torch.linalg.eigh`; fails for one matrix in ten of the package's."""

    def __init__(self, fault, true_eigh=torch.linalg.eigh):
        if fault not in FAULTS:
            raise ValueError(f"LAPLACE_DEBIAS_FAULTY_EIGH is {fault!r}; expected one of {FAULTS}")
        self.fault = fault
        self.true_eigh = true_eigh

    def __call__(self, A, *args, **kwargs):
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.partition(".")[0] != PACKAGE or not A.is_floating_point() or not is_hit(A):
            return self.true_eigh(A, *args, **kwargs)
        if self.fault == "raise":
            raise torch.linalg.LinAlgError("linalg.eigh: failed to converge (by a test's seam)")
        values, vectors = self.true_eigh(A, *args, **kwargs)
        return torch.return_types.linalg_eigh((values, torch.full_like(vectors, torch.nan)))


def is_hit(A):
    """Whether a matrix is one of those that fail; an empty one is not."""
    entries = A.detach().cpu().contiguous().numpy().tobytes()
    digest = hashlib.blake2b(entries, digest_size=8).digest()
    return bool(entries) and int.from_bytes(digest, "big") % ONE_IN == 0


def install(fault):
    """Replaces `torch.linalg.eigh` for the rest of the process."""
    torch.linalg.eigh = FaultyEigh(fault)
