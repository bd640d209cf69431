"""Kronecker-factored curvature: factors, directions, magnitudes."""
