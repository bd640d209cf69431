"""Layers: their curvature blocks, and what goes through them in a backward pass."""
