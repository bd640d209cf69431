"""Layers: their curvature blocks, and their inputs and output gradients."""
