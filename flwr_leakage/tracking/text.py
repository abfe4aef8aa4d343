"""Make text from clients and run folders safe to show in terminals and pages."""

import io
import re
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 2000
"""The largest number of characters of a message or note, a choice; the rest is cut."""

_ROOM = 50
"""The number of characters of a cut text that are left for the words on its original length."""

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
_PLAIN = re.compile(r"[\x20-\x7e]*")


def accept_any_text() -> None:
    """Let standard output and error replace characters that their encoding lacks.

    Only the package's own commands call it, at their start, as it changes the whole process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def plain_text(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    r"""Return a text that is cut to a length and has no control or invisible characters.

    Line breaks and tabs stay. Other control characters (terminal escapes), marks of writing
    direction, lone surrogates and characters of zero width become ``\u…`` escapes. A result of this
    function is returned unchanged.

    Args:
        text: a text of any origin and length.
        max_characters: the largest number of characters of the result, ≥ 60. A text that is cut
            ends with the number of its characters.

    Example:
        >>> plain_text("\x1b[2Jgone\u202e")
        '\\u001b[2Jgone\\u202e'
        >>> plain_text("a" * 70, 60)
        'aaaaaaaaaa… (cut from 70 characters)'
    """
    kept = text[:max_characters]
    if not _PLAIN.fullmatch(kept):
        kept = "".join(map(_spelled, kept))
    if max(len(text), len(kept)) <= max_characters:
        return kept
    return f"{kept[: max_characters - _ROOM]}… (cut from {len(text):,} characters)"


def plain_tree(node: Any, treat: Callable[[str], str] = plain_text) -> Any:
    r"""Return the JSON content ``node`` with each text and key replaced by the result of ``treat``
    for it.

    By default control and invisible characters become escapes such as ``\u001b``.
    """
    if isinstance(node, str):
        return treat(node)
    if isinstance(node, dict):
        return {treat(key): plain_tree(value, treat) for key, value in node.items()}
    return [plain_tree(value, treat) for value in node] if isinstance(node, list) else node


def _spelled(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
