"""Second-order optimisers."""

from laplace_debias.optim.hessian_free import DebiasedHessianFree, StepReport

__all__ = ["DebiasedHessianFree", "StepReport"]
