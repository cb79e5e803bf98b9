"""The Jinja2 environment chat templates are written for, fenced in: a template comes with the model file.

Options, filters and functions are those of Hugging Face transformers (`chat_template_utils`), but for five that no chat
template needs and whose cost cannot be told beforehand: `urlize`, `wordwrap`, `pprint`, `random` and `lipsum`. A
template cannot reach Python objects beyond the messages, nor change them; its steps, its time, what it makes and what
it gives out are bounded (`npu.template_budget`).

The bound on time has a remainder: a single operation is never interrupted. On the largest value there may be, the
slowest ones take half a second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, NoReturn, cast

from hostcache.errors import BadModelFile, MissingExtra, ModelError, UsageError

try:
    from jinja2 import TemplateSyntaxError, Undefined, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, LoopControlExtension
    from jinja2.parser import Parser
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as missing:
    raise MissingExtra("chat templates need 'jinja2': pip install 'rockpage[model]'", extra="model") from missing

from .template_budget import VALUE_LIMIT, Budget, check_format, check_growth, check_search, weigh
from .template_functions import (
    SafeNamespace,
    bounded_filter,
    new_dict,
    printed,
    raise_exception,
    round_to_digits,
    step,
    stepping_test,
    strftime_now,
    sum_of_numbers,
    to_json,
)
from .template_steps import CONCAT, MADE, STEP, count_steps

__all__ = ["OUTPUT_LIMIT", "SandboxedTemplate", "one_budget"]

OUTPUT_LIMIT = 1 << 20
"""Bytes of UTF-8 a template may give out: twice the longest context of Llama-type models, 131,072 tokens of 4 bytes.
The `tokenizers` library takes up to 170 bytes of memory for each (0.23)."""

_TOO_MUCH = f"it gives out more than {OUTPUT_LIMIT} bytes"

_GROWING_METHODS = frozenset({"center", "join", "ljust", "replace", "rjust", "zfill"})
_SEARCHING_METHODS = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"})
_LEFT_OUT = frozenset({"pprint", "random", "urlize", "wordwrap"})

# Of texts: `encode` imports whatever codec it is asked for, and how much the others grow is hard to tell. Of mappings:
# `fromkeys` takes keys of equal hash in one go. Of numbers and bytes: `(1).to_bytes(n)` has n bytes.
_CLOSED_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset({"encode", "expandtabs", "maketrans", "translate"}),
    dict: frozenset({"fromkeys"}),
}
_CLOSED_TYPES = (int, float, bytes)


one_budget = Budget.spend
"""A context in which all renderings share one budget."""


class SandboxedTemplate:
    """One compiled template.

    Args:
        source: the template's text.

    Raises:
        BadModelFile: the source is not a Jinja2 template.
    """

    def __init__(self, source: str) -> None:
        try:
            with Budget.spend_apart():
                self._template = _Sandbox().from_string(source)
        except TemplateSyntaxError as error:
            raise BadModelFile(
                f"the model's chat template is wrong in line {error.lineno}: {error.message};"
                " fetch the file again, or use --prompt without --chat",
                line=error.lineno,
                problem=error.message,
            ) from error
        except (RecursionError, SyntaxError, MemoryError) as error:  # limits of Jinja2's parser and of Python's
            raise BadModelFile(
                f"the model's chat template is nested too deeply ({error}); use --prompt without --chat",
                problem=str(error),
            ) from error
        except Exception as error:  # whatever the compiler raises, such as for a number of 5000 digits
            raise BadModelFile(
                f"the model's chat template cannot be compiled ({error}); fetch the file again, or use --prompt"
                " without --chat",
                problem=str(error),
            ) from error

    def render(self, variables: Mapping[str, object]) -> str:
        """Run the template.

        Raises:
            UsageError: the template refuses the values, fails on them, or exceeds what a rendering may use.
            ModelError: the template reaches outside its sandbox.
        """
        pieces: list[str] = []
        size = 0
        try:
            with Budget.spend():
                for piece in self._template.generate(variables):
                    size += len(piece)
                    if size > OUTPUT_LIMIT:
                        raise_exception(_TOO_MUCH)
                    pieces.append(piece)
            text = "".join(pieces)
            # Encoding also refuses halves of characters, which no tokenizer takes.
            if len(text.encode()) > OUTPUT_LIMIT:
                raise_exception(_TOO_MUCH)
        except SecurityError as error:
            raise ModelError(
                f"the model's chat template reaches outside its sandbox: {error};"
                " do not trust this file, or use --prompt without --chat",
                problem=str(error),
            ) from error
        except Exception as error:  # a template is code: whatever it raises, it failed on these values
            problem = str(error) or type(error).__name__
            raise UsageError(
                f"the model's chat template does not take these messages: {problem};"
                " change them, or use --prompt without --chat",
                problem=problem,
            ) from error
        return text


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; in use it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # the optimiser would run filters while compiling
            finalize=printed,
            extensions=[LoopControlExtension, _GenerationTag],
        )
        self.filters["tojson"] = to_json
        self.filters["sum"] = sum_of_numbers(self.filters["sum"])
        self.filters["round"] = round_to_digits(self.filters["round"])
        self.filters = {
            name: bounded_filter(name, item) for name, item in self.filters.items() if name not in _LEFT_OUT
        }
        self.filters |= {STEP: step, MADE: Budget.made, CONCAT: self.concat}
        self.tests = {name: stepping_test(cast("Callable[..., Any]", test)) for name, test in self.tests.items()}
        del self.globals["lipsum"]
        self.globals["dict"] = new_dict
        self.globals["namespace"] = SafeNamespace
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return count_steps(super()._parse(source, name, filename), self)

    def handle_exception(self, source: str | None = None) -> NoReturn:  # noqa: ARG002 - as the base
        """Pass the error being handled on. The base class first compiles code for each frame of its traceback."""
        raise  # noqa: PLE0704 - whoever calls this handles it

    @staticmethod
    def concat(pieces: Iterable[object]) -> str:
        """What blocks, macros and `~` join their pieces with."""
        texts = [str(piece) for piece in pieces]
        weigh(texts)
        return str(Budget.made("".join(texts)))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: ANN401 - as the base
        closed = any(isinstance(obj, kind) and attr in names for kind, names in _CLOSED_METHODS.items())
        closed = closed or isinstance(obj, _CLOSED_TYPES)
        return not closed and super().is_safe_attribute(obj, attr, value)

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - as the base
        Budget.step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:  # noqa: ANN401 - as the base
        Budget.step()  # here filters look up attributes, too
        return super().getitem(obj, argument)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:  # noqa: ANN401 - the base class takes anything
        # The base class gives a value that fails once it is used; printed, it would be an empty string.
        raise SecurityError(f"attribute {attribute!r} of {type(obj).__name__!r} is closed to templates")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - as the base
        Budget.step()
        if operator == "**" or (
            operator == "*" and _length(left) * _times(right) + _length(right) * _times(left) > VALUE_LIMIT
        ):
            raise SecurityError(f"'{operator}' would make a value of unbounded size")
        if operator == "%" and isinstance(left, str):
            check_format(left, right if isinstance(right, tuple) else (right,))
        return Budget.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, N805 - as the base
        Budget.step()
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str) and __obj.__name__ in _GROWING_METHODS:
            args = tuple(list(item) if isinstance(item, Iterator) else item for item in args)
            check_growth(text, args)
        if isinstance(text, str) and __obj.__name__ in _SEARCHING_METHODS:
            check_search(text, [*args, *kwargs.values()])
        return Budget.made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:  # noqa: ANN401 - as the base
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        @functools.wraps(formatted)
        def checked(*args: Any, **kwargs: Any) -> str:  # noqa: ANN401 - a template's values
            check_format(value.__self__, [*args, *kwargs.values()])
            return formatted(*args, **kwargs)

        return checked


def _length(value: object) -> int:
    return len(value) if isinstance(value, Sized) else 0


def _times(value: object) -> int:
    return value if isinstance(value, int) else 0
