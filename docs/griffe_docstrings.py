"""An extension of griffe: docstrings as Sphinx and doctest write them, for Markdown."""

import re
from typing import Any

import griffe


class PlainDocstrings(griffe.Extension):
    """Names the section ``Example:`` as griffe does, and removes roles such as ``:func:``."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r":[a-z]+:`[~.]?([^`]*)`", r"`\1`", text)
