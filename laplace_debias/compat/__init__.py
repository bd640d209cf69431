"""Interfaces of other libraries on top of the posteriors of this package."""
