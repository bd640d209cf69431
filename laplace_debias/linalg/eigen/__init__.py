"""Eigenpairs, and the Krylov spaces that they are found in."""
