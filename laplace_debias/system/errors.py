"""Exceptions that several packages raise or handle."""


class RankError(RuntimeError):
    """Raised on a rank because another rank has failed or disappeared.

    It also stands in for an error whose type this rank cannot reconstruct.
    """
