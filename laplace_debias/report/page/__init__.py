"""The page of a run: one HTML file that tells whether a network's uncertainty is any good."""

from laplace_debias.report.page.write import write_page

__all__ = ["write_page"]
