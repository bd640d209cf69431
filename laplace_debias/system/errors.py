"""Errors that several packages raise or handle."""


class RankError(RuntimeError):
    """An error for a different rank that has failed or disappeared.

    It stands for an error whose type is not available on this rank.
    """
