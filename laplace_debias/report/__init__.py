"""Tables and pictures of results, which need the packages of the extra `cli`."""

from laplace_debias.system.checks import check_extra

check_extra("cli", "jinja2", "matplotlib", "pandas", "pyarrow", "rich")
