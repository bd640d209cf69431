"""Pillow, which is only installed with the extra `cli`."""

from typing import Any


def pillow() -> Any:
    """Pillow's module of images.

    Raises:
        ImportError: If Pillow is missing.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("images need Pillow: pip install 'laplace-debias[cli]'") from error
    return Image
