"""Estimates of numbers that a matrix has, from products with random vectors."""
