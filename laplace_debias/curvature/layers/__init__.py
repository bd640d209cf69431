"""Layers: their curvature blocks, their inputs and their output gradients."""
