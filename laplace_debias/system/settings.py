"""Checks of settings that a command makes before torch is imported."""


def check_at_least(settings: object, least: int, *names: str) -> None:
    """Require that settings are None or at least `least`."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}. Pass at least {least}.")
