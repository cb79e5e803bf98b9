"""A stream of token ids to a stream of text: nothing half a character, nothing behind a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from hostcache.errors import UsageError

from .tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopChecker"]


class Detokenizer:
    """Incremental decoding of one stream; what it gave out and `flush` join up to `Tokenizer.decode` of all its ids.

    A character may span several tokens. The bytes of an unfinished one, at most three, are held back until the token
    that completes it arrives or shows that it never will.

    Args:
        tokenizer: gives each token's bytes.
        special: write control tokens out; otherwise they give no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Take the next token; returns the characters it completes, often none.

        Raises:
            UsageError: the id is outside the vocabulary; the stream is as before.
        """
        return self._decoder.decode(self._tokenizer.token_bytes(token, special=self._special))

    def flush(self) -> str:
        """End the stream: an unfinished character becomes U+FFFD. A new stream may follow."""
        return self._decoder.decode(b"", final=True)


class StopChecker:
    """Ends a stream of text at the first stop string, which may be spread over any number of pieces.

    Text that could be the beginning of a stop string is held back until more text decides. The stop string that is
    complete first wins, of several that end at the same character the longest; so the text that comes out does not
    depend on how the stream was cut into pieces. The stop string itself never comes out.

    Attributes:
        stopped: the stop string that ended the stream, or None while it goes on.

    Args:
        stops: the stop strings; may be empty, then everything passes.

    Raises:
        UsageError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise UsageError("a stop string is empty: it would end every answer at once; leave it out", stops=stops)
        self._stops = tuple(stops)
        self._held = ""  # a proper beginning of a stop string, or empty
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """Take the next piece of text; returns what is certain to lie before any stop string."""
        if self.stopped is not None:
            return ""
        text = self._held + text
        # Ordered by where a match ends, then by where it begins.
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _, start, self.stopped = min(matches)
            self._held = ""
            return text[:start]
        certain = len(text) - self._undecided(text)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """End the stream: what was held back was no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
