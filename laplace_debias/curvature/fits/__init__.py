"""Fits: directions and magnitudes of every curvature block, from data."""
