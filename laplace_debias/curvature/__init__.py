"""Operators of networks: what curvature is, and how it is factored."""
