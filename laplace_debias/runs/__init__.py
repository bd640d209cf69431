"""The records of a run of `assess`: their schema, and the folder that they are stored in."""

from laplace_debias.system.checks import check_extra

check_extra("cli", "pyarrow")
