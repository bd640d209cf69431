"""Tables and pictures of results; they need the package's extra `cli`."""

from laplace_debias.system.checks import check_extra

check_extra("cli", "jinja2", "matplotlib", "pandas", "pyarrow", "rich")
