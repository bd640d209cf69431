"""Linear algebra that knows no network."""

from laplace_debias.operators.assume import assume
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.block_diagonal import BlockDiagonal
from laplace_debias.operators.compose import Product, Scaled, Sum, Transpose
from laplace_debias.operators.dense import Dense
from laplace_debias.operators.diagonal import Diagonal
from laplace_debias.operators.eigen_kronecker import EigenKronecker, Spectrum
from laplace_debias.operators.identity import Identity
from laplace_debias.operators.kronecker import Kronecker
from laplace_debias.operators.layout import ParameterLayout
from laplace_debias.operators.low_rank import LowRankPlusDiagonal
from laplace_debias.operators.permutation import Permutation
from laplace_debias.operators.permuted import Permuted
from laplace_debias.operators.scipy_bridge import from_scipy
from laplace_debias.operators.submatrix import SubMatrix

__all__ = [
    "BlockDiagonal",
    "Dense",
    "Diagonal",
    "EigenKronecker",
    "Identity",
    "Kronecker",
    "LinearOperator",
    "LowRankPlusDiagonal",
    "ParameterLayout",
    "Permutation",
    "Permuted",
    "Product",
    "Scaled",
    "Spectrum",
    "SubMatrix",
    "Sum",
    "Transpose",
    "assume",
    "from_scipy",
]
