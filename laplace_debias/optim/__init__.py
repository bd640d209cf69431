"""Second-order optimisers for training networks."""

from laplace_debias.optim.hessian_free import DebiasedHessianFree, StepReport

__all__ = ["DebiasedHessianFree", "StepReport"]
