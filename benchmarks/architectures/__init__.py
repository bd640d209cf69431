"""Architectures of other libraries: what the default covers and what it costs."""
