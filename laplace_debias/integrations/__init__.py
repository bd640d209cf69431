"""Adapters to other libraries, each of which an extra of the package installs."""
