"""Typed access to what a model says of itself; each mistake becomes an error that names file, key and value."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn, TypeVar

from hostcache.errors import BadModelFile, UnsupportedModel

__all__ = ["Keys"]

_Item = TypeVar("_Item")

_LARGEST = 2**31  # of a dimension: positions and token ids are int32


class Keys:
    """The keys of one file. A key whose value is None counts as missing, as JSON's null does.

    Args:
        path: names the file in messages.
        values: by key.
    """

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        self.path = path
        self._values = values

    def text(self, key: str, default: str | None = None) -> str:
        """A string.

        Raises:
            BadModelFile: it is missing without a default, or of another type.
        """
        value = self._value(key, default)
        if not isinstance(value, str):
            self.contradict(key, value, "it must be a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean.

        Raises:
            BadModelFile: it is of another type.
        """
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.contradict(key, value, "it must be true or false")
        return value

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = _LARGEST) -> int:
        """An integer that counts something: layers, elements, tokens.

        Raises:
            BadModelFile: it is missing without a default, of another type, or not a dimension of anything.
            UnsupportedModel: it is a list, one value for each layer.
        """
        value = self._value(key, default)
        if isinstance(value, list):
            self.refuse(f"'{key}' that differs by layer", "use a model with equal layers")
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.contradict(key, value, f"it must be {'a positive' if least else 'an'} integer, {most} at most")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number; a default of 0 lets 0 pass too.

        Raises:
            BadModelFile: it is missing without a default, of another type, negative or infinite.
        """
        value = self._value(key, default)
        # The comparison is False of NaN, and exact for integers of any length.
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not (0 < value <= sys.float_info.max or value == default == 0)
        ):
            self.contradict(key, value, "it must be a positive number")
        return float(value)

    def items(self, key: str, kind: type[_Item], count: int) -> list[_Item]:
        """A list of so many values of one type.

        Raises:
            BadModelFile: it is missing, or not such a list.
        """
        value = self._value(key, None)
        if not isinstance(value, list) or len(value) != count or not all(type(item) is kind for item in value):
            self.contradict(key, value, f"it must be a list of {count} of type {kind.__name__}")
        return value

    def value(self, key: str) -> object:
        """Whatever is there; None if it is missing."""
        return self._values.get(key)

    def contradict(self, key: str, value: object, reason: str) -> NoReturn:
        """Refuse a value that cannot be.

        Raises:
            BadModelFile: always.
        """
        path, shown = str(self.path), f"{value!r:.100}"
        raise BadModelFile(
            f"{path}: '{key}' is {shown}: {reason}; fetch the file again", path=path, key=key, value=value
        )

    def refuse(self, what: str, way_out: str) -> NoReturn:
        """Refuse a variant that rockpage does not run.

        Raises:
            UnsupportedModel: always.
        """
        path = str(self.path)
        raise UnsupportedModel(f"{path}: the model has {what}, which is not supported: {way_out}", path=path, what=what)

    def _value(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            path = str(self.path)
            raise BadModelFile(f"{path}: key '{key}' is missing; fetch the file again", path=path, key=key)
        return value
