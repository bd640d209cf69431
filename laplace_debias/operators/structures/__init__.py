"""Operators of each structure, and the arithmetic of these operators."""
