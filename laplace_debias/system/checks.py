"""Checks that settings anywhere have in common."""


def check_at_least(settings: object, least: int, *names: str) -> None:
    """Refuse settings below a bound; None passes.

    Args:
        settings: The settings.
        least: The least number allowed.
        names: Names of their attributes.

    Raises:
        ValueError: If one of them is smaller.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}; expected at least {least}")
