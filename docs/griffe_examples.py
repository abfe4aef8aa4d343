"""An extension of griffe: the section ``Example:`` of a docstring is code, as ``Examples:`` is."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Names the section as griffe's parser of Google's style knows it."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
