"""Operators of each structure, with the arithmetic of the structure."""
