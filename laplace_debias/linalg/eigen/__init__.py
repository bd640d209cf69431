"""Eigenpairs, and the Krylov spaces in which the algorithms search for eigenpairs."""
