"""Linear systems, inverses and inverse roots."""
