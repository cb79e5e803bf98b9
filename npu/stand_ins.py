"""Private-use characters in place of message text, to tell it from the text of the template around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from hostcache.errors import UsageError

__all__ = ["StandIns", "map_texts"]

_PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))  # planes 15 and 16 of Unicode
_DEEPEST = 64  # levels of lists and mappings in a message; tool schemas have about ten


class StandIns:
    """Swaps each character for one that occurs nowhere, and back.

    White space stands for itself: templates strip it, and no control token is made of it alone.

    Args:
        texts: the texts to swap.
        avoid: the whole text before the swap; no character of it is used as a stand-in.

    Raises:
        UsageError: the texts hold more different characters than there are for private use.
    """

    def __init__(self, texts: list[str], avoid: str) -> None:
        characters = set().union(*texts)
        taken = set(avoid)
        free = (code for code in chain(*_PRIVATE_USE) if chr(code) not in taken)
        swapped = sorted(character for character in characters if not character.isspace())
        self._to = {ord(character): code for character, code in zip(swapped, free, strict=False)}
        self._back = {code: character for character, code in self._to.items()}
        if len(self._to) < len(swapped):
            raise UsageError(
                f"the messages hold {len(swapped)} different characters, more than can be told apart ({len(self._to)});"
                " shorten them",
                characters=len(swapped),
            )

    def mark(self, text: str) -> str:
        """Put stand-ins in place of every character but white space."""
        return text.translate(self._to)

    def unmark(self, text: str) -> str:
        """Put the characters back."""
        return text.translate(self._back)


def map_texts(
    value: Any,  # noqa: ANN401 - any part of a message
    change: Callable[[str], str],
    change_name: Callable[[str], str],
    depth: int = 0,
) -> Any:  # noqa: ANN401 - the same shape as `value`
    """Rebuild a message (strings, lists, mappings) with its strings changed.

    Args:
        value: a message or a part of one.
        change: for texts.
        change_name: for what templates look up or compare rather than print: keys, and the values of `role` and `type`.
        depth: levels above `value`.

    Raises:
        UsageError: nested deeper than any message is.
    """
    if depth > _DEEPEST:
        raise UsageError(f"a message is nested more than {_DEEPEST} levels deep; flatten it", depth=depth)
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change_name(key) if isinstance(key, str) else key: map_texts(
                item, change_name if key in ("role", "type") else change, change_name, depth + 1
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [map_texts(item, change, change_name, depth + 1) for item in value]
    return value
