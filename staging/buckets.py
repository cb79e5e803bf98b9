"""Context lengths that attention graphs are compiled for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from hostcache.errors import NoBucket, UsageError

from .layout import TOKEN_MULTIPLE

__all__ = ["DEFAULT_BUCKETS", "Buckets"]

DEFAULT_BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096)
"""Tokens. Powers of two: a padded context is less than twice its length, and seven shapes make a small graph file."""


class Buckets:
    """The lengths a context may be padded to.

    Args:
        sizes: tokens, ascending, each a multiple of `TOKEN_MULTIPLE`.

    Attributes:
        sizes: as given.
        largest: the longest context that can be staged, in tokens.

    Raises:
        UsageError: the list is empty, not ascending, or holds a size the device cannot take.

    Example:
        >>> from staging import Buckets
        >>> Buckets((64, 256)).fit(65)
        256
    """

    def __init__(self, sizes: Sequence[int] = DEFAULT_BUCKETS) -> None:
        self.sizes = tuple(sizes)
        ascending = all(low < high for low, high in zip((0, *self.sizes), self.sizes, strict=False))
        if not self.sizes or not ascending or any(size % TOKEN_MULTIPLE for size in self.sizes):
            raise UsageError(
                f"buckets must be ascending positive multiples of {TOKEN_MULTIPLE} tokens, got {self.sizes}",
                sizes=self.sizes,
            )
        self.largest = self.sizes[-1]

    def fit(self, tokens: int) -> int:
        """The smallest bucket that holds `tokens` tokens.

        Raises:
            NoBucket: the context is longer than the largest bucket.
        """
        index = bisect_left(self.sizes, tokens)
        if index == len(self.sizes):
            raise NoBucket(
                f"a context of {tokens} tokens is longer than the largest bucket of {self.largest}: "
                "add a bucket, or run it on the cpu runtime",
                tokens=tokens,
                largest=self.largest,
            )
        return self.sizes[index]
