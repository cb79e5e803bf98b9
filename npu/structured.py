"""Answers that follow a JSON schema, a regular expression, a list of choices or a grammar.

The work is done by llguidance: it walks the vocabulary's trie along the grammar and says which tokens may come next.
It was chosen over xgrammar, whose wheel needs torch and transformers, and outlines-core, which knows regular languages
only and builds an index of the whole vocabulary first. llguidance needs no other package, is under the MIT licence, and
has one wheel of 2.9 MB for aarch64 that serves every Python (stable ABI, glibc 2.31 or later).
"""

from __future__ import annotations

import json
import textwrap
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import MissingExtra, RequestFailed, UsageError

from .json_multiples import excessive_multiple

if TYPE_CHECKING:
    import llguidance

    from .tokenizer import Tokenizer

__all__ = ["Constraint", "Structure", "StructureCompiler"]

TEXT_LIMIT = 1 << 18
"""Characters of a schema, an expression or a grammar; 3000 string properties, about a third of it, compile in 0.4 s."""

_KEPT = 16  # compiled structures a compiler keeps

# llguidance's defaults let `(a{1000}){1000}` take 0.5 s and 170 MB at each token; with half of its fuel or less that
# fails once, after 0.2 s, while an e-mail address, an enumeration of 2000 texts or an object of 3000 fields still pass
# (llguidance 1.9.1).
_LIMITS = {"initial_lexer_fuel": 100_000, "step_lexer_fuel": 50_000, "verbose_errors": False}

_DEAD_END = "NoExtension"  # how llguidance's message for it begins
_NOTHING_FITS = "no token of the vocabulary fits"

# JSON as `json.dumps` writes it. Free white space would be legal, but a small model can fill its whole answer with it.
_JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Structure:
    """What an answer must look like: made by one of the class methods, checked when a request is added.

    An answer that `max_tokens`, the context or a stop string ends early is a beginning of what was asked for.

    Attributes:
        syntax: how `text` is to be read.
        text: a JSON schema, a regular expression, or a grammar.

    Raises:
        UsageError: `text` is no text.

    Example:
        >>> from npu.engine import Engine
        >>> from npu.sampler import SamplingParams
        >>> from npu.structured import Structure
        >>> colour = SamplingParams(structure=Structure.choice([" purple", " green"]))
        >>> with Engine.load("model.gguf", pool_bytes=64 << 20) as engine:
        ...     print("Grass is" + "".join(engine.generate("Grass is", colour)))
        Grass is green
    """

    syntax: Literal["JSON schema", "regular expression", "grammar"]
    text: str = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise UsageError(f"the {self.syntax} is a {type(self.text).__name__}; pass its text", syntax=self.syntax)

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> Structure:
        """JSON that the schema accepts, laid out as `json.dumps` does; object members come in the schema's order.

        Which keywords are known is llguidance's to say; one that is not is refused, never ignored. A schema may set
        llguidance's options under `"x-guidance"`.

        Raises:
            UsageError: the mapping cannot be written as JSON.
        """
        if not isinstance(schema, str):
            try:
                schema = json.dumps(schema, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise UsageError(f"the JSON schema cannot be written as JSON: {error}") from error
        return cls("JSON schema", schema)

    @classmethod
    def regex(cls, pattern: str) -> Structure:
        """A text that the whole expression matches: the syntax of Rust's `regex`, without look-around."""
        return cls("regular expression", pattern)

    @classmethod
    def choice(cls, options: Sequence[str]) -> Structure:
        """One of several texts.

        Raises:
            UsageError: there is none, or one is empty.
        """
        if isinstance(options, str) or not options or not all(isinstance(one, str) and one for one in options):
            raise UsageError(f"choices are a list of non-empty texts, got {options!r}", options=options)
        return cls("grammar", "start: " + " | ".join(map(json.dumps, options)))

    @classmethod
    def lark(cls, grammar: str) -> Structure:
        """A text that follows a context-free grammar, in llguidance's dialect of Lark; it begins at `start`."""
        return cls("grammar", grammar)


class StructureCompiler:
    """Turns structures into constraints over one vocabulary, and keeps those it has compiled last.

    Nothing is built before the first structure comes: for a vocabulary of 49,152 it takes 0.12 s and 23 MB, once.

    Args:
        tokenizer: the vocabulary, and the tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._end_ids = tokenizer.eos_ids  # that `_vocabulary` was built with
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[Structure, llguidance.LLMatcher] = OrderedDict()

    def constraint(self, structure: Structure) -> Constraint:
        """A constraint for one answer.

        Raises:
            UsageError: the structure is malformed, too large, uses what is not supported, or no answer can follow it.
            MissingExtra: llguidance is not installed.
        """
        if self._end_ids != self._tokenizer.eos_ids:  # the first conversation has added the end of a turn
            self._end_ids = self._tokenizer.eos_ids
            self._vocabulary = None
            self._compiled.clear()
        matcher = self._compiled.get(structure)
        if matcher is None:
            matcher = self._compiled[structure] = self._compile(structure)
        self._compiled.move_to_end(structure)
        if len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return Constraint(matcher, self._tokenizer.vocab_size)

    def _compile(self, structure: Structure) -> llguidance.LLMatcher:
        try:
            from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 - an optional extra
        except ImportError as error:
            raise MissingExtra(
                "structured output needs 'llguidance': pip install 'rockpage[structured]'", extra="structured"
            ) from error
        if len(structure.text) > TEXT_LIMIT:
            raise _refusal(structure, f"it has {len(structure.text)} characters, {TEXT_LIMIT} at most; simplify it")
        if structure.syntax == "JSON schema" and (step := excessive_multiple(structure.text)):
            raise _refusal(
                structure, f"a multipleOf of {step} takes too many states; round it, or leave it to the model"
            )
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer)
        try:
            match structure.syntax:
                case "JSON schema":
                    grammar = LLMatcher.grammar_from_json_schema(structure.text, defaults=_JSON_LAYOUT)  # type: ignore[arg-type] # a TypedDict of these keys
                case "regular expression":
                    grammar = LLMatcher.grammar_from_regex(structure.text)
                case "grammar":
                    grammar = _unforced(structure.text)
            matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))  # type: ignore[arg-type] # three options by name
        except ValueError as error:  # no JSON, or no valid Unicode
            raise _refusal(structure, str(error)) from error
        matcher.compute_bitmask()  # finds out whether anything can begin
        trouble = matcher.get_error()
        if trouble and not trouble.startswith(_DEAD_END):
            raise _refusal(structure, trouble)
        if matcher.is_stopped():
            raise _refusal(structure, "no text of this model's tokens satisfies it, unless the empty one; loosen it")
        return matcher


class Constraint:
    """Which tokens may come next in one answer.

    That is a function of the answer's tokens. What has been fed to the matcher is kept, so that a step costs one token;
    an answer that is not its continuation (a step that was rolled back) is fed anew.

    Args:
        start: a matcher at the beginning of the structure; copied, so that constraints share it.
        vocab_size: ids are below it.
    """

    def __init__(self, start: llguidance.LLMatcher, vocab_size: int) -> None:
        self._start = start
        self._matcher = start.deep_copy()
        self._vocab_size = vocab_size
        self._fed: list[int] = []

    def allowed(self, answer: NDArray[np.int32]) -> NDArray[np.intp]:
        """The tokens that may follow `answer`, ids, ascending, at least one; end tokens where it may end.

        Raises:
            RequestFailed: no token of the vocabulary goes on as the structure asks, or it has become too complex.
        """
        self._feed(answer.tolist())
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._raise_error()
        allowed = np.flatnonzero(np.unpackbits(mask, count=self._vocab_size, bitorder="little"))
        if not allowed.size:  # it may end here, and the model has no end token to say so
            raise self._failure(_NOTHING_FITS)
        return allowed

    def completed_by(self, answer: NDArray[np.int32], token: int) -> bool:
        """Whether nothing can follow `answer` and `token`: the structure is complete.

        Raises:
            RequestFailed: `token` is not allowed there, or the structure has become too complex.
        """
        self._feed([*answer.tolist(), token])
        self._raise_error()
        return self._matcher.is_stopped()

    def _feed(self, answer: list[int]) -> None:
        known = len(self._fed)
        if answer[:known] != self._fed:
            self._matcher = self._start.deep_copy()  # `reset` would not take it out of an error
            known = 0
        self._fed = answer
        self._matcher.consume_tokens(answer[known:])

    def _raise_error(self) -> None:
        error = self._matcher.get_error()
        if error:
            raise self._failure(_NOTHING_FITS if error.startswith(_DEAD_END) else _one_line(error))

    def _failure(self, reason: str) -> RequestFailed:
        return RequestFailed(
            f"the structure cannot be followed behind token {len(self._fed)} of the answer: {reason}; loosen it, or use"
            " a model whose vocabulary can spell what it asks for",
            tokens=len(self._fed),
            reason=reason,
        )


class _Vocabulary:
    """A vocabulary as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = [
            token for token, text in enumerate(self.tokens) if tokenizer.token_bytes(token, special=False) != text
        ]
        self.end_ids = sorted(tokenizer.eos_ids)
        if not self.end_ids:  # llguidance wants one: it lies behind the ids that the mask is cut to
            self.end_ids = [len(self.tokens)]
            self.special_token_ids.append(len(self.tokens))
            self.tokens.append(b"<end>")
        self.eos_token_id = self.end_ids[0]

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        return [int(token) for token in self._tokenizer.encode(text, bos=False)]


def _unforced(grammar: str) -> str:
    """A grammar in llguidance's own form, under one that leaves it to the model how a text is cut into tokens.

    Otherwise llguidance writes down every byte that must follow, and in `start: /a+/ "a"`, where the first terminal
    takes each `a`, that has no end (1.9.1). The option holds for nested grammars too, and cannot be taken back by them.
    """
    around = '%llguidance {"no_forcing": true}\nstart: @answer'
    return json.dumps({"grammars": [{"lark_grammar": around}, {"name": "answer", "lark_grammar": grammar}]})


def _vocabulary(tokenizer: Tokenizer) -> llguidance.LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415 - an optional extra

    vocabulary = _Vocabulary(tokenizer)
    return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.end_ids)


def _refusal(structure: Structure, reason: str) -> UsageError:
    return UsageError(
        f"the {structure.syntax} cannot be used: {_one_line(reason)}", syntax=structure.syntax, reason=reason
    )


def _one_line(text: str) -> str:
    return textwrap.shorten(text.replace("<non-verbose/>", ""), 300)
