"""Estimators of traces, diagonals and norms, from products with random vectors."""
