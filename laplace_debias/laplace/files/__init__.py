"""A fitted posterior on disk."""
