"""Seeded faults, as data: plausible mistakes, most of them made and reported in other paged caches.

A fault is one entry of a group: what goes wrong, the code as it is, and the code as it would be. The group says in which
file, and which test files of the ordinary suite must notice. To add one, add a line.
"""

# ruff: noqa: E501 - a fault is one line
# fmt: off
from __future__ import annotations

from .attention_faults import ATTENTION_FAULTS
from .bench_faults import BENCH_FAULTS
from .codec_faults import CODEC_FAULTS
from .dense_faults import DENSE_FAULTS
from .extent_faults import EXTENT_FAULTS
from .fault import group
from .model_faults import MODEL_FAULTS
from .overflow_faults import OVERFLOW_FAULTS
from .pressure_faults import PRESSURE_FAULTS
from .replay_faults import REPLAY_FAULTS
from .scheduler_faults import SCHEDULER_FAULTS
from .state_faults import STATE_FAULTS
from .window_faults import WINDOW_FAULTS
from .window_launch_faults import WINDOW_LAUNCH_FAULTS

__all__ = ["FAULTS"]

POOL = group(
    "hostcache/blocks.py",
    "hostcache/test_blocks.py",
    ("a block is handed out without a reference", "            refs[block] = 1\n", "            refs[block] = 0\n"),
    ("a single block is handed out without a reference", "self.refs[block] = 1\n", "self.refs[block] = 0\n"),
    ("a new owner cannot be told from the old one", "            generation[block] += 1", "            pass"),
    ("a single block's new owner cannot be told from the old one", "self.generation[block] += 1", "pass"),
    ("the newest cached block is evicted", "next(iter(self._cached), None)", "next(reversed(self._cached), None)"),
    ("a hit leaves its block evictable", "self._cached.pop(block, None)", "pass"),
    ("a second release passes", "if refs < 1 or", "if refs < 0 or"),
    (
        "a free block is acquired",
        "if block < 0 or not self._kept[block]:\n                raise",
        "if False:\n                raise",
    ),
    (
        "the blocks behind fences count as available",
        "own = len(self._free) + len(self._cached)",
        "own = len(self._free) + len(self._cached) + len(self._fenced)",
    ),
    (
        "a fence does not outlast its block's owner",
        "if self._fences[block]:\n            self._f",
        "if False:\n            self._f",
    ),
    ("the first of two fences lets a block go", "self._fences[block] -= 1", "self._fences[block] = 0"),
    (
        "a forgotten block is lost",
        "del self._cached[block]\n            self._add_free(block)",
        "del self._cached[block]",
    ),
    (
        "a kept block may be written",
        "return self.refs[block] == 1 and not self._kept[block]",
        "return self.refs[block] == 1",
    ),
    ("the check is blind for a block in two states", "if states > 1:", "if states > 2:"),
)

FENCES = group(
    "hostcache/fence.py",
    "hostcache/test_blocks.py",
    ("a failed fence keeps what it had", "            self.release()\n            raise\n", "            raise\n"),
)

TABLE = group(
    "hostcache/table.py",
    "hostcache/test_table.py hostcache/test_table_stateful.py",
    ("a fork takes no references", "        self._pool.acquire_all(self.blocks)\n", ""),
    ("copy on write copies a token too few", "fresh, self.length % self._pool.block_tokens)", "fresh, self.length % self._pool.block_tokens - 1)"),
    ("copy on write goes the wrong way", "self._copy(shared, fresh,", "self._copy(fresh, shared,"),
    ("copy on write forgets the array of ids", "        self._noted = min(self._noted, index)\n", ""),
    ("truncation forgets the array of ids", "        self._noted = min(self._noted, keep)\n", ""),
    ("copy on write leaks the shared block", "        self._pool.release(old)\n", ""),
    ("a shared tail is written in place", "or self._pool.writable(self.blocks[-1])", "or True"),
    ("the private copy is not counted", "return grown + (count > 0 and self.shared_tail is not None)", "return grown"),
    ("truncation drops a block that is partly used", "keep = -(-(length - self.gap.tokens) // self._pool.block_tokens)", "keep = length // self._pool.block_tokens"),
    ("truncation leaks", "        self._pool.release_all(dropped)\n        if length and", "        if length and"),
    ("a table that grows forgets its first ids", "                self._noted = 0\n", ""),
    ("slots are off by a block's tokens", "* size + positions % size", "* size + positions % size + 1"),
)

BYTES = group(
    "hostcache/cache.py",
    "hostcache/test_cache.py",
    ("every layer is written into the first", "self._c_row_bytes,\n            layer,", "self._c_row_bytes,\n            0,"),
    ("half of a block's rows are copied", "geometry.layers * 2 * geometry.kv_heads,", "geometry.layers * geometry.kv_heads,"),
    ("the slot behind the pool is written", "self._c_spans, self.units)", "self._c_spans, self.units + 1)"),
    ("a layer's writes are noted in the first", "self._c_written + layer * self.units", "self._c_written"),
    ("a copied block seems untouched", "        self.rewrites[destination] += 1\n", ""),
    ("a copied block seems empty", "self._written[:, destination] = tokens", "self._written[:, destination] = 0"),
)

NAMESPACE = group(
    "hostcache/namespace.py",
    "hostcache/test_prefix.py",
    ("the tenant's salt is not in the key", '"adapter", "salt", "prompt_version"):', '"adapter", "prompt_version"):'),
    ("a namespace's fields run into each other", 'struct.pack("<II", len(name), len(value)) + name.encode() + value', "name.encode() + value"),
)

PREFIX_NODE = group(
    "hostcache/prefix_node.py",
    "hostcache/test_prefix.py",
    ("a partial match counts a token too many", "return int(differs.argmax()) if", "return int(differs.argmax()) + 1 if"),
    ("tokens of another type are taken as they come", "if tokens.dtype != np.int32:", "if False:"),
)

PREFIX_RUN = group(
    "hostcache/prefix_node.py",
    "hostcache/test_prefix_runs.py",
    ("a run is followed beyond a node without bytes", "            if node.block < 0:\n                break\n", ""),
    ("a run does not notice that bytes are lost", "if node.place < len(self._blocks):", "if False:"),
    ("the bytes that are lost are those behind", "if node.place < len(self._blocks):", "if node.place + 1 < len(self._blocks):"),
    ("a run is never longer than it was at first", "if len(self._blocks) < len(self.nodes):", "if not self._blocks:"),
    ("all that a run holds is a hit", "if not text.startswith(tokens, offset):", "if False:"),
    ("where a run begins in the prompt is not looked at", "if not text.startswith(tokens, offset):", "if tokens not in text:"),
    ("tokens of lost bytes stay in the run", "del self._tokens[node.place * len(node.tokens) :], self._blocks[node.place :]", "del self._blocks[node.place :]"),
)

PREFIX = group(
    "hostcache/prefix.py",
    "hostcache/test_prefix.py hostcache/test_prefix_runs.py hostcache/test_prefix_stateful.py hostcache/test_collisions.py",
    (
        "a block's own tokens name it, whatever is in front",
        "child = node.children.get(self._wrap(text[offset : offset + key_bytes]))",
        "child = next((n for n in self._by_block.values() if n.tokens == text[offset : offset + key_bytes] and not n.place), None)",
    ),
    ("a hit covers the whole prompt", "if not whole:", "if False:"),
    ("a hit takes no references", "        self._pool.acquire_all(blocks)\n", ""),
    ("a partial hit takes no reference", "        self._pool.acquire(partial.block)\n", ""),
    ("a node without bytes is a hit", "if child is None or child.block < 0:", "if child is None:"),
    ("an equal child's block is replaced", "if child.block < 0 and block not in self._by_block:", "if block not in self._by_block:"),
    ("publishing goes on behind what was invalidated", "if not node.alive:  #", "if False:  #"),
    ("a tail is published behind what was invalidated", "if not node.alive:\n", "if False:\n"),
    ("invalidated nodes stay alive", "node.alive = False", "pass"),
    ("invalidation spares the prompt version it was asked for", "if prompt_version in (None, version)", "if prompt_version is None"),
    ("node numbers are reused", "PrefixNode(next(self._numbers), parent, tokens)", "PrefixNode(len(self._by_block) + 1, parent, tokens)"),
    ("a node is removed while a sequence stands on it", "node.tails or node.holders)", "node.tails)"),
    ("a node is removed while it has children", "(node.block >= 0 or node.children or node.tails or node.holders)", "(node.block >= 0 or node.holders)"),
    ("nodes are never removed", "while node.alive and not", "while False and not"),
    ("a parent is evicted before its leaf", "while node.resident_children:\n", "while False:\n"),
    ("an evicted node still claims its block", "        node.block = -1\n", ""),
    ("evictions are not counted at the parent", "node.parent.resident_children -= 1", "pass"),
    ("a tail that says nothing new keeps its block", "if tail is not None and tail.block >= 0:", "if False:"),
    ("a tail without bytes stays in the tree", "        self._prune(tail)  #", "        #"),
    ("a second child continues the run of the first", "if run is None or run.nodes[-1] is not node:", "if run is None:"),
    ("a removed node stays in its run", "                node.run.pop()", "                pass"),
)

GATHER = group(
    "staging/plan.py",
    "staging/test_plan.py",
    ("what lies behind the last token is copied, too", "np.minimum(geometry.block_tokens, lengths[sequence] - first)", "np.full_like(first, geometry.block_tokens)"),
    ("all sequences read the first one's table", "tables[sequence, nth]", "tables[0 * sequence, nth]"),
    ("the block behind the pool is read", "ids.max() <= highest", "ids.max() <= highest + 1"),
    ("one token behind the last is not zeroed", "valid, layout.tokens - valid]", "valid + 1, layout.tokens - valid - 1]"),
    ("the tail is not zeroed", "valid < layout.tokens]", "valid < 0]"),
    ("a table shorter than its context is followed", "if per_sequence.max(initial=0) > tables.shape[1]:", "if False:"),
)

STAGING = [
    *group(
        "staging/layout.py",
        "staging/test_plan.py staging/test_layout.py",
        ("tiles lie a head apart", "tile_stride = self.tokens * tile_bytes", "tile_stride = self.tokens * token_bytes"),
        ("keys have no room for their mask", "return self.head_dim + (0 if self.mask_rows else MARK_CHANNELS)", "return self.head_dim"),
        ("operands share a cache line", "return -(-nbytes // ALIGNMENT) * ALIGNMENT", "return nbytes"),
    ),
    *group(
        "staging/buffer.py",
        "staging/test_buffer.py staging/test_plan.py",
        ("a plan that fits one cache fits any", "if prepared.checked is not cache:", "if prepared.checked is None:"),
        ("a buffer is filled twice", "if self._layout is not None:", "if False:"),
        ("a released buffer still seems filled", "self.state = BufferState.FREE\n        self._layout = None\n", "self.state = BufferState.FREE\n"),
        ("the result's place is not synced", "self._device.sync_to_device(self._offset, self.layout.nbytes)", "self._device.sync_to_device(self._offset, self.layout.out_offset)"),
        ("a buffer is handed to the device unsynced", "        self.require(BufferState.READY)\n", ""),
        ("the first buffer is synced whichever was filled", "self._device.sync_from_device(self._offset + ", "self._device.sync_from_device("),
        ("operands larger than a buffer are copied", "if layout.nbytes > len(self.memory):", "if False:"),
    ),
    *group(
        "staging/arena.py",
        "staging/test_arena.py",
        ("a busy buffer is handed out again", "            if buffer.state is BufferState.FREE:\n", "            if True:\n"),
        ("buffers overlap", "memory[start : start + self.buffer_bytes]", "memory[start : start + self.buffer_bytes + 1]"),
    ),
    *group(
        "staging/residency.py",
        "staging/test_residency.py staging/test_residency_stateful.py",
        ("a copy outlives its blocks' owner", "np.array([generation[block] for block in ids.tolist()], np.int64)", "0 * ids"),
        ("what was written again stays in a copy", "cache.rewrites[ids]", "0 * ids"),
        ("what a copy never held counts as kept", "np.minimum(np.minimum(blocks * block_tokens, self._lengths), before)", "np.minimum(blocks * block_tokens, before)"),
        ("the step's own token counts as kept", "self._lengths), before)", "self._lengths), before + 1)"),
        ("blocks behind one that differs are kept", "same.argmin(axis=1))", "same.shape[1])"),
        ("two launches of a step share a copy", "sum(layout == plan.layout for layout, _ in self._in_step)", "0"),
        ("a copy of this step makes room", "if key not in self._in_step and copy.idle:", "if copy.idle:"),
        ("a copy that a job has makes room", "if key not in self._in_step and copy.idle:", "if key not in self._in_step:"),
        ("copies overlap", "if copy.start - end >= nbytes:", "if copy.start - end >= nbytes // 2:"),
        ("a copy reaches behind the memory", "if len(self._memory) - end >= nbytes else None", "if len(self._memory) - end >= nbytes // 2 else None"),
    ),
    *group(
        "staging/plan.py",
        "staging/test_residency.py staging/test_residency_stateful.py",
        ("a shorter sequence leaves the longer one's tail", "np.ascontiguousarray(tails[tails[:, 2] > 0])", "tails[:0]"),
        ("growth begins at the start of its block", "runs[:, 2] += skipped", "runs[:, 2] += 0"),
    ),
    *group(
        "staging/_gather.c",
        "staging/test_gather_kernel.py",
        ("values are read where keys are", "values_plain, &rows, &from, rows.kv_bytes, run);", "values_plain, &rows, &from, 0, run);"),
        ("heads are read a layer apart", "at += rows->row_bytes)\n        put_tokens", "at += rows->layer_bytes)\n        put_tokens"),
        ("a run is read from its block's start", "(int32_t)run[2] % rows->block_tokens", "0"),
        ("hidden tokens are not marked", "put_marks(to, &p, tokens, mark);", "put_marks(to, &p, tokens, 0);"),
    ),
    *group(
        "staging/_gather.c",
        "staging/test_staged_codecs.py",
        ("quantised rows stay rotated", "            ops->rotate(values, head_dim, piece);\n", ""),
        ("a quantised run is read from its block's start", "(int32_t)(run[2] + t) % rows->block_tokens", "(int32_t)t"),
        ("quantised values are read where keys are", "&values, &rows, &from, rows.kv_bytes, run);\n            continue", "&values, &rows, &from, 0, run);\n            continue"),
        ("quantised rows are read token by token", "quantised ? 0 : keys", "0 ? 0 : keys"),
    ),
    *group(
        "npu/host_share.py",
        "npu/test_staged_codecs.py",
        ("the host takes every codec for fp16", "None if step.codecs is None else step.codecs[sequences]", "None"),
    ),
    *group(
        "npu/launch.py",
        "npu/test_staged_codecs.py",
        ("a launch takes every codec for fp16", "None if batch.codecs is None else batch.codecs[sequences]", "None"),
    ),
    *group(
        "staging/_copy.h",
        "staging/test_gather_kernel.py",
        ("what is left of a row is not copied", "i < n; i += VECTOR_BYTES", "i < 0; i += VECTOR_BYTES"),
    ),
    *group(
        "staging/resident_buffer.py",
        "staging/test_residency.py staging/test_residency_stateful.py",
        ("a layer that missed a step only grows", "in (refill.edition - 1, refill.edition)", "in (refill.edition - 2, refill.edition - 1, refill.edition)"),
        ("what was never synced counts as known", "        self._filled = refill.edition\n", "        self._filled = self._edition = refill.edition\n"),
        ("the caller's own tokens are not synced", "growth.tails, own]", "growth.tails]"),
        ("cleared tokens are not synced", "growth.tails, own]", "own]"),
        ("of tiles only the first strip is synced", "(head * strips + np.arange(strips))", "(head * strips + 0 * np.arange(strips))"),
        ("a foreign plan leaves a copy that seems known", "        self._edition = None\n        if refill is None or", "        if refill is None or"),
    ),
    *group(
        "staging/buckets.py",
        "staging/test_buckets.py",
        ("a context that fills a bucket takes the next", "bisect_left(self.sizes, tokens)", "bisect_left(self.sizes, tokens + 1)"),
    ),
]

DEVICE = [
    *group(
        "npu/staged.py",
        "npu/test_staged_fences.py",
        ("blocks are not fenced while they are read", ".fence(part.blocks)", ".fence([])"),
        ("fences outlast their step", "        self._steps = {}\n        self._fences.close()\n        if self._host is not None:\n            self._host.end()", "        self._steps = {}\n        if self._host is not None:\n            self._host.end()"),
        ("a failed begin keeps its fences", "        with contextlib.ExitStack() as fences:\n", "        fences = contextlib.ExitStack()\n        if True:\n"),
    ),
    *group(
        "npu/emulated_device.py",
        "npu/test_emulated_device.py",
        ("the device sees what was never synced", "np.full(len(memory), 0xFF, np.uint8)", "memory"),
        ("writes after the sync pass", "if not np.array_equal(", "if False and not np.array_equal("),
        ("a torn run is whole", "slice(0, 1) if number in self.faults.torn else slice(None)", "slice(None)"),
        ("a failing run passes", "if number in self.faults.failing or", "if"),
        ("all runs take the first core", "max(self._core_free_at[core], ", "max(self._core_free_at[0], "),
        ("a dead core works", " or core in self.faults.dead_cores:", ":"),
    ),
    *group(
        "npu/contract.py",
        "npu/test_emulated_device.py npu/test_contract.py",
        ("one dirty token passes", "by_sequence[sequence, :, length:]", "by_sequence[sequence, :, length + 1 :]"),
        ("a row that sees nothing passes", "if len(blind):", "if False:"),
        ("any mask passes", "if not allowed.all():", "if False:"),
        ("a dimension that needs 14 bits passes", "if largest > MAX_DIMENSION:", "if largest > MAX_DIMENSION + 1:"),
        ("an operand may start anywhere", "if start % ALIGNMENT:", "if start % 2:"),
        ("an operand may reach beyond its buffer", "<= memory.nbytes - array.nbytes:", "<= memory.nbytes:"),
        ("rows with gaps pass", "if not array.flags.c_contiguous:", "if False:"),
        ("rows need no padding", "if layout.rows % ROW_MULTIPLE or layout", "if layout"),
        ("a query that ignores the mask passes", "if (marks != expected).any():", "if False:"),
        ("heads of a sequence have masks of their own", "if unused.any() or (by_sequence != by_sequence[:, :1]).any():", "if unused.any():"),
        ("a job without a canary passes", "if not (sound and all(", "if not (all("),
        ("a canary's shift may be anything", "np.isin(drawn, SHIFTS).all()", "True"),
        ("rows may see the canary", "and not _of_others(layout, visible)[..., -CANARY_TOKENS:].any()", ""),
    ),
    *group(
        "npu/canary.py",
        "npu/test_emulated_device.py npu/test_emulated_attention.py npu/test_emulated_launch.py npu/test_canary.py",
        ("a result of which one head is fresh passes", "        if stale:\n", "        if stale == len(out):\n"),
        ("every launch asks the same question", "next(_launches)", "(0 * next(_launches))"),
        ("the canary's rows see everything", "            mask[:, -rows:] = MASKED\n", ""),
        ("NaN is an answer", "~(self.errors(out) <= _TOLERANCE)", "self.errors(out) > _TOLERANCE"),
        ("K's shift is the same in every launch", "self._key = shifts[:heads]", "self._key = np.repeat(SHIFTS[:1], heads)"),
        ("the query's shift is the same in every launch", "self._query = shifts[heads : heads + asked].reshape", "self._query = np.repeat(SHIFTS[:1], asked).reshape"),
        ("the mask's shift is the same in every launch", "self._mask = shifts[heads + asked :].reshape", "self._mask = np.repeat(SHIFTS[:1], hidden).reshape"),
        ("heads share K's shift", "self._key = shifts[:heads]", "self._key = shifts[:1].repeat(heads)"),
        ("heads share the query's shift", "shifts[heads : heads + asked].reshape", "shifts[heads : heads + rows].repeat(heads).reshape"),
        ("a wrong answer is within the tolerance", "_TOLERANCE = 0.015", "_TOLERANCE = 0.25"),
        ("the nonces are one", "np.array([0, 1] *", "np.array([0, 0] *"),
    ),
    *group(
        "npu/launch.py",
        "npu/test_emulated_attention.py npu/test_emulated_launch.py",
        ("a row sees the token behind its own", "position >= seen", "position > seen"),
        ("scores are not scaled", "q[self.rows] * np.float32(layout.head_dim**-0.5)", "q[self.rows] * np.float32(1)"),
    ),
    *group(
        "npu/staged.py",
        "npu/test_emulated_attention.py",
        ("a buffer is lost when a job has ended", "            done.buffer.release()\n", "            pass\n"),
        ("a buffer is free while its job hangs", "        if done.run.ended:\n", "        if True:\n"),
        ("freshness is not proven", "            done.canary.check(done.buffer.out)\n", ""),
        ("the result is read before it is synced", "            done.buffer.sync_from_device()\n", ""),
        ("a failed launch is run again on the same core", "self.cores.pick(avoid=done.core)", "done.core"),
        ("a failed launch is left as it is", "            self._on_host(done.planned.launch, layer, q, out, error)\n", "            pass\n"),
        ("memory goes back that the device still writes to", "if not self._stuck:", "if True:"),
    ),
    *group(
        "npu/staged.py",
        "npu/test_resident_attention.py",
        ("a device that copies again is given copies to keep", "if not device.reads_in_place:", "if False:"),
        ("a launch that stays staged is gathered all the same", "None if copy is None else copy.acquire(layer)", "None"),
    ),
    *group(
        "npu/step_planner.py",
        "npu/test_resident_attention.py npu/test_placement.py npu/test_emulated_attention.py",
        ("a launch that stays staged is weighed as if it were gathered", "gathered_bytes=token + layout.nbytes - layout.query_offset", "gathered_bytes=layout.nbytes"),
        ("a prompt's tiles are weighed as if they stayed staged", "or layout.mask_rows or not", "or not"),
        ("a prompt's tiles are kept staged", "if self._residency is None or cut.layout.mask_rows:", "if self._residency is None:"),
        ("copies are never free again", "            self._residency.begin_step()\n", "            pass\n"),
        ("a context that fills the largest bucket counts as beyond it", "staged <= self.capacity", "staged < self.capacity"),
        ("the host forgets what is beyond the largest bucket", "Share.joined([Share.of(batch, beyond), *shares])", "Share.joined([Share.of(batch, beyond[:0]), *shares])"),
    ),
    *group(
        "npu/cores.py",
        "npu/test_cores.py",
        ("a core that hangs gets more jobs", "(dead or self._in_a_row", "(self._in_a_row"),
        ("failures are counted over successes", "        self._in_a_row[core] = 0\n", ""),
        ("the first core gets every job", "min(trusted, key=self._in_flight.__getitem__, default=None)", "min(trusted, default=None)"),
    ),
    *group(
        "npu/placement.py",
        "npu/test_placement.py",
        ("the dearer way is taken", "self.model.on_device(cut.work, len(cuts)) < self.model.on_host(cut.work)", "self.model.on_device(cut.work, len(cuts)) > self.model.on_host(cut.work)"),
        ("launches are weighed as if each were alone", "self.model.on_device(cut.work, len(cuts)) <", "self.model.on_device(cut.work) <"),
    ),
    *group(
        "npu/cost_model.py",
        "npu/test_cost_model.py",
        ("gathering costs nothing", "return gather + (self", "return (self"),
        ("more cores are counted than there are", "min(self.cores, launches)", "launches"),
    ),
    *group(
        "npu/cost_fit.py",
        "npu/test_cost_fit.py",
        ("a launch counts its bytes twice", "smallest.seconds - smallest.work.staged_bytes / device_bytes", "smallest.seconds"),
        ("a launch may be worth nothing", ", smallest.seconds / 2)", ", 0)"),
        ("the device is blamed for the gathering", "_without(timing, timing.work.gathered_bytes / gather)", "timing"),
        ("a tile's arithmetic pays for the launch", "timing.work.gathered_bytes / gather + launch)", "timing.work.gathered_bytes / gather)"),
        ("what is constant counts as growth", "amount(timing.work) - amount(smallest.work), timing.seconds - smallest.seconds", "amount(timing.work), timing.seconds"),
    ),
    *group(
        "npu/cost_measure.py",
        "npu/test_cost_measure.py",
        ("the run that sets things up counts", "    run(0)\n", ""),
        ("a launch that the host computed is taken for the device's", "if staged.cores.failures:", "if False:"),
    ),
    *group(
        "npu/calibration.py",
        "npu/test_calibration.py",
        ("figures of another machine are trusted", "if calibration.key != key:", "if False:"),
        ("figures of another format are trusted", "if calibration.format != _FORMAT:", "if False:"),
        ("what is no file is opened", "if path.exists() and not path.is_file():", "if False:"),
        ("half a file makes an error of the run", "(OSError, ValueError, RecursionError)", "OSError"),
    ),
    *group(
        "npu/runtime_choice.py",
        "npu/test_runtimes.py",
        ("auto takes a driver that the vendor's runtime cannot use", 'if board.npu is not None and board.npu.driver == "rknpu" else None', "if board.npu is not None else None"),
        ("auto hands memory to an NPU from a heap that is closed", "heap.node.usable for heap in heaps", "heap.node for heap in heaps"),
        ("an NPU without an IOMMU is given scattered memory", "if npu is None or npu.iommu else CMA_HEAPS", "if npu is None or npu.iommu else PREFERRED_HEAPS"),
    ),
    *group(
        "npu/runtimes.py",
        "npu/test_runtimes.py",
        ("auto gives the device everything", 'placement = placement or "cost"', 'placement = placement or "device"'),
        ("what was measured is never used", "by_cost.model = load_cost_model(", "load_cost_model("),
        ("costs are sought by another number of threads", "heads, threads)\n        by_cost", "heads, 1)\n        by_cost"),
    ),
    *group(
        "npu/checks.py",
        "npu/test_processes.py",
        ("a forked child computes", "if here != opened_in:", "if False:"),
    ),
]

DMA = [
    *group(
        "hostcache/dma_heap.py",
        "hostcache/test_dma_heap.py",
        ("the last piece of a range is not synced", "-(-(offset + nbytes) // self.piece_bytes)", "(offset + nbytes) // self.piece_bytes"),
        ("the device's bytes are fetched where the host's are handed over", "self._sync(dma_buf.end_cpu_access", "self._sync(dma_buf.begin_cpu_access"),
        ("all pieces lie at the start", "base + index * self.piece_bytes", "base"),
        ("pages that the machine has not are asked for", "pieces * piece_bytes > budget.available", "False"),
        ("a heap that gives out keeps what it gave", "        for descriptor in descriptors:\n            os.close(descriptor)\n        return error", "        return error"),
        ("a region in use loses its descriptors", "        super().close()\n        self._close_descriptors()", "        self._close_descriptors()\n        super().close()"),
    ),
    *group(
        "hostcache/dma_buf.py",
        "hostcache/test_dma_buf.py",
        ("a signal ends a sync", "(InterruptedError, BlockingIOError)", "BlockingIOError"),
        ("the flags are taken for the descriptor", "HEAP_ALLOCATION.unpack(request)[1]", "HEAP_ALLOCATION.unpack(request)[2]"),
    ),
    *group(
        "staging/udmabuf.py",
        "staging/test_udmabuf.py",
        ("a view's pages are not listed for devices", "            dma_buf.begin_cpu_access(self.fd)\n", ""),
        ("a run behind the region is shown", "or offset + nbytes > region.nbytes", ""),
    ),
]

EXPORT = [
    *group(
        "npu/attention_graph.py",
        "npu/test_attention_graph.py",
        ("the canary has no row", "self.tile * self.group + CANARY_ROWS", "self.tile * self.group"),
        ("K is transposed the other way", '["k_columns"], perm=[0, 2, 1, 3]', '["k_columns"], perm=[0, 2, 3, 1]'),
        ("the mask of rows is that of tokens", '["mask_columns"], perm=[0, 2, 3, 1]', '["mask_columns"], perm=[0, 2, 1, 3]'),
        ("a tile takes several sequences", "or (self.masked and batch > 1)", ""),
        ("a dimension of 13 bits and one passes", "if largest > MAX_DIMENSION:", "if largest > MAX_DIMENSION + 1:"),
    ),
    *group(
        "npu/attention_export.py",
        "npu/test_attention_export.py",
        ("any operators will do", "if operators != [FUSED_ATTENTION]:", "if not operators:"),
        ("a batch takes more memory than the arena has", "if graph.layout(batch, tokens).nbytes <= room", "if True"),
    ),
    *group(
        "npu/rknn_log.py",
        "npu/test_rknn_log.py",
        ("an operator without a name is passed over", r'\d+/\d+/(\d+) +(\d+) *(\S*)")', r'\d+/\d+/(\d+) +(\d+) +(\S+)")'),
        ("a row that cannot be read is passed over", "if int(number) != len(rows):", "if False:"),
        ("a warning is harmless if it begins so", "if not _HARMLESS.fullmatch(line)", "if not _HARMLESS.match(line[:1])"),
    ),
    *group(
        "npu/rknn_cache.py",
        "npu/test_attention_export.py npu/test_dense_export.py npu/test_rknn_cache.py",
        ("a damaged file is taken from the cache", "lambda file: _sha256(file) == note.sha256", "lambda _: True"),
        ("compiled graphs have no bound", "            self.room.make_room(0, limit", "            (lambda *_, **__: None)(0, limit"),
        ("a graph goes before it was placed", "        weakref.finalize(self, file.close)", "        file.close()"),
        ("another compiler's work is taken", "json.dumps([_NOTE_VERSION, version, TARGET,", "json.dumps([_NOTE_VERSION, TARGET,"),
        ("another text's scales are taken", "            digest.update(array.tobytes())\n", ""),
        ("complaints are not minded", "    if compiled.complaints:\n", "    if False:\n"),
    ),
    *group(
        "npu/rknn_manifest.py",
        "npu/test_attention_export.py",
        ("a file with other bytes is believed", "if digest != entry.sha256:", "if False:"),
        ("a file outside the folder is read", "if entry.file != Path(entry.file).name or \"\\0\" in entry.file:", "if False:"),
        ("an older export's files stay", "if stray.name not in sources:", "if False:"),
    ),
    *group(
        "npu/rknn_toolkit.py",
        "npu/test_rknn_toolkit.py",
        ("a late answer is taken for the next call's", "        except BaseException:  # Ctrl-C: its answer would be taken for that of the next call\n            self._end()\n", "        except BaseException:\n"),
        ("a call says what an earlier one printed", "file.seek(start)", "file.seek(0)"),
        ("the worker sees the modules of this folder", '"-I", ', '"-B", '),
    ),
    *group(
        "npu/dense_decoder.py",
        "npu/test_dense_segments.py",
        ("heads turn the other way", "heads[..., second] * sin", "-heads[..., second] * sin"),
        ("neighbours turn where halves should", "if interleaved else (slice(half)", "if not interleaved else (slice(half)"),
        ("padding is taken for results", "[out[:used].copy() for out", "[out.copy() for out"),
        ("keys are normed by the queries' weight", "self._norms.get((layer, name))", 'self._norms.get((layer, "q"))'),
    ),
    *group(
        "npu/dense_graph.py",
        "npu/test_dense_segments.py",
        ("the residual skips attention", 'graph.node("Add", out, "residual", name="middle")', 'graph.node("Add", out, out, name="middle")'),
        ("smoothing is not made up for", "_gate.weight\") * mlp", "_gate.weight\")"),
    ),
    *group(
        "npu/dense_export.py",
        "npu/test_dense_export.py",
        ("the head is int8, too", "if calibration is not None and index < config.layers:", "if calibration is not None:"),
        ("int8 is calibrated by the first rows of each piece", "tuple(as_channels(x[start : start + rows])", "tuple(as_channels(x[:rows])"),
    ),
]

BOARD = [
    *group(
        "npu/rknnlite.py",
        "npu/test_rknnlite.py",
        ("a run's code is ignored, as the wheel does", 'if returned := self._call("run", run):', 'if self._call("run", run) is None:'),
        ("a context that could not be set up is left behind", "        except BaseException:\n            self.release()\n            raise", "        except ZeroDivisionError:\n            raise"),
        ("a result of another shape is taken", "if found != [(np.float32, shape) for shape in shapes]:", "if not found:"),
        ("an error keeps the wheel's frames alive", '            said = f"{type(error).__name__}: {error}"\n', '            raise self._error(name, "failed", f"{type(error).__name__}: {error}") from None\n'),
        ("all graphs run on the first core", "core_mask=1 << core", "core_mask=1"),
    ),
    *group(
        "npu/rknnlite_device.py",
        "npu/test_rknnlite_device.py",
        ("cycles pile up", "        gc.collect(0)\n", "        pass\n"),
        ("the mask is handed over with rows for channels", "job.mask[:, np.newaxis]", "job.mask.swapaxes(1, 2)[:, np.newaxis]"),
    ),
    *group(
        "npu/niceness.py",
        "npu/test_rknnlite.py",
        ("the process stays above all others", "os.setpriority(os.PRIO_PROCESS, thread, before[thread])", "pass"),
    ),
    *group(
        "npu/rknn_errors.py",
        "npu/test_rknnlite_device.py",
        ("a library of another version is used", "if version != toolkit:", "if False:"),
    ),
    *group(
        "npu/board_device.py",
        "npu/test_rknnlite_device.py",
        ("what has not begun waits behind a run that hangs", "began = not self._future.cancel()", "began = True"),
        ("a context in use is destroyed", "                    continue\n", "                    pass\n"),
        ("a forked child gives back its parent's contexts", "if os.getpid() == self._process:", "if True:"),
        ("a job's buffer counts as free while the core reads it", "return self._future.done()", "return True"),
        ("the NPU is not given back", "        self._lock.release()\n", "        pass\n"),
    ),
    *group(
        "npu/rknnrt.py",
        "npu/test_rknnrt.py",
        ("a code is not looked at", "        if code:\n            raise call_error(where, name", "        if False:\n            raise call_error(where, name"),
        ("a version of unknown structs passes", "if not numbers or not KNOWN_VERSIONS[0] <=", "if not numbers or False and not KNOWN_VERSIONS[0] <="),
        ("the library's own syncs stay on", "            | InitFlag.DISABLE_FLUSH_INPUT_MEM_CACHE\n", ""),
    ),
    *group(
        "npu/rknnrt_context.py",
        "npu/test_rknnrt.py",
        ("imports pile up", "while len(self._memories) > MOST_MEMORIES:", "while False:"),
        ("a fresh import goes before an old one", "self._memories.popitem(last=False)[1]", "self._memories.popitem(last=True)[1]"),
        ("an operand in another order is handed over", "            if found != expected:", "            if False:"),
        ("shapes that may be half set count as set", "        self._current = None  # whatever fails, they are set anew\n", ""),
    ),
    *group(
        "npu/rknnrt_device.py",
        "npu/test_rknnrt_device.py",
        ("what was written is not synced", "self._unsynced.update(range(", "set().update(range("),
        ("the result is not fetched", "        side.sync_from_device(start, side.piece_bytes)\n", ""),
        ("all cores lay their operands out in one place", "start = core * side.piece_bytes", "start = 0"),
        ("a core's own memory is not given back", "            self._side.close()\n\n    def _open", "            pass\n\n    def _open"),
    ),
    *group(
        "npu/board_trial.py",
        "npu/test_rknnrt_device.py",
        ("a trial that is wrong passes", "if not off <= _TOLERANCE:", "if False:"),
    ),
    *group(
        "npu/core_worker.py",
        "npu/test_rknnlite_device.py",
        ("work that was withdrawn runs", "if future.set_running_or_notify_cancel():", "if future.set_running_or_notify_cancel() or True:"),
        ("a failed job is taken for one that worked", "future.set_exception(error)", "future.set_result(None)"),
    ),
    *group(
        "npu/dense_probe.py",
        "npu/test_dense_probe.py",
        ("what as many rows answered is asked again", "self._answered = self._answered_by[rows] = number", "self._answered = number"),
        ("an answer that is no number passes", "if not np.linalg.norm(got - want) <= reach]", "if np.linalg.norm(got - want) > reach]"),
        ("a segment may answer alike", "((self._reach > 0) &", "((self._reach >= 0) &"),
    ),
    *group(
        "npu/rknnlite_segments.py",
        "npu/test_rknnlite_segments.py",
        ("a segment's result is not proven", "        segment.probe.check(number, rows, [output[-1] for output in outputs])\n", ""),
        ("the proof's row is handed out as a token's", "return [output[:-PROBE_ROWS] for output in outputs]", "return list(outputs)"),
        ("segments stay on the NPU", "segment.context.release()", "pass"),
        ("a run is given up and the next one queued", "if self._running is not None and not futures.wait([self._running], self._seconds).done:", "if False:"),
    ),
    *group(
        "npu/dense_folder.py",
        "npu/test_rknnlite_segments.py",
        ("another model's segments are taken", "if self.manifest.model_sha256 != self._fingerprint:", "if False:"),
        ("fp16 and int8 segments share KV", '"/".join((runner.numerics, *host))', '"/".join(host)'),
    ),
    *group(
        "npu/loading.py",
        "npu/test_rknnlite_segments.py",
        ("a closed engine keeps the NPU", "        self.decoder.close()\n", ""),
    ),
    *group(
        "npu/stepper.py",
        "npu/test_rknnlite_segments.py",
        ("a failed step keeps what it took", "                self._scheduler.rollback(plan)\n", ""),
    ),
]

WEIGHTS_CACHE = [
    *group(
        "npu/cache_room.py",
        "npu/test_cache_room.py",
        ("the newest goes first", "key=lambda entry: entry.used)", "key=lambda entry: -entry.used)"),
        ("what is in use goes", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB"),
        ("what is written does not count", "if total + needed <= limit and", "if total <= limit and"),
        ("what was removed still counts", "                total -= entry.nbytes\n", "                pass\n"),
        ("the disk is not asked", " and needed <= shutil.disk_usage(self.folder).free", ""),
        ("all goes though it does not help", "if needed > shutil.disk_usage(self.folder).free + removable:", "if False:"),
        ("somebody else's folders go", " if _ENTRY_NAME.fullmatch(path.name)]", "]"),
        ("a file that is being removed is opened", ".st_nlink == 0:", ".st_nlink < 0:"),
        ("a load does not count as use", "os.utime(file.fileno())", "pass"),
    ),
    *group(
        "npu/weights_cache.py",
        "npu/test_cache_room.py npu/test_weights_cache.py",
        ("the cache has no bound", "        room.make_room(nbytes, limit, beside=entry)\n", ""),
        ("a damaged file is believed", " and _hash(file, plan.nbytes) == file.read()", ""),
    ),
    *group(
        "npu/decoder.py",
        "npu/test_cache_room.py",
        ("a loaded model's weights are removed", "weakref.finalize(segments, open_in_use(folder / WEIGHTS_FILE).close)", "pass"),
    ),
]

MEMORY = [
    *group(
        "hostcache/memory_budget.py",
        "hostcache/test_memory_budget.py",
        ("a parent's limit is not asked", "for step in (below, *below.parents):", "for step in (below,):"),
        ("pages of files count as used", ' - _droppable(folder / "memory.stat")', ""),
        ("pages of inodes count as used", ', "slab_reclaimable")', ")"),
        ("pages of the cgroups below do not count", 'pages.get(f"total_{kind}", pages.get(kind, 0))', "pages.get(kind, 0)"),
        ("the higher of two limits holds", "limit = min(_numbers(folder, _LIMITS)", "limit = max(_numbers(folder, _LIMITS)"),
        ("a container looks for its path on the host", "below = absolute.relative_to(mounted) if inside else PurePosixPath()", "below = absolute.relative_to('/')"),
    ),
    *group(
        "hostcache/region.py",
        "hostcache/test_region.py",
        ("a pool that gets its process killed is taken", "if budget is not None and nbytes > budget.available:", "if False:"),
    ),
    *group(
        "npu/model_memory.py",
        "npu/test_model_memory.py",
        ("what is loaded counts twice", "ram_bytes=budget.available + loaded", "ram_bytes=budget.available"),
        ("all that a process holds counts as libraries", "min(_resident_bytes(), LIBRARIES_BYTES)", "_resident_bytes()"),
        ("what a step computes in is not planned", " + step_bytes(config.hidden, config.ffn, max_rows)", ""),
        ("what stays staged is not asked for", 'resident_bytes=0 if demand.runtime == "cpu" else demand.resident_bytes', "resident_bytes=0"),
    ),
    *group(
        "npu/loading.py",
        "npu/test_loading.py",
        ("a load that fails keeps its swap space", "            opened.callback(swap.close)\n", "            pass\n"),
        ("a load that fails keeps its pool", "        opened.callback(cache.close)\n", ""),
        ("a closed engine keeps its swap space", "            self.swap.close()\n", "            pass\n"),
    ),
    *group(
        "npu/loading.py",
        "npu/test_model_memory.py",
        ("a model is loaded without asking for its memory", "pool = choose_pool(source, demand, asked=pool_bytes)", 'pool = PoolChoice(pool_bytes or 192 << 20, "")'),
        ("what auto stages on a board is not asked for", "runtime=first_choice(runtime, graphs)", 'runtime="cpu" if runtime == "auto" else runtime'),
    ),
    *group(
        "npu/mapped_file.py",
        "npu/test_mapped_file.py",
        ("other files are released, too", "if name == real:", "if name.endswith(path.name):"),
    ),
    *group(
        "npu/segments.py",
        "npu/test_mapped_file.py",
        ("scales stay mapped", "            release_mappings(folder / WEIGHTS_FILE)\n", ""),
    ),
    *group(
        "tools/plan.py",
        "tools/test_plan.py",
        ("the kernel's share of a cgroup is left", "(DEFAULT_RESERVE if budget.cgroup is None else 0)", "DEFAULT_RESERVE"),
    ),
]

DISCOVERY = [
    *group(
        "npu/npu_search.py",
        "npu/test_discovery.py",
        ("any driver's device is the NPU", "if device.driver == VENDOR_DRIVER:", "if device.driver:"),
        ("every render node is the NPU's", "if d.below(device) and d.node]", "if d.node]"),
        ("another maker's accel node is rocket's", 'if d.node and f"/{ROCKET_PARENT}/" in d.path]', "if d.node]"),
        ("the card node comes first", 'not posixpath.basename(path).startswith("render")', 'posixpath.basename(path).startswith("render")'),
        ("a fuse of another chip's takes a core", '(npu.driver, npu.compatible) == ("rknpu", FUSED)', 'npu.driver == "rknpu"'),
    ),
    *group(
        "npu/device_node.py",
        "npu/test_discovery.py",
        ("a plain file is a device", "if not stat.S_ISCHR(found.st_mode):", "if False:"),
        ("a link of another node is taken", 'machine.target(link) or "")) == path', 'machine.target(link) or "")) != path'),
    ),
    *group(
        "npu/kernel_devices.py",
        "npu/test_discovery.py npu/test_kernel_devices.py",
        ("a name that begins alike is a part", 'startswith(f"{other.path}/")', "startswith(other.path)"),
        ("another machine's files are asked of this one's udev", "if machine.is_this_one:", "if True:"),
    ),
    *group(
        "npu/machine.py",
        "npu/test_discovery.py",
        ("a file that has gone is an error", "        except OSError:\n            return None\n\n    def number", "        except ZeroDivisionError:\n            return None\n\n    def number"),
        ("a link leads out of the root", "if not real.is_relative_to(root) or", "if"),
        ("a symbolic link is followed", "return os.lstat(self.path(name))", "return os.stat(self.path(name))"),
    ),
    *group(
        "npu/discovery.py",
        "npu/test_discovery.py",
        ("a CPU's clock is in kHz", "kilohertz * 1000", "kilohertz"),
        ("the first frequency is the highest", "highest=max((hertz for hertz in map(decimal, offered) if hertz is not None), default=limit)", "highest=next((hertz for hertz in map(decimal, offered) if hertz is not None), limit)"),
        ("a core that is fused off is counted", "soc, npu = RK3583, replace(npu, cores=2)", "soc = RK3583"),
    ),
]

DOCTOR = [
    *group(
        "npu/doctor.py",
        "npu/test_doctor.py",
        ("a warning is a failure", '"degraded" if "warn" in', '"unusable" if "warn" in'),
        ("a chip without graphs is asked for the vendor's software", "if case.board.runs_graphs:", "if case.board.is_board:"),
    ),
    *group(
        "npu/selftest.py",
        "npu/test_selftest.py",
        ("mainline's driver will do", 'npu is not None and npu.driver == "rknpu":', "npu is not None:"),
        ("what the doctor finds unusable is no failure", 'failed = npu is not None and', 'failed = npu is None and'),
    ),
    *group(
        "npu/selftest_launches.py",
        "npu/test_selftest.py",
        ("no old operand is tried", "if not any(_old_is_refused(", "if False and any(_old_is_refused("),
        ("an old operand that was noticed is taken for another failure", 'if "stale" not in error.values:', "if True:"),
        ("what is no number passes", "wrong = ~(differences <= LARGEST_ERROR)", "wrong = differences > LARGEST_ERROR"),
        ("only the first core is tried", "for core in range(bench.device.cores):", "for core in range(1):"),
        ("a library that takes priority is not noticed", "if now < before:", "if now < before - 40:"),
    ),
    *group(
        "npu/selftest_oracle.py",
        "npu/test_selftest_bench.py",
        ("a row sees the token behind it", ">= seen[:, np.newaxis, np.newaxis]", "> seen[:, np.newaxis, np.newaxis]"),
    ),
    *group(
        "npu/selftest_tokens.py",
        "npu/test_selftest.py",
        ("a token that is far behind will do", '"proved" if gap <= NEAR_TIE else "failed"', '"proved"'),
        ("tokens that no NPU computed prove something", "if on_device.trouble or not on_device.launches:", "if on_device.trouble:"),
    ),
    *group(
        "npu/selftest_residency.py",
        "npu/test_selftest_residency.py",
        ("copies that never grow prove something", "if cores.failures or not counts.grown:", "if cores.failures:"),
    ),
    *group(
        "npu/selftest_report.py",
        "npu/test_selftest.py",
        ("a report tells whose folder it was", "details=tuple(map(anonymous, self.details))", "details=self.details"),
        ("what did not run is proved", 'return "incomplete" if any(', 'return "proved" if any('),
    ),
    *group(
        "npu/doctor_access.py",
        "npu/test_doctor_access.py",
        ("a stale node is the driver's", 'if npu is None or npu.form != "misc":', "if npu is None:"),
        ("a closed render node is a remark", "if npu.nodes[0].usable:", "if npu.nodes[0].kind:"),
        ("whoever was let in is told to ask again", "if process.future_groups.issuperset(groups):", "if False:"),
    ),
    *group(
        "npu/doctor_vendor.py",
        "npu/test_doctor_checks.py",
        ("0.10 is older than 0.9", "tuple(int(number) for number in re.findall", "tuple(number for number in re.findall"),
        ("a library for another processor will do", "== AARCH64\n", "> 0\n"),
        ("graphs of another version will do", "if _numbers(library.version) != _numbers(case.toolkit):", "if False:"),
    ),
    *group(
        "npu/doctor_memory.py",
        "npu/test_doctor_memory.py",
        ("a parent group's limit is passed over", "min(limited, key=lambda budget: budget.available)", "limited[0]"),
        ("what a group's others use counts as left", "and scarcest.available < case.plan", "and scarcest.limit < case.plan"),
        ("contiguous memory matters behind an IOMMU", "if npu is None or npu.iommu:", "if npu is None:"),
        ("all of the machine's memory counts as available", "for field in (\"MemAvailable\", \"MemTotal\")", "for field in (\"MemTotal\", \"MemTotal\")"),
    ),
    *group(
        "npu/doctor_speed.py",
        "npu/test_doctor_checks.py",
        ("the vendor's governor is trusted", '"userspace", "rknpu_ondemand"})', '"userspace"})'),
        ("a zone may heat up to where it slows down", "zone.passive - NEAR", "zone.passive"),
    ),
]

FAULTS = [
    *ATTENTION_FAULTS,
    *BENCH_FAULTS,
    *CODEC_FAULTS,
    *DENSE_FAULTS,
    *EXTENT_FAULTS,
    *POOL,
    *FENCES,
    *TABLE,
    *BYTES,
    *NAMESPACE,
    *PREFIX_NODE,
    *PREFIX_RUN,
    *PREFIX,
    *SCHEDULER_FAULTS,
    *GATHER,
    *STAGING,
    *DEVICE,
    *DMA,
    *BOARD,
    *EXPORT,
    *WEIGHTS_CACHE,
    *MEMORY,
    *MODEL_FAULTS,
    *OVERFLOW_FAULTS,
    *PRESSURE_FAULTS,
    *STATE_FAULTS,
    *REPLAY_FAULTS,
    *WINDOW_FAULTS,
    *WINDOW_LAUNCH_FAULTS,
    *DISCOVERY,
    *DOCTOR,
]
