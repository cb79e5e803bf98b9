"""Watches a process while a template renders: whatever it does beyond computing is a way out of the sandbox."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any

from jinja2.runtime import Undefined
from jinja2.sandbox import SandboxedEnvironment

from tests.fuzz.guard import Broken

__all__ = ["watched"]

# Jinja2 hashes undefined values by their id, and looks at attributes before it decides whether to hand them out.
_HARMLESS = frozenset({"builtins.id", "object.__getattr__"})
_INNER_TYPES = (CodeType, FrameType, ModuleType, TracebackType)


class _Watch:
    """Hears two things while armed.

    Audit events (PEP 578): files, imports, code, processes, sockets. And attributes that the sandbox hands out though
    their names begin with an underscore, or though they are parts of Python itself.
    """

    def __init__(self) -> None:
        self.armed = False
        self.heard: list[str] = []
        sys.addaudithook(self._hear)  # for as long as the process lives
        for name in ("getattr", "getitem"):
            setattr(SandboxedEnvironment, name, self._listening(getattr(SandboxedEnvironment, name)))

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.armed and event not in _HARMLESS:
            self.heard.append(f"{event} {arguments!r:.200}")

    def _listening(self, look_up: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(look_up)
        def listening(environment: SandboxedEnvironment, obj: Any, name: Any) -> Any:
            value = look_up(environment, obj, name)
            inner = isinstance(value, _INNER_TYPES) or (isinstance(name, str) and name.startswith("_"))
            if inner and not isinstance(value, Undefined) and not (isinstance(obj, Mapping) and name in obj):
                self.heard.append(f"attribute {name!r:.200} of {type(obj).__name__}")
            return value

        return listening


@cache
def _watch() -> _Watch:
    return _Watch()


@contextmanager
def watched() -> Iterator[None]:
    """Watch the block.

    Raises:
        Broken: it set something off.
    """
    watch = _watch()
    watch.heard.clear()
    watch.armed = True
    try:
        yield
    finally:
        watch.armed = False
        if watch.heard:
            raise Broken(f"the template has reached {watch.heard}")
