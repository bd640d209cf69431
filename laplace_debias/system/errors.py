"""Errors that several packages raise or handle."""


class RankError(RuntimeError):
    """Another rank has failed, with an error that has no counterpart here, or is gone."""
