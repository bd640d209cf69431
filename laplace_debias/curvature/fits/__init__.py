"""Fits, which compute the directions and magnitudes of every curvature block from data."""
