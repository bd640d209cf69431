"""Eigenpairs, and the Krylov spaces in which they are found."""
