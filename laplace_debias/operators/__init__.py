"""Linear operators: their structures, arithmetic and closed forms."""

from laplace_debias.operators.algebra import Product, Scaled, Sum, Transpose
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.layout import ParameterLayout
from laplace_debias.operators.structures.block_diagonal import BlockDiagonal
from laplace_debias.operators.structures.dense import Dense
from laplace_debias.operators.structures.diagonal import Diagonal, Identity
from laplace_debias.operators.structures.eigen_kronecker import EigenKronecker, Spectrum
from laplace_debias.operators.structures.kronecker import Kronecker
from laplace_debias.operators.structures.low_rank import LowRankPlusDiagonal
from laplace_debias.operators.structures.wrappers import Permuted, SubMatrix, assume

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
    "Permuted",
    "Product",
    "Scaled",
    "Spectrum",
    "SubMatrix",
    "Sum",
    "Transpose",
    "assume",
]
