"""What a chat template finds in its sandbox: filters, tests and functions, each within the budget of a rendering."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.utils import Namespace

from .template_budget import Budget, check_format, check_growth, check_search

__all__ = [
    "SafeNamespace",
    "bounded_filter",
    "new_dict",
    "printed",
    "raise_exception",
    "round_to_digits",
    "step",
    "stepping_test",
    "strftime_now",
    "sum_of_numbers",
    "to_json",
]

_GROWING_FILTERS = frozenset({"batch", "center", "indent", "join", "replace", "tojson", "xmlattr"})
_WALKING_FILTERS = frozenset(
    {
        *("batch", "groupby", "join", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr"),
        *("slice", "sort", "sum", "unique"),
    }
)
_MOST_DIGITS = 308  # of a float, before or behind the point; rounding to more computes a power of ten as long


class SafeNamespace(Namespace):
    """`namespace` of templates: no name that Python gives a meaning, and nothing of its inside when printed."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as `dict`
        names = new_dict(*args, **kwargs)
        for name in names:
            _check_name(name)
        super().__init__(names)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:  # namespaces may hold each other: printed in full, they would have no bound
        return "<Namespace>"


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def bounded_filter(name: str, item: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes a step, refuses to grow or search without bound, and whose result is weighed or counted."""
    before_value = 1 if hasattr(item, "jinja_pass_arg") else 0  # the context comes first

    @functools.wraps(item)
    def bounded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a template's values
        Budget.step()
        if name in _WALKING_FILTERS:
            args = (*args[:before_value], _walked(args[before_value]), *args[before_value + 1 :])
        if name in _GROWING_FILTERS or name == "format":
            args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
            value, arguments = args[before_value], [*args[before_value + 1 :], *kwargs.values()]
            if name == "format":
                check_format(str(value), arguments)
            else:
                check_growth(value, arguments)
        if name == "trim":
            check_search(str(args[before_value]), [*args[before_value + 1 :], *kwargs.values()])
        result = item(*args, **kwargs)
        return _counted(result) if isinstance(result, Iterator) else Budget.made(result)

    return bounded


def _walked(items: Iterable[Any]) -> Iterator[Any]:
    """What a filter is given, each a step, so that time is looked at before a C loop has seen all of it."""
    for item in items:
        Budget.step()
        yield item


def _counted(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        Budget.step()
        yield Budget.made(item)


def stepping_test(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test that takes a step."""

    @functools.wraps(test)
    def stepping(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a template's values
        Budget.step()
        return test(*args, **kwargs)

    return stepping


def step(value: Any) -> Any:  # noqa: ANN401 - a template's values
    """Take a step, and hand the value on."""
    Budget.step()
    return value


@pass_context  # so that constants are not printed at compile time
def printed(_context: Context, value: Any) -> str:  # noqa: ANN401 - a template's values
    """What `{{ value }}` writes."""
    return value if isinstance(value, str) else str(Budget.made(str(value)))


def sum_of_numbers(sum_filter: Callable[..., Any]) -> Callable[..., Any]:
    """`sum`, but not of lists or texts."""

    @functools.wraps(sum_filter)
    def summed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a template's values
        start = kwargs.get("start", args[3] if len(args) > 3 else 0)  # environment, iterable, attribute, start
        if not isinstance(start, int | float):
            raise SecurityError("'sum' of anything but numbers takes the square of its length")
        return sum_filter(*args, **kwargs)

    return summed


def round_to_digits(round_filter: Callable[..., Any]) -> Callable[..., Any]:
    """`round`, but not to more digits than a float has."""

    @functools.wraps(round_filter)
    def rounded(value: Any, precision: int = 0, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a template's values
        if not isinstance(precision, int) or abs(precision) > _MOST_DIGITS:
            raise TemplateError(f"it rounds to {precision!r:.20} digits, {_MOST_DIGITS} are the most")
        return round_filter(value, precision, *args, **kwargs)

    return rounded


def new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401 - as `dict`, but for its class's methods
    """`dict` as a function; pairs take a step each, for numbers can be chosen whose hashes are equal."""
    return dict(*(arg if isinstance(arg, Mapping) else _walked(arg) for arg in args), **kwargs)


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja2's own `tojson` escapes `<`, `>`, `&` and `'` for HTML, which no model has been trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    """Refuse the messages."""
    raise TemplateError(message)


def strftime_now(layout: str) -> str:
    """The present time."""
    if len(layout) > 256:
        raise SecurityError("a date's layout of unbounded size")
    return datetime.now().strftime(layout)  # local time, as the user sees it
