"""The shadow over processes that end and begin: prefixes and sessions on disk, pins, and a swap file that fails.

Every slot is compared with what was computed for its tokens, in whichever process that was: KV is a function of
namespace and tokens, so the shadow of one process knows what the files of another must hold.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.blocks import BlockPool
from hostcache.codec import FP16
from hostcache.errors import BadStateFile, UsageError
from hostcache.prefix import Namespace, PrefixCache
from hostcache.prefix_store import PrefixStore
from hostcache.saved_prefix import restore_prefix, save_prefix
from hostcache.state_file import StateReader
from hostcache.swap import SwapSpace
from hostcache.swap_store import FileStore

from .shadow import NAMESPACES, OWNER, ShadowEngine


@dataclass
class RestartingShadow(ShadowEngine):
    """One process; what it leaves in `folder` is for the next."""

    folder: Path = field(default=Path(), kw_only=True)

    def __post_init__(self) -> None:
        self.prefix_cache = self.timed_prefix_cache
        super().__post_init__()
        limit = self.random.choice((3, 40)) * self.cache.geometry.block_bytes * 8
        self.store = PrefixStore(
            self.folder, self.cache, self.prefix.of(FP16), max_bytes=limit, max_age=1e6, clock=lambda: 1e9 + self.now
        )

    def timed_prefix_cache(self, pool: BlockPool) -> PrefixCache:
        return PrefixCache(pool, clock=lambda: self.now)

    def swap_space(self, nbytes: int) -> SwapSpace:
        return SwapSpace(nbytes, self.cache, self.folder, clock=lambda: self.now)

    def close(self) -> None:
        if self.swap is not None:
            self.seen["swap failures"] += self.swap.stats.failures
            self.swap.close()

    def random_event(self) -> None:
        super().random_event()
        draw = self.random.random()
        namespace, tokens = self.some_prompt()
        if draw < 0.10:
            self.seen["kept"] += self.store.save(namespace, tokens) > 0
        elif draw < 0.35:
            self.seen["restored"] += self.store.restore(namespace, tokens) > 0
        elif draw < 0.40:
            self.pin(namespace, tokens)
        elif draw < 0.42:
            self.seen["unpinned"] += self.prefix.unpin(OWNER) > 0
        elif draw < 0.46:
            with_note = {"kind": "session", "note": b"shadow"}
            save_prefix(self.folder / "session", self.cache, self.prefix, namespace, tokens, **with_note)  # type: ignore[arg-type]
            self.seen["session saved"] += 1
        elif draw < 0.50:
            self.load_session()
        elif draw < (0.90 if self.swap is not None and self.swap.used else 0.53):
            self.damage()

    def some_prompt(self) -> tuple[Namespace, NDArray[np.int32]]:
        """What a request has come to, or what one may ask."""
        if self.live and self.random.random() < 0.7:
            request = self.random.choice(self.live)
            return request.namespace, request.tokens.copy()
        length = self.random.randint(1, self.blocks * self.block_tokens)
        tokens = [self.random.choice((0, 0, 0, 1)) for _ in range(length)]
        return self.random.choice(NAMESPACES), np.array(tokens, dtype=np.int32)

    def pin(self, namespace: Namespace, tokens: NDArray[np.int32]) -> None:
        try:
            self.seen["pinned"] += self.prefix.of(FP16).pin(namespace, tokens, OWNER, self.random.uniform(0.1, 4)) > 0
        except UsageError:
            self.seen["pin refused"] += 1

    def load_session(self) -> None:
        try:
            with StateReader(self.folder / "session") as reader:
                for namespace in NAMESPACES:
                    if not reader.header.differences(namespace, self.cache.geometry):
                        restored = restore_prefix(reader, self.cache, self.prefix.of(FP16), namespace)
                        self.seen["session restored"] += restored > 0
        except FileNotFoundError:
            pass
        except BadStateFile:
            self.seen["session refused"] += 1

    def damage(self) -> None:
        """A bit of some file, or of the swap file, is not what it was."""
        if self.swap is not None and self.swap.used:
            assert isinstance(self.swap._store, FileStore)
            flip(self.swap._store._file.fileno(), self.random.random())
            self.seen["swap damaged"] += 1
            return
        files = sorted(path for path in self.folder.iterdir() if path.suffix in ("", ".kv"))
        if files:
            fd = os.open(self.random.choice(files), os.O_RDWR)
            flip(fd, self.random.random())
            os.close(fd)
            self.seen["file damaged"] += 1


def flip(fd: int, where: float) -> None:
    """Flip a bit of an open file, `where` of its length."""
    size = os.fstat(fd).st_size
    position = int(where * size)
    os.pwrite(fd, bytes([os.pread(fd, 1, position)[0] ^ 1]), position)


def processes(folder: Path, rounds: int) -> Iterator[RestartingShadow]:
    """One after the other, over the same folder; blocks have as many tokens in all of them, pools differ."""
    for seed in range(rounds):
        yield RestartingShadow(seed, 4, (6, 16, 40)[seed % 3], folder=folder)


@pytest.mark.parametrize("rounds", [120, pytest.param(400, marks=pytest.mark.long)])
def test_what_comes_back_from_disk_is_what_was_computed(tmp_path: Path, rounds: int) -> None:
    seen: Counter[str] = Counter()
    for process in processes(tmp_path, rounds):
        try:
            process.run(150)
        finally:
            process.close()
        seen += process.seen
    for event in ("kept", "restored", "pinned", "pin refused", "unpinned", "session saved", "session restored",
                  "session refused", "file damaged", "swap damaged", "swap failures", "hit"):  # fmt: skip
        assert seen[event] >= rounds // 20, (event, seen)
