"""Comparisons of speed and memory with other libraries: `python -m benchmarks`."""
