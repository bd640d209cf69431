"""Tables and pictures from results. Needs the extra `cli`, and knows no model."""

from laplace_debias.system.checks import check_extra

check_extra("cli", "jinja2", "matplotlib", "pandas", "pyarrow", "rich")
