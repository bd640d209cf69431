"""Ways to take directions and magnitudes, compared."""
