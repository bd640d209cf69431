"""Operators by their structure, with its arithmetic."""
