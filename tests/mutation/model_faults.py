"""Seeded faults in what is done around the pool: models, rotation, sampling, structures, files and processes."""

# ruff: noqa: E501 - a fault is one line
# fmt: off
from __future__ import annotations

from .fault import group

__all__ = ["MODEL_FAULTS"]

ROPE = group(
    "npu/rope.py",
    "npu/test_rope.py",
    ("linear scaling speeds up", "slowed = trained / self.factor", "slowed = trained * self.factor"),
    ("factors multiply", "trained / np.array(self.factors)", "trained * np.array(self.factors)"),
    ("yarn slows the fast pairs", "trained * (1 - slow) + slowed * slow", "trained * slow + slowed * (1 - slow)"),
    ("yarn's ramp begins a pair late", "math.floor(pair_that_turns(self.beta_fast))", "math.ceil(pair_that_turns(self.beta_fast))"),
    ("yarn's ramp ends a pair early", "math.ceil(pair_that_turns(self.beta_slow))", "math.floor(pair_that_turns(self.beta_slow))"),
    ("yarn sharpens attention by the binary logarithm", "weight * math.log(factor) + 1.0", "weight * math.log2(factor) + 1.0"),
    ("Llama 3 slows the fast pairs", "1 / ((1 - kept) / factor + kept)", "1 / (kept / factor + (1 - kept))"),
    ("Llama 3 mixes from no turn on", "np.clip((turns - low) / (high - low), 0.0, 1.0)", "np.clip(turns / high, 0.0, 1.0)"),
    ("the factor of cos and sin is not in the identity", "        digest.update(np.float64(self.attention).tobytes())\n", ""),
)

ROPE_KEYS = group(
    "npu/gguf_rope.py",
    "npu/test_model.py",
    ("a factor without a type is nothing", '"linear" if factor != 1 else "none"', '"none"'),
    ("yarn's usual attention is left out", "attention=trained.attention * yarn_attention(factor)", "attention=trained.attention"),
    ("factors of any number pass", "factors.shape != (head_dim // 2,) or not", "not"),
)

DECODER = [
    *group(
        "npu/decoder.py",
        "npu/test_numerics.py",
        ("activations are not in the id", "                    activations,\n                    config.positions_identity", "                    config.positions_identity"),
        ("the rotation is not in the id", "config.positions_identity", '"rope"'),
        ("the libraries' versions are not in the id", 'f"onnxruntime-{segments.runtime_version}"', '"onnxruntime"'),
        ("the machine is not in the id", "machine_identity(),", '"machine",'),
        ("forms of weights are not in the id", 'f"forms-{FORM_VERSION}"', '"forms"'),
        ("threads are in the id", 'f"forms-{FORM_VERSION}"', 'f"forms-{FORM_VERSION}-{threads}"'),
    ),
    *group(
        "npu/rope.py",
        "npu/test_decoder.py",
        ("cos is not stretched", "np.cos(angles) * self.attention", "np.cos(angles)"),
    ),
    *group(
        "npu/model_runner.py",
        "npu/test_numerics.py",
        ("the model is not in the id", "{decoder.fingerprint}|", ""),
        ("the attention runtime is not in the id", "|attention={self._runtime.numerics}", ""),
    ),
    *group(
        "npu/emulated_device.py",
        "npu/test_numerics.py",
        ("rounding is not in the id", 'f"{self.name}-{rounding}"', "self.name"),
    ),
    *group(
        "npu/staged.py",
        "npu/test_numerics.py",
        ("buckets are not in the id", ", *map(str, sizes.sizes)]", "]"),
        ("the host is not in the id", 'named if host is None else f"{named}+{host.numerics}"', "named"),
    ),
    *group(
        "npu/machine_identity.py",
        "npu/test_machine_identity.py",
        ("extensions are not told apart", '" ".join(sorted(extensions.split()))', '""'),
        ("machines of another kind of kernel count as alike", '("flags", "Features")', '("flags",)'),
    ),
    *group(
        "npu/graphs.py",
        "npu/test_decoder.py npu/test_graphs.py",
        ("the bias of q and k is forgotten", 'self._add_bias(graph, f"{block}.attn_{name}.bias", value)', "value"),
        ("the bias of v is forgotten", 'self._add_bias(graph, f"{block}.attn_v.bias", v)', "v"),
        ("heads are not normed", "if not self._config.family.qk_norm:", "if True:"),
        ("heads are normed together", "np.array([0, -1, self._config.head_dim])", "np.array([0, 1, -1])"),
        ("all families turn neighbours", "int(config.family.interleaved)", "1"),
        ("gate and up change places", "gate, up = graph.linear", "up, gate = graph.linear"),
        ("K and V are quantised once", ", self._groups[names], twice=True)", ", self._groups[names])"),
    ),
]

TILES = [
    *group(
        "npu/tiles.py",
        "npu/test_tiled_decoder.py",
        ("scales lie by row", ".reshape(tiles, lib.RP_LANES, blocks).transpose(0, 2, 1)", ".reshape(tiles, blocks, lib.RP_LANES)"),
        ("codes lie by row", "codes.transpose(0, 2, 3, 1)", "codes.transpose(0, 2, 1, 3)"),
        ("codes of Q4_0 have no zero", "TiledType(Q4_0_BLOCK, 4, 8, offset=False)", "TiledType(Q4_0_BLOCK, 4, 0, offset=False)"),
        ("half a tile is none", "rows, columns = -(-info.shape[0] // lib.RP_LANES)", "rows, columns = (info.shape[0] // lib.RP_LANES)"),
        ("an array begins where the one before it has not ended", "end = -(-(end + nbytes) // _ALIGNMENT)", "end = ((end + nbytes) // _ALIGNMENT)"),
    ),
    *group(
        "npu/tiled_decoder.py",
        "npu/test_tiled_decoder.py",
        ("logits are those of the first rows", "rows.attended[:wanted] = rows.attended[logit_rows]", "pass"),
        ("the last layer's MLP runs twice", "if number + 1 < len(layers):", "if True:"),
        ("a closed decoder goes on", "        if self._closed:\n", "        if False:\n"),
    ),
    *group(
        "npu/tiled_decoder.py",
        "npu/test_numerics.py",
        ("the machine is not in the id of tiles", "machine_identity())", '"machine")'),
        ("the tiles' version is not in the id", 'f"tiles-{TILE_VERSION}"', '"tiles"'),
        ("the rotation is not in the id of tiles", '"/".join((*parts, config.positions_identity))', '"/".join(parts)'),
    ),
    *group(
        "npu/tiled_weights.py",
        "npu/test_tiled_decoder.py",
        ("biases are left out of tiles", "if config.family.qkv_bias:", "if False:"),
        ("heads are not normed behind tiles", "if config.family.qk_norm:", "if False:"),
        ("all families turn neighbours behind tiles", "self.model.interleaved = config.family.interleaved", "self.model.interleaved = True"),
    ),
]

FOLDERS = [
    *group(
        "npu/huggingface.py",
        "npu/test_folders.py",
        ("llama's rows stay in halves", "if self._config.family.interleaved and _ROTATED", "if False and _ROTATED"),
        ("every family's rows are reordered", "if self._config.family.interleaved and _ROTATED", "if _ROTATED"),
        ("rows are reordered the other way round", "shape[0] // head_dim, 2, head_dim // 2, -1)", "shape[0] // head_dim, head_dim // 2, 2, -1)"),
        ("only the first shard is read", "        for shard in shards:\n", "        for shard in shards[:1]:\n"),
    ),
    *group(
        "npu/hf_tokenizer.py",
        "npu/test_folders.py npu/test_hf_tokenizer.py",
        ("generation_config.json is not asked for ends", "GenerationConfig.from_folder(folder).eos_ids or ", ""),
        ("the tokenizer's own end is forgotten", "({eos_id} if eos_id is not None else frozenset())", "frozenset()"),
    ),
    *group(
        "npu/generation_config.py",
        "npu/test_folders.py npu/test_hf_tokenizer.py",
        ("of several ends one counts", "    return tuple(ids)\n", "    return tuple(ids[:1])\n"),
    ),
    *group(
        "npu/spm.py",
        "npu/test_spm.py",
        ("runs grow from short to long", "for run in reversed(runs)]", "for run in runs]"),
        ("runs of unequal lengths pass", "for length in range(2, len(runs) + 2)]:", "for length in map(len, runs)]:"),
        ("what scores lowest is joined first", "key=lambda piece: -scores[pieces[piece]])\n    for", "key=lambda piece: scores[pieces[piece]])\n    for"),
    ),
]

CONVERT = [
    *group(
        "npu/requantise.py",
        "npu/test_convert.py",
        ("embedding and head get 4 bits", 'GGMLType.Q8_0 if name in _VOCABULARY_MATRICES else _MATRICES[weights]', "_MATRICES[weights]"),
        ("what is small already is made larger", "if info.type not in _DENSE and info.nbytes <=", "if False and info.nbytes <="),
        ("rows that are no whole blocks are quantised", "if info.shape[-1] % target.block_elements:", "if False:"),
        ("the first rows are written again and again", "rows[start : start + step]", "rows[:step]"),
        ("the loss of the last rows is told", "loss.error += float(", "loss.error = float("),
        ("broken weights are stored", "if not np.isfinite(error).all():", "if False:"),
    ),
    *group(
        "npu/convert.py",
        "npu/test_convert.py",
        ("the source's pages stay", "                    source.release_pages()\n", ""),
        ("tensors are not padded", "                writer.write_padding(file, written)\n", ""),
        ("a full disk shows at the end", "            _set_aside(fd, nbytes, out)\n", ""),
        ("integers are narrowed", "if limits.min <= low and high <= limits.max:", "if limits.min <= low:"),
        ("what was not changed is called quantised", "if requantised else {}", ""),
    ),
    *group(
        "hostcache/whole_file.py",
        "hostcache/test_whole_file.py npu/test_convert.py",
        ("a file that is there is written over", "if not replace and os.path.lexists(path):", "if False:"),
        ("what failed keeps its name", "            os.unlink(hidden, dir_fd=folder)\n", "            pass\n"),
        ("permissions are whatever they are", "os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode)", "os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o777)"),
    ),
]

SAMPLING = [
    *group(
        "npu/sampler.py",
        "npu/test_sampler.py npu/test_logit_filters.py",
        ("the prompt is penalised like the answer", "self._adjusted(logits, history, history[prompt_length:])", "self._adjusted(logits, history, history)"),
        ("min-p comes before top-p", "if params.top_p < 1:\n            kept = filters.top_p(weights, params.top_p)", "if params.min_p > 0:\n            kept = np.flatnonzero(weights >= params.min_p)"),
        ("typical-p is left out", "if params.typical_p < 1:", "if False:"),
        ("the bias is left out", "filters.bias(scores, self._biased, self._bias)", "pass"),
        ("a structure comes behind the filters", "scores = filters.rule_out(scores, allowed)", "pass"),
        ("the caller's logits are changed", "scores = logits.copy()", "scores = logits"),
        ("positions share a random number", "counter=position)", "counter=0)"),
        ("seeds share a random number", "key=self.seed", "key=0"),
        ("a token of probability 0 can be drawn", 'side="right"', 'side="left"'),
    ),
    *group(
        "npu/logit_filters.py",
        "npu/test_sampler.py npu/test_logit_filters.py",
        ("negative scores are divided, too", "np.where(before > 0, before / penalty, before * penalty)", "before / penalty"),
        ("presence is counted", "(counts * frequency + presence)", "counts * (frequency + presence)"),
        ("frequency is not counted", "(counts * frequency + presence)", "(frequency + presence)"),
        ("a bias is set, not added", "scores[tokens] += amounts", "scores[tokens] = amounts"),
        ("what equals the k-th is dropped", "scores >= kth_largest(scores, k)", "scores > kth_largest(scores, k)"),
        ("the token that reaches the sum is dropped", "np.cumsum(weights[ranked]), goal)) + 1", "np.cumsum(weights[ranked]), goal))"),
        ("of equal ranks the last come first", 'np.argsort(-rank[head], kind="stable")', "np.argsort(rank[head], kind=\"stable\")[::-1]"),
        ("typical-p prefers what surprises least", "-np.abs(surprise - entropy)", "-surprise"),
        ("a wide nucleus ends with the first look", "        size *= 8\n", "        break\n"),
        ("what is not allowed stays likely", "np.full_like(scores, -np.inf)", "np.zeros_like(scores)"),
    ),
    *group(
        "npu/logprobs.py",
        "npu/test_logprobs.py",
        ("alternatives are not normalised", "float(logits[one]) - normaliser", "float(logits[one])"),
        ("of equal tokens the last is named", 'np.argsort(-logits[candidates], kind="stable")', 'np.argsort(logits[candidates], kind="stable")[::-1]'),
    ),
    *group(
        "npu/step_guard.py",
        "npu/test_engine_one_step.py",
        ("two steps run at once", "if not self._lock.acquire(blocking=False):", "if False:"),
        ("what was put off is forgotten", "self._put_off.pop(0)()", "self._put_off.pop(0)"),
        ("an engine is closed within a step", "if self.busy:", "if False:"),
    ),
    *group(
        "npu/stream.py",
        "npu/test_engine.py npu/test_structured_engine.py",
        ("log-probabilities are those of what was asked for", "token_logprobs(logits, token, self.params.logprobs)", "token_logprobs(logits * 2, token, self.params.logprobs)"),
        ("an end token is text", "if token in self._end_ids:", "if False:"),
        ("a complete structure goes on", "(constraint is not None and constraint.completed_by(answer, token))", "False"),
        ("a fork draws its own seed", "None if params else self.sampler", "None"),
        ("what was held back at the end is lost", "self._detokenizer.flush()) + self._stops.flush()", "self._detokenizer.flush())"),
    ),
    *group(
        "npu/structured.py",
        "npu/test_structured.py",
        ("a step that was rolled back stays fed", "if answer[:known] != self._fed:", "if False:"),
        ("answers share a matcher", "self._matcher = start.deep_copy()", "self._matcher = start"),
        ("control tokens are text", "if tokenizer.token_bytes(token, special=False) != text", "if False"),
        ("one end token of several ends an answer", "eos_token=vocabulary.end_ids)", "eos_token=vocabulary.end_ids[:1])"),
        ("JSON may be laid out freely", '"whitespace_flexible": False', '"whitespace_flexible": True'),
        ("the bits of the mask are read backwards", 'bitorder="little"', 'bitorder="big"'),
        ("complexity has no bound", "limits=LLParserLimits(**_LIMITS)", "limits=None"),
    ),
]

PROCESSES = [
    *group(
        "npu/device_lock.py",
        "npu/test_device_lock.py",
        ("any lock of a process is shared", "lock.held and lock.shared and", "lock.held and"),
        ("two processes hold a device", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB"),
        ("a forked child keeps the device", "    for lock in list(_held):\n        lock.release()\n", ""),
        ("the holder is not named", "        self._file.write(f", "        str(f"),
        ("arguments are written down", "Path(sys.argv[0]).name or 'python'", "' '.join(sys.argv)"),
        ("an old holder's name stays", "        self._file.truncate(0)\n", ""),
        ("a link is followed", " | os.O_NOFOLLOW", ""),
        ("a file with another name is written", " or found.st_nlink != 1", ""),
        ("other users cannot lock", "os.fchmod(fd, 0o666)", "pass"),
        ("what others wrote reaches the terminal", '"".join(filter(str.isprintable, program))', "program"),
        ("a device's name leads elsewhere", "if not re.fullmatch(", "if not re.match("),
    ),
    *group(
        "npu/beam.py",
        "npu/test_beam.py",
        ("an end counts however unlikely it is", "(ends and rank < width)", "ends"),
        ("beams forget what they had gathered", " + np.array([[beam.logprob] for beam in beams])", ""),
        ("long answers are not favoured", "math.pow(length, self.length_penalty)", "length"),
        ("the search ends when enough are complete", "params.early_stopping or bound", "True or bound"),
        ("beams are left behind", "        for beam in beams:\n            beam.request.table.release()\n        return heirs\n", "        return heirs\n"),
        ("an error keeps the beams' blocks", "        finally:\n            for beam in beams:\n                beam.request.table.release()\n", "        finally:\n            pass\n"),
        ("a beam goes on in its parent's tokens", "buffer = source.buffer.copy()", "buffer = source.buffer"),
    ),
    *group(
        "npu/speculation.py",
        "npu/test_speculation.py",
        ("the oldest match is proposed", "int(places[-1])", "int(places[0])"),
        ("the match itself is proposed", "int(places[-1]) + size", "int(places[-1])"),
    ),
    *group(
        "npu/stepper.py",
        "npu/test_speculation.py",
        ("guesses are accepted unseen", "if count and sampled[-1] != (request.buffer[request.length + count - 1], False):", "if False:"),
        ("what was accepted behind a stop string is handed out", "                del tokens[count:]\n", ""),
    ),
    *group(
        "npu/stream.py",
        "npu/test_speculation.py",
        ("behind a guess the history lacks it", "request.buffer[: request.length + ahead]", "request.tokens"),
        ("only the last token's log-probability is reported", "known = self._logprobs if ahead else ()", "known = ()"),
    ),
    *group(
        "npu/weights_cache.py",
        "npu/test_processes.py",
        ("others may look into the cache", "missing.mkdir(mode=0o700", "missing.mkdir(mode=0o755"),
    ),
]

MODEL_FAULTS = [*ROPE, *ROPE_KEYS, *DECODER, *TILES, *FOLDERS, *CONVERT, *SAMPLING, *PROCESSES]
