"""Adapters to other libraries, which an extra of the package installs."""

from laplace_debias.system.checks import check_extra

check_extra("botorch", "botorch")
