"""Adapters for other libraries. Each library is installed with an extra of this package."""
