"""The Jinja2 environment chat templates are written for, fenced in: a template comes with the model file.

Options, filter and functions are those of Hugging Face transformers (`chat_template_utils`). A template cannot reach
Python objects beyond the messages, nor change them, and what it gives out is bounded. Its time is not, nor the memory
of a single filter: a model file can waste both, but nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sized
from datetime import datetime
from typing import Any, NoReturn

from hostcache.errors import BadModelFile, MissingExtra, ModelError, UsageError

try:
    from jinja2 import TemplateError, TemplateSyntaxError, Undefined, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, LoopControlExtension
    from jinja2.parser import Parser
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as missing:
    raise MissingExtra("chat templates need 'jinja2': pip install 'rockpage[model]'", extra="model") from missing

__all__ = ["OUTPUT_LIMIT", "SandboxedTemplate"]

OUTPUT_LIMIT = 4 << 20
"""Characters a template may give out: several times a context of 131,072 tokens, the longest of Llama-type models."""


class SandboxedTemplate:
    """One compiled template.

    Args:
        source: the template's text.

    Raises:
        BadModelFile: the source is not a Jinja2 template.
    """

    def __init__(self, source: str) -> None:
        try:
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

    def render(self, variables: Mapping[str, object]) -> str:
        """Run the template.

        Raises:
            UsageError: the template refuses the values, fails on them, or gives out more than `OUTPUT_LIMIT`.
            ModelError: the template reaches outside its sandbox.
        """
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                size += len(piece)
                if size > OUTPUT_LIMIT:
                    _raise_exception(f"it gives out more than {OUTPUT_LIMIT} characters")
                pieces.append(piece)
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
        return "".join(pieces)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; in use it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationTag])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:  # noqa: ANN401 - the base class takes anything
        # The base class gives a value that fails once it is used; printed, it would be an empty string.
        raise SecurityError(f"attribute {attribute!r} of {type(obj).__name__!r} is closed to templates")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - as the base
        if operator == "**" or _length(left) * _times(right) + _length(right) * _times(left) > OUTPUT_LIMIT:
            raise SecurityError(f"'{operator}' would make a value of unbounded size")
        return super().call_binop(context, operator, left, right)


def _length(value: object) -> int:
    return len(value) if isinstance(value, Sized) else 0


def _times(value: object) -> int:
    return value if isinstance(value, int) else 0


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja2's own `tojson` escapes `<`, `>`, `&` and `'` for HTML, which no model has been trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)  # local time, as the user sees it
