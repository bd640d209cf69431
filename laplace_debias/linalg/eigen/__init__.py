"""Eigenpairs, and the Krylov bases in which they are found."""
