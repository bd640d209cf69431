"""Examples in docstrings as griffe knows them."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Reads a section `Example:` as griffe's `Examples:`, whose doctests it shows as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Renames the section of one object's docstring."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
