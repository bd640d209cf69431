"""A griffe extension that shows the examples of docstrings as code."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Treat a section `Example:` like griffe's section `Examples:`, whose doctests are code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in the docstring of an object."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
