"""The inverse of an operator, as an operator: in closed form where there is one, else by solves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from laplace_debias.linalg.checks import (
    check_choice,
    check_finite,
    check_generator,
    check_operator,
    check_square,
)
from laplace_debias.linalg.results import Status
from laplace_debias.linalg.solvers.conjugate_gradient import cg
from laplace_debias.linalg.solvers.lsmr import lsmr
from laplace_debias.linalg.solvers.neumann import default_scale, neumann
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.exact import exact_inverse
from laplace_debias.operators.layout import ParameterLayout
from laplace_debias.operators.structures.wrappers import Wrapper
from laplace_debias.system.shown import warn

_SOLVERS: dict[str, Callable[..., Any]] = {"cg": cg, "lsmr": lsmr, "neumann": neumann}
_OPTIONS = {
    "auto": ("tol", "max_iter", "preconditioner"),
    "exact": (),
    "cg": ("tol", "max_iter", "preconditioner"),
    "lsmr": ("tol", "max_iter", "damping"),
    "neumann": ("tol", "num_terms", "scale", "preconditioner", "generator"),
}


def inverse(
    A: LinearOperator,
    method: str = "auto",
    **options: Any,
) -> LinearOperator:
    r"""The inverse of an operator, as an operator: it multiplies, transposes and goes to SciPy.

    - `"exact"`: in closed form, for structured operators; the result is structured again.
    - `"cg"`: each product solves by conjugate gradients; A must be positive definite.
    - `"lsmr"`: each product solves least squares; A may be rectangular or singular, and this is
      then its pseudo-inverse.
    - `"neumann"`: each product sums a Neumann series, so that it is linear.
    - `"auto"`: exact where there is a closed form, else CG if A claims to be positive
      semi-definite, else LSMR.

    Args:
        A: Operator `[rows, columns]`; square but for LSMR.
        method: One of the above.
        options: Of the solver, `cg`, `lsmr` or `neumann`, as it takes them: `tol` (1e-6; Neumann
            has no default), `max_iter` (CG, LSMR), `preconditioner` (CG, Neumann; a closed form
            does not use it), `damping` (LSMR), `num_terms`, `scale`, `generator` (Neumann, whose
            scale is computed once, here).

    Returns:
        An operator `[columns, rows]`. Its products warn where a solve did not converge.

    Raises:
        ValueError: The method is unknown, has no such option, or there is no closed form.

    Warns:
        RuntimeWarning: Upon a product, if its solve did not converge; with the remedy.
    """
    check_operator(A)
    check_choice(method, _OPTIONS, "method")
    options = {name: value for name, value in options.items() if value is not None}
    for name in options:
        if name not in _OPTIONS[method]:
            takers = [repr(other) for other, names in _OPTIONS.items() if name in names]
            raise (ValueError if takers else TypeError)(
                f"`{name}` is not an option of method={method!r}; expected one of "
                f"{', '.join(_OPTIONS[method]) or 'none'}. "
                f"{' and '.join(takers) or 'No method'} would take it."
            )
    generator, preconditioner = options.get("generator"), options.get("preconditioner")
    check_generator(generator, A)
    if method != "lsmr" and not (method == "auto" and A.shape[0] != A.shape[1]):
        check_square(A, "inverse")
    if method in ("auto", "exact") and A.shape[0] == A.shape[1]:
        check_finite(A)
        closed_form = exact_inverse(A)
        if closed_form is not None:
            return closed_form
        if method == "exact":
            raise ValueError(
                f"{type(A).__name__} has no inverse in closed form; expected a structured "
                "operator. Use method='cg' if it is positive definite, else 'lsmr'."
            )
    if method == "auto":
        method = "cg" if A.is_positive_semidefinite else "lsmr"
        if method == "lsmr" and preconditioner is not None:
            raise ValueError(
                f"{type(A).__name__} does not claim to be positive semi-definite, so method='auto' "
                "is 'lsmr', which takes no `preconditioner`: leave it out, or use method='cg' if A "
                "is positive definite."
            )
    if method == "neumann" and "scale" not in options:
        options["scale"], _ = default_scale(A, preconditioner, generator)
    return Inverse(A, method, options)


@dataclass(frozen=True, eq=False)
class Inverse(Wrapper):
    """An inverse whose products are solves; made by `inverse`."""

    method: str
    options: dict[str, Any]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the operator's adjoint."""
        return self.operator.shape[1], self.operator.shape[0]

    @property
    def layout(self) -> ParameterLayout | None:
        """How named parameters lie in the operator's rows, if they do."""
        return self.operator.T.layout

    @property
    def T(self) -> "Inverse":  # noqa: N802
        """The inverse of the adjoint."""
        if self.is_symmetric:
            return self
        options = dict(self.options)
        preconditioner = options.get("preconditioner")
        if isinstance(preconditioner, LinearOperator):
            options["preconditioner"] = preconditioner.T
        elif preconditioner is not None and self.method == "neumann":
            raise NotImplementedError(
                "The adjoint of a preconditioner that is a function is unknown: pass it as a "
                "LinearOperator."
            )
        return Inverse(self.operator.T, self.method, options)

    def _matmat(self, matrix: Tensor) -> Tensor:
        solution = _SOLVERS[self.method](self.operator, matrix, **self.options)
        # Without a tolerance a Neumann series is meant to end after its terms.
        is_to_end = self.method == "neumann" and "tol" not in self.options
        if not (solution.converged or (is_to_end and solution.status is Status.MAX_ITER)):
            warn(f"inverse by {self.method}: {solution.message}", RuntimeWarning)
        return solution.x
