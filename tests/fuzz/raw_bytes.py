"""Changes to bytes, whatever they mean."""

from __future__ import annotations

from typing import Any, TypeAlias

from hypothesis import strategies as st

__all__ = ["Change", "change_bytes", "changes_of_bytes"]

Change: TypeAlias = tuple[Any, ...]
"""What is done to a case's seed. The first word says what; numbers that lead beyond an end start again at the front."""

_PLACES = st.integers(0, 1 << 16)


def changes_of_bytes() -> st.SearchStrategy[Change]:
    """Changes that `change_bytes` understands."""
    data = st.binary(min_size=1, max_size=9)
    return st.one_of(
        st.tuples(st.just("write"), _PLACES, data),
        st.tuples(st.just("insert"), _PLACES, data),
        st.tuples(st.just("cut"), _PLACES),
        st.tuples(st.just("copy"), _PLACES, st.integers(1, 2000), _PLACES),
    )


def change_bytes(raw: bytes, change: Change) -> bytes:
    """The bytes with one change made."""
    ends = len(raw) + 1
    match change:
        case ("write", int(at), bytes(data)):
            return raw[: at % ends] + data + raw[at % ends + len(data) :]
        case ("insert", int(at), bytes(data)):
            return raw[: at % ends] + data + raw[at % ends :]
        case ("cut", int(at)):
            return raw[: at % ends]
        case ("copy", int(start), int(length), int(to)):
            return raw[: to % ends] + raw[start % ends :][:length] + raw[to % ends :]
    raise ValueError(f"{change!r} is no change of bytes")
