"""Seeded faults in what lets several codecs share one pool."""

# ruff: noqa: E501 - a fault is one line
# fmt: off
from __future__ import annotations

from .fault import group

__all__ = ["EXTENT_FAULTS"]

POOL_TESTS = "hostcache/test_extents.py"
CODEC_TESTS = "hostcache/test_scheduler_codecs.py hostcache/test_shadow_codecs.py"

EXTENT_FAULTS = [
    *group(
        "hostcache/extents.py",
        POOL_TESTS,
        ("the check is blind for an extent of two codecs", "if owners != 1:", "if owners < 1:"),
        ("the check is blind for an extent of none", "if owners != 1:", "if owners > 1:"),
        ("a codec's own idle extents count twice", "for other in self.users if other is not user)", "for other in self.users)"),
        ("the extent that was used last goes first", "if oldest is None or clock < oldest[0]:", "if oldest is None or clock > oldest[0]:"),
        ("withheld extents count as used", "return self.total - self.common - len(self.withheld)", "return self.total - self.common"),
    ),
    *group(
        "hostcache/extents.py",
        "hostcache/test_balloon.py",
        ("extents that could be given up are not", "            ages.update(user.idle)\n", "            pass\n"),
        ("what is cached in an extent that is lent stays known", "                user.give_up(extent)\n", "                pass\n"),
    ),
    *group(
        "hostcache/blocks.py",
        POOL_TESTS,
        ("one's own cached blocks go before anybody's", "foreign is not None and (own is None or foreign[0] < self._cached[own])", "foreign is not None and own is None"),
        ("other codecs' extents go first", "foreign is not None and (own is None or foreign[0] < self._cached[own])", "foreign is not None"),
        ("blocks in the memory of other codecs count as used", " - self.withheld - self.elsewhere\n\n    @property\n    def withheld", " - self.withheld\n\n    @property\n    def withheld"),
        ("other codecs' idle extents cannot be had", "return own if self._alone else own + self.extents.idle_besides(self)", "return own"),
    ),
    *group(
        "hostcache/lowest_first.py",
        POOL_TESTS,
        ("an extent is listed as often as a block of it is freed", "        if extent not in self._listed:\n", "        if True:\n"),
    ),
    *group(
        "hostcache/slabs.py",
        POOL_TESTS,
        ("an empty extent stays with its codec", "        if slab.free == self._whole:\n", "        if False:\n"),
        ("an extent with a block in use goes back", "        if slab.free == self._whole:\n", "        if not slab.busy:\n"),
        ("an extent goes to another codec while a block of it is fenced", "        if self._fences[block]:\n            self._fenced.add(block)\n            return\n", "        if self._fences[block]:\n            self._fenced.add(block)\n            self._slabs[self.extent_of(block)].busy -= 1\n            return\n"),
        ("a block taken from an idle extent leaves it idle", "            self.idle.pop(extent, None)\n            for block", "            for block"),
        ("a block that is used again does not count as in use", "        if was_cached:\n", "        if False:\n"),
        ("a freed block is never found again", "        self._partial.add(extent)\n        if slab.busy:\n", "        if slab.busy:\n"),
        ("a freed block is not found beside those in use", "        if slab.busy:\n            self._beside.add(extent)\n", "        if slab.busy:\n            pass\n"),
        ("what is cached beside blocks in use is not found", "        if self._slabs[extent].busy:\n            self._note_kept_beside(block)\n", "        if self._slabs[extent].busy:\n            pass\n"),
        ("what was cached before others were used is not found", "                if block in self._cached:\n                    self._note_kept_beside(block)\n", "                pass\n"),
        ("what is out of date is never swept", "if len(self._kept_beside) > 2 * len(self._cached)", "if False and len(self._kept_beside) > 2 * len(self._cached)"),
        ("the highest free block goes first", "self._take(extent, free & -free)", "self._take(extent, 1 << free.bit_length() - 1)"),
        ("blocks of two units begin in the middle of one another", "(bit.bit_length() - 1) * self.span", "bit.bit_length() - 1"),
        ("what is given up is taken out one block at a time", "        for block in self._blocks_of(extent):\n            self.evict_block(block)\n", "        self.evict_block(extent)\n"),
        ("thrifty pools take free extents all the same", "self._take_spare() if thrifty and self.spare else", "self._take_free() if thrifty and self.spare else"),
        ("idle extents count as beside blocks in use", " - len(self.idle) * self.per_extent", ""),
        ("free extents count for one block", "foreign * self.per_extent\n", "foreign\n"),
    ),
    *group(
        "hostcache/codec_pools.py",
        POOL_TESTS,
        ("units have no room for scales", "most = max(", "most = min("),
        ("units straddle cache lines", "-(-most // UNIT_ALIGNMENT) * UNIT_ALIGNMENT", "most"),
    ),
    *group(
        "hostcache/promises.py",
        CODEC_TESTS,
        ("other codecs' promises are free", "blocks + self._blocks[pool] + extents * pool.per_extent", "blocks + self._blocks[pool]"),
        ("other codecs' promises count by blocks", "other.extents_for(promised) for other", "promised for other"),
        ("one's own promises count as others', too", " if other is not pool)", ")"),
    ),
    *group(
        "hostcache/relief.py",
        CODEC_TESTS,
        ("a block of another codec counts as one of one's own", "extents += emptied +", "extents += self._freed[other] +"),
        ("an extent counts as emptied by its first block", "self._freed_in[extent] == pool.busy_in(extent)", "self._freed_in[extent] == 1"),
        ("extents that others were promised count as freed", " + other.extents_for(promised) - other.extents_for(left)", ""),
    ),
    *group(
        "hostcache/running_set.py",
        CODEC_TESTS,
        ("guarantees do not make pools thrifty", "self._extents.thrifty = self.guaranteed.total > 0", "pass"),
    ),
    *group(
        "hostcache/step_filler.py",
        CODEC_TESTS,
        ("some grow though others cannot", "if len(places) > self._extents.common or batch.needs_copy(places):", "if batch.needs_copy(places):"),
        ("keys of lean blocks are turned as fp16", "self._turn_block if request.codec is FP16 else partial(self._turn_block, codec=request.codec)", "self._turn_block"),
    ),
    *group(
        "hostcache/decode_batch.py",
        CODEC_TESTS,
        ("codecs stay where those that left were", "self._windowing, self._codes, self._newest", "self._windowing, self._newest"),
        ("a batch of one lean codec passes for fp16", "only is not None and only.codec is FP16", "only is not None"),
    ),
    *group(
        "hostcache/step.py",
        CODEC_TESTS,
        ("prompts beside fp16 sequences are fp16", "_codes_or_fp16(codecs, len(prefills))", "_codes_or_fp16(None, len(prefills))"),
        ("rows have the codec of the first sequences", "np.repeat(self.codecs, np.diff(self.query_starts))", "np.resize(self.codecs, self.rows)"),
    ),
    *group(
        "hostcache/intake.py",
        CODEC_TESTS,
        ("a fork is stored as fp16", "parent.namespace, parent.layout, codec=parent.codec", "parent.namespace, parent.layout, codec=FP16"),
    ),
    *group(
        "hostcache/prefix_caches.py",
        "hostcache/test_prefix_caches.py",
        ("each codec pins as much as all may", "max_pinned=room, clock", "max_pinned=max_pinned, clock"),
        ("codecs number their nodes alike", "clock=clock, numbers=numbers)", "clock=clock)"),
    ),
    *group(
        "hostcache/pins.py",
        "hostcache/test_prefix_caches.py",
        ("pins in one extent count each", "        return len(self._pinned)\n", "        return sum(self._pinned.values())\n"),
        ("an unpinned block keeps its extent's room", "                self._room.give_back(block)\n", ""),
    ),
    *group(
        "hostcache/state_format.py",
        "hostcache/test_saved_codecs.py",
        ("rows of scaled codecs pass for elements", "return ROWS if codec.scaled else ELEMENTS", "return ELEMENTS"),
        ("a file's blocks have the size of fp16 ones", "BlockLayout(self.geometry, codec_named(self.codec)).block_bytes", "self.geometry.block_bytes"),
    ),
    *group(
        "hostcache/state_file.py",
        "hostcache/test_saved_codecs.py",
        ("a neighbour's scales are saved, too", "    rows[:, layout.payload_bytes + tokens * layout.groups * SCALE_BYTES :] = 0\n", ""),
    ),
    *group(
        "hostcache/prefix_store.py",
        "hostcache/test_saved_codecs.py",
        ("a prefix in one codec replaces that in another", ", person=codec.name.encode())", ")"),
        ("a prefix is restored in whichever codec", " and stored.header.codec == codec.name:", ":"),
    ),
    *group(
        "hostcache/prefix_caches.py",
        "hostcache/test_saved_codecs.py",
        ("the folder keeps what lean caches forget", "        for cache in self.caches.values():\n            cache.on_invalidate = call\n", "        next(iter(self.caches.values())).on_invalidate = call\n"),
    ),
    *group(
        "hostcache/swap.py",
        "hostcache/test_swap_codecs.py",
        ("a block of several units is kept by its first", "for index, slot in enumerate(place):\n            self._store.write(", "for index, slot in enumerate(place[:1]):\n            self._store.write("),
        ("every block takes one unit", "len(blocks) * pool.span > self.free", "len(blocks) > self.free"),
        ("a ticket forgets its codec", "SwapTicket(next(self._ids), len(blocks), codec)", "SwapTicket(next(self._ids), len(blocks))"),
    ),
]
