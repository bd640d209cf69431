"""Predictions, their uncertainty and their evaluation."""
