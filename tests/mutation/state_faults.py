"""Seeded faults in what moves blocks out of the pool and keeps them: swap, state files, persisted prefixes, pins."""

# ruff: noqa: E501 - a fault is one line
# fmt: off
from __future__ import annotations

from .fault import group

__all__ = ["STATE_FAULTS"]

SWAP = [
    *group(
        "hostcache/swap.py",
        "hostcache/test_swap.py",
        ("swap takes more than it has room for", "or len(blocks) > self.free:", "or len(blocks) > self.total:"),
        ("swapped blocks come back in another order", "for slot, whole in zip(slots, into, strict=True):", "for slot, whole in zip(reversed(slots), into, strict=True):"),
        ("what was taken keeps its room", "        self._give_back(self._slots.pop(ticket))\n", "        self._slots.pop(ticket)\n"),
        ("a ticket is good twice", "self._give_back(self._slots.pop(ticket))", "self._give_back(self._slots[ticket])"),
        ("what was dropped keeps its room", "        self._give_back(self._slots_of(ticket))\n        del", "        self._slots_of(ticket)\n        del"),
        ("an interrupted put keeps its room", "            self._give_back(slots)\n            raise\n", "            raise\n"),
        ("a failed put keeps its room", "            self._give_back(slots)\n            self._fail(error)\n", "            self._fail(error)\n"),
        ("a lost ticket stays", "            self.drop(ticket)\n            self._fail(error)\n", "            self._fail(error)\n"),
        ("a file that failed is written again", "if self.failure is not None or", "if"),
        ("free blocks are swapped out", "if not pool.refs[block] and not pool.is_kept(block):", "if False:"),
        ("a block that came back seems full", "self._tokens[slot] = self._cache.tokens_written(block)", "self._tokens[slot] = self._cache.geometry.block_tokens"),
        ("the way back costs nothing", "return self._out.seconds_for(nbytes) + self._back.seconds_for(nbytes)", "return self._out.seconds_for(nbytes)"),
        ("the swap space's check is blind", "if sorted(behind + self._free) != list(range(self.total)):", "if False:"),
    ),
    *group(
        "hostcache/bandwidth.py",
        "hostcache/test_swap.py",
        ("old measurements weigh as much as new ones", "self._seconds = self._seconds * REMEMBERED + seconds", "self._seconds = self._seconds + seconds"),
    ),
    *group(
        "hostcache/swap_store.py",
        "hostcache/test_swap.py",
        ("a write that stops early is complete", "left, offset = left[written:], offset + written", "left = left[:0]"),
        ("a read that stops early is complete", "left, offset = left[got:], offset + got", "left = left[:0]"),
        ("other bytes than were written come back", "if zlib.crc32(into.data) != self._sums[slot]:", "if False:"),
        ("slots of memory overlap", "slot * self._slot_bytes : (slot + 1) * self._slot_bytes]", "slot : slot + self._slot_bytes]"),
        ("the disk fills up under load", "                os.posix_fallocate(self._file.fileno(), 0, nbytes)  #", "                pass  #"),
        ("a refused file stays open", "                self._file.close()\n                raise\n", "                raise\n"),
    ),
    *group(
        "hostcache/cache.py",
        "hostcache/test_swap.py",
        ("a shared block is overwritten", "if not self.pool.writable(block):", "if False:"),
        ("an overwritten block seems untouched", "        self.rewrites[block] += 1\n        self._written[:, block] = tokens\n", "        self._written[:, block] = tokens\n"),
    ),
]

PINS = [
    *group(
        "hostcache/pins.py",
        "hostcache/test_pins.py",
        ("a pin refers to nothing", "            self._pool.acquire(block)\n", "            pass\n"),
        ("the first of two pins to end lets a block go", "            if not self._holders[block]:\n                del self._holders[block]\n                self._pool.release(block)", "            if block in self._holders:\n                del self._holders[block]\n                self._pool.release(block)"),
        ("ended pins keep their blocks", "                self._pool.release(block)\n", "                pass\n"),
        ("the cap counts what is pinned twice", "if self.blocks + len(fresh) > self.max_blocks:", "if self.blocks + len(blocks) > self.max_blocks:"),
        ("there is no cap", "if self.blocks + len(fresh) > self.max_blocks:", "if False:"),
        ("a renewed pin keeps its old blocks, too", "        if old is not None:\n            self._let_go(old)\n", ""),
        ("a pin ends a moment late", "if pin.until <= now)", "if pin.until < now)"),
        ("pins never end", "if now < self._next_end:", "if True:"),
        ("the next end is not noted", "        self._holders.update(blocks)\n        old = self._pins.get(name)\n        self._pins[name] = Pin(tuple(blocks), self._clock() + seconds)\n        if old is not None:\n            self._let_go(old)\n        self._note_next_end()", "        self._holders.update(blocks)\n        old = self._pins.get(name)\n        self._pins[name] = Pin(tuple(blocks), self._clock() + seconds)\n        if old is not None:\n            self._let_go(old)"),
        ("an owner ends everybody's pins", "if name[0] == owner)", "if name)"),
        ("pins of another namespace end with it", "if name[1] == space)", "if name)"),
    ),
    *group(
        "hostcache/prefix.py",
        "hostcache/test_pins.py",
        ("invalidated prefixes stay pinned", "            self._pins.release_space(key)\n", ""),
        ("nobody hears of invalidations", "            self.on_invalidate(namespace, prompt_version)\n", "            pass\n"),
        ("a lookup does not end pins", "        self.expire_pins()\n        text = bytes_of(tokens)[", "        text = bytes_of(tokens)["),
    ),
]

STATE_FAULTS = [*SWAP, *PINS]
