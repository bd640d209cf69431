"""Stochastic estimators of traces, diagonals, norms and spectral densities."""
