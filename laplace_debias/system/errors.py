"""Errors that several packages raise or handle."""


class RankError(RuntimeError):
    """An error that is raised because another rank has failed or disappeared.

    It replaces an error whose type is not available on this rank.
    """
