"""Dataclasses to JSON and back, so that a file's fields are listed once: in the class."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

__all__ = ["from_json"]

_Data = TypeVar("_Data")


def from_json(kind: type[_Data], value: object) -> _Data:
    """Make an object of what `json.loads` gave for its `dataclasses.asdict`.

    Fields may be int, float, str, bool, tuples of one type without end, and dataclasses of these.

    Args:
        kind: the dataclass.
        value: all of its fields and nothing else.

    Raises:
        ValueError: a field is missing, unknown or of another type; the message says where, such as `graphs[0].file`.
    """
    made: _Data = _read(kind, value, "")
    return made


def _read(kind: Any, value: object, where: str) -> Any:  # noqa: ANN401 - a type, and an object of it
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, value, where)
    if get_origin(kind) is tuple:
        element, _ = get_args(kind)
        if not isinstance(value, list):
            raise ValueError(f"{where or 'it'} is {value!r:.50}, not a list")
        return tuple(_read(element, item, f"{where}[{index}]") for index, item in enumerate(value))
    if kind is float and type(value) is int:  # JSON has one kind of numbers
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{where} is beyond what a float holds") from None
    if type(value) is not kind:
        raise ValueError(f"{where} is {value!r:.50}, not of type {kind.__name__}")
    return value


def _read_fields(kind: Any, value: object, where: str) -> Any:  # noqa: ANN401 - as above
    types = get_type_hints(kind)
    hints = {field.name: types[field.name] for field in dataclasses.fields(kind)}
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'it'} is {value!r:.50}, not an object")
    if unlike := sorted(hints.keys() ^ value.keys()):
        raise ValueError(f"{where or 'it'} lacks, or must not have, {', '.join(unlike)}")
    prefix = f"{where}." if where else ""
    return kind(**{name: _read(hint, value[name], prefix + name) for name, hint in hints.items()})
