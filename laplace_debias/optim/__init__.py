"""Second-order optimisers for the parameters of networks."""

from laplace_debias.optim.hessian_free import DebiasedHessianFree, StepReport

__all__ = ["DebiasedHessianFree", "StepReport"]
