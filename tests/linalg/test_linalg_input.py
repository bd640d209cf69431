"""Bad input raises an error with a remedy, before any product or at the first bad product."""

import itertools

import numpy as np
import pytest
import torch
from spectra import Matrix, generator, symmetric, uniform
from torch.testing import assert_close

from laplace_debias.linalg import (
    cg,
    diagonal,
    eigsh,
    frobenius_norm,
    inverse,
    inverse_sqrt,
    logdet,
    matrix_function_trace,
    neumann,
    spectral_density,
    spectral_norm,
    trace,
)
from laplace_debias.operators import (
    BlockDiagonal,
    Dense,
    Diagonal,
    EigenKronecker,
    Identity,
    LowRankPlusDiagonal,
    Permuted,
    assume,
)

B = torch.ones(60, dtype=torch.float64)
FUNCTIONS = {
    "trace": lambda A, **options: trace(A, num_matvecs=20, **options),
    "hutch++": lambda A, **options: trace(A, "hutch++", num_matvecs=20, **options),
    "xtrace": lambda A, **options: trace(A, "xtrace", num_matvecs=20, **options),
    "diagonal": lambda A, **options: diagonal(A, num_matvecs=20, **options),
    "xdiag": lambda A, **options: diagonal(A, "xdiag", num_matvecs=20, **options),
    "frobenius_norm": lambda A, **options: frobenius_norm(A, num_matvecs=20, **options),
    "spectral_norm": spectral_norm,
    "lanczos": lambda A, **options: eigsh(A, 3, **options),
    "arpack": lambda A, **options: eigsh(A, 3, "arpack", **options),
    "power": lambda A, **options: eigsh(A, 3, "power", **options),
    "spectral_density": lambda A, **options: spectral_density(
        A, num_probes=2, num_steps=9, **options
    ),
    "logdet": lambda A, **options: logdet(A, 2, 9, **options),
    "matrix_function_trace": lambda A, **options: matrix_function_trace(
        A, torch.exp, 2, 9, **options
    ),
    "neumann": lambda A, **options: neumann(A, B, scale=0.1, **options),
}


class Failing(Matrix):
    """An operator whose products are NaN from the fourth column on."""

    def _matmat(self, matrix):
        product = super()._matmat(matrix).clone()
        bad = torch.arange(self.columns - matrix.shape[1], self.columns) >= 3
        product[7, bad] = torch.nan
        return product


class Elsewhere(Matrix):
    """An operator that claims a device for which this machine has no generator."""

    @property
    def device(self):
        return torch.device("meta")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_products_that_are_not_finite_are_named(name):
    A = Failing(symmetric(1 + uniform(60)).matrix, is_positive_semidefinite=True)
    with pytest.raises(ValueError, match="product 4 with Failing contains NaN or Inf"):
        FUNCTIONS[name](A, generator=generator())


def test_spectral_norm_names_the_operator_whose_products_are_not_finite():
    # The operator is not symmetric, so the products are those of A Aᵀ.
    A = Failing(torch.ones(60, 70, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"product \d+ with Failing contains NaN or Inf"):
        spectral_norm(A, generator=generator())


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"frobenius_norm", "spectral_norm"}))
def test_operators_that_are_not_square_are_refused(name):
    A = Matrix(torch.ones(60, 50, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"\(60, 50\).*square"):
        FUNCTIONS[name](A)
    assert A.columns == 0


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"neumann"}))
def test_generators_on_another_device_are_refused(name):
    A = Elsewhere(torch.eye(60, dtype=torch.float64))
    with pytest.raises(ValueError, match="`generator` is on cpu, but the operator is on meta"):
        FUNCTIONS[name](A, generator=generator())
    assert A.columns == 0


STRUCTURES = {
    "diagonal": Diagonal,
    "dense": lambda x: assume(Dense(x.diag()), symmetric=True),
    "eigen-kronecker": lambda x: EigenKronecker(None, None, x.reshape(6, 10)),
    "blocks": lambda x: BlockDiagonal({"a": Diagonal(x[:20]), "b": Dense(x[20:].diag())}),
    "shifted": lambda x: Permuted(Diagonal(x)) + 0.5 * Identity(60),
    "low rank": lambda x: LowRankPlusDiagonal(x[:, None], x[:1] ** 0, 1.0),
    "number": lambda x: float(x.sum()) * Identity(60, torch.float64),
}


@pytest.mark.parametrize("name", [*sorted(set(FUNCTIONS) - {"neumann"}), "inverse"])
def test_closed_forms_refuse_what_is_not_finite(name):
    function = {**FUNCTIONS, "inverse": inverse}[name]
    for structure, bad in itertools.product(STRUCTURES.values(), (torch.nan, torch.inf)):
        values = 1 + uniform(60)
        values[7] = bad
        with pytest.raises(ValueError, match=r"contains NaN or Inf. Look for NaN"):
            function(structure(values))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*FUNCTIONS, "inverse", "inverse_sqrt", "cg"])
def test_half_precision_is_refused(name, dtype):
    functions = {"inverse": inverse, "inverse_sqrt": inverse_sqrt, "cg": lambda A: cg(A, B)}
    function = {**FUNCTIONS, **functions}[name]
    A = Matrix(torch.eye(60, dtype=dtype))
    structured = [structure(1 + uniform(60)).to(dtype) for structure in STRUCTURES.values()]
    for operator in (A, *structured):
        with pytest.raises(ValueError, match=rf"is {dtype}, but must be float32 or float64"):
            function(operator)
    assert A.columns == 0


@pytest.mark.parametrize("name", [*FUNCTIONS, "inverse", "cg"])
def test_matrices_are_to_be_wrapped(unchecked, name):
    function = {**FUNCTIONS, "inverse": inverse, "cg": lambda A: cg(A, B)}[name]
    for wrong in (torch.eye(60, dtype=torch.float64), np.eye(60)):
        kind = type(wrong).__name__
        with pytest.raises(TypeError, match=f"Expected a LinearOperator, got {kind}.*Dense"):
            function(wrong)
    with pytest.raises(TypeError, match=r"got function.*a subclass of LinearOperator"):
        function(lambda v: 2 * v)


@pytest.mark.parametrize("solver", [cg, neumann])
def test_right_hand_sides_on_another_device_are_refused(solver):
    with pytest.raises(ValueError, match="on meta, but the operator"):
        solver(A, B.to("meta"))


SPREAD = symmetric(torch.linspace(0.01, 1, 60), is_positive_semidefinite=True)
RANDOM = {
    "lanczos": lambda g: eigsh(SPREAD, 2, tol=1e-2, generator=g).vectors,
    "arpack": lambda g: eigsh(SPREAD, 2, "arpack", tol=1e-2, generator=g).vectors,
    "power": lambda g: eigsh(SPREAD, 2, "power", tol=1e-1, generator=g).vectors,
    "spectral_norm": lambda g: spectral_norm(SPREAD, tol=1e-2, generator=g).value,
    "neumann": lambda g: neumann(SPREAD, B, 5, generator=g).x,
}


@pytest.mark.parametrize("name", RANDOM)
def test_the_generator_and_nothing_else_decides(name):
    first, same_seed, other_seed = (RANDOM[name](generator(seed)) for seed in (0, 0, 1))
    assert first.equal(same_seed)
    assert not first.equal(other_seed)


SHOWN = {
    "eigsh": lambda: eigsh(SPREAD, 2, progress=True),
    "spectral norm": lambda: spectral_norm(SPREAD, progress=True),
    "Frobenius norm": lambda: frobenius_norm(SPREAD, 20, progress=True),
    "diagonal": lambda: diagonal(SPREAD, num_matvecs=20, progress=True),
    "logdet": lambda: logdet(SPREAD, 2, 9, progress=True),
    "f(A)": lambda: matrix_function_trace(SPREAD, torch.exp, 2, 9, progress=True),
    "spectral density": lambda: spectral_density(SPREAD, num_steps=9, progress=True),
    "products": lambda: neumann(SPREAD, B, 5, scale=1.0, progress=True),
}


@pytest.mark.parametrize("label", SHOWN)
def test_progress_is_shown_on_request(label, capsys):
    SHOWN[label]()
    assert label in capsys.readouterr().err


def test_parameters_for_cg_name_the_remedy(unchecked):
    with pytest.raises(TypeError, match=r"`b` is a dict.*`inverse\(A\) @ b`.*flatten"):
        cg(A, {"weight": B})


def test_operators_on_two_devices_are_refused():
    on_cpu = Diagonal(B)
    on_meta = Diagonal(B).to("meta")
    for combine in (lambda a, b: a + b, lambda a, b: a @ b, lambda a, b: a - 2 * b):
        with pytest.raises(ValueError, match=r"cpu.*meta|meta.*cpu"):
            combine(on_cpu, on_meta)


A = symmetric(1 + uniform(60))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: trace(A, "hutchpp"), r"'hutchpp'. Use .* Did you mean 'hutch\+\+'"),
        (lambda: trace(A, "hutch++", 2), "num_matvecs must be at least 3"),
        (lambda: trace(A, num_matvecs=0), "num_matvecs must be at least 1"),
        (lambda: diagonal(A, num_matvecs=0), "num_matvecs must be at least 1"),
        (lambda: eigsh(A, 0), "`k` is 0. Pass a number from 1 to 60"),
        (lambda: eigsh(A, 61), "`k` is 61. Pass a number from 1 to 60"),
        (lambda: eigsh(A, method="lancoz"), "Did you mean 'lanczos'"),
        (lambda: eigsh(A, which="SN"), "'SN'. Use 'largest'"),
        (lambda: eigsh(A, tol=0.0), "`tol` is 0.0"),
        (lambda: eigsh(A, 10, max_matvecs=5), "max_matvecs must be at least 10"),
        (lambda: eigsh(A, 3, "power", max_matvecs=5), "the block has 13 vectors"),
        (lambda: eigsh(A, 3, "arpack", max_matvecs=5), "ARPACK stores"),
        (lambda: spectral_norm(A, tol=-1.0), "`tol` is -1.0"),
        (lambda: spectral_norm(A, max_matvecs=2), "max_matvecs must be at least 3"),
        (lambda: spectral_density(A, scale="logarithmic"), "Did you mean 'log'"),
        (lambda: spectral_density(A, num_probes=0), "num_probes must be at least 1"),
        (lambda: spectral_density(A, num_steps=1), "num_steps must be at least 2"),
        (lambda: spectral_density(A, 1), "num_points must be at least 2"),
        (lambda: spectral_density(A, width=0.0), "`width` is 0.0"),
        (lambda: spectral_density(A, floor=0.1), "`floor` applies only to `scale=.log"),
        (lambda: spectral_density(A, scale="log", floor=9.0), "All eigenvalues are within"),
        (lambda: neumann(A, B[:10]), r"`b` has shape \(10,\)"),
        (lambda: neumann(A, B, 0), "num_terms must be at least 1"),
        (lambda: neumann(A, B, scale=-1.0), "`scale` is -1.0"),
        (lambda: neumann(A, B, tol=0.0), "`tol` is 0.0"),
    ],
)
def test_arguments_out_of_range_are_refused_with_a_remedy(unchecked, call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "function",
    [diagonal, trace, logdet, frobenius_norm, spectral_norm, inverse, inverse_sqrt, eigsh],
)
def test_closed_forms_are_not_rounded_by_autocast(function):
    torch.manual_seed(0)
    U_G, U_A = (torch.linalg.qr(torch.randn(n, n)).Q for n in (3, 4))
    for A in (
        EigenKronecker(U_G, U_A, torch.rand(3, 4) + 1),
        LowRankPlusDiagonal(torch.randn(12, 2), torch.ones(2), torch.rand(12) + 1),
        LowRankPlusDiagonal(torch.randn(12, 2), torch.ones(2), 1.0),
    ):
        options = {"k": 2} if function is eigsh else {}
        expected = function(A.to(torch.float64), **options)
        with torch.autocast("cpu", torch.bfloat16):
            with pytest.raises(RuntimeError, match="autocast"):
                function(A, **options)
            # Autocast does not round float64.
            computed = function(A.to(torch.float64), **options)
        for value in ("value", "values"):
            if hasattr(expected, value):
                assert_close(getattr(computed, value), getattr(expected, value))
