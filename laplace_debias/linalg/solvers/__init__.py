"""Solutions of linear systems."""
