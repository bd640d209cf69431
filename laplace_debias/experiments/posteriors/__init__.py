"""Posteriors on test images: what they predict, and how far they are from the truth."""
