"""Fit a posterior: schemes, plans, resuming and updates."""
