"""Adapters to other libraries, which an extra of the package installs."""
