"""A seam that makes every tenth eigendecomposition of the package fail, as LAPACK does at times.

`LAPLACE_DEBIAS_FAULTY_EIGH=nan pytest` returns eigenvectors that are not a number, without an
error; `raise` raises. Both were seen with well-scaled matrices in float32 (MKL, AVX2). Only calls
from the package are hit: the tests' oracle and other libraries get the true `torch.linalg.eigh`.
"""

import sys

import torch

FAULTS = ("nan", "raise")
EVERY = 10
PACKAGE = "laplace_debias"


class FaultyEigh:
    """In the place of `torch.linalg.eigh`; counts the package's calls and fails in every tenth."""

    def __init__(self, fault, true_eigh=torch.linalg.eigh):
        if fault not in FAULTS:
            raise ValueError(f"LAPLACE_DEBIAS_FAULTY_EIGH is {fault!r}; expected one of {FAULTS}")
        self.fault = fault
        self.true_eigh = true_eigh
        self.calls = 0

    def __call__(self, A, *args, **kwargs):
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.partition(".")[0] != PACKAGE or not A.is_floating_point() or A.numel() == 0:
            return self.true_eigh(A, *args, **kwargs)
        self.calls += 1
        if self.calls % EVERY:
            return self.true_eigh(A, *args, **kwargs)
        if self.fault == "raise":
            raise torch.linalg.LinAlgError("linalg.eigh: failed to converge (by a test's seam)")
        values, vectors = self.true_eigh(A, *args, **kwargs)
        return torch.return_types.linalg_eigh((values, torch.full_like(vectors, torch.nan)))


def install(fault):
    """Replaces `torch.linalg.eigh` for the rest of the process."""
    torch.linalg.eigh = FaultyEigh(fault)
