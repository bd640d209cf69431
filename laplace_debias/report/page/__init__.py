"""The page of a run: a single HTML file that shows the quality of a network's uncertainty."""

from laplace_debias.report.page.write import write_page

__all__ = ["write_page"]
