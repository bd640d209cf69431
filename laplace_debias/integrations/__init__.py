"""Adapters to other libraries; each library is installed by an extra of the package."""
