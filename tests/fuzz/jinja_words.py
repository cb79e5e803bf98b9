"""The words that hostile templates are made of."""

from __future__ import annotations

from jinja2.filters import FILTERS as ALL_FILTERS
from jinja2.runtime import LoopContext, Macro
from jinja2.tests import TESTS as ALL_TESTS
from jinja2.utils import Cycler, Joiner, Namespace

__all__ = ["ATTRIBUTES", "FILTERS", "GROWTH", "LITERALS", "NAMES", "OPERATORS", "STATEMENTS", "TESTS"]

NAMES = (
    *("messages", "tools", "documents", "bos_token", "add_generation_prompt", "m", "x", "ns", "f", "undefined"),
    *("range", "dict", "namespace", "cycler", "joiner", "lipsum", "raise_exception", "strftime_now"),
    *("loop", "self", "super", "caller", "varargs", "kwargs", "context", "environment", "__builtins__", "_", "g"),
)
LITERALS = (
    *("0", "1", "2", "-1", "63", "1000", "99999999", "10**9", "9" * 22, "9" * 5000, "1e308", "0.1", "none", "true"),
    *("''", "'a'", "'ab' * 99", "'\\n'", "'\\ud800'", "'%s'", "'%999999d'", "'%c'", "'{}'", "'{0.__class__}'"),
    *("'{0[0]}'", "'{:>9999999}'", "'__class__'", "'__globals__'", "'role'", "'content'", "'user'", "'a.b.c'"),
    *("'utf-7'", "'rot13'", "'idna'", "'ab' * 999999", "range(99999)|join", "messages * 999", "[[]] * 999"),
    *("[]", "{}", "()", "[1, 2]", "{'a': 1}", "range(99999)", "range(999999999)", "range(99999)|list"),
)
ATTRIBUTES = tuple(
    sorted(
        {
            *(name for kind in (str, bytes, int, float, list, dict, tuple, range, set) for name in dir(kind)),
            *(name for kind in (LoopContext, Macro, Cycler, Joiner, Namespace) for name in dir(kind)),
            *("role", "content", "tool_calls", "x", "__globals__", "__builtins__", "__mro__", "mro", "_module"),
            *("__code__", "__func__", "__self__", "__wrapped__", "func_globals", "gi_frame", "f_globals", "f_back"),
            *("environment", "eval_ctx", "parent", "blocks", "name", "exported_vars", "get_exported"),
        }
    )
)
FILTERS = tuple(sorted({*ALL_FILTERS, "tojson", "nosuch"}))
TESTS = tuple(sorted({*(name for name in ALL_TESTS if name.isidentifier()), "nosuch"}))
OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", ">=", "and", "or", "in", "not in")
GROWTH = ("{0} + {0}", "{0} ~ {0}", "[{0}, {0}]", "{0} * 9", "{0}|string + {0}|string", "{0}|list + {0}|list")
STATEMENTS = (
    "{% for m in VALUE %}BODY{% endfor %}",
    "{% for m in VALUE recursive %}BODY{{ loop(m) }}{% endfor %}",
    "{% for m in range(9999) if VALUE %}BODY{% else %}BODY{% endfor %}",
    "{% for x in range(999999) %}{% for m in messages %}BODY{% endfor %}{% endfor %}",
    "{% if VALUE %}BODY{% endif %}",
    "{% set x = VALUE %}BODY",
    "{% set x %}BODY{% endset %}{{ x }}",
    "{% set ns = namespace(x=VALUE) %}{% for m in range(99) %}{% set ns.x = GROWN %}{% endfor %}BODY",
    "{% set ns = namespace(x=VALUE) %}{% set ns.y = ns %}{{ ns }}BODY",
    "{% macro f(x) %}BODY{{ f(x) }}{% endmacro %}{{ f(VALUE) }}",
    "{% macro f(x) %}BODY{{ caller(x) }}{% endmacro %}{% call(m) f(VALUE) %}BODY{% endcall %}",
    "{% filter string %}BODY{% endfilter %}",
    "{% with x = VALUE %}BODY{% endwith %}",
    "{% include VALUE %}BODY",
    "{% import VALUE as x %}BODY",
    "{% extends VALUE %}BODY",
    "{% block b %}BODY{{ self.b() }}{% endblock %}",
    "{% autoescape VALUE %}BODY{% endautoescape %}",
    "{% generation %}BODY{% endgeneration %}",
    "{% raw %}BODY",
)
