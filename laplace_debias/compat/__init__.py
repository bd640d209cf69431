"""Interfaces of other libraries, implemented with the posteriors of this package."""
