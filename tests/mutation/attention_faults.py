"""Seeded faults in the C attention kernel, its codecs, segments and checks, as data."""

# ruff: noqa: E501 - a fault is one line
# fmt: off
from __future__ import annotations

from .fault import group

__all__ = ["ATTENTION_FAULTS"]

ATTENTION_FAULTS = [
    *group(
        "npu/_attention_body.h",
        "npu/test_cpu_attention.py npu/test_attention_windows.py npu/test_cpu_attention_codecs.py",
        ("weights do not shrink when the maximum rises", "v_store(sum + d, v_load(sum + d) * shrink)", "v_store(sum + d, v_load(sum + d))"),
        ("a maximum that is not a power's changes bits by how much is weighed at once", "v_highest(v_round(best))", "v_highest(best)"),
        ("rows walk through blocks that the first one's window hides", "skipped_by(step, &rows, rows.rows) == skipped_by(step, &rows, 0)", "true"),
        ("the output is not rotated back", "if (view->layout->rotation > 1)\n        rotate_row(part", "if (false)\n        rotate_row(part"),
        ("a thread computes the segments behind its own, too", "        behind = first + segment < behind ? first + segment : behind;\n", ""),
        ("all heads of a tile read the first one's K", "            piece[i].k += view->layout->row_bytes;\n", ""),
        ("all heads of a tile read the first one's V", "            piece[i].v += view->layout->row_bytes;\n", ""),
        ("heads that go together are taken for tokens", "tile->heads > 1 ? 0 : ", ""),
        ("segments are merged without the first", "float *part = part_of(step, tile, 0, r);", "float *part = part_of(step, tile, 1, r);"),
    ),
    *group(
        "npu/_attention_walk.h",
        "npu/test_cpu_attention.py npu/test_attention_windows.py npu/test_cpu_attention_codecs.py",
        ("segments move with blocks that a window hides", "block < at->sink_blocks ? block : block - at->skipped", "block"),
        ("a full piece is whole though its end is not seen", "end <= s->position[0] + 1 &&", "end <= s->position[last] + 1 &&"),
        ("a full piece is whole though a window hides some of it", "(s->oldest[last] <= piece->position || end <= view->sinks)", "true"),
    ),
    *group(
        "npu/_attention_levels.h",
        "npu/test_cpu_attention_codecs.py",
        ("scales of another place in the block", "+ piece->before * groups;", ";"),
        ("a scale that a row may not see breaks it", "if (!piece[i].whole) { /* a scale", "if (false) { /* a scale"),
        ("all groups have the first one's scale", "v_load(scales[g] + v * LANES)", "v_load(scales[0] + v * LANES)"),
        ("all pieces have the first one's weights", "weight[r] + i * RP_PIECE + t", "weight[r] + t"),
        ("queries of a tile have the first one's scale", "v_splat(query_scale[r])", "v_splat(query_scale[0])"),
    ),
    *group(
        "npu/_attention_dots.h",
        "npu/test_cpu_attention_codecs.py",
        ("AVX2: all tokens of a piece have the first one's scale", "dot[other], scales + t,", "dot[other], scales,"),
        ("AVX2: the second row of two has the first one's scale", "query_scale[r], query_scale[other]", "query_scale[r], query_scale[r]"),
    ),
    *group(
        "npu/_attention.c",
        "npu/test_cpu_attention_codecs.py",
        ("the last heads are more than there are", "heads < left ? heads : left", "heads"),
        ("what is merged does not shrink", "into[d] = into[d] * shrink", "into[d] = into[d]"),
        ("heads share their segments' memory", "(int64_t)tile.kv_head * segments * tile.rows", "(int64_t)0 * segments * tile.rows"),
        ("a tile is merged once only", "            *finished = 0;\n", ""),
    ),
    *group(
        "npu/checks.py",
        "npu/test_cpu_attention_codecs.py",
        ("blocks begin anywhere in an extent", "| (tables % spans > 0)", ""),
        ("a block may stick out of the pool", "(tables > units - spans)", "(tables >= units)"),
        ("a codec that the pool does not serve passes", "if number not in units:", "if number > 2:"),
    ),
    *group(
        "npu/cpu.py",
        "npu/test_cpu_attention_codecs.py",
        ("no codec is rotated", "described.rotation = codec.rotation(self._geometry.head_dim)", "described.rotation = 1"),
    ),
]
