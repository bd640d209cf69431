"""Checks of settings, which a command makes before torch is imported."""


def check_at_least(settings: object, least: int, *names: str) -> None:
    """Refuse settings below a bound; None passes."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}; expected at least {least}")
