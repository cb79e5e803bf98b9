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
        ("swap takes more than it has room for", "or len(blocks) * pool.span > self.free:", "or len(blocks) * pool.span > self.total:"),
        ("swapped blocks come back in another order", "for place, block in zip(_by_block(slots, pool.span), blocks, strict=True):\n                self._cache.o", "for place, block in zip(_by_block(slots[::-1], pool.span), blocks, strict=True):\n                self._cache.o"),
        ("what was taken keeps its room", "        self._give_back(self._slots.pop(ticket))\n", "        self._slots.pop(ticket)\n"),
        ("a swap ticket is good twice", "self._give_back(self._slots.pop(ticket))", "self._give_back(self._slots[ticket])"),
        ("what was dropped keeps its room", "        self._give_back(self._slots_of(ticket))\n        del", "        self._slots_of(ticket)\n        del"),
        ("an interrupted put keeps its room", "            self._give_back(slots)\n            raise\n", "            raise\n"),
        ("a failed put keeps its room", "            self._give_back(slots)\n            self._fail(error)\n", "            self._fail(error)\n"),
        ("a lost ticket stays", "            self.drop(ticket)\n            self._fail(error)\n", "            self._fail(error)\n"),
        ("a file that failed is written again", "if self.failure is not None or", "if"),
        ("free blocks are swapped out", "if not pool.refs[block] and not pool.is_kept(block):", "if False:"),
        ("a block that came back seems full", "self._tokens[place[0]] = self._cache.tokens_written(block)", "self._tokens[place[0]] = self._cache.geometry.block_tokens"),
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
        ("other bytes than were written come back", "if zlib.crc32(content.data) != self._sums[slot]:", "if False:"),
        ("slots of memory overlap", "slot * self._slot_bytes : (slot + 1) * self._slot_bytes]", "slot : slot + self._slot_bytes]"),
        ("the disk fills up under load", "                os.posix_fallocate(self._file.fileno(), 0, nbytes)  #", "                pass  #"),
        ("a refused file stays open", "                self._file.close()\n                raise\n", "                raise\n"),
    ),
    *group(
        "hostcache/cache.py",
        "hostcache/test_cache.py hostcache/test_swap.py",
        ("a shared block is overwritten", "if not self.pool_of(codec).writable(block):", "if False:"),
        ("an overwritten block seems untouched", "        self.rewrites[block] += 1\n        self._written[:, block] = tokens\n", "        self._written[:, block] = tokens\n"),
    ),
]

PINS = [
    *group(
        "hostcache/pins.py",
        "hostcache/test_pins.py",
        ("a pin refers to nothing", "            self._pool.acquire(block)\n", "            pass\n"),
        ("the first of two pins to end lets a block go", "            if not self._holders[block]:\n                del self._holders[block]\n", "            if block in self._holders:\n                del self._holders[block]\n"),
        ("ended pins keep their blocks", "                self._pool.release(block)\n", "                pass\n"),
        ("the cap counts what is pinned twice", "room.taken + room.needed(fresh) > room.most", "room.taken + len(blocks) > room.most"),
        ("there is no cap", "if room.taken + room.needed(fresh) > room.most:", "if False:"),
        ("a renewed pin keeps its old blocks, too", "        if old is not None:\n            self._let_go(old)\n", ""),
        ("a pin ends a moment late", "if pin.until <= now)", "if pin.until < now)"),
        ("pins never end", "if now < self._next_end:", "if True:"),
        ("the next end is not noted", "        self._holders.update(blocks)\n        old = self._pins.get(name)\n        self._pins[name] = _Pin(tuple(blocks), self._clock() + seconds)\n        if old is not None:\n            self._let_go(old)\n        self._note_next_end()", "        self._holders.update(blocks)\n        old = self._pins.get(name)\n        self._pins[name] = _Pin(tuple(blocks), self._clock() + seconds)\n        if old is not None:\n            self._let_go(old)"),
        ("an owner ends everybody's pins", "if name[0] == owner)", "if name)"),
        ("pins of another namespace end with it", "if name[1] == space)", "if name)"),
    ),
    *group(
        "hostcache/prefix.py",
        "hostcache/test_pins.py",
        ("invalidated prefixes stay pinned", "            self._pins.release_space(key)\n", ""),
        ("nobody hears of invalidations", "            self.on_invalidate(namespace, prompt_version)\n", "            pass\n"),
        ("a lookup does not end pins", "        self.expire_pins()\n        text = bytes_of(tokens)\n        if", "        text = bytes_of(tokens)\n        if"),
    ),
]

FILES = [
    *group(
        "hostcache/whole_file.py",
        "hostcache/test_power_loss.py hostcache/test_whole_file.py",
        ("a file has its name before its bytes are on disk", "        os.fsync(fd)\n", ""),
        ("a new name may be lost after it was reported", "        os.fsync(folder)\n", ""),
        ("a file is written where the old one lies", "            os.rename(hidden, path.name, src_dir_fd=folder, dst_dir_fd=folder)\n", "            os.unlink(path.name, dir_fd=folder) if path.exists() else None\n            os.rename(hidden, path.name, src_dir_fd=folder, dst_dir_fd=folder)\n"),
    ),
    *group(
        "hostcache/state_format.py",
        "hostcache/test_state_file.py",
        ("the header's digest is not compared", "or digest != _header_digest(version, text):", "or False:"),
        ("a later version is taken for damage", "if version != VERSION:\n            raise OtherVersion(", "if version != VERSION:\n            raise FormatError("),
        ("what the header's fields are is not looked at", "            header.require_sound()\n", ""),
        ("more KV than tokens is believed", "or not 0 <= self.computed <= self.tokens", "or not 0 <= self.computed"),
        ("the note is not part of the contents", "hashlib.blake2b(note + tokens, digest_size", "hashlib.blake2b(tokens, digest_size"),
        ("a block passes in another place", 'salt=struct.pack("<Q8x", block)', 'salt=struct.pack("<Q8x", 0)'),
        ("a block of another file passes", "key=preamble[-DIGEST_BYTES:]", "key=MAGIC"),
        ("the geometry is not compared", "for name, value in asdict(geometry).items()),", "for name, value in ()),"),
        ("the codec is not compared", '                ("codec", self.codec, codec.name),\n', ""),
        ("the layout is not compared", '                ("layout", self.layout, _layout_of(codec_named(self.codec))),\n', ""),
        ("another model's KV is used", "if self.numerics != namespace.numerics and self.codec == codec.name:", "if False:"),
        ("another tenant's KV is used", "if not found and self.namespace != namespace.digest:", "if False:"),
        ("the salt is in the file", "namespace=namespace.digest,", "namespace=namespace.digest + namespace.salt,"),
    ),
    *group(
        "hostcache/namespace.py",
        "hostcache/test_state_file.py",
        ("a namespace's digest leaves the salt out", "hashlib.blake2b(self.key(), digest_size", "hashlib.blake2b(self.numerics.encode(), digest_size"),
    ),
    *group(
        "hostcache/state_file.py",
        "hostcache/test_state_file.py hostcache/test_saved_prefix.py",
        ("a state file is anybody's to read", "whole_file(path, 0o600, replace=True)", "whole_file(path, 0o644, replace=True)"),
        ("a neighbour's KV is saved, too", "rows[:, tokens * layout.token_bytes : layout.payload_bytes] = 0", "pass"),
        ("the file's size is not compared", "            if size != expected:\n", "            if False:\n"),
        ("the contents' digest is not compared", "if content_digest(note, tokens) != header.contents:", "if False:"),
        ("a block's digest is not compared", "if section_digest(self._preamble, block, section[:size]) != section[size:]:", "if False:"),
        ("another model's file is used", "        if differences:\n", "        if False:\n"),
        ("a damaged file stays where it is", "                done = set_aside(self.path)\n", "                pass\n"),
        ("a good file that came meanwhile is set aside", "if (status.st_dev, status.st_ino) == self._identity:", "if True:"),
        ("anybody's file is renamed", "if not self._preamble.startswith(MAGIC):", "if False:"),
        ("a refused state file stays open", "        except BaseException:\n            self.close()\n            raise\n", "        except BaseException:\n            raise\n"),
        ("a header of any size is read", "if header_bytes > MOST_HEADER_BYTES:", "if False:"),
    ),
    *group(
        "hostcache/saved_prefix.py",
        "hostcache/test_saved_prefix.py",
        ("blocks are known before all of them are proven", "            cache.overwrite(block, reader.read_block(index), header.tokens_in(index), codec)\n", "            cache.overwrite(block, reader.read_block(index), header.tokens_in(index), codec)\n            node = prefix.publish(node, tokens[index * size : (index + 1) * size], block)\n"),
        ("making room evicts what the rest stands on", "first, node = len(hit.blocks), hit.node\n", "first, node = len(hit.blocks), hit.node\n    pool.release_all(hit.blocks)\n    hit = type(hit)([], node)\n"),
        ("more is asked for than there is", "pool.allocate(min(missing, pool.available))", "pool.allocate(missing)"),
        ("a block that is partly of use is believed whole", "else most // size * size", "else most"),
        ("what was restored stays in use", "pool.release_all([*hit.blocks, *taken])", "pool.release_all(hit.blocks)"),
        ("what comes back is known as what it is not", "tokens[index * size : (index + 1) * size], block)", "tokens[:size], block)"),
        ("a part that is known is read again", "missing = 0 if first * size + hit.partial_tokens == wanted else", "missing = 0 if False else"),
        ("a saved sequence's blocks stay in use", "        cache.pool_of(prefix.codec).release_all(blocks)\n", "        pass\n"),
    ),
    *group(
        "hostcache/prefix_store.py",
        "hostcache/test_prefix_store.py",
        ("prefixes of any size are kept", "        if nbytes > self._max_bytes:\n", "        if False:\n"),
        ("the folder grows without bound", "(total > self._max_bytes or self._clock() - used > self._max_age)", "(self._clock() - used > self._max_age)"),
        ("old files stay", "(total > self._max_bytes or self._clock() - used > self._max_age)", "(total > self._max_bytes)"),
        ("a clock that is behind removes everything", "self._clock() - used > self._max_age", "abs(self._clock() - used) > self._max_age"),
        ("the newest file goes first", "in sorted(found):", "in sorted(found, reverse=True):"),
        ("using a file does not make it newer", "        self._touch(best.path)\n", ""),
        ("set-aside files do not count", "(SUFFIX, SUFFIX + BAD_SUFFIX, TEMPORARY)", "(SUFFIX, TEMPORARY)"),
        ("other files in the folder are removed", "if entry.name.endswith((SUFFIX, SUFFIX + BAD_SUFFIX, TEMPORARY)) and entry", "if entry"),
        ("another namespace's prefix is restored", "if stored.header.namespace == namespace.digest and", "if"),
        ("a file that was replaced is believed", "if not np.array_equal(reader.tokens, best.tokens):", "if False:"),
        ("a damaged file is tried again and again", "            del self._stored[best.path]\n", ""),
        ("the folder keeps what was invalidated", "            if gone:\n", "            if False:\n"),
        ("the folder keeps what another process wrote of it", "            if path not in self._stored:\n", "            if False:\n"),
        ("every version goes", "prompt_version in (None, header.prompt_version)", "True"),
        ("the folder is anybody's to read", "self.folder.mkdir(mode=0o700,", "self.folder.mkdir(mode=0o755,"),
        ("the shortest prefix is taken", "                    best, most = stored, common\n", "                    best = stored\n"),
        ("what is no state file stays in the folder", "                set_aside(path)  #", "                pass  #"),
    ),
]

SESSIONS = [
    *group(
        "npu/sessions.py",
        "npu/test_sessions.py",
        ("what was pinned is not kept on disk", "        self.keep(namespace, tokens[:pinned], codec)\n", ""),
        ("what is on disk is not looked at", "            self._store.restore(namespace, tokens, codec)\n", "            pass\n"),
        ("a loaded session stays out of the pool", "restored = restore_prefix(reader, self._cache, prefix, namespace)", "restored = 0"),
        ("a session is saved for everybody", "self._kept.save(Path(path), engine.namespace(salt, prompt_version, kv)", "self._kept.save(Path(path), engine.namespace('', prompt_version, kv)"),
        ("a session is loaded in the middle of a step", "        with self._guard.step():\n            namespace =", "        if True:\n            namespace ="),
        ("a pinned prompt is computed for everybody", "in engine.generate(tokens, once, salt=salt, prompt_version=prompt_version, kv=kv)", "in engine.generate(tokens, once, kv=kv)"),
        ("a pinned prompt is computed although it is on disk", "if self._kept.recall(namespace, tokens, codec) < whole:", "if True:"),
    ),
    *group(
        "npu/stream_intake.py",
        "npu/test_sessions.py",
        ("requests do not look for prefixes on disk", "            self._kept.recall(namespace, tokens, codec)\n", "            pass\n"),
    ),
    *group(
        "tools/conversation.py",
        "tools/test_run_session.py",
        ("a text begins anew behind its session", "return np.concatenate([self._tokens, self._engine.tokenizer.encode(text, bos=False)])", "return self._engine.tokenizer.encode(text)"),
        ("an answer is not remembered", '[*self._messages, {"role": "assistant", "content": text}]', "self._messages"),
        ("a text goes on behind its end", "            answer = answer[:-1]  #", "            pass  #"),
        ("a chat goes on as a text", "self.chat = chat or bool(self._messages)", "self.chat = chat"),
        ("a text goes on as a chat", "if chat and not self._messages:", "if False:"),
        ("a second system message is ignored", "            if system is not None:\n                raise", "            if False:\n                raise"),
        ("a missing folder shows when the answer is there", "if self._path is not None and not self._path.parent.is_dir():", "if False:"),
        ("what is no session makes room for one", "            if path.exists():  # no state file", "            if False:  # no state file"),
        ("a session is lost without a word", "            self.lost = error\n", ""),
        ("anybody's note is a chat", 'all(message.keys() == {"role", "content"} for message in messages)', "True"),
    ),
]

COMMAND = [
    *group(
        "tools/answers.py",
        "tools/test_run_answers.py",
        ("all answers have one seed", "engine.add_branches(prompt, count, params, **options)", "tuple(engine.add_request(prompt, params, **options) for _ in range(count))"),
        ("answers are drawn where none is random", "if count > 1 and params.temperature == 0:", "if False:"),
        ("what a search does not heed is taken", "if getattr(params, name) != getattr(usual, name):", "if False:"),
        ("a search asks for more than the context leaves", "max_tokens=min(max_tokens, room)", "max_tokens=max_tokens"),
        ("an answer's beginning is shown again", "            self._shown = len(one.text)\n", ""),
        ("answers are shown when all are there", "if one.finish_reason is None or", "if any(a.finish_reason is None for a in self._answers) or"),
    ),
    *group(
        "tools/run.py",
        "tools/test_run_answers.py",
        ("guesses are not asked for", '"speculate": args.speculate,', '"speculate": 0,'),
        ("a session goes on from one of several answers", "if args.session is not None and (", "if False and ("),
        ("nothing is swapped", '"swap_bytes": args.swap,', '"swap_bytes": 0,'),
    ),
    *group(
        "tools/run.py",
        "tools/test_run_prefixes.py",
        ("a prompt is not kept", "            engine.sessions.keep(conversation.beginning(prompt))\n", "            pass\n"),
        ("a folder that takes no file is found out at the end", "        tempfile.TemporaryFile(dir=args.keep_prefixes).close()\n", ""),
    ),
    *group(
        "tools/conversation.py",
        "tools/test_run_prefixes.py",
        ("each question is kept", "        if not self.chat:\n            return prompt\n        other", "        if True:\n            return prompt\n        other"),
    ),
    *group(
        "tools/command.py",
        "tools/test_help.py",
        ("rare options fill the help", "if group not in self._rare]", "]"),
        ("rare options are nowhere shown", "        return super().format_help()\n\n    def error", "        return self.format_help()\n\n    def error"),
    ),
    *group(
        "hostcache/prefix_store.py",
        "hostcache/test_prefix_store.py",
        ("what is kept is written again", "if path in self._stored and path.exists():", "if False:"),
        ("a file that somebody removed is kept", "if path in self._stored and path.exists():", "if path in self._stored:"),
    ),
    *group(
        "npu/sessions.py",
        "npu/test_sessions.py",
        ("a prompt is kept for everybody", "return self._kept.keep(engine.namespace(salt, prompt_version, kv), ids", "return self._kept.keep(engine.namespace(kv=kv), ids"),
    ),
]

# What the shadow must see: the wrong KV, whatever wrong number it comes from.
RESTARTS = [
    *group(
        "hostcache/saved_prefix.py",
        "hostcache/test_shadow_restart.py",
        ("a block comes back in its neighbour's place", "reader.read_block(index)", "reader.read_block(max(index - 1, 0))"),
    ),
    *group(
        "hostcache/state_file.py",
        "hostcache/test_shadow_restart.py",
        ("what is damaged is restored", "if section_digest(self._preamble, block, section[:size]) != section[size:]:", "if len(section) != size + DIGEST_BYTES:"),
    ),
    *group(
        "hostcache/swap.py",
        "hostcache/test_shadow_restart.py",
        ("a lost ticket is not told", "            self._fail(error)\n            raise SwapError(", "            self._fail(error)\n            return\n            raise SwapError("),
    ),
    *group(
        "hostcache/pins.py",
        "hostcache/test_shadow_restart.py",
        ("a pin's reference is not its own", "            self._pool.acquire(block)\n", "            pass\n"),
    ),
]

# And beside all that happens at once.
AT_ONCE = [
    *group(
        "npu/beam.py",
        "npu/test_shadow_everything.py",
        ("beams write into one table", "table = source.table.fork()", "table = source.table"),
        ("a parent of beams keeps its blocks", "            beam.request.table.release()\n        return heirs", "            pass\n        return heirs"),
    ),
    *group(
        "hostcache/saved_prefix.py",
        "npu/test_shadow_everything.py",
        ("a block from disk lies in its neighbour's place, beside all else", "reader.read_block(index)", "reader.read_block(max(index - 1, 0))"),
    ),
]

STATE_FAULTS = [*SWAP, *PINS, *FILES, *SESSIONS, *COMMAND, *RESTARTS, *AT_ONCE]
