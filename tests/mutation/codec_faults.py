"""Seeded faults in int8 and int4 KV."""

# ruff: noqa: E501 - a fault is one line
# fmt: off
from __future__ import annotations

from .fault import group

__all__ = ["CODEC_FAULTS"]

CODEC_FAULTS = [
    *group(
        "hostcache/codec.py",
        "hostcache/test_codec.py",
        ("a group need not divide a head", "if self.group_limit and head_dim % self.group_limit == 0", "if self.group_limit"),
        ("what no power of two divides is rotated", "head_dim & -head_dim if", "head_dim if"),
    ),
    *group(
        "hostcache/block_layout.py",
        "hostcache/test_block_layout.py",
        ("scales take no room", "used = self.payload_bytes + self.scale_bytes", "used = self.payload_bytes"),
        ("rows are not padded", "-(-used // ROW_ALIGNMENT) * ROW_ALIGNMENT if", "used if"),
    ),
    *group(
        "hostcache/_rows.c",
        "hostcache/test_kv_codecs.py",
        ("what is beyond every scale has one", "return scale < 0x7c00u ? scale : NO_SCALE;", "return scale;"),
        ("the scale that misfits most is taken", "if (misfit < least) {", "if (misfit > least || i == 0) {"),
        ("levels are cut off", "codes[i] = (uint8_t)(code_of(rounded[i])", "codes[i] = (uint8_t)(7 & code_of(rounded[i])"),
        ("negative levels are those of positive ones", "rounded < 0 ? 15 - code : code", "code"),
    ),
    *group(
        "hostcache/_rows_avx2.c",
        "hostcache/test_kv_codecs.py",
        ("lanes that are two apart are not mixed", "_mm256_add_ps(_mm256_permute_ps(x, 0x4E), _mm256_xor_ps(x, sign2))", "x"),
        ("elements are compared with levels of others", "_mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8)", "_mm256_packs_epi16(low, high)"),
    ),
    *group(
        "hostcache/_kv.c",
        "hostcache/test_kv_codecs.py",
        ("scales of all tokens are those of the first", "offset * scale_bytes_of(codec, head_dim)", "0 * offset"),
        ("a copy leaves the scales behind", "memcpy(to + scales_offset, from + scales_offset, (size_t)(tokens * scale_bytes));", ""),
        ("a block may begin within another", "block % spans[codec] || ", ""),
        ("the block behind the pool is written", "block >= units", "block > units"),
    ),
    *group(
        "hostcache/_kv.c",
        "npu/test_key_balance.py",
        ("keys keep what they have in common", "shifted[i] = x[i] - offset[i];", "shifted[i] = x[i] + 0 * offset[i];"),
        ("all heads have the first one's matrix", "matrices + (int64_t)(h / share) * head_dim * head_dim", "matrices"),
        ("rows of every codec are combined", "if (codecs[r] != codec) {", "if (0) {"),
    ),
    *group(
        "npu/key_balance.py",
        "npu/test_key_balance.py",
        ("keys come back without what they have in common", "(back + self.offsets[layer])", "back"),
    ),
    *group(
        "npu/key_moments.py",
        "npu/test_key_balance.py",
        ("queries are not transposed", "np.linalg.inv(matrix).T", "np.linalg.inv(matrix)"),
        ("moments of keys are not about what is taken away", " + np.outer(off, off)", ""),
        ("the first token does not count", "key_moments += FIRST_TOKEN_WEIGHT * np.outer(away, away)", "pass"),
    ),
    *group(
        "npu/key_statistics.py",
        "npu/test_key_balance.py",
        ("constants are measured at every start", "    cache.keep(key, balance)\n", ""),
    ),
    *group(
        "npu/key_cache.py",
        "npu/test_key_balance.py",
        ("damaged key constants are believed", "return hashlib.sha256(content).digest() == digest and", "return"),
        ("constants of another shape are believed", " and len(content) == _nbytes(shape)", ""),
        ("key constants fill the disk", "self.room.make_room(_DIGEST_BYTES + len(content), limit, beside=path.parent)", "pass"),
    ),
    *group(
        "npu/model_runner.py",
        "npu/test_kv_engine.py",
        ("all codecs share KV", "|kv={form}", ""),
        ("queries are not those for the keys that are stored", "keys, q = balance.keys(layer, codecs, keys), balance.queries(layer, codecs, q)", "keys = balance.keys(layer, codecs, keys)"),
    ),
    *group(
        "npu/stream_intake.py",
        "npu/test_kv_engine.py",
        ("every request is stored as the engine's are", "return self._codec if kv is None else codec_named(kv)", "return self._codec"),
    ),
    *group(
        "npu/rerotation.py",
        "npu/test_rerotation.py",
        ("keys of int4 are turned in the form that is stored", "balance = self._balance if codec is INT4 else None", "balance = None"),
    ),
]
